"""Tiles of a packed weight as float32: w[n, k] = (decode(data[n, k]) - zero[n, g]) * scale[n // group_n, g] * global[n], g = k // group_k.

Every decode is exact (lib/codec.py). A code times an E4M3, E8M0 or FP16 scale fits in 24 bits, so it is exact too and a weight is
rounded at most once, by its global scale (or by its FP32 scale where there is no global one). Nothing is kept in fewer than 24 bits, so
no scale of a checkpoint can overflow or vanish on the way.
"""
import triton
import triton.language as tl

from .codec import decode_e2m1, decode_e4m3, decode_e5m2, decode_e8m0


@triton.jit
def decode_code(code, CODEC: tl.constexpr):
    """uint8 code (a nibble for the 4-bit codecs) -> float32."""
    if CODEC == "e2m1":
        return decode_e2m1(code)
    elif CODEC == "e4m3":
        return decode_e4m3(code)
    elif CODEC == "e5m2":
        return decode_e5m2(code)
    elif CODEC == "int8":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    elif CODEC == "u4b8":
        return code.to(tl.float32) - 8.0
    else:
        return code.to(tl.float32)


@triton.jit
def round_bf16(x):
    """float32 -> bfloat16, nearest even, by bits: sm_70 has no instruction for it, and Triton's interpreter truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decode_scale(raw, SCALE_CODEC: tl.constexpr):
    """A stored scale (a byte, float16 or float32) -> float32."""
    if SCALE_CODEC == "e4m3":
        return decode_e4m3(raw)
    elif SCALE_CODEC == "e8m0":
        return decode_e8m0(raw)
    else:
        return raw.to(tl.float32)


@triton.jit
def _spread(groups, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr):
    """[BLOCK_N, GROUPS] -> [BLOCK_N, BLOCK_K], every value repeated over its group."""
    if GROUPS == 1:
        return tl.broadcast_to(groups, (BLOCK_N, BLOCK_K))
    else:
        return tl.reshape(tl.broadcast_to(groups[:, :, None], (BLOCK_N, GROUPS, BLOCK_K // GROUPS)), (BLOCK_N, BLOCK_K))


@triton.jit
def load_weight(
    data_ptr, scale_ptr, zero_ptr, global_scale, offs_n, start_k, N, K, stride_dn, stride_sn, stride_zn,
    CODEC: tl.constexpr, SCALE_CODEC: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows `offs_n` [BLOCK_N] and columns start_k .. start_k + BLOCK_K of the weight, float32 [BLOCK_N, BLOCK_K].

    Outside N x K the result is finite and means nothing: activations there must be zero.

    `start_k` is a multiple of BLOCK_K. GROUP_K divides BLOCK_K, or the other way round; 0 means one group for all of K.
    `global_scale` is float32 [BLOCK_N] (1 where the format has none).
    """
    live_n = (offs_n < N)[:, None]
    rows = offs_n.to(tl.int64)[:, None]
    if CODEC == "e2m1" or CODEC == "u4" or CODEC == "u4b8":
        offs_b = start_k // 2 + tl.arange(0, BLOCK_K // 2)
        byte = tl.load(data_ptr + rows * stride_dn + offs_b[None, :], mask=live_n & (offs_b < K // 2)[None, :], other=0)
        code = tl.interleave(byte & 0xF, byte >> 4)
    else:
        offs_k = start_k + tl.arange(0, BLOCK_K)
        code = tl.load(data_ptr + rows * stride_dn + offs_k[None, :], mask=live_n & (offs_k < K)[None, :], other=0)
    weight = decode_code(code, CODEC)

    GROUPS: tl.constexpr = BLOCK_K // GROUP_K if GROUP_K > 0 and GROUP_K < BLOCK_K else 1
    group = tl.arange(0, GROUPS) + (start_k // GROUP_K if GROUP_K > 0 else 0)
    live = live_n & (group * GROUP_K < K)[None, :]
    raw = tl.load(scale_ptr + rows // GROUP_N * stride_sn + group[None, :], mask=live, other=0)
    scale = decode_scale(raw, SCALE_CODEC)
    if HAS_ZERO:
        zero = tl.load(zero_ptr + rows * stride_zn + group[None, :], mask=live, other=0).to(tl.float32)
        weight -= _spread(zero, BLOCK_N, BLOCK_K, GROUPS)
    if GROUP_K == 0 and (CODEC == "u4" or CODEC == "u4b8"):  # code 0 is not 0 here, and beyond K the row's own scale still applies
        weight = tl.where((start_k + tl.arange(0, BLOCK_K) < K)[None, :], weight, 0.0)
    return weight * _spread(scale, BLOCK_N, BLOCK_K, GROUPS) * global_scale[:, None]
