"""Attention of new tokens over a paged KV cache: prompts, chunks of prompts, any mix of lengths in one call.

The formula is in `_attention`. Sequence b has queries q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] and seq_lens[b] keys, its new
tokens included; key j is slot (block_table[b, j // page_size], j % page_size) of the caches.

    causal       query at position p sees keys 0..p; otherwise all keys of its sequence
    window       |key - query| < window: with causal, `window` keys including the query's own
    lse          natural log of the softmax denominator, the sink included

A sequence with seq_len 0 is padding: its rows become zeros. Rows of q that belong to no sequence are not written. Rows that see
no key become zeros with lse = -inf (with a sink: the sink's logit). Slots that no query sees are never read into a result,
whatever they hold. Limits: head_dim up to 512; a NaN or infinity in a value that some queries of a sequence see may also reach
queries of the same sequence that do not see it (0 * NaN in the product with the values).
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from ..lib.online_softmax import LOG2E, attend, finish, head_scale, key_range
from ..probe import arch_of
from ..registry import impl, launch, op, resolve
from ..types import Arithmetic, Needs, Plan, Work
from . import _attention as shared
from . import _kv


class AttnPrefillGeometry(shared.AttentionGeometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`q_len`: longest run of new tokens in the batch."""

    DYNAMIC = ("batch", "q_len", "kv_len")
    DEFAULTS = {**shared.AttentionGeometry.DEFAULTS, "q_len": 2048, "causal": True}

    q_len: int
    causal: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_len < 0:
            raise ValueError(f"q_len={self.q_len}: it must not be negative")


def reference(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, *, max_seqlen_q, max_seqlen_k, scale=None, causal=True, window=None,
    softcap=None, sinks=None, alibi_slopes=None, k_scale=None, v_scale=None, kv_dtype=None, out=None, lse=None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Output, and log-sum-exp if `lse` is given, in float64; NaN in rows that belong to no sequence."""
    result = {"out": torch.full(q.shape, float("nan"), dtype=torch.float64, device=q.device)}
    if lse is not None:
        result["lse"] = torch.full(q.shape[:2], float("nan"), dtype=torch.float64, device=q.device)
    parts = shared.compute(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q.tolist(), scale=scale, causal=causal, window=window, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype, dtype=torch.float64,
    )  # fmt: skip
    for rows, values in parts:
        for name, value in zip(("out", "lse"), values, strict=True):
            if name in result:
                result[name][rows] = value
    return result


def tolerance(inputs, expected) -> dict[str, torch.Tensor]:
    """Elementwise bounds (`_attention._rows`): FP32 dot products, scores, exponentials and sums, one FP16 rounding."""
    bounds = {name: torch.zeros_like(value) for name, value in expected.items()}
    settings = {name: inputs.get(name) for name in ("scale", "window", "softcap", "sinks", "alibi_slopes", "k_scale", "v_scale", "kv_dtype")}
    parts = shared.compute(
        *(inputs[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")), inputs["cu_seqlens_q"].tolist(),
        causal=inputs.get("causal", True), dtype=torch.float64, errors=True, **settings,
    )  # fmt: skip
    for rows, (_, _, *errors) in parts:
        for name, error in zip(("out", "lse"), errors, strict=True):
            if name in bounds:
                bounds[name][rows] = error
    return bounds


def make_inputs(
    geometry: AttnPrefillGeometry, *, seed: int, device: str, lens: tuple[tuple[int, int], ...] | None = None, layout: str = "separate",
    spare: int = 2, scaled: bool | str = False, spikes: bool = False, v_size: float | None = None, scale: float | None = None,
    lse: bool = True, padding: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Random queries and cache. `lens`: (q_len, kv_len) of each sequence, default all as the geometry says; `padding`: rows of
    q after the last sequence; the rest: `_attention.random_cache`.
    """
    g = torch.Generator().manual_seed(seed)
    pairs = list(lens) if lens is not None else [(geometry.q_len, geometry.kv_len)] * geometry.batch
    bounds = torch.tensor([0, *(q for q, _ in pairs)]).cumsum(0).to(torch.int32)
    shape = (int(bounds[-1]) + padding, geometry.q_heads, geometry.head_dim)
    return {
        "q": _kv.random_normal(shape, torch.float16, device, g),
        **shared.random_cache(geometry, pairs, generator=g, device=device, layout=layout, spare=spare, scaled=scaled,
                              spikes=spikes, v_size=v_size),
        "cu_seqlens_q": bounds.to(device), "max_seqlen_q": geometry.q_len, "max_seqlen_k": geometry.kv_len, "scale": scale,
        "causal": geometry.causal, **shared.random_features(geometry, g, device), "out": _kv.poison(shape, torch.float16, device),
        "lse": _kv.poison(shape[:2], torch.float32, device) if lse else None,
    }  # fmt: skip


def work(geometry: AttnPrefillGeometry) -> Work:
    return shared.work(geometry, geometry.q_len, geometry.causal)


def _g(q_heads: int, kv_heads: int, head_dim: int, batch: int, q_len: int, kv_len: int, page_size: int = 16, **more: Any) -> dict[str, Any]:
    return {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch, "q_len": q_len, "kv_len": kv_len, "page_size": page_size, **more}


MIXED = ((3, 40), (1, 1), (0, 0), (17, 17), (0, 9), (1, 33), (5, 0))

CASES = shared.cases(AttnPrefillGeometry, [
    ("prompt_9q_3kv_d64", _g(9, 3, 64, 1, 37, 37), {}),
    ("empty_batch", _g(2, 2, 64, 0, 0, 0), {}),
    ("no_tokens", _g(2, 2, 64, 2, 0, 20), {}),
    ("one_token", _g(3, 1, 16, 1, 1, 1), {}),
    ("zero_length", _g(2, 1, 64, 2, 4, 0), {}),
    ("mixed_lengths", _g(6, 1, 64, 7, 17, 40), {"lens": MIXED}),
    ("mixed_lengths_padded_rows", _g(4, 4, 32, 7, 17, 40, 5), {"lens": MIXED, "padding": 3, "lse": False}),
    ("chunk_after_prefix_gqa5_d80", _g(5, 1, 80, 1, 9, 71, 5), {}),
    ("page_1_d72_gqa7", _g(14, 2, 72, 2, 5, 21, 1), {"lens": ((5, 21), (2, 8))}),
    ("gqa6_d256_e4m3", _g(6, 1, 256, 1, 5, 40, kv_dtype="e4m3"), {"scaled": True}),
    ("page_784_window_gqa6_d256_e4m3", _g(6, 1, 256, 1, 12, 800, 784, kv_dtype="e4m3", window=25), {"scaled": True, "layout": "vllm26"}),
    ("d128_gqa8_vllm26", _g(16, 2, 128, 2, 6, 30), {"lens": ((6, 30), (3, 3)), "layout": "vllm26"}),
    ("d96_vllm19_e5m2", _g(4, 2, 96, 2, 6, 30, kv_dtype="e5m2"), {"lens": ((6, 30), (3, 3)), "layout": "vllm19", "scaled": True}),
    ("d192_e4m3_vllm26_one_scale", _g(4, 2, 192, 1, 4, 19, kv_dtype="e4m3"), {"layout": "vllm26", "scaled": "tensor"}),
    ("d512", _g(2, 1, 512, 1, 3, 20), {}),
    ("not_causal", _g(4, 2, 64, 2, 11, 30, causal=False), {"lens": ((11, 30), (7, 3))}),
    ("window_across_pages", _g(4, 2, 64, 1, 40, 75, 5, window=13), {}),
    ("window_1", _g(2, 2, 32, 1, 7, 12, window=1), {}),
    ("window_not_causal", _g(2, 1, 64, 2, 20, 45, 5, window=9, causal=False), {"lens": ((20, 45), (19, 4))}),
    ("softcap", _g(4, 2, 64, 1, 12, 50, softcap=True), {"scale": 0.7}),
    ("sinks", _g(8, 1, 64, 3, 7, 35, sinks=True), {"lens": ((7, 35), (2, 2), (3, 0))}),
    ("sinks_nothing_seen", _g(4, 2, 32, 1, 19, 4, window=3, causal=False, sinks=True), {}),
    ("alibi", _g(6, 2, 64, 1, 12, 60, alibi=True), {}),
    ("everything_e4m3", _g(10, 2, 80, 3, 15, 66, 5, kv_dtype="e4m3", window=21, softcap=True, sinks=True, alibi=True),
     {"lens": ((15, 66), (4, 4), (1, 50)), "scaled": True, "layout": "vllm19", "scale": 0.3}),
    ("spikes", _g(4, 1, 64, 1, 16, 90), {"spikes": True}),
    ("large_values", _g(4, 2, 64, 1, 9, 80), {"v_size": 6e4}),
]) + shared.cases(AttnPrefillGeometry, [
    ("prefill_8k_at_32k_24q_4kv_d256_e4m3", _g(24, 4, 256, 1, 8192, 32768, 784, kv_dtype="e4m3"), {"scaled": True, "layout": "vllm26"}),
    ("prefill_2k_at_8k_24q_4kv_d256", _g(24, 4, 256, 1, 2048, 8192, 784), {"layout": "vllm26"}),
    ("prefill_2k_at_8k_6q_1kv_d256_e4m3", _g(6, 1, 256, 1, 2048, 8192, 784, kv_dtype="e4m3"), {"scaled": "tensor"}),
    ("prefill_4k_32q_8kv_d128", _g(32, 8, 128, 2, 4096, 4096), {"layout": "vllm19"}),
    ("prefill_4k_64q_8kv_d64_window_sinks", _g(64, 8, 64, 1, 4096, 4096, window=128, sinks=True), {}),
    ("prefill_2k_9q_3kv_d64", _g(9, 3, 64, 4, 2048, 2048), {}),
    ("prefill_1k_at_4k_d80_softcap_e5m2", _g(32, 32, 80, 1, 1024, 4096, kv_dtype="e5m2", softcap=True), {"scaled": True}),
    ("prefill_1k_d512_alibi", _g(8, 2, 512, 1, 1024, 1024, alibi=True), {}),
], production=True)  # fmt: skip


def run(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, sinks, alibi_slopes,
    k_scale, v_scale, kv_dtype, out, lse,
) -> None:  # fmt: skip
    kind = shared.check(q, k_cache, v_cache, block_table, seq_lens, scale=scale, window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
                        k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype, out=out, lse=lse)
    _kv.check_tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), q.device)
    batch = seq_lens.shape[0]
    _kv.require(cu_seqlens_q.shape[0] == batch + 1, f"cu_seqlens_q has {cu_seqlens_q.shape[0]} elements; seq_lens asks for {batch + 1}")
    shared.check_length("max_seqlen_q", max_seqlen_q)
    shared.check_length("max_seqlen_k", max_seqlen_k)
    if shared.values_are_checked(q.device):
        shared.check_values(k_cache, block_table, seq_lens, max_seqlen_k)
        _check_queries(cu_seqlens_q.tolist(), seq_lens.tolist(), q.shape[0], max_seqlen_q, causal)
    if batch == 0 or q.shape[0] == 0 or max_seqlen_q == 0:
        return
    geometry = AttnPrefillGeometry(
        **shared.geometry_fields(kind, q, k_cache, batch, max_seqlen_k, window, softcap, sinks, alibi_slopes),
        q_len=shared.next_power_of_2(max_seqlen_q), causal=causal,
    )  # fmt: skip
    launch(
        resolve(OP, geometry, arch_of(q.device)), geometry, q.device, q=q, k_cache=_kv.as_bytes(k_cache), v_cache=_kv.as_bytes(v_cache),
        block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
        k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, max_seqlen_q=min(max_seqlen_q, q.shape[0]),
    )  # fmt: skip


def _check_queries(bounds: list[int], lengths: list[int], tokens: int, max_seqlen_q: int, causal: bool) -> None:
    _kv.require(bounds[0] >= 0, f"cu_seqlens_q[0]={bounds[0]}: it must not be negative")
    _kv.require(bounds[-1] <= tokens, f"cu_seqlens_q[-1]={bounds[-1]} exceeds the {tokens} tokens of q")
    for i, length in enumerate(lengths):
        q_len = bounds[i + 1] - bounds[i]
        _kv.require(q_len >= 0, f"cu_seqlens_q[{i + 1}]={bounds[i + 1]} is smaller than the element before it, {bounds[i]}")
        _kv.require(q_len <= max_seqlen_q, f"sequence {i} has {q_len} queries, more than max_seqlen_q={max_seqlen_q}")
        _kv.require(
            not causal or length == 0 or length >= q_len,
            f"seq_lens[{i}]={length} does not include the sequence's {q_len} new tokens (0 would mark padding)",
        )


def attn_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of new tokens over a paged cache that already holds their keys and values (formula: module docstring).

    Args:
        q: [tokens, q_heads, head_dim] float16, the sequences one after another.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], float16, float8_e4m3fn, float8_e5m2, or uint8 with `kv_dtype`.
            Any strides, last axis contiguous. q_heads is a multiple of kv_heads.
        block_table: [batch, max_pages] int32, page of each page_size tokens; entries beyond a sequence's length may hold anything.
        seq_lens: [batch] int32, keys of each sequence, its new tokens included; 0: padding.
        cu_seqlens_q: [batch + 1] int32, where each sequence's queries begin in q, and the end.
        max_seqlen_q, max_seqlen_k: host integers, not below any q_len / seq_len; they size the launch.
        scale: factor of the dot product, None: head_dim ** -0.5.
        window: keys that a query sees, itself included, None: all. Not causal: |key - query| < window.
        softcap: s -> softcap * tanh(s / softcap), None: off.
        sinks: [q_heads] float32, one more logit per head, in the denominator only.
        alibi_slopes: [q_heads] float32, adds slope * (key position - query position).
        k_scale, v_scale: float32, 1 or kv_heads elements, FP8 caches only; real value = stored * scale. None means 1.
        kv_dtype: "e4m3" or "e5m2", what a uint8 cache holds.
        out: like q, written and returned; None: a new tensor. Rows that belong to no sequence are not touched.
        lse: [tokens, q_heads] float32, written if given: log of the softmax denominator, the sink included.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, stride, device or value; the text names it. Lengths and page
            ids are checked for CPU tensors and in debug mode (SM70_TRITON_DEBUG=1); a kernel never reads beyond the tensors.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    function = torch.ops.sm70_triton.attn_prefill if torch.compiler.is_compiling() else run
    function(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seqlen_k, scale, causal, window, softcap, sinks,
             alibi_slopes, k_scale, v_scale, kv_dtype, out, lse)
    return out


OP = op(
    "attn_prefill",
    geometry=AttnPrefillGeometry,
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float? scale, bool causal, int? window, float? softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, "
    "Tensor? v_scale, str? kv_dtype, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    outputs=("out", "lse"),
    call=attn_prefill,
    run=run,
    reference=reference,
    cases=CASES,
    make_inputs=make_inputs,
    tolerance=tolerance,
    work=work,
)

ARITHMETIC = Arithmetic(qk_accum_bits=32, pv_accum_bits=32)


@impl(OP, "torch", rev=1, needs=Needs(min_arch=0), arithmetic=ARITHMETIC, plan=shared.NoPlan, automatic=False,
      default=lambda geometry, arch: shared.NoPlan(), candidates=lambda geometry, arch: [shared.NoPlan()])
@_kv.like_a_kernel
def _launch_torch(plan: shared.NoPlan, geometry: AttnPrefillGeometry, *, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale,
                  softcap, sinks, alibi_slopes, k_scale, v_scale, out, lse, max_seqlen_q) -> None:  # fmt: skip
    parts = shared.compute(
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q.tolist(), scale=scale, causal=geometry.causal, window=geometry.window or None,
        softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
        kv_dtype=None if geometry.kv_dtype == "fp16" else geometry.kv_dtype, dtype=torch.float32,
    )  # fmt: skip
    for rows, values in parts:
        out[rows] = values[0].half()
        if lse is not None:
            lse[rows] = values[1]


class SimtPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program: `block_m` rows (tokens x the query heads of one KV head) of one sequence, in steps of `block_n` keys."""

    block_m: int
    block_n: int
    num_warps: int


@triton.jit(do_not_specialize=["tokens", "tiles", "batch", "room", "pages", "window"])
def _attn_prefill_simt_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, len_ptr, cu_ptr, sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    tokens, tiles, batch, room, pages, window, qk_scale, cap,
    stride_qt, stride_qh, stride_kp, stride_ko, stride_kh, stride_vp, stride_vo, stride_vh, stride_b, stride_ot, stride_oh, stride_lt, stride_lh,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KV_DTYPE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) % batch
    tile = tiles - 1 - tl.program_id(0) // batch  # causal: the last tiles see most keys, so they start first
    kv_head = tl.program_id(1).to(tl.int64)  # heads may be the outermost axis of a cache: head * stride beyond 2^31
    first_token = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), tokens)
    q_len = tl.minimum(tl.load(cu_ptr + sequence + 1), tokens) - first_token
    if tile * BLOCK_M >= q_len * GROUP:
        return
    length = tl.maximum(tl.load(len_ptr + sequence), 0)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = token < q_len
    q_pos = length - q_len + token
    first = length - q_len + tile * BLOCK_M // GROUP
    last = length - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    begin, end = key_range(first, last, tl.minimum(length, room), window, CAUSAL, WINDOW)  # pyright: ignore[reportGeneralTypeIssues]

    scale = qk_scale * head_scale(k_scale_ptr, kv_head, K_SCALE)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slope_ptr + head) * LOG2E
    sink = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sink_ptr + head) * LOG2E
    at = (first_token + token).to(tl.int64)
    acc, top, total = attend(
        q_ptr, at * stride_qt + head * stride_qh, live, q_pos, slope, begin, end, k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_vh,
        table_ptr + sequence.to(tl.int64) * stride_b, pages, scale, cap, window, stride_kp, stride_ko, stride_vp, stride_vo,
        PAGE, D, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_K, KV_DTYPE, CAUSAL, WINDOW, SOFTCAP, ALIBI,
    )  # fmt: skip
    out, lse = finish(acc, top, total, sink, head_scale(v_scale_ptr, kv_head, V_SCALE), SINKS)
    offs_d = tl.arange(0, BLOCK_D)
    tl.store(out_ptr + (at * stride_ot + head * stride_oh)[:, None] + offs_d[None, :], out.to(tl.float16), mask=live[:, None] & (offs_d < D)[None, :])
    if LSE:
        tl.store(lse_ptr + at * stride_lt + head * stride_lh, lse, mask=live)


def _candidates(geometry: AttnPrefillGeometry, arch: int) -> Iterable[SimtPlan]:
    return [SimtPlan(block_m=m, block_n=n, num_warps=w) for m in (16, 32, 64, 128) for n in (16, 32, 64) for w in (4, 8)]


def _default(geometry: AttnPrefillGeometry, arch: int) -> SimtPlan:
    # Measured with aot.usage for sm_70: the largest tiles that never spill; masked head dimensions hold more addresses.
    rows = shared.next_power_of_2(shared.next_power_of_2(geometry.q_len) * geometry.group)
    most = min(64, 8192 // geometry.block_d) // (1 if geometry.head_dim == geometry.block_d else 2)
    block_m = max(16, min(rows, most))
    if arch == 75 and geometry.block_d == 512:
        block_m = 8  # Turing has less shared memory
    return SimtPlan(block_m=block_m, block_n=16, num_warps=8 if block_m * geometry.block_d >= 4096 else 4)


def _feasible(plan: SimtPlan, geometry: AttnPrefillGeometry, arch: int) -> str | None:
    return shared.simt_refusal(geometry, arch, plan.block_m, plan.block_n, plan.num_warps)


@impl(OP, "simt", rev=1, needs=Needs(min_arch=70, packages=("triton",)), arithmetic=ARITHMETIC, plan=SimtPlan, priority=10, feasible=_feasible,
      default=_default, candidates=_candidates)
def _launch_simt(plan: SimtPlan, geometry: AttnPrefillGeometry, *, q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, softcap, sinks,
                 alibi_slopes, k_scale, v_scale, out, lse, max_seqlen_q) -> None:  # fmt: skip
    qk_scale, cap = shared.score_values(geometry, scale, softcap)
    tiles = shared.cdiv(max_seqlen_q * geometry.group, plan.block_m)
    _attn_prefill_simt_kernel[(tiles * geometry.batch, geometry.kv_heads)](
        q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, sinks, alibi_slopes, k_scale, v_scale, out, lse,
        q.shape[0], tiles, geometry.batch, shared.table_room(block_table, geometry.page_size), k_cache.shape[0], geometry.window, qk_scale, cap,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        block_table.stride(0), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), 0 if lse is None else lse.stride(1),
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, CAUSAL=geometry.causal, LSE=lse is not None,
        **shared.kernel_constants(geometry, k_scale, v_scale), num_warps=plan.num_warps, num_stages=1,
    )  # fmt: skip
