"""Attention of one new token per sequence over a paged KV cache, split over the keys.

The formula is in `_attention`: the query of sequence b sits at position seq_lens[b] - 1 and sees the `window` keys up to and
including its own, or all of them. seq_len 0 marks padding: zeros, lse = -inf (with a sink: the sink's logit).

Each split of a sequence's keys leaves a numerator, a maximum and a sum in FP32; a second kernel merges them. How many splits is
decided from host integers, which keys a split gets from the length on the device, so a captured CUDA graph serves other lengths
and page tables. A split without keys leaves maximum -inf and sum 0.
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

#: 2 programs on each of a V100's 80 multiprocessors; the workspace has room for twice as many splits, for tuned plans.
TARGET_PROGRAMS = 160
MIN_KEYS = 64  # a split with fewer keys costs more in the merge than it saves


class AttnDecodeGeometry(shared.AttentionGeometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One query per sequence."""

    DYNAMIC = ("batch", "kv_len")
    IGNORED = ("q_len", "causal")


def max_splits(batch: int, kv_heads: int, max_seqlen_k: int) -> int:
    """The most splits a plan may use: the workspace is sized for it."""
    return max(1, min(shared.cdiv(shared.next_power_of_2(max_seqlen_k), MIN_KEYS), shared.cdiv(2 * TARGET_PROGRAMS, max(1, batch * kv_heads))))


def attn_decode_workspace(*, batch: int, q_heads: int, kv_heads: int, head_dim: int, max_seqlen_k: int) -> int:
    """Bytes of workspace that `attn_decode` needs for these sizes, whatever the plan: FP32 numerator, maximum and sum per split and
    query head. 0 if the keys are never split. It grows with max_seqlen_k; over batch sizes, take the largest of those served.
    """
    for name, value in (("batch", batch), ("max_seqlen_k", max_seqlen_k)):
        shared.check_length(name, value)
    for name, value in (("q_heads", q_heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        _kv.require(value >= 1, f"{name}={value}: it must be at least 1")
    _kv.require(q_heads % kv_heads == 0, f"q_heads={q_heads} is not a multiple of kv_heads={kv_heads}")
    splits = max_splits(batch, kv_heads, max_seqlen_k)
    return 0 if splits == 1 else 4 * batch * splits * q_heads * (head_dim + 2)


def reference(
    q, k_cache, v_cache, block_table, seq_lens, *, max_seqlen_k, scale=None, window=None, softcap=None, sinks=None, alibi_slopes=None,
    k_scale=None, v_scale=None, kv_dtype=None, out=None, lse=None, workspace=None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Output, and log-sum-exp if `lse` is given, in float64."""
    parts = shared.compute(
        q, k_cache, v_cache, block_table, seq_lens, list(range(q.shape[0] + 1)), scale=scale, causal=True, window=window, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype, dtype=torch.float64,
    )  # fmt: skip
    result = {"out": torch.zeros(q.shape, dtype=torch.float64, device=q.device)}
    if lse is not None:
        result["lse"] = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
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
        *(inputs[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")), list(range(inputs["q"].shape[0] + 1)),
        causal=True, dtype=torch.float64, errors=True, **settings,
    )  # fmt: skip
    for rows, (_, _, *errors) in parts:
        for name, error in zip(("out", "lse"), errors, strict=True):
            if name in bounds:
                bounds[name][rows] = error
    return bounds


def make_inputs(
    geometry: AttnDecodeGeometry, *, seed: int, device: str, lens: tuple[int, ...] | None = None, layout: str = "separate", spare: int = 2,
    scaled: bool | str = False, spikes: bool = False, v_size: float | None = None, scale: float | None = None, lse: bool = True,
    workspace: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Random queries and cache. `lens`: keys of each sequence, default all as the geometry says; `workspace`: pass one, full of
    NaN; the rest: `_attention.random_cache`.
    """
    g = torch.Generator().manual_seed(seed)
    pairs = [(1, kv) for kv in (lens if lens is not None else [geometry.kv_len] * geometry.batch)]
    shape = (len(pairs), geometry.q_heads, geometry.head_dim)
    size = attn_decode_workspace(batch=len(pairs), q_heads=shape[1], kv_heads=geometry.kv_heads, head_dim=shape[2], max_seqlen_k=geometry.kv_len)
    return {
        "q": _kv.random_normal(shape, torch.float16, device, g),
        **shared.random_cache(geometry, pairs, generator=g, device=device, layout=layout, spare=spare, scaled=scaled,
                              spikes=spikes, v_size=v_size),
        "max_seqlen_k": geometry.kv_len, "scale": scale, **shared.random_features(geometry, g, device),
        "out": _kv.poison(shape, torch.float16, device), "lse": _kv.poison(shape[:2], torch.float32, device) if lse else None,
        "workspace": _kv.poison((size // 4,), torch.float32, device) if workspace else None,
    }  # fmt: skip


def work(geometry: AttnDecodeGeometry) -> Work:
    return shared.work(geometry, 1, True)


def _g(q_heads: int, kv_heads: int, head_dim: int, batch: int, kv_len: int, page_size: int = 16, **more: Any) -> dict[str, Any]:
    return {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "batch": batch, "kv_len": kv_len, "page_size": page_size, **more}


CASES = shared.cases(AttnDecodeGeometry, [
    ("splits_9q_3kv_d64", _g(9, 3, 64, 1, 300), {}),
    ("empty_batch", _g(2, 2, 64, 0, 0), {}),
    ("zero_length", _g(2, 1, 64, 2, 0), {}),
    ("one_key", _g(3, 1, 16, 1, 1), {}),
    ("one_split_9q_3kv_d64", _g(9, 3, 64, 1, 60), {}),
    ("mixed_lengths", _g(4, 2, 64, 5, 200), {"lens": (200, 0, 1, 65, 33)}),
    ("own_workspace", _g(4, 2, 32, 2, 150, 5), {"lens": (150, 77), "workspace": False, "lse": False}),
    ("short_under_a_long_plan", _g(2, 1, 64, 3, 2000), {"lens": (3, 60, 0)}),
    ("gqa5_d80_page_5", _g(5, 1, 80, 1, 131, 5), {}),
    ("page_1_d72_gqa7", _g(14, 2, 72, 2, 70, 1), {"lens": (70, 9)}),
    ("gqa6_d256_e4m3", _g(6, 1, 256, 1, 70, kv_dtype="e4m3"), {"scaled": True}),
    ("page_784_window_gqa6_d256_e4m3", _g(6, 1, 256, 1, 800, 784, kv_dtype="e4m3", window=65), {"scaled": True, "layout": "vllm26"}),
    ("d128_gqa8_vllm26", _g(16, 2, 128, 2, 90), {"lens": (90, 65), "layout": "vllm26"}),
    ("d96_vllm19_e5m2", _g(4, 2, 96, 2, 80, kv_dtype="e5m2"), {"layout": "vllm19", "scaled": True}),
    ("d192_e4m3_vllm26_one_scale", _g(4, 2, 192, 1, 79, kv_dtype="e4m3"), {"layout": "vllm26", "scaled": "tensor"}),
    ("d512_gqa16", _g(16, 1, 512, 1, 70), {}),
    ("mqa_20q_d512_in_two_programs", _g(20, 1, 512, 2, 70, sinks=True, alibi=True), {"lens": (70, 3)}),
    ("window_across_pages", _g(4, 2, 64, 2, 200, 5, window=91), {"lens": (200, 50)}),
    ("window_1", _g(2, 2, 32, 1, 130, window=1), {}),
    ("softcap", _g(4, 2, 64, 1, 150, softcap=True), {"scale": 0.7}),
    ("sinks", _g(8, 1, 64, 3, 135, sinks=True), {"lens": (135, 2, 0)}),
    ("alibi", _g(6, 2, 64, 1, 160, alibi=True), {}),
    ("everything_e4m3", _g(10, 2, 80, 3, 166, 5, kv_dtype="e4m3", window=101, softcap=True, sinks=True, alibi=True),
     {"lens": (166, 4, 90), "scaled": True, "layout": "vllm19", "scale": 0.3}),
    ("spikes", _g(4, 1, 64, 1, 190), {"spikes": True}),
    ("large_values", _g(4, 2, 64, 1, 180), {"v_size": 6e4}),
]) + shared.cases(AttnDecodeGeometry, [
    *((f"decode_{batch}_at_32k_{q}q_{kv}kv_d{d}_{kind}", _g(q, kv, d, batch, 32768, page, kv_dtype=kind), {"scaled": kind != "fp16", "layout": layout})
      for batch in (1, 8, 32)
      for q, kv, d, page, kind, layout in ((24, 4, 256, 784, "e4m3", "vllm26"), (24, 4, 256, 784, "fp16", "vllm26"), (32, 8, 128, 16, "fp16", "vllm19"))),
    ("decode_1_at_32k_6q_1kv_d256_e4m3", _g(6, 1, 256, 1, 32768, 784, kv_dtype="e4m3"), {"scaled": "tensor"}),
    ("decode_16_at_8k_64q_8kv_d64_window_sinks", _g(64, 8, 64, 16, 8192, window=128, sinks=True), {}),
    ("decode_4_at_2k_9q_3kv_d64", _g(9, 3, 64, 4, 2048), {}),
    ("decode_4_at_4k_48q_1kv_d128", _g(48, 1, 128, 4, 4096), {}),
    ("decode_4_at_2k_142q_2kv_d64_e4m3", _g(142, 2, 64, 4, 2048, kv_dtype="e4m3"), {}),
    ("decode_4_at_4k_32q_32kv_d80_softcap_e5m2", _g(32, 32, 80, 4, 4096, kv_dtype="e5m2", softcap=True), {"scaled": True}),
], production=True)  # fmt: skip


def run(
    q, k_cache, v_cache, block_table, seq_lens, max_seqlen_k, scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale, kv_dtype, out, lse,
    workspace,
) -> None:  # fmt: skip
    kind = shared.check(q, k_cache, v_cache, block_table, seq_lens, scale=scale, window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
                        k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype, out=out, lse=lse)
    batch, heads, dim = q.shape
    _kv.require(seq_lens.shape[0] == batch, f"seq_lens has {seq_lens.shape[0]} elements, q has {batch} sequences")
    shared.check_length("max_seqlen_k", max_seqlen_k)
    size = attn_decode_workspace(batch=batch, q_heads=heads, kv_heads=k_cache.shape[2], head_dim=dim, max_seqlen_k=max_seqlen_k)
    if workspace is not None:
        _kv.check_tensor("workspace", workspace, 1, (torch.float32, torch.uint8), q.device)
        _kv.require(workspace.nbytes >= size, f"workspace has {workspace.nbytes} bytes; attn_decode_workspace asks for {size}")
        offset = workspace.storage_offset() * workspace.element_size()
        _kv.require(offset % 4 == 0, f"workspace begins at byte {offset} of its storage; a multiple of 4 is accepted")
    if shared.values_are_checked(q.device):
        shared.check_values(k_cache, block_table, seq_lens, max_seqlen_k)
    if batch == 0:
        return
    geometry = AttnDecodeGeometry(**shared.geometry_fields(kind, q, k_cache, batch, max_seqlen_k, window, softcap, sinks, alibi_slopes))
    if workspace is None:
        workspace = torch.empty(size // 4, dtype=torch.float32, device=q.device)
    launch(
        resolve(OP, geometry, arch_of(q.device)), geometry, q.device, q=q, k_cache=_kv.as_bytes(k_cache), v_cache=_kv.as_bytes(v_cache),
        block_table=block_table, seq_lens=seq_lens, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
        k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, workspace=workspace[: size // workspace.element_size()].view(torch.float32),
    )  # fmt: skip


def attn_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_k: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest token of each sequence over a paged cache that already holds its key and value.

    Args:
        q: [batch, q_heads, head_dim] float16.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], float16, float8_e4m3fn, float8_e5m2, or uint8 with `kv_dtype`.
            Any strides, last axis contiguous. q_heads is a multiple of kv_heads.
        block_table: [batch, max_pages] int32, page of each page_size tokens; entries beyond a sequence's length may hold anything.
        seq_lens: [batch] int32, keys of each sequence, the new one included; 0: padding, gives zeros.
        max_seqlen_k: host integer, not below any seq_len; it sizes the launch and the workspace. A captured graph serves every
            length up to it.
        scale: factor of the dot product, None: head_dim ** -0.5.
        window: keys that the query sees, its own included, None: all.
        softcap: s -> softcap * tanh(s / softcap), None: off.
        sinks: [q_heads] float32, one more logit per head, in the denominator only.
        alibi_slopes: [q_heads] float32, adds slope * (key position - query position).
        k_scale, v_scale: float32, 1 or kv_heads elements, FP8 caches only; real value = stored * scale. None means 1.
        kv_dtype: "e4m3" or "e5m2", what a uint8 cache holds.
        out: like q, written and returned; None: a new tensor.
        lse: [batch, q_heads] float32, written if given: natural log of the softmax denominator, the sink included.
        workspace: 1-D float32 or uint8 of at least `attn_decode_workspace(...)` bytes, any content; None: allocated here.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, stride, device or value; the text names it. Lengths and page
            ids are checked for CPU tensors and in debug mode (SM70_TRITON_DEBUG=1); a kernel never reads beyond the tensors.
    """
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    function = torch.ops.sm70_triton.attn_decode if torch.compiler.is_compiling() else run
    function(q, k_cache, v_cache, block_table, seq_lens, max_seqlen_k, scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale, kv_dtype,
             out, lse, workspace)
    return out


OP = op(
    "attn_decode",
    geometry=AttnDecodeGeometry,
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, SymInt max_seqlen_k, float? scale, int? window, "
    "float? softcap, Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, str? kv_dtype, Tensor(a!) out, Tensor(b!)? lse, "
    "Tensor(c!)? workspace) -> ()",
    outputs=("out", "lse"),
    call=attn_decode,
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
def _launch_torch(plan: shared.NoPlan, geometry: AttnDecodeGeometry, *, q, k_cache, v_cache, block_table, seq_lens, scale, softcap, sinks,
                  alibi_slopes, k_scale, v_scale, out, lse, workspace) -> None:  # fmt: skip
    parts = shared.compute(
        q, k_cache, v_cache, block_table, seq_lens, list(range(q.shape[0] + 1)), scale=scale, causal=True, window=geometry.window or None,
        softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale,
        kv_dtype=None if geometry.kv_dtype == "fp16" else geometry.kv_dtype, dtype=torch.float32,
    )  # fmt: skip
    for rows, values in parts:
        out[rows] = values[0].half()
        if lse is not None:
            lse[rows] = values[1]


class SimtPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program: the query heads of one KV head over one of `num_splits` parts of a sequence, in steps of `block_n` keys.

    Heads that do not fit into its registers (multi-query attention) go to further programs, which read the same keys again.
    """

    block_n: int
    num_warps: int
    num_splits: int


def _rows(geometry: AttnDecodeGeometry) -> int:
    """Query heads of one program, a power of two. Measured with aot.usage for sm_70: more of them spill."""
    return min(shared.next_power_of_2(geometry.group), 8192 // geometry.block_d)


@triton.jit(do_not_specialize=["room", "pages", "window", "splits"])
def _attn_decode_simt_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, len_ptr, sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, part_ptr, stat_ptr,
    room, pages, window, splits, qk_scale, cap,
    stride_qt, stride_qh, stride_kp, stride_ko, stride_kh, stride_vp, stride_vo, stride_vh, stride_b, stride_ot, stride_oh, stride_lt, stride_lh,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KV_DTYPE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M  # of the query heads that share a KV head
    kv_head = (tl.program_id(1) // tiles).to(tl.int64)  # heads may be the outermost axis of a cache: head * stride beyond 2^31
    split = tl.program_id(2)
    length = tl.maximum(tl.load(len_ptr + sequence), 0)
    begin, end = key_range(length - 1, length - 1, tl.minimum(length, room), window, True, WINDOW)  # pyright: ignore[reportGeneralTypeIssues]
    if SPLIT:  # whole tiles, as evenly as they go
        first_tile = begin // BLOCK_N
        each = tl.cdiv(tl.cdiv(end, BLOCK_N) - first_tile, splits)
        begin = tl.maximum(begin, (first_tile + split * each) * BLOCK_N)
        end = tl.minimum(end, (first_tile + (split + 1) * each) * BLOCK_N)

    row = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < GROUP
    head = kv_head * GROUP + row
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slope_ptr + head, mask=live, other=0.0) * LOG2E
    acc, top, total = attend(
        q_ptr, sequence * stride_qt + head * stride_qh, live, length - 1 + row * 0, slope, begin, end, k_ptr + kv_head * stride_kh,
        v_ptr + kv_head * stride_vh, table_ptr + sequence * stride_b, pages, qk_scale * head_scale(k_scale_ptr, kv_head, K_SCALE), cap, window,
        stride_kp, stride_ko, stride_vp, stride_vo, PAGE, D, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_K, KV_DTYPE, True, WINDOW, SOFTCAP, ALIBI,
    )  # fmt: skip
    offs_d = tl.arange(0, BLOCK_D)
    if SPLIT:
        heads = tl.num_programs(1) // tiles * GROUP
        at = (sequence * splits + split) * heads + head
        filled = live & (total != 0.0)  # the merge does not read the numerator of an empty split
        tl.store(part_ptr + at[:, None] * D + offs_d[None, :], acc, mask=filled[:, None] & (offs_d < D)[None, :])
        tl.store(stat_ptr + at * 2, top, mask=live)
        tl.store(stat_ptr + at * 2 + 1, total, mask=live)
    else:
        sink = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:
            sink = tl.load(sink_ptr + head, mask=live, other=0.0) * LOG2E
        out, lse = finish(acc, top, total, sink, head_scale(v_scale_ptr, kv_head, V_SCALE), SINKS)
        tl.store(out_ptr + sequence * stride_ot + head[:, None] * stride_oh + offs_d[None, :], out.to(tl.float16), mask=live[:, None] & (offs_d < D)[None, :])
        if LSE:
            tl.store(lse_ptr + sequence * stride_lt + head * stride_lh, lse, mask=live)


@triton.jit(do_not_specialize=["splits"])
def _attn_decode_merge_kernel(
    part_ptr, stat_ptr, sink_ptr, v_scale_ptr, out_ptr, lse_ptr, splits, stride_ot, stride_oh, stride_lt, stride_lh,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr, V_SCALE: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One program per sequence and query head. Maxima are integers, so the weights are powers of two and exact."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        at = (sequence * splits + split) * heads + head
        tops = tl.load(stat_ptr + at * 2, mask=split < splits, other=float("-inf"))
        totals = tl.load(stat_ptr + at * 2 + 1, mask=split < splits, other=0.0)
        parts = tl.load(part_ptr + at[:, None] * D + offs_d[None, :], mask=(totals != 0.0)[:, None] & (offs_d < D)[None, :], other=0.0)
        above = tl.maximum(top, tl.max(tops, 0))
        anchor = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(top - anchor)
        weight = tl.exp2(tops - anchor)
        acc = acc * shrink[:, None] + tl.sum(parts * weight[:, None], 0)[None, :]
        total = total * shrink + tl.sum(totals * weight, 0)
        top = above
    sink = tl.zeros([1], tl.float32)
    if SINKS:
        sink += tl.load(sink_ptr + head) * LOG2E
    out, lse = finish(acc, top, total, sink, head_scale(v_scale_ptr, head // GROUP, V_SCALE), SINKS)
    tl.store(out_ptr + sequence * stride_ot + head * stride_oh + offs_d[None, :], out.to(tl.float16), mask=(offs_d < D)[None, :])
    if LSE:
        tl.store(lse_ptr + sequence * stride_lt + head * stride_lh + tl.arange(0, 1), lse)


def _candidates(geometry: AttnDecodeGeometry, arch: int) -> Iterable[SimtPlan]:
    most = max_splits(geometry.batch, geometry.kv_heads, geometry.kv_len)
    splits = sorted({1, *(max(1, most >> i) for i in range(4))})
    return [SimtPlan(block_n=n, num_warps=w, num_splits=s) for s in splits for n in (16, 32, 64) for w in (2, 4, 8)]


def _default(geometry: AttnDecodeGeometry, arch: int) -> SimtPlan:
    most = max_splits(geometry.batch, geometry.kv_heads, geometry.kv_len)
    splits = min(most, shared.cdiv(TARGET_PROGRAMS, max(1, geometry.batch * geometry.kv_heads)))
    return SimtPlan(block_n=32 if geometry.block_d <= 128 and _rows(geometry) * geometry.block_d <= 2048 else 16, num_warps=4, num_splits=splits)


def _feasible(plan: SimtPlan, geometry: AttnDecodeGeometry, arch: int) -> str | None:
    most = max_splits(geometry.batch, geometry.kv_heads, geometry.kv_len)
    if not 1 <= plan.num_splits <= most:
        return f"num_splits={plan.num_splits}: the workspace has room for 1 to {most}"
    return shared.simt_refusal(geometry, arch, _rows(geometry), plan.block_n, plan.num_warps)


@impl(OP, "simt", rev=1, needs=Needs(min_arch=70, packages=("triton",)), arithmetic=ARITHMETIC, plan=SimtPlan, priority=10, feasible=_feasible,
      default=_default, candidates=_candidates)
def _launch_simt(plan: SimtPlan, geometry: AttnDecodeGeometry, *, q, k_cache, v_cache, block_table, seq_lens, scale, softcap, sinks, alibi_slopes,
                 k_scale, v_scale, out, lse, workspace) -> None:  # fmt: skip
    qk_scale, cap = shared.score_values(geometry, scale, softcap)
    constants = shared.kernel_constants(geometry, k_scale, v_scale)
    split = plan.num_splits > 1
    entries = geometry.batch * plan.num_splits * geometry.q_heads if split else 0
    part, stat = workspace[: entries * geometry.head_dim], workspace[entries * geometry.head_dim :]
    block_m = _rows(geometry)
    written = out, lse, out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), 0 if lse is None else lse.stride(1)
    _attn_decode_simt_kernel[(geometry.batch, geometry.kv_heads * shared.cdiv(geometry.group, block_m), plan.num_splits)](
        q, k_cache, v_cache, block_table, seq_lens, sinks, alibi_slopes, k_scale, v_scale, out, lse, part, stat,
        shared.table_room(block_table, geometry.page_size), k_cache.shape[0], geometry.window, plan.num_splits, qk_scale, cap,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        block_table.stride(0), *written[2:], BLOCK_M=block_m, BLOCK_N=plan.block_n, LSE=lse is not None,
        SPLIT=split, **constants, num_warps=plan.num_warps, num_stages=1,
    )  # fmt: skip
    if split:
        _attn_decode_merge_kernel[(geometry.batch, geometry.q_heads)](
            part, stat, sinks, v_scale, *written[:2], plan.num_splits, *written[2:], GROUP=geometry.group, D=geometry.head_dim,
            BLOCK_D=geometry.block_d, BLOCK_S=8, SINKS=geometry.sinks, V_SCALE=constants["V_SCALE"], LSE=lse is not None, num_warps=4, num_stages=1,
        )  # fmt: skip
