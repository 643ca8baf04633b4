"""8- and 4-bit codes to and from floats by bit placement, exact for every code.

Triton cannot cast to or from `fp8e4nv` on sm_70, so FP8 lives in memory as bytes and is decoded here. Formulas: OCP 8-bit
Floating Point Specification (E4M3, E5M2) and OCP Microscaling Formats (E2M1, E8M0).
"""
import triton
import triton.language as tl


@triton.jit
def decode_e4m3(code):
    """uint8 E4M3 -> float32. The seven magnitude bits land in a half as value * 2^-8, subnormals included; 0x7f, 0xff are NaN."""
    wide = code.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def decode_e5m2(code):
    """uint8 E5M2 -> float32: the upper byte of a half, infinities and NaN included."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_e2m1(code):
    """Low nibble E2M1 -> float32. Its three magnitude bits land in a half as value * 2^-14."""
    wide = code.to(tl.uint16)
    half = (((wide & 0x8) << 12) | ((wide & 0x7) << 9)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def decode_e8m0(code):
    """uint8 E8M0 -> float32 2^(code - 127). Code 0 is the float32 subnormal 2^-127; 0xff is NaN."""
    wide = code.to(tl.uint32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 0xFF, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    # Round to nearest even. Normals: add half a step to the float32 bits. Subnormals: adding 2^(24 - BIAS - MANTISSA) puts the
    # step of the float32 sum at the format's own step, and the hardware rounds.
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    m = magnitude.to(tl.uint32, bitcast=True)
    normal = ((m + (1 << (SHIFT - 1)) - 1 + ((m >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    subnormal = (magnitude + MAGIC).to(tl.uint32, bitcast=True) - tl.full([], MAGIC, tl.float32).to(tl.uint32, bitcast=True)
    code = tl.where(magnitude < SMALLEST_NORMAL, subnormal, normal)
    return tl.where(x != x, 0x7F, code | sign).to(tl.uint8)


@triton.jit
def encode_e4m3(x):
    """float32 -> uint8 E4M3, nearest even, saturating to +-448 (infinities too); NaN -> 0x7f."""
    return _encode_fp8(x, 3, 7, 448.0)


@triton.jit
def encode_e5m2(x):
    """float32 -> uint8 E5M2, nearest even, saturating to +-57344 (infinities too); NaN -> 0x7f."""
    return _encode_fp8(x, 2, 15, 57344.0)


@triton.jit
def decode_kv(raw, KV_DTYPE: tl.constexpr):
    """A loaded cache value (float16, or a byte) -> float32, before its scale."""
    if KV_DTYPE == "e4m3":
        return decode_e4m3(raw)
    elif KV_DTYPE == "e5m2":
        return decode_e5m2(raw)
    else:
        return raw.to(tl.float32)
