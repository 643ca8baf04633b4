"""What both quantised GEMMs share: geometry, argument checks, reference, error bound, random weights, and the two implementations.

    out[m, n] = act(sum_k x[m, perm[k]] * w[n, k] + bias[n])          w[n, k] = (decode(data[n, k]) - zero[n, g]) * scale * global[n]

with one scale per group_n x group_k block. With an activation the rows of `w` are [gate; up] and out = act(gate) * up, [M, N / 2].
Every value is float32 from the decoded weight to the single rounding to x.dtype at the end: no activation or scale of a
checkpoint can overflow on the way (an FP16 accumulator or FP16 scale would; that is the well-known "!!!!" failure of V100s).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
import torch
import triton
import triton.language as tl

from .. import env, formats
from ..formats import PackedWeight
from ..lib.dequant import load_weight, round_bf16
from ..probe import arch_of
from ..registry import impl, launch, resolve
from ..types import Arithmetic, Case, Geometry, Needs, Op, Plan, Work
from . import _kv

SCHEMA = (
    "(Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? global_scale, Tensor? perm, Tensor? bias, str codec, str scale_codec, "
    "int group_n, int group_k, str? activation, Tensor(a!) out) -> ()"
)
ACT_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ACTIVATIONS = ("silu", "gelu_tanh")
SCALE_DTYPES = {"e4m3": torch.uint8, "e8m0": torch.uint8, "f16": torch.float16, "f32": torch.float32}
PER_BYTE = {"e2m1": 2, "u4": 2, "u4b8": 2, "e4m3": 1, "e5m2": 1, "int8": 1}

Positive = Annotated[int, msgspec.Meta(ge=1)]


class GemmGeometry(Geometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`M` activation rows of `K` values against `N` weight rows, all local. With `gated` the output has N / 2 columns.

    The fields after `act_dtype` are those of a `PackedWeight`: what a kernel is specialised on. On a command line `format` (and
    `group`) stand for them.
    """

    DYNAMIC = ("M",)
    FORMATS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    act_dtype: Literal["fp16", "bf16"] = "fp16"
    codec: Literal["e2m1", "u4", "u4b8", "e4m3", "e5m2", "int8"]
    scale_codec: Literal["e4m3", "e8m0", "f16", "f32"]
    group_n: Positive
    group_k: Positive
    zero: bool = False
    global_scale: bool = False
    perm: bool = False
    N: Positive
    K: Positive
    gated: bool | Literal["silu", "gelu_tanh"] = False
    M: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.gated is True:
            raise ValueError(f"gated=True; accepted: false, {', '.join(ACTIVATIONS)}")
        if self.gated and self.N % 2:
            raise ValueError(f"N={self.N} with gated={self.gated!r}: [gate; up] need an even number of rows")
        if PER_BYTE[self.codec] == 2 and self.K % 2:
            raise ValueError(f"K={self.K}: {self.codec} packs two columns in a byte, so K must be even")
        if PER_BYTE[self.codec] == 2 and self.K % self.group_k:
            raise ValueError(f"K={self.K} is not a multiple of the group of {self.group_k}")
        if self.zero and self.group_n != 1:
            raise ValueError(f"group_n={self.group_n} with zero points; 1 is accepted")

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]):
        """A geometry from M, N, K, format, group, act_dtype, gated (true is "silu") and perm: see `Geometry.from_keys`."""
        keys = dict(keys)
        if "codec" in keys:  # the fields themselves, as a config file spells them
            return super().from_keys(keys)
        name, group = keys.pop("format", next(iter(cls.FORMATS))), keys.pop("group", None)
        if not isinstance(name, str) or name not in cls.FORMATS:
            raise ValueError(f"format={name!r}; accepted: {', '.join(cls.FORMATS)}")
        unknown = [key for key in keys if key not in ("M", "N", "K", "act_dtype", "gated", "perm")]
        if unknown:
            raise ValueError(f"geometry key {unknown[0]!r} is not known; accepted: M, N, K, format, group, act_dtype, gated, perm")
        values = {"M": 1, "N": 4096, "K": 4096, **cls.FORMATS[name], **keys}
        fixed = values.pop("fixed_group", False)
        if group is not None:
            if fixed and group != values["group_k"]:
                raise ValueError(f"group={group!r} with format={name!r}; accepted: {values['group_k']}")
            values["group_k"] = group
        if values["group_k"] == -1:  # one scale for a whole row
            values["group_k"] = values["K"]
        if PER_BYTE[values["codec"]] == 1 and isinstance(values["K"], int):
            values["group_k"] = min(values["group_k"], values["K"])
        if values.get("gated") in (None, True):  # a bare switch means the usual one
            values["gated"] = "silu" if values.get("gated") else False
        return super().from_keys(values)

    @property
    def columns(self) -> int:
        return self.N // 2 if self.gated else self.N

    @property
    def scale_shape(self) -> tuple[int, int]:
        return -(-self.N // self.group_n), -(-self.K // self.group_k)


def flatten(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str | None, out: torch.Tensor) -> tuple[Any, ...]:
    """The arguments of the torch.library op for those of the public function."""
    return (x, weight.data, weight.scale, weight.zero, weight.global_scale, weight.perm, bias, weight.codec, weight.scale_codec,
            weight.group_n, weight.group_k, activation, out)


def call(run: Callable[..., None], opaque: Any, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None,
         activation: str | None, out: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
    """Body of the public functions: allocates `out` if there is none. `opaque` is the torch.library op, for torch.compile."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; a tensor is accepted")
    if x.ndim != 2:
        raise ValueError(f"x.shape={tuple(x.shape)}: it must have 2 axes, [M, K]")
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; sm70_triton.formats.PackedWeight is accepted")
    if weight.k != x.shape[1]:
        raise ValueError(f"x.shape={tuple(x.shape)}: the second axis must be the weight's K, {weight.k}")
    if out is None:
        out = torch.empty((x.shape[0], weight.n // 2 if activation else weight.n), dtype=x.dtype, device=x.device)
    (opaque if torch.compiler.is_compiling() else run)(*flatten(x, weight, bias, activation, out))
    return out


def serve(op: Op, x, data, scale, zero, global_scale, perm, bias, codec, scale_codec, group_n, group_k, activation, out) -> None:
    """Body of both ops' `run`: check every argument, make the geometry, resolve, launch."""
    geometry_type = cast("type[GemmGeometry]", op.geometry)
    codecs = sorted({f["codec"] for f in geometry_type.FORMATS.values()})
    device = x.device
    _kv.check_tensor("x", x, 2, tuple(ACT_DTYPES.values()), device)
    if codec not in codecs:
        raise ValueError(f"weight.codec={codec!r}; {op.name} accepts: {', '.join(codecs)}")
    if scale_codec not in SCALE_DTYPES:
        raise ValueError(f"weight.scale_codec={scale_codec!r}; accepted: {', '.join(SCALE_DTYPES)}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}; accepted: None, {', '.join(ACTIVATIONS)}")
    _kv.check_tensor("weight.data", data, 2, (torch.uint8,), device)
    rows, n, k = x.shape[0], data.shape[0], data.shape[1] * PER_BYTE[codec]
    _kv.require(x.shape[1] == k, f"x.shape={tuple(x.shape)}: the second axis must be the weight's K, {k}")
    _kv.require((zero is not None) == (codec == "u4"), f"weight.zero is {'None' if zero is None else 'given'} with codec {codec!r}; only 'u4' has zero points")
    geometry = geometry_type(
        M=rows, N=n, K=k, codec=codec, scale_codec=scale_codec, group_n=group_n, group_k=min(group_k, k) if k == data.shape[1] else group_k, zero=zero is not None,
        global_scale=global_scale is not None, perm=perm is not None, act_dtype="fp16" if x.dtype == torch.float16 else "bf16",
        gated=activation or False,
    )  # fmt: skip
    _kv.check_tensor("weight.scale", scale, 2, (SCALE_DTYPES[scale_codec],), device)
    expected = [("weight.scale", scale, geometry.scale_shape), ("out", out, (rows, geometry.columns))]
    if zero is not None:
        _kv.check_tensor("weight.zero", zero, 2, (torch.uint8,), device)
        expected.append(("weight.zero", zero, geometry.scale_shape))
    if global_scale is not None:
        _kv.check_tensor("weight.global_scale", global_scale, 1, (torch.float32,), device)
        expected.append(("weight.global_scale", global_scale, (n,)))
    if perm is not None:
        _kv.check_tensor("weight.perm", perm, 1, (torch.int32,), device)
        expected.append(("weight.perm", perm, (k,)))
    if bias is not None:
        _kv.check_tensor("bias", bias, 1, (torch.float16, torch.bfloat16, torch.float32), device)
        expected.append(("bias", bias, (n,)))
    _kv.check_tensor("out", out, 2, (x.dtype,), device)
    for name, tensor, shape in expected:
        _kv.require(tuple(tensor.shape) == shape, f"{name}.shape={tuple(tensor.shape)}; it must be {shape}")
    if perm is not None and (device.type == "cpu" or (env.get().debug and device.type != "meta")):
        low, high = int(perm.min()), int(perm.max())
        _kv.require(low >= 0 and high < k, f"weight.perm holds {low if low < 0 else high}; accepted: 0 to {k - 1}")
    if rows == 0:
        return
    _kv.check_output("out", out)
    _kv.require(device.type == "meta" or out.data_ptr() != x.data_ptr(), "out shares memory with x, which programs still read while others write")
    launch(resolve(op, geometry, arch_of(device)), geometry, device, x=x, data=data, scale=scale, zero=zero, global_scale=global_scale, perm=perm, bias=bias, out=out)


# ---- specification -------------------------------------------------------------------------------------------------------


def _activate64(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """SiLU, or GELU's tanh form, which is g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 g^3))."""
    return gate * torch.sigmoid(gate if activation == "silu" else _GELU * (gate + 0.044715 * gate**3))


_GELU = 1.5957691216057308  # 2 * sqrt(2 / pi)


def _linear64(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 x @ w.T + bias, and the same with every term's magnitude: what rounding errors are proportional to."""
    wide = formats.dequantize(weight)
    x64 = x.double()
    y, size = x64 @ wide.T, x64.abs() @ wide.abs().T
    return (y, size) if bias is None else (y + bias.double(), size + bias.double().abs())


def reference(x: torch.Tensor, weight: PackedWeight, *, bias: torch.Tensor | None = None, activation: str | None = None,
              out: torch.Tensor | None = None) -> dict[str, torch.Tensor]:  # fmt: skip
    """float64 throughout, from exactly decoded weights; a result beyond the range of x.dtype is infinite, as a rounding makes it."""
    y = _linear64(x, weight, bias)[0]
    if activation:
        gate, up = y.chunk(2, -1)
        y = _activate64(gate, activation) * up
    beyond = y.abs() >= (65520.0 if x.dtype == torch.float16 else 2.0**128 - 2.0**119)
    return {"out": torch.where(beyond, torch.copysign(torch.full_like(y, float("inf")), y), y)}


def tolerance(inputs: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Worst-case bound of float32 arithmetic in any order, then one rounding to x.dtype. u = 2^-24.

    Linear part: a weight carries two roundings, a product one, a sum over K at most K, the bias one more: with n = K + 4 and
    g = n u / (1 - n u), |error| <= g (|x| @ |w|.T + |bias|). float32 underflow adds 2^-126 for each of the K terms.

    Gated part, y = act(gate) up: |act'| <= 1.13 for SiLU and GELU, so an error d of the gate becomes at most 1.13 d. act itself is
    g sigmoid(t); exp is good to (8 + 8 |t|) u (2^-22 of PTX ex2.approx, and the rounded argument), of which the part
    sigmoid(-|t|) survives in the sigmoid, and a dozen roundings remain.
    """
    x, weight, bias, activation = (inputs.get(name) for name in ("x", "weight", "bias", "activation"))
    assert x is not None and weight is not None
    u = 2.0**-24
    y, size = _linear64(x, weight, bias)
    n = (weight.k + 4) * u
    error = n / (1 - n) * size + (weight.k + 4) * 2.0**-126 * (1 + x.double().abs().amax(-1, keepdim=True))
    if activation:
        (gate, up), (gate_error, up_error) = y.chunk(2, -1), error.chunk(2, -1)
        act = _activate64(gate, activation).abs()
        t = (gate if activation == "silu" else _GELU * (gate + 0.044715 * gate**3)).abs()
        act_error = 1.13 * gate_error
        act_error += (act + act_error) * ((8 + 8 * t) * torch.sigmoid(-t) + 12) * u + (gate.abs() + gate_error) * 2.0**-126
        error = act_error * (up.abs() + up_error) + act * up_error
        error += u * (act + act_error) * (up.abs() + up_error)
    unit, tiny = (2.0**-11, 2.0**-25) if x.dtype == torch.float16 else (2.0**-8, 2.0**-126)
    return {"out": (1 + unit) * error + unit * expected["out"].abs() + tiny}


def work(geometry: GemmGeometry) -> Work:
    g = geometry
    groups = g.scale_shape[0] * g.scale_shape[1]
    packed = g.N * g.K // PER_BYTE[g.codec] + groups * (SCALE_DTYPES[g.scale_codec].itemsize + g.zero) + 4 * g.N * g.global_scale + 4 * g.K * g.perm
    return Work(flops=2 * g.M * g.N * g.K, bytes=packed + 2 * g.M * (g.K + g.columns))


# ---- inputs --------------------------------------------------------------------------------------------------------------


def _integers(shape: tuple[int, ...], low: int, high: int, device: str, g: torch.Generator, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Uniform in [low, high). Small ones are made on the CPU, so that a seed means the same numbers everywhere."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    count = 1
    for axis in shape:
        count *= axis
    if count > 1 << 22 and device != "cpu":
        on_device = torch.Generator(device).manual_seed(g.initial_seed())
        return torch.randint(low, high, shape, dtype=dtype, device=device, generator=on_device)
    return torch.randint(low, high, shape, dtype=dtype, generator=g).to(device)


def _scales(geometry: GemmGeometry, device: str, g: torch.Generator, exponents: tuple[int, int] | None) -> torch.Tensor:
    """Scales that make outputs of order 1, or, with `exponents`, powers of two over that whole range (E4M3: every finite code)."""
    if geometry.scale_codec == "e4m3":
        return _integers(geometry.scale_shape, 0x01, 0x7F, device, g)
    if geometry.scale_codec == "e8m0":
        low, high = exponents or (-8, -5)
        return _integers(geometry.scale_shape, 127 + low, 128 + high, device, g)
    spread = {"e2m1": 3, "u4": 5, "u4b8": 5, "e4m3": 128, "e5m2": 8192, "int8": 74}[geometry.codec] * geometry.K**0.5
    scale = (_integers(geometry.scale_shape, 100, 256, device, g).float() + 1) / (256 * spread)
    if exponents is not None:
        scale *= torch.exp2(_integers(geometry.scale_shape, 0, exponents[1] - exponents[0] + 1, device, g).float() + exponents[0])
    return scale.to(SCALE_DTYPES[geometry.scale_codec])


def random_weight(geometry: GemmGeometry, device: str, g: torch.Generator, *, exponents: tuple[int, int] | None = None,
                  globals_: tuple[int, ...] = (-10,), nan: bool = False) -> PackedWeight:  # fmt: skip
    """Random codes and scales, straight in the packed layout. `globals_`: exponent of the global scale of each fused part; `nan`
    plants a scale byte, or an FP8 code, that means NaN in the first row."""
    n, k, codec = geometry.N, geometry.K, geometry.codec
    data = _integers((n, k // PER_BYTE[codec]), 0, 256, device, g)
    if codec in ("e4m3", "e5m2"):  # keep the sign, drop what is not finite
        data = (data & 0x80) | (data & 0x7F).clamp(max=0x7E if codec == "e4m3" else 0x7B)
    scale = _scales(geometry, device, g, exponents)
    zero = _integers(geometry.scale_shape, 0, 17, device, g) if geometry.zero else None
    global_scale = None
    if geometry.global_scale:
        parts = torch.arange(n) * len(globals_) // n
        global_scale = (1.25 * torch.exp2(torch.tensor(globals_, dtype=torch.float32)))[parts].to(device)
    perm = torch.randperm(k, generator=g).to(torch.int32).to(device) if geometry.perm else None
    weight = PackedWeight(codec=codec, n=n, k=k, group_n=geometry.group_n, group_k=geometry.group_k, data=data, scale=scale,
                          scale_codec=geometry.scale_codec, zero=zero, global_scale=global_scale, perm=perm)  # fmt: skip
    if nan:  # afterwards: a PackedWeight refuses such scales when it is made
        (scale if scale.dtype == torch.uint8 else data)[0, 0] = 0xFF if geometry.scale_codec == "e8m0" else 0x7F
    return weight


def checkpoint_weight(geometry: GemmGeometry, layout: str, parts: int, g: torch.Generator) -> PackedWeight:
    """A normal weight rounded into a checkpoint layout and packed, on the CPU: `parts` fused projections, each 8 times the last."""
    packed = []
    options: dict[str, Any] = {"group": geometry.group_k} if layout in ("awq", "gptq", "ct_int4") else {}
    if geometry.perm:
        options["act_order"] = torch.randperm(geometry.K, generator=g)
    for part in range(parts):
        w = torch.randn((geometry.N // parts, geometry.K), generator=g) * (8.0 ** (part - 1) * geometry.K**-0.5)
        packed.append(formats.pack(layout, formats.quantize(layout, w, **options)))
    return formats.concat(packed) if parts > 1 else packed[0]


def make_inputs(geometry: GemmGeometry, *, seed: int, device: str, bias: str | None = None, amplitude: float = 1.0, strided: bool = False,
                layout: str | None = None, parts: int = 1, **weight: Any) -> dict[str, Any]:  # fmt: skip
    """Random activations N(0, amplitude^2) and a weight: with `layout` a checkpoint's, else random codes (`random_weight`).
    `strided`: rows of x and out inside wider buffers of NaN."""
    g = torch.Generator().manual_seed(seed)
    dtype, rows, k = ACT_DTYPES[geometry.act_dtype], geometry.M, geometry.K
    pad = 8 if strided else 0
    x = _kv.poison((rows, k + pad), dtype, device)[:, :k]
    if rows * k > 1 << 24 and device not in ("cpu", "meta"):
        x.normal_(generator=torch.Generator(device).manual_seed(seed)).mul_(amplitude)
    else:
        x.copy_(_kv.random_normal((rows, k), torch.float32, device, g) * amplitude)
    out = _kv.poison((rows, geometry.columns + pad), dtype, device)[:, : geometry.columns]
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    if layout is None or device == "meta":
        packed = random_weight(geometry, device, g, **weight)
    else:
        packed = checkpoint_weight(geometry, layout, parts, g).to(device)
    return {
        "x": x, "weight": packed, "out": out, "activation": geometry.gated or None,
        "bias": None if bias is None else _kv.random_normal((geometry.N,), dtypes[bias], device, g),
    }


def case(geometry_type: type[GemmGeometry], name: str, M: int, N: int, K: int, format: str, *, group: int | None = None, act_dtype: str = "fp16",
         gated: str | bool = False, perm: bool = False, production: bool = False, **options: Any) -> Case:  # fmt: skip
    keys = {"M": M, "N": N, "K": K, "format": format, "group": group, "act_dtype": act_dtype, "gated": gated, "perm": perm}
    return Case(name=name, geometry=geometry_type.from_keys(keys), options=options, production=production)


# ---- implementation `torch` ----------------------------------------------------------------------------------------------


class TorchPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to choose."""


def decode32(data: torch.Tensor, codec: str) -> torch.Tensor:
    """Codes -> float32 [N, K], exact. Small-integer operations over the whole tensor: on a CPU several times faster than look-ups."""
    if codec == "int8":
        return data.view(torch.int8).float()
    if codec == "e5m2":
        return data.view(torch.float8_e5m2).float()
    if codec == "e4m3":  # magnitude bits in a half are value * 2^-8; 0x7f must become a NaN
        wide = data.view(torch.int8).short()
        magnitude = wide & 0x7F
        half = (wide & -0x8000) | (magnitude << 7) | (((magnitude + 1) >> 7) * 0x7C00)
        return half.view(torch.float16).float().mul_(256.0)
    nibbles = torch.stack((data & 0xF, data >> 4), -1).view(data.shape[0], -1).view(torch.int8)
    if codec == "e2m1":
        m = nibbles & 7  # 0 .. 7 mean 0, 1, 2, 3, 4, 6, 8, 12 halves
        halves = m + (m - 4).clamp_(min=0) + 2 * (m - 6).clamp_(min=0)
        return halves.mul_(1 - ((nibbles >> 2) & 2)).float().mul_(0.5)
    return nibbles.float() if codec == "u4" else nibbles.float().sub_(8.0)


@_kv.like_a_kernel
def _launch_torch(plan: TorchPlan, geometry: GemmGeometry, *, x, data, scale, zero, global_scale, perm, bias, out) -> None:
    n, k, group = geometry.N, geometry.K, geometry.group_k
    s = scale.float() if scale.dtype.is_floating_point else decode_scale32(scale, geometry.scale_codec)
    if geometry.group_n > 1:
        s = s.repeat_interleave(geometry.group_n, 0)[:n]
    weight = decode32(data, geometry.codec)
    if k % group == 0:
        blocks = weight.view(n, k // group, group)
        if zero is not None:
            blocks -= zero.float()[:, :, None]
        blocks *= s[:, :, None]
    else:  # ragged FP8 blocks; they have no zero points
        weight *= s.repeat_interleave(group, 1)[:, :k]
    if global_scale is not None:
        weight *= global_scale[:, None]
    wide = x.float() if perm is None else x.float()[:, perm.long()]
    y = wide @ weight.T
    if bias is not None:
        y += bias.float()
    if geometry.gated:
        gate, up = y.chunk(2, -1)
        y = gate * torch.sigmoid(gate if geometry.gated == "silu" else _GELU * (gate + 0.044715 * gate**3)) * up
    out.copy_(y)


def decode_scale32(scale: torch.Tensor, scale_codec: str) -> torch.Tensor:
    """Scale bytes -> float32, exact. E8M0: 2^(code - 127), 0xff is NaN."""
    if scale_codec == "e4m3":
        return scale.view(torch.float8_e4m3fn).float()
    wide = scale.int()
    return torch.where(wide == 0, 0x00400000, torch.where(wide == 0xFF, 0x7FC00000, wide << 23)).view(torch.float32)


# ---- implementation `simt` -----------------------------------------------------------------------------------------------


class SimtPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tile of one program: block_m x block_n (rows of the weight, gate and up together), block_k columns a step.

    block_m below 16 keeps one float32 sum per (m, n, k lane) and adds the lanes once at the end; from 16 on, `tl.dot`.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int


DOT_M = tl.constexpr(16)


@triton.jit
def _sigmoid(t):
    e = tl.exp(-tl.abs(t))  # at most 1: a large -t would overflow exp(t)
    return tl.div_rn(tl.where(t >= 0, 1.0, e), 1.0 + e)


@triton.jit(do_not_specialize=["M"])  # one kernel for every batch size: none is compiled while a server runs
def _gemm_simt_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, global_ptr, perm_ptr, bias_ptr, out_ptr, M, N, K,
    stride_xm, stride_dn, stride_sn, stride_zn, stride_om,
    CODEC: tl.constexpr, SCALE_CODEC: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_GLOBAL: tl.constexpr, HAS_PERM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile_n = tl.program_id(0) // tiles_m  # one axis: a grid's others end at 65535
    offs_m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    live_m = (offs_m < M)[:, None]
    if ACTIVATION != "none":  # even rows of the tile are gates, odd ones their ups, so that one product makes both
        live_n = offs_n < N
        offs_n = tl.where(live_n, offs_n // 2 + (offs_n % 2) * (N // 2), N)
    x_rows = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    global_scale = tl.full((BLOCK_N,), 1.0, tl.float32)
    if HAS_GLOBAL:
        global_scale = tl.load(global_ptr + offs_n, mask=offs_n < N, other=0.0)
    if BLOCK_M < DOT_M:
        acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        live_k = offs_k < K
        if HAS_PERM:
            offs_k = tl.load(perm_ptr + offs_k, mask=live_k, other=0)
            live_k &= (offs_k >= 0) & (offs_k < K)  # a bad index must not read outside x
        x = tl.load(x_rows + offs_k[None, :], mask=live_m & live_k[None, :], other=0.0).to(tl.float32)
        weight = load_weight(
            data_ptr, scale_ptr, zero_ptr, global_scale, offs_n, start_k, N, K, stride_dn, stride_sn, stride_zn,
            CODEC, SCALE_CODEC, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if BLOCK_M < DOT_M:
            acc += x[:, None, :] * weight[None, :, :]
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    y = tl.sum(acc, 2) if BLOCK_M < DOT_M else acc  # [BLOCK_M, BLOCK_N]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    columns = N
    if ACTIVATION != "none":
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        t = gate if ACTIVATION == "silu" else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        y = gate * _sigmoid(t) * up
        columns = N // 2
        offs_n = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    y = round_bf16(y) if out_ptr.dtype.element_ty == tl.bfloat16 else y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_n[None, :], y, mask=live_m & (offs_n < columns)[None, :])


def _launch_simt(plan: SimtPlan, geometry: GemmGeometry, *, x, data, scale, zero, global_scale, perm, bias, out) -> None:
    g = geometry
    _gemm_simt_kernel[(triton.cdiv(g.M, plan.block_m) * triton.cdiv(g.N, plan.block_n),)](
        x, data, scale, zero, global_scale, perm, bias, out, g.M, g.N, g.K,
        x.stride(0), data.stride(0), scale.stride(0), zero.stride(0) if g.zero else 0, out.stride(0),
        CODEC=g.codec, SCALE_CODEC=g.scale_codec, GROUP_N=g.group_n, GROUP_K=0 if g.group_k >= g.K else g.group_k, HAS_ZERO=g.zero,
        HAS_GLOBAL=g.global_scale, HAS_PERM=g.perm, HAS_BIAS=bias is not None, ACTIVATION=g.gated or "none",
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, num_warps=plan.num_warps,
    )  # fmt: skip


def _step(geometry: GemmGeometry, most: int) -> int:
    """The largest power of two up to `most` that a step over K may take: whole groups, or a whole part of one."""
    group = geometry.group_k
    if group >= geometry.K or group & (group - 1) == 0:
        return most
    return min(most, group & -group)


def _supports(geometry: GemmGeometry, arch: int) -> str | None:
    return None if _step(geometry, 16) == 16 else f"a group of {geometry.group_k} is neither a power of two nor a multiple of 16"


def _feasible(plan: SimtPlan, geometry: GemmGeometry, arch: int) -> str | None:
    m, n, k, threads = plan.block_m, plan.block_n, plan.block_k, 32 * plan.num_warps
    if any(size < 1 or size & (size - 1) for size in (m, n, k)) or k < 16 or n < 2:
        return f"blocks of {m} x {n} x {k}: powers of two, block_n from 2, block_k from 16"
    if k != _step(geometry, k):
        return f"a step of {k} is neither whole groups of {geometry.group_k} nor a whole part of one"
    # tl.dot without tensor cores stages both operands as float32; otherwise only layout changes pass through shared memory.
    shared = 4 * (m + n) * k if m >= DOT_M.value else 4 * max(m, n) * k
    if shared > 98304:
        return f"{shared} bytes of shared memory; 98304 are there"
    registers = (m * n if m >= DOT_M.value else m * n * k) / threads
    return f"{registers:.0f} float32 sums a thread would spill" if registers > 64 else None


def _default(geometry: GemmGeometry, arch: int) -> SimtPlan:
    m = 1 << (max(1, geometry.M) - 1).bit_length()
    if m <= 8:
        k = _step(geometry, 128)
        return SimtPlan(block_m=m, block_n=max(2, min(16, 8192 // (m * k))), block_k=k, num_warps=4)
    # Rows that are no multiple of 16 bytes are loaded byte by byte, with a pointer each: fewer of them a thread, or they spill.
    return SimtPlan(block_m=min(m, 64), block_n=64, block_k=_step(geometry, 32), num_warps=4 if geometry.K % 32 == 0 else 8)


def _candidates(geometry: GemmGeometry, arch: int) -> Iterable[SimtPlan]:
    blocks_m = [m for m in (1, 2, 4, 8, 16, 32, 64, 128) if m < 2 * max(1, geometry.M)]
    return [
        SimtPlan(block_m=m, block_n=n, block_k=k, num_warps=w)
        for m in blocks_m for n in (4, 8, 16, 32, 64, 128) for k in (16, 32, 64, 128, 256) for w in (2, 4, 8)
    ]  # fmt: skip


def implement(op: Op) -> None:
    """Register both implementations for an op."""
    exact = Arithmetic(accum_bits=32, weight_decode="exact")
    impl(op, "torch", rev=1, needs=Needs(min_arch=0), arithmetic=exact, plan=TorchPlan, automatic=False,
         default=lambda geometry, arch: TorchPlan(), candidates=lambda geometry, arch: [TorchPlan()])(_launch_torch)  # fmt: skip
    impl(op, "simt", rev=1, needs=Needs(min_arch=70, packages=("triton",)), arithmetic=exact, plan=SimtPlan, priority=10,
         supports=_supports, feasible=_feasible, default=_default, candidates=_candidates)(_launch_simt)  # fmt: skip
