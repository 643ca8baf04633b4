"""What attn_prefill and attn_decode share: geometry, argument checks, the reference, error bounds, random inputs, launch values.

The formula, for query i of a sequence with q_len queries and kv_len keys (the new tokens included), at position
p = kv_len - q_len + i, head h of KV head h // (q_heads / kv_heads):

    x_j   = scale * k_scale * (q_i . k_j)
    s_j   = softcap * tanh(x_j / softcap)  (or x_j)  + alibi_slope_h * (j - p)
    seen  : j < kv_len, j <= p if causal, |j - p| < window if there is one
    out_i = sum_seen exp(s_j) v_scale v_j / (sum_seen exp(s_j) + exp(sink_h))
    lse_i = ln(the same denominator)
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .. import env
from ..types import Case, Geometry, Plan, Work
from . import _kv

UNIT = 2.0**-24  # half a unit in the last place of float32
ROUND_FP16 = 2.0**-11
BLOCK_K = 16  # slice of the head dimension in a score's dot product, the least that tl.dot takes: registers are scarce


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class AttentionGeometry(Geometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`batch` sequences of up to `kv_len` keys; `window` 0 is none; softcap, sinks and alibi say whether a call has them."""

    DEFAULTS = {
        "q_heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 1, "kv_len": 8192, "kv_dtype": "fp16", "page_size": 16,
        "window": 0, "softcap": False, "sinks": False, "alibi": False,
    }  # fmt: skip

    kv_dtype: str
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    batch: int
    kv_len: int
    window: int = 0
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False

    def __post_init__(self) -> None:
        if self.kv_dtype not in _kv.KV_DTYPES:
            raise ValueError(f"kv_dtype={self.kv_dtype!r}; accepted: {', '.join(_kv.KV_DTYPES)}")
        for name in ("q_heads", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        for name in ("batch", "kv_len", "window"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: it must not be negative")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads={self.q_heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim > 512:
            raise ValueError(f"head_dim={self.head_dim}; accepted: 1 to 512")

    @classmethod
    def from_keys(cls, keys):
        keys = dict(keys)
        if keys.get("window", 0) is None:
            keys["window"] = 0
        cap = keys.get("softcap")
        if cap is None:
            keys.pop("softcap", None)
        elif not isinstance(cap, bool):
            if not isinstance(cap, (int, float)) or not 0 <= cap < math.inf:
                raise ValueError(f"softcap={cap!r}: a number that is not negative (0: none), or true or false")
            keys["softcap"] = cap > 0
        return super().from_keys(keys)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def block_d(self) -> int:
        """Head dimension as kernels see it: a power of two, at least the 16 that tl.dot takes."""
        return max(16, next_power_of_2(self.head_dim))


class NoPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing to choose."""


# ---------------------------------------------------------------------------------------------------------------- checks


def check(q, k_cache, v_cache, block_table, seq_lens, *, scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale, kv_dtype, out, lse) -> str:
    """Check the arguments that both operations have; returns the cache's format. Looks at no device memory."""
    _kv.require(isinstance(q, torch.Tensor), f"q is a {type(q).__name__}; a tensor is accepted", TypeError)
    device = q.device
    _kv.check_tensor("q", q, 3, (torch.float16,), device)
    kind = _kv.check_cache(k_cache, v_cache, kv_dtype, device)
    _kv.check_tensor("block_table", block_table, 2, (torch.int32,), device)
    _kv.check_tensor("seq_lens", seq_lens, 1, (torch.int32,), device)
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    _kv.require(k_cache.shape[3] == dim, f"k_cache.shape={tuple(k_cache.shape)}: its head dimension must be that of q, {dim}")
    _kv.require(min(heads, kv_heads) > 0 and heads % kv_heads == 0, f"q has {heads} heads: a multiple of the cache's {kv_heads} KV heads is accepted")
    _kv.require(
        seq_lens.shape[0] == block_table.shape[0],
        f"seq_lens has {seq_lens.shape[0]} sequences, block_table.shape={tuple(block_table.shape)}",
    )
    _kv.check_tensor("out", out, 3, (torch.float16,), device)
    _kv.require(out.shape == q.shape, f"out.shape={tuple(out.shape)} must equal q.shape={tuple(q.shape)}")
    _kv.check_output("out", out)
    if lse is not None:
        _kv.check_tensor("lse", lse, 2, (torch.float32,), device)
        _kv.check_output("lse", lse)
        _kv.require(lse.shape == (tokens, heads), f"lse.shape={tuple(lse.shape)} must be {(tokens, heads)}")
    for name, values in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if values is not None:
            _kv.check_tensor(name, values, 1, (torch.float32,), device)
            _kv.require(values.shape[0] == heads, f"{name} has {values.shape[0]} elements; one per query head is needed, {heads}")
    _kv.check_scale("k_scale", k_scale, kv_heads, kind, device)
    _kv.check_scale("v_scale", v_scale, kv_heads, kind, device)
    for name, number in (("scale", scale), ("softcap", softcap)):  # kernels take them in float32
        _kv.require(number is None or isinstance(number, (int, float)), f"{name} is a {type(number).__name__}; a float or None is accepted", TypeError)
    _kv.require(scale is None or abs(scale) < 2.0**100, f"scale={scale}: it must be finite, and below 2^100")
    _kv.require(softcap is None or 2.0**-100 < softcap < 2.0**100, f"softcap={softcap}: a positive number, or None for none (2^-100 to 2^100)")
    _kv.require(window is None or isinstance(window, int), f"window is a {type(window).__name__}; an int or None is accepted", TypeError)
    _kv.require(window is None or 1 <= window < 2**31, f"window={window}: at least 1, or None for no window, and below 2^31")
    return kind


def check_length(name: str, value: int) -> None:
    _kv.require(isinstance(value, int), f"{name} is a {type(value).__name__}; an int is accepted (a tensor would have to synchronise)", TypeError)
    _kv.require(0 <= value < 2**31, f"{name}={value}: it must be at least 0 and below 2^31")


def check_values(k_cache, block_table, seq_lens, max_seqlen_k: int) -> None:
    """Check lengths and page ids. Reads device memory: for CPU tensors and debug mode."""
    lengths = seq_lens.tolist()
    pages, page_size = k_cache.shape[:2]
    for i, length in enumerate(lengths):
        where = f"seq_lens[{i}]={length}"
        _kv.require(length >= 0, f"{where}: it must not be negative")
        _kv.require(length <= max_seqlen_k, f"{where} exceeds max_seqlen_k={max_seqlen_k}")
        room = block_table.shape[1] * page_size
        _kv.require(length <= room, f"{where} exceeds the {room} tokens of a row of block_table ({block_table.shape[1]} pages of {page_size})")
    if not block_table.numel():
        return
    used = torch.arange(block_table.shape[1], device=block_table.device) * page_size < seq_lens[:, None]
    wrong = used & ((block_table < 0) | (block_table >= pages))
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ValueError(f"block_table[{b}, {i}]={int(block_table[b, i])}: the cache has pages 0 to {pages - 1}")


def values_are_checked(device: torch.device) -> bool:
    return device.type == "cpu" or (env.get().debug and device.type != "meta")


def geometry_fields(kind, q, k_cache, batch, max_seqlen_k, window, softcap, sinks, alibi_slopes) -> dict[str, Any]:
    """Lengths are rounded up to powers of two: a server's change with every step, and each geometry is looked up once."""
    return {
        "kv_dtype": kind, "q_heads": q.shape[1], "kv_heads": k_cache.shape[2], "head_dim": q.shape[2], "page_size": k_cache.shape[1],
        "batch": batch, "kv_len": next_power_of_2(max_seqlen_k), "window": window or 0, "softcap": softcap is not None, "sinks": sinks is not None,
        "alibi": alibi_slopes is not None,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- reference


class _Terms(NamedTuple):
    """Settings of one call, heads split as [kv_heads, group, 1, 1]."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    slopes: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor


def compute(
    q, k_cache, v_cache, block_table, seq_lens, bounds: list[int], *, scale, causal, window, softcap, sinks, alibi_slopes, k_scale,
    v_scale, kv_dtype, dtype: torch.dtype, errors: bool = False,
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:  # fmt: skip
    """Yield (rows, (out, lse)) in `dtype` for parts of the sequences; with `errors` also the bounds of both.

    `bounds`: where each sequence's queries begin in q, and the end. Keys beyond the table, and keys of pages that do not exist,
    are not seen.
    """
    kind = _kv.kv_dtype_of(k_cache, kv_dtype)
    pages, page_size, kv_heads, dim = k_cache.shape
    heads = q.shape[1]

    def split(per_head: torch.Tensor | None) -> torch.Tensor | None:
        return None if per_head is None else per_head.to(dtype).reshape(kv_heads, -1, 1, 1)

    ones = torch.ones(kv_heads, dtype=dtype, device=q.device)
    terms = _Terms(
        scale=dim**-0.5 if scale is None else scale, causal=causal, window=window, softcap=softcap, sinks=split(sinks), slopes=split(alibi_slopes),
        k_scale=(ones if k_scale is None else k_scale.to(dtype).reshape(-1).expand(kv_heads)).view(-1, 1, 1, 1),
        v_scale=(ones if v_scale is None else v_scale.to(dtype).reshape(-1).expand(kv_heads)).view(-1, 1, 1),
    )  # fmt: skip
    for b, length in enumerate(seq_lens.tolist()):
        first, q_len = bounds[b], bounds[b + 1] - bounds[b]
        length = max(0, length)
        end = min(length, block_table.shape[1] * page_size)
        begin = max(0, length - q_len - window + 1) if window else 0  # older keys are seen by no row: never touch them
        k_pos = torch.arange(begin, max(begin, end), device=q.device)
        page = block_table[b, k_pos // page_size].long()
        exists = (page >= 0) & (page < pages)
        if not bool(exists.all()):
            k_pos, page = k_pos[exists], page[exists]
        k, v = (_decode(_kv.as_bytes(cache)[page, k_pos % page_size], kind, dtype).transpose(0, 1) for cache in (k_cache, v_cache))
        step = max(1, 2**25 // max(1, heads * len(k_pos)))  # rows at a time, so that scores stay within 256 MiB
        for row in range(0, q_len, step):
            rows = slice(first + row, first + min(q_len, row + step))
            q_pos = torch.arange(row, row + rows.stop - rows.start, device=q.device) + (length - q_len)
            yield rows, _rows(q[rows].to(dtype), k, v, q_pos, k_pos, terms, errors)


def _decode(stored: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    return stored.to(dtype) if kind == "fp16" else stored.view(_kv.FLOAT8[kind]).to(torch.float32).to(dtype)


def _rows(q, k, v, q_pos, k_pos, t: _Terms, errors: bool) -> tuple[torch.Tensor, ...]:
    """q [R, Hq, D] against k, v [Hkv, L, D] -> out [R, Hq, D] and lse [R, Hq]."""
    rows, heads, dim = q.shape
    kv_heads, keys = k.shape[:2]
    group = heads // kv_heads
    q = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)

    def merge(x: torch.Tensor) -> torch.Tensor:
        """[Hkv, group * R, ...] -> [R, Hq, ...]"""
        return x.reshape(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)

    ahead = k_pos[None, :] - q_pos[:, None]  # [R, L]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if t.causal:
        seen &= ahead <= 0
    if t.window:
        seen &= ahead.abs() < t.window

    x = (q @ k.mT).view(kv_heads, group, rows, keys) * (t.scale * t.k_scale)
    s = x if t.softcap is None else t.softcap * torch.tanh(x / t.softcap)
    bias = None if t.slopes is None else t.slopes * ahead
    if bias is not None:
        s = s + bias
    s = s.masked_fill(~seen, -math.inf)
    top = s.amax(-1, keepdim=True) if keys else s.new_full((kv_heads, group, rows, 1), -math.inf)
    if t.sinks is not None:
        top = torch.maximum(top, t.sinks)
    anchor = top.masked_fill(top == -math.inf, 0.0)
    p = torch.exp(s - anchor)
    total = p.sum(-1, keepdim=True)
    if t.sinks is not None:
        total = total + torch.exp(t.sinks - anchor)
    p = (p / total.masked_fill(total == 0, 1.0)).view(kv_heads, group * rows, keys)
    v = v * t.v_scale
    out = p @ v
    lse = anchor + torch.log(total)  # log(0) = -inf where nothing is seen and there is no sink
    if not errors:
        return merge(out), merge(lse)[..., 0]

    # Bounds. `chance(n)` units bound a sum of n rounding errors: never more than n, and, taking them as independent with mean
    # zero, 8 sqrt(n) with probability 1 - 2 exp(-32) (Higham and Mary 2019, theorem 2.4).
    def chance(n: int) -> float:
        return min(n, 8 * math.sqrt(n)) * UNIT

    # 1. Errors of the scores. Dot products: independent from key to key. The rest, in units of float32 rounding: constants and
    # scales (4 |x|), tanh (20 units of the cap, or 8 |x| below a quarter of it), bias and sum, s - max, and exp2 (2^-22 = 4).
    dot = (chance(dim + 2) * ((q.abs() @ k.abs().mT).view(kv_heads, group, rows, keys) * (abs(t.scale) * t.k_scale.abs()))).masked_fill(~seen, 0.0)
    other = 4 * x.abs()
    if t.softcap is not None:
        other += torch.where(x.abs() < 0.25 * t.softcap, 8 * x.abs(), torch.full_like(x, 24 * t.softcap))
    if bias is not None:
        other += 4 * (bias.abs() + x.abs())
    other = (UNIT * (other + (anchor - s) + 6)).masked_fill(~seen, 0.0)
    dot, other = (e.view(kv_heads, group * rows, keys) for e in (dot, other))
    # A sink is one more key whose value is 0.
    anchor = anchor.reshape(kv_heads, group * rows, 1)
    total = total.reshape(kv_heads, group * rows, 1)
    sink = torch.zeros_like(total)
    if t.sinks is not None:
        logit = t.sinks.expand(-1, -1, rows, 1).reshape(kv_heads, group * rows, 1)
        sink = torch.exp(logit - anchor) / total * UNIT * (2 * logit.abs() + (anchor - logit) + 6)
    # 2. d out = sum p (v - out) d s: dot-product errors add up as independent ones, the others as if they all conspired.
    # 3. Sums over the keys, the division and the scale of V, then one rounding to FP16 (2^-25 is half of its smallest step).
    sums = chance(keys + 8)
    size = out.abs()
    squares = (p * dot).square()
    spread = 8 * (2 * (squares @ v.square() + squares.sum(-1, keepdim=True) * out.square())).sqrt()
    worst = (p * (other + sums)) @ v.abs() + size * ((p * other).sum(-1, keepdim=True) + sink + sums + 8 * UNIT)
    second = 1 + 4 * ((dot + other).amax(-1, keepdim=True) if keys else 0.0)  # errors of exp beyond first order
    out_error = (spread + worst) * second + 1e-37
    out_error = out_error * (1 + ROUND_FP16) + ROUND_FP16 * size + 2.0**-25
    lse_error = (8 * squares.sum(-1, keepdim=True).sqrt() + (p * other).sum(-1, keepdim=True) + sink + sums) * second
    lse_error = lse_error + UNIT * (4 * (anchor.abs() + 1) + 4 * lse.reshape_as(anchor).abs() + 8)  # max + log2, times ln 2
    return merge(out), merge(lse)[..., 0], merge(out_error), merge(lse_error.nan_to_num(posinf=0.0))[..., 0]


# ---------------------------------------------------------------------------------------------------------------- inputs


def random_cache(
    geometry: AttentionGeometry, lens: list[tuple[int, int]], *, generator: torch.Generator, device: str, layout: str, spare: int, scaled: bool | str,
    spikes: bool, v_size: float | None,
) -> dict[str, Any]:  # fmt: skip
    """A cache whose pages lie in random order, NaN in every slot that no query may see, and its table, lengths and scales
    (`scaled`: one per KV head, or one for the "tensor").

    `layout`: "separate"; "vllm19": kv_cache [pages, 2, page, heads, D].unbind(1); "vllm26": kv_cache [pages, heads, page, 2 D],
    .transpose(1, 2).split(D, -1). Unused table entries are wild. Long caches repeat a block of at most 2^24 random values.
    """
    g, page, heads, dim, kind = generator, geometry.page_size, geometry.kv_heads, geometry.head_dim, geometry.kv_dtype
    needed = [cdiv(kv, page) for _, kv in lens]
    pages = sum(needed) + spare
    width = max([cdiv(geometry.kv_len, page), *needed, 1]) + (1 if spare else 0)
    dtype = torch.float16 if kind == "fp16" else torch.uint8
    if layout == "vllm19":
        k_cache, v_cache = _kv.poison((pages, 2, page, heads, dim), dtype, device).unbind(1)
    elif layout == "vllm26":
        k_cache, v_cache = _kv.poison((pages, heads, page, 2 * dim), dtype, device).transpose(1, 2).split(dim, -1)
    else:
        k_cache, v_cache = (_kv.poison((pages, page, heads, dim), dtype, device) for _ in "kv")
    order = torch.randperm(pages, generator=g).tolist()
    table = torch.where(torch.rand(len(lens), width, generator=g) < 0.5, -1, 2**31 - 1).to(torch.int32)
    scales: list[torch.Tensor | None] = [None, None]
    if scaled:
        shape = heads if scaled != "tensor" else 1
        scales = [torch.rand(shape, generator=g) * 0.05 + 0.01 for _ in "kv"]
    inputs = {"k_cache": k_cache, "v_cache": v_cache}
    if device != "meta":
        block = max(1, min(max([kv for _, kv in lens], default=0), 2**24 // (heads * dim)))
        source = []
        for i in range(2):
            x = torch.randn(block, heads, dim, generator=g)
            if i == 0 and spikes:  # a few keys whose scores reach +-100 with queries of about 1
                x[torch.rand(block, generator=g) < 0.1] *= 100 / 3
            if i == 1 and v_size:
                x = x.sign() * v_size * (1 - 0.05 * x.abs().clamp_max(4))
            scale = scales[i]
            source.append(_kv.quantize(x.half(), _kv.per_head(scale, heads, x), kind).to(device))
    else:
        source = []
    for b, (q_len, kv) in enumerate(lens):
        mine = [order.pop() for _ in range(needed[b])]
        table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        if not source:
            continue
        k_pos = torch.arange(max(0, kv - q_len - geometry.window + 1) if geometry.window else 0, kv)
        slot = torch.tensor(mine, dtype=torch.int64)[k_pos // page].to(device), (k_pos % page).to(device)
        from_block = ((k_pos + 977 * b) % len(source[0])).to(device)
        for cache, values in zip((k_cache, v_cache), source, strict=True):
            cache[slot] = values[from_block]
    if kind != "fp16":
        inputs = {name: cache if layout != "separate" else cache.view(_kv.FLOAT8[kind]) for name, cache in inputs.items()}
    return {
        **inputs, "block_table": table.to(device), "seq_lens": torch.tensor([kv for _, kv in lens], dtype=torch.int32).to(device),
        "k_scale": None if scales[0] is None else scales[0].to(device), "v_scale": None if scales[1] is None else scales[1].to(device),
        "kv_dtype": None if kind == "fp16" else kind,
    }  # fmt: skip


def random_features(geometry: AttentionGeometry, generator: torch.Generator, device: str) -> dict[str, Any]:
    """window, softcap, sinks, ALiBi slopes as the geometry asks for."""
    heads, g = geometry.q_heads, generator
    return {
        "window": geometry.window or None,
        "softcap": 5.0 if geometry.softcap else None,
        "sinks": (torch.randn(heads, generator=g) * 2).to(device) if geometry.sinks else None,
        "alibi_slopes": (2.0 ** -(8.0 * torch.arange(1, heads + 1) / heads)).to(device) if geometry.alibi else None,
    }


def work(geometry: AttentionGeometry, q_len: int, causal: bool) -> Work:
    """Two multiply-adds per head, dimension, and visible pair; q, out and the visible K and V once."""
    kv, w = geometry.kv_len, geometry.window
    first = kv - q_len

    def ramp(n: int) -> int:
        """0 + 1 + ... + n."""
        return n * (n + 1) // 2 if n > 0 else 0

    pairs = ramp(kv) - ramp(first) if causal else q_len * kv
    if w:  # rows at position p lose the p - w + 1 oldest keys
        pairs -= ramp(kv - w) - ramp(first - w)
        if not causal:  # and the kv - p - w farthest ahead
            pairs -= ramp(q_len - w)
    keys = kv - (max(0, first - w + 1) if w else 0)
    moved = 2 * keys * geometry.kv_heads * geometry.head_dim * (2 if geometry.kv_dtype == "fp16" else 1)
    moved += 4 * q_len * geometry.q_heads * geometry.head_dim
    return Work(flops=4 * geometry.batch * geometry.q_heads * geometry.head_dim * max(0, pairs), bytes=geometry.batch * moved)


# ---------------------------------------------------------------------------------------------------------------- launch


def kernel_constants(geometry: AttentionGeometry, k_scale, v_scale) -> dict[str, Any]:
    """The constexpr arguments that follow from a geometry."""
    return {
        "GROUP": geometry.group, "PAGE": geometry.page_size, "D": geometry.head_dim, "BLOCK_D": geometry.block_d, "BLOCK_K": BLOCK_K,
        "KV_DTYPE": geometry.kv_dtype, "WINDOW": geometry.window > 0, "SOFTCAP": geometry.softcap, "SINKS": geometry.sinks,
        "ALIBI": geometry.alibi, "K_SCALE": scale_mode(k_scale), "V_SCALE": scale_mode(v_scale),
    }  # fmt: skip


def simt_refusal(geometry: AttentionGeometry, arch: int, block_m: int, block_n: int, num_warps: int) -> str | None:
    """Why `online_softmax.attend` with this tile would not fit a CTA; None if it does."""
    shared, limit = simt_shared_bytes(geometry, block_m, block_n), 65536 if arch == 75 else 98304  # Turing has less than Volta
    if shared > limit:
        return f"{shared} bytes of shared memory; a CTA has {limit}"
    held = block_m * geometry.block_d // (32 * num_warps)
    return f"{held} accumulators and {block_n} keys a thread would spill" if held * block_n > 1024 else None


def simt_shared_bytes(geometry: AttentionGeometry, block_m: int, block_n: int) -> int:
    """float32 q, which Triton keeps there across tiles, the operands of the second dot product, and a row of rescale factors."""
    width = cdiv(geometry.head_dim, BLOCK_K) * BLOCK_K
    return 4 * (block_m * width + block_n * (block_m + geometry.block_d) + block_m)


def scale_mode(scale: torch.Tensor | None) -> str:
    return "none" if scale is None else "tensor" if scale.numel() == 1 else "head"


def score_values(geometry: AttentionGeometry, scale: float | None, softcap: float | None) -> tuple[float, float]:
    """(qk_scale, cap) as `online_softmax.score` takes them, before the scale of K."""
    qk_scale = geometry.head_dim**-0.5 if scale is None else scale
    log2e = math.log2(math.e)
    return (qk_scale * log2e, 0.0) if softcap is None else (qk_scale / softcap, softcap * log2e)


def table_room(block_table: torch.Tensor, page_size: int) -> int:
    """Tokens that a row of the table can hold, kept clear of int32 overflow in a kernel's loop."""
    return min(block_table.shape[1] * page_size, 2**31 - 4096)


def cases(geometry: type[AttentionGeometry], rows: list[tuple[str, dict[str, Any], dict[str, Any]]], production: bool = False) -> list[Case]:
    return [Case(name=name, geometry=geometry.from_keys(keys), options=options, production=production) for name, keys, options in rows]
