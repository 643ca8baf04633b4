"""Write the keys and values of new tokens into a paged KV cache.

    page, offset = divmod(slot_mapping[t], page_size)
    k_cache[page, offset, h, :] = encode(key[t, h, :] / k_scale[h])          likewise v

`encode` is the identity for FP16; for E4M3 and E5M2 it divides in FP32, saturates to the largest finite value (448, 57344)
and rounds once, to nearest even. A negative slot marks padding and writes nothing; so does a slot beyond the cache.
Two tokens with the same slot race, as in every paged cache: the caller gives each token its own.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from .. import env
from ..lib.codec import encode_e4m3, encode_e5m2
from ..probe import arch_of
from ..registry import impl, launch, op, resolve
from ..types import Arithmetic, Case, Geometry, Needs, Plan, Work
from . import _kv


class KvWriteGeometry(Geometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens` new tokens for `kv_heads` local heads of `head_dim`."""

    DYNAMIC = ("tokens",)
    DEFAULTS = {"kv_heads": 8, "head_dim": 128, "kv_dtype": "fp16", "page_size": 16, "tokens": 1}
    IGNORED = ("q_heads", "batch", "q_len", "kv_len", "causal", "window", "softcap", "sinks", "alibi")

    kv_dtype: str
    kv_heads: int
    head_dim: int
    page_size: int
    tokens: int

    def __post_init__(self) -> None:
        if self.kv_dtype not in _kv.KV_DTYPES:
            raise ValueError(f"kv_dtype={self.kv_dtype!r}; accepted: {', '.join(_kv.KV_DTYPES)}")
        for name, least in (("kv_heads", 1), ("head_dim", 1), ("page_size", 1), ("tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least {least}")

    @classmethod
    def from_keys(cls, keys):
        keys = dict(keys)
        if "tokens" not in keys and ("batch" in keys or "q_len" in keys):
            factors = {name: keys.get(name, 1) for name in ("batch", "q_len")}
            for name, value in factors.items():
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ValueError(f"{name}={value!r}; an integer that is not negative is accepted")
            keys["tokens"] = factors["batch"] * factors["q_len"]
        return super().from_keys(keys)


def reference(key, value, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None, kv_dtype=None) -> dict[str, torch.Tensor]:
    """The caches after the write, bit for bit."""
    kind = _kv.kv_dtype_of(k_cache, kv_dtype)
    pages, page_size, kv_heads, _ = k_cache.shape
    kept = (slot_mapping >= 0) & (slot_mapping < pages * page_size)
    slots = slot_mapping[kept]
    result = {}
    for name, tokens, cache, scale in (("k_cache", key, k_cache, k_scale), ("v_cache", value, v_cache, v_scale)):
        written = _kv.as_bytes(cache).clone()
        stored = _kv.quantize(tokens[kept], _kv.per_head(scale, kv_heads, key), kind)
        written[slots // page_size, slots % page_size] = stored
        result[name] = written.view(cache.dtype)
    return result


def make_inputs(geometry: KvWriteGeometry, *, seed: int, device: str, padding: float = 0.2, scaled: bool = False, strided: bool = False) -> dict[str, Any]:
    """Random tokens for random distinct slots of a cache of NaN. `strided` interleaves K and V in one buffer, as vLLM lays them out."""
    g = torch.Generator().manual_seed(seed)
    heads, dim, page = geometry.kv_heads, geometry.head_dim, geometry.page_size
    pages = -(-2 * max(1, geometry.tokens) // page) + 1
    slots = torch.randperm(pages * page, generator=g)[: geometry.tokens]
    slots = torch.where(torch.rand(geometry.tokens, generator=g) < padding, -1, slots)
    dtype = torch.float16 if geometry.kv_dtype == "fp16" else torch.uint8
    both = _kv.poison((pages, page, heads, 2 * dim), dtype, device)
    k_cache, v_cache = both.split(dim, -1) if strided else (_kv.poison((pages, page, heads, dim), dtype, device) for _ in "kv")
    scales = (torch.rand(heads, generator=g) + 0.01).to(device) if scaled else None
    key, value = (_kv.random_normal((geometry.tokens, heads, dim), torch.float16, device, g) for _ in "kv")
    if device != "meta" and geometry.tokens and geometry.kv_dtype != "fp16":
        key[0, 0, :6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 6e4, -1e-4, 0.0], dtype=torch.float16, device=device)[:dim]
    return {
        "key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots.to(device), "k_scale": scales,
        "v_scale": scales, "kv_dtype": None if geometry.kv_dtype == "fp16" else geometry.kv_dtype,
    }


def tolerance(inputs, expected) -> dict[str, None]:
    """Bit equality: division and rounding are both correctly rounded."""
    return {"k_cache": None, "v_cache": None}


def work(geometry: KvWriteGeometry) -> Work:
    values = 2 * geometry.tokens * geometry.kv_heads * geometry.head_dim
    return Work(flops=0 if geometry.kv_dtype == "fp16" else values, bytes=values * (4 if geometry.kv_dtype == "fp16" else 3) + 8 * geometry.tokens)


def _case(name: str, tokens: int, kv_heads: int, head_dim: int, page_size: int, kv_dtype: str = "fp16", production: bool = False, **options: Any) -> Case:
    geometry = KvWriteGeometry(tokens=tokens, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, kv_dtype=kv_dtype)
    return Case(name=name, geometry=geometry, options=options, production=production)


CASES = [
    _case("empty", 0, 2, 64, 16),
    _case("one_token", 1, 3, 64, 16),
    _case("odd_sizes", 7, 3, 80, 5),
    _case("odd_head_dim_e4m3", 9, 2, 72, 3, "e4m3", scaled=True),
    _case("e4m3", 33, 2, 64, 16, "e4m3"),
    _case("e4m3_scaled_strided", 33, 4, 128, 16, "e4m3", scaled=True, strided=True),
    _case("e5m2_scaled", 33, 2, 64, 16, "e5m2", scaled=True),
    _case("strided", 20, 2, 256, 8, strided=True),
    _case("all_padding", 5, 2, 64, 16, padding=2.0),
    _case("prefill_8k_kv4_d256_e4m3", 8192, 4, 256, 784, "e4m3", production=True, scaled=True),
    _case("prefill_8k_kv8_d128", 8192, 8, 128, 16, production=True),
    _case("decode_32_kv8_d128_e5m2", 32, 8, 128, 16, "e5m2", production=True),
]


def run(key, value, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None, kv_dtype=None) -> None:
    _kv.require(isinstance(key, torch.Tensor), f"key is a {type(key).__name__}; a tensor is accepted", TypeError)
    device = key.device
    _kv.check_tensor("key", key, 3, (torch.float16,), device)
    _kv.check_tensor("value", value, 3, (torch.float16,), device)
    kind = _kv.check_cache(k_cache, v_cache, kv_dtype, device)
    _kv.check_output("k_cache", k_cache)
    _kv.check_output("v_cache", v_cache)
    _kv.check_tensor("slot_mapping", slot_mapping, 1, (torch.int64,), device)
    tokens, heads, dim = key.shape
    _kv.require(value.shape == key.shape, f"value.shape={tuple(value.shape)} must equal key.shape={tuple(key.shape)}")
    _kv.require(k_cache.shape[2:] == key.shape[1:], f"k_cache.shape={tuple(k_cache.shape)} must end in kv_heads, head_dim = {heads}, {dim}")
    _kv.require(slot_mapping.shape[0] == tokens, f"slot_mapping has {slot_mapping.shape[0]} entries, key has {tokens} tokens")
    _kv.check_scale("k_scale", k_scale, heads, kind, device)
    _kv.check_scale("v_scale", v_scale, heads, kind, device)
    if key.numel() == 0:
        return
    if env.get().debug and device.type != "meta":
        top = k_cache.shape[0] * k_cache.shape[1]
        _kv.require(int(slot_mapping.max()) < top, f"slot_mapping holds {int(slot_mapping.max())}; the cache has {top} slots")
    geometry = KvWriteGeometry(kv_dtype=kind, kv_heads=heads, head_dim=dim, page_size=k_cache.shape[1], tokens=tokens)
    launch(resolve(OP, geometry, arch_of(device)), geometry, device, key=key, value=value, k_cache=_kv.as_bytes(k_cache),
           v_cache=_kv.as_bytes(v_cache), slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale)  # fmt: skip


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: str | None = None,
) -> None:
    """Store new keys and values in a paged cache (formula: module docstring). Writes `k_cache` and `v_cache`, returns nothing.

    Args:
        key, value: [tokens, kv_heads, head_dim] float16.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], float16, float8_e4m3fn, float8_e5m2, or uint8 with `kv_dtype`.
            Any strides, last axis contiguous.
        slot_mapping: [tokens] int64, page * page_size + offset; negative: skip the token.
        k_scale, v_scale: float32, 1 or kv_heads elements, FP8 caches only; stored value = key / scale. None means 1.
        kv_dtype: "e4m3" or "e5m2", what a uint8 cache holds.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, stride or device; the text names it.
    """
    function = torch.ops.sm70_triton.kv_write if torch.compiler.is_compiling() else run
    function(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_dtype)


OP = op(
    "kv_write",
    geometry=KvWriteGeometry,
    schema="(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, str? kv_dtype) -> ()",
    outputs=("k_cache", "v_cache"),
    call=kv_write,
    run=run,
    reference=reference,
    cases=CASES,
    make_inputs=make_inputs,
    tolerance=tolerance,
    work=work,
)


class TorchPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to choose."""


@impl(OP, "torch", rev=1, needs=Needs(min_arch=0), arithmetic=Arithmetic(cache_encode="exact"), plan=TorchPlan, automatic=False,
      default=lambda geometry, arch: TorchPlan(), candidates=lambda geometry, arch: [TorchPlan()])
@_kv.like_a_kernel
def _launch_torch(plan: TorchPlan, geometry: KvWriteGeometry, *, key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
    kind = None if geometry.kv_dtype == "fp16" else geometry.kv_dtype
    expected = reference(key, value, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, kv_dtype=kind)
    k_cache.copy_(expected["k_cache"])
    v_cache.copy_(expected["v_cache"])


class SimtPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program writes `block_t` tokens of one head."""

    block_t: int
    num_warps: int


@triton.jit
def _store(x_ptr, cache_ptr, scale_ptr, offs_t, head, offs_d, page, offset, live, stride_t, stride_h, stride_cp, stride_co, stride_ch,
           SCALE: tl.constexpr, KV_DTYPE: tl.constexpr):  # fmt: skip
    x = tl.load(x_ptr + offs_t[:, None].to(tl.int64) * stride_t + head * stride_h + offs_d[None, :], mask=live, other=0.0)
    if KV_DTYPE != "fp16":
        x = x.to(tl.float32)
        if SCALE == "head":
            x = tl.div_rn(x, tl.load(scale_ptr + head))
        elif SCALE == "tensor":
            x = tl.div_rn(x, tl.load(scale_ptr))
        x = encode_e4m3(x) if KV_DTYPE == "e4m3" else encode_e5m2(x)
    tl.store(cache_ptr + page[:, None] * stride_cp + offset[:, None] * stride_co + head * stride_ch + offs_d[None, :], x, mask=live)


@triton.jit(do_not_specialize=["tokens", "slots_in_cache"])  # one kernel for every number of tokens
def _kv_write_simt_kernel(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, tokens, slots_in_cache,
    stride_kt, stride_kh, stride_vt, stride_vh, stride_kcp, stride_kco, stride_kch, stride_vcp, stride_vco, stride_vch,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, KV_DTYPE: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)  # heads may be the outermost axis of a cache: head * stride beyond 2^31
    offs_d = tl.arange(0, BLOCK_D)
    slot = tl.load(slot_ptr + offs_t, mask=offs_t < tokens, other=-1)
    live = ((slot >= 0) & (slot < slots_in_cache))[:, None] & (offs_d < D)[None, :]  # [BLOCK_T, BLOCK_D]
    page = slot // PAGE
    offset = slot % PAGE
    _store(key_ptr, k_cache_ptr, k_scale_ptr, offs_t, head, offs_d, page, offset, live, stride_kt, stride_kh, stride_kcp, stride_kco, stride_kch, K_SCALE, KV_DTYPE)
    _store(value_ptr, v_cache_ptr, v_scale_ptr, offs_t, head, offs_d, page, offset, live, stride_vt, stride_vh, stride_vcp, stride_vco, stride_vch, V_SCALE, KV_DTYPE)


def _candidates(geometry: KvWriteGeometry, arch: int) -> Iterable[SimtPlan]:
    return [SimtPlan(block_t=t, num_warps=w) for t in (1, 2, 4, 8, 16) for w in (1, 2, 4)]


def _default(geometry: KvWriteGeometry, arch: int) -> SimtPlan:
    # 16-byte loads: 8 FP16 a lane. One warp then covers 256 values, the rest of a block is more tokens.
    per_warp = max(1, 256 // int(triton.next_power_of_2(geometry.head_dim)))
    return SimtPlan(block_t=per_warp if geometry.tokens < 512 else 4 * per_warp, num_warps=1 if geometry.tokens < 512 else 4)


def _feasible(plan: SimtPlan, geometry: KvWriteGeometry, arch: int) -> str | None:
    values = plan.block_t * triton.next_power_of_2(geometry.head_dim) // (32 * plan.num_warps)
    return f"{values} values a thread would spill" if values > 64 else None


def scale_mode(scale: torch.Tensor | None) -> str:
    return "none" if scale is None else "tensor" if scale.numel() == 1 else "head"


@impl(OP, "simt", rev=1, needs=Needs(min_arch=70, packages=("triton",)), arithmetic=Arithmetic(cache_encode="exact"), plan=SimtPlan, priority=10,
      feasible=_feasible, default=_default, candidates=_candidates)
def _launch_simt(plan: SimtPlan, geometry: KvWriteGeometry, *, key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale) -> None:
    tokens, heads, dim = key.shape
    _kv_write_simt_kernel[(triton.cdiv(tokens, plan.block_t), heads)](
        key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, tokens, k_cache.shape[0] * geometry.page_size,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2), PAGE=geometry.page_size, D=dim, BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_T=plan.block_t, KV_DTYPE=geometry.kv_dtype, K_SCALE=scale_mode(k_scale), V_SCALE=scale_mode(v_scale), num_warps=plan.num_warps,
    )  # fmt: skip
