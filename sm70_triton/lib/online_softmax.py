"""Paged attention over one range of keys with an online softmax: the page walk, the mask, the score and the update, once.

Every attention kernel calls `attend` for its rows and `finish` (or a merge) at the end; window, softcap, sinks and ALiBi are
constexpr switches. Scores are kept in units of log2, so that the exponential is one exp2.

The running maximum is rounded up to an integer. A rescale is then a power of two and exact, so neither the number of tiles
nor the number of splits adds rounding errors, and exp2(score - max) stays at most 1.

Keys are walked in tiles that start at multiples of BLOCK_N whatever the row: a row's sums are then grouped the same way for
every query tile, chunk of a prompt, and batch it may be part of.
"""
import triton
import triton.language as tl

from .codec import decode_kv

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def page_walk(table_ptr, k_pos, live, pages, PAGE: tl.constexpr):
    """Key positions -> (page as int64, offset in it, live). A position whose table entry is out of range is not live.

    The caller makes sure that live positions lie inside the table.
    """
    page = tl.load(table_ptr + k_pos // PAGE, mask=live, other=-1)
    return page.to(tl.int64), k_pos % PAGE, live & (page >= 0) & (page < pages)


@triton.jit
def load_rows(cache_ptr, rows, live, offs_d, D: tl.constexpr, KV_DTYPE: tl.constexpr):
    """Decoded float32 [rows, offs_d] of a cache; zero where a row is not live, so that 0 * NaN can't happen later."""
    mask = live[:, None] & (offs_d < D)[None, :]
    return decode_kv(tl.load(cache_ptr + rows[:, None] + offs_d[None, :], mask=mask, other=0), KV_DTYPE)


@triton.jit
def key_range(first, last, length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[begin, end) of the keys that rows at positions first..last can see; each key in it is seen by at least one of them."""
    begin = 0
    end = length
    if CAUSAL:
        end = tl.minimum(end, last + 1)
    if WINDOW:
        begin = first - tl.minimum(first, window - 1)  # at least 0; `first - window` could overflow, as `last + window` could
        if not CAUSAL:
            end = last + tl.minimum(end - last, window)
    return begin, end


@triton.jit
def visible(q_pos, k_pos, live, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[rows, keys] mask."""
    ahead = k_pos[None, :] - q_pos[:, None]
    mask = live[None, :] & (ahead == ahead)
    if CAUSAL:
        mask = mask & (ahead <= 0)
    if WINDOW:
        mask = mask & (ahead > -window)
        if not CAUSAL:
            mask = mask & (ahead < window)
    return mask


@triton.jit
def tanh(x):
    """Within 20 units of 2^-24; within 4 relative ones where |x| < 1/4, which (1 - e) / (1 + e) would not be."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x + x * y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835))))
    return tl.where(y < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def score(qk, q_pos, k_pos, mask, qk_scale, cap, slope, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Raw dot products -> scores in log2 units, -inf where masked.

    qk_scale includes log2(e) without a softcap and 1 / cap with one; cap and slope include log2(e).
    """
    s = qk * qk_scale
    if SOFTCAP:
        s = tanh(s) * cap
    if ALIBI:
        s += slope[:, None] * (k_pos[None, :] - q_pos[:, None]).to(tl.float32)
    return tl.where(mask, s, float("-inf"))


@triton.jit
def attend(
    q_ptr, q_rows, q_live, q_pos, slope, begin, end, k_ptr, v_ptr, table_ptr, pages, qk_scale, cap, window,
    stride_kp, stride_ko, stride_vp, stride_vo,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    KV_DTYPE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Rows q_rows (element offsets of q) over keys [begin, end) -> numerator [BLOCK_M, BLOCK_D], max and sum [BLOCK_M].

    Everything is float32: operands, products, probabilities. q is read again for each tile, in slices of BLOCK_K, which keeps
    registers free; it stays in L1.
    """
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        k_pos = start + tl.arange(0, BLOCK_N)
        page, offset, live = page_walk(table_ptr, k_pos, (k_pos >= begin) & (k_pos < end), pages, PAGE)
        k_rows = page * stride_kp + offset.to(tl.int64) * stride_ko
        v_rows = page * stride_vp + offset.to(tl.int64) * stride_vo

        qk = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for first in tl.static_range(0, D, BLOCK_K):
            offs_k = first + tl.arange(0, BLOCK_K)
            q = tl.load(q_ptr + q_rows[:, None] + offs_k[None, :], mask=q_live[:, None] & (offs_k < D)[None, :], other=0.0).to(tl.float32)
            k = load_rows(k_ptr, k_rows, live, offs_k, D, KV_DTYPE)
            qk = tl.dot(q, tl.trans(k), qk, input_precision="ieee")
        s = score(qk, q_pos, k_pos, visible(q_pos, k_pos, live, window, CAUSAL, WINDOW), qk_scale, cap, slope, SOFTCAP, ALIBI)

        above = tl.maximum(top, tl.ceil(tl.max(s, 1)))
        anchor = tl.where(above == float("-inf"), 0.0, above)  # -inf - -inf is NaN
        p = tl.exp2(s - anchor[:, None])  # exactly 0 where masked
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(v_ptr, v_rows, live, offs_d, D, KV_DTYPE)
        # A tile's sum is formed by itself: two short chains of additions instead of one as long as the context. It is an fma
        # because Triton would turn dot + sum into one long chain.
        acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), tl.dot(p, v, input_precision="ieee"))
        top = above
    return acc, top, total


@triton.jit
def finish(acc, top, total, sink, v_scale, SINKS: tl.constexpr):
    """Close the softmax -> output rows and their log-sum-exp (natural log). `sink` is in log2 units.

    Rows that see nothing give zeros and -inf, or the sink's own logit.
    """
    if SINKS:
        above = tl.maximum(top, tl.ceil(sink))
        anchor = tl.where(above == float("-inf"), 0.0, above)
        shrink = tl.exp2(top - anchor)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - anchor)
        top = above
    nothing = total == 0.0
    out = tl.where(nothing[:, None], 0.0, acc * (v_scale / tl.where(nothing, 1.0, total))[:, None])
    lse = tl.where(nothing, float("-inf"), (top + tl.log2(tl.where(nothing, 1.0, total))) * LN2)
    return out, lse


@triton.jit
def head_scale(scale_ptr, head, MODE: tl.constexpr):
    """The float32 scale of one KV head; MODE is "none", "tensor" or "head"."""
    if MODE == "none":
        return 1.0
    elif MODE == "tensor":
        return tl.load(scale_ptr)
    else:
        return tl.load(scale_ptr + head)
