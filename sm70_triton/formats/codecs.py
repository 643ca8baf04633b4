"""8- and 4-bit number formats: the value of every code, and rounding to the nearest code.

E4M3 and E5M2: OCP 8-bit Floating Point Specification (E4M3 has no infinity; 0x7f and 0xff are NaN). E2M1 and E8M0: OCP
Microscaling Formats (E8M0 is 2^(code - 127); 0xff is NaN). float64 holds every value of every format exactly, float32 too.
"""
from __future__ import annotations

import functools
import math

import torch

# (exponent bits, mantissa bits, exponent bias, largest finite magnitude code)
_MINIFLOATS = {"e2m1": (2, 1, 1, 0x7), "e4m3": (4, 3, 7, 0x7E), "e5m2": (5, 2, 15, 0x7B)}
CODECS = (*_MINIFLOATS, "e8m0")
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _magnitude(code: int, mantissa_bits: int, bias: int) -> float:
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent:
        mantissa += 1 << mantissa_bits
    return math.ldexp(mantissa, max(exponent, 1) - bias - mantissa_bits)


@functools.cache
def _values(codec: str) -> tuple[float, ...]:
    if codec == "e8m0":
        return (*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan)
    if codec not in _MINIFLOATS:
        raise ValueError(f"codec {codec!r} has no table; accepted: {', '.join(CODECS)}")
    exponent_bits, mantissa_bits, bias, largest = _MINIFLOATS[codec]
    magnitudes = [_magnitude(code, mantissa_bits, bias) for code in range(largest + 1)]
    magnitudes += [math.inf] * (codec == "e5m2")
    magnitudes += [math.nan] * ((1 << (exponent_bits + mantissa_bits)) - len(magnitudes))
    return (*magnitudes, *(-m for m in magnitudes))


def table(codec: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """float64 value of every code: 16 entries for e2m1, 256 for e4m3, e5m2 and e8m0.

    Made anew each time: a cached tensor could be a fake one, left by whatever traced the first call.
    """
    return torch.tensor(_values(codec), dtype=torch.float64, device=device)


def decode(codes: torch.Tensor, codec: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values of uint8 codes in `dtype`. An e2m1 code above 15 is an IndexError."""
    return table(codec, codes.device).to(dtype)[codes.long()]


def encode(values: torch.Tensor, codec: str) -> torch.Tensor:
    """Nearest code of e4m3, e5m2 or e2m1 as uint8: ties to the even code, infinities and what lies beyond saturate to the largest
    finite value, the sign of zero stays. NaN becomes 0x7f; e2m1 has none, there NaN is a ValueError.
    """
    if codec not in _MINIFLOATS:
        raise ValueError(f"codec {codec!r} cannot be encoded; accepted: {', '.join(_MINIFLOATS)}")
    exponent_bits, mantissa_bits, _, largest = _MINIFLOATS[codec]
    nan = values.isnan()
    if codec == "e2m1" and bool(nan.any()):
        raise ValueError("values hold NaN, which e2m1 cannot express")
    if codec == "e2m1":  # steps of 0.5 below 2, 1 below 4, then 2: rounding multiples of them is exact in any dtype
        magnitude = values.abs().clamp(max=6)
        step = 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)
        # 2^-14 times an E2M1 value is a half whose bits 9 to 11 are the code
        rounded = ((magnitude / step).round() * step * 2.0**-14).half().view(torch.int16) >> 9
        return rounded.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    if values.dtype != torch.float64:  # torch's cast is to nearest even too, and quicker; it would round a float64 twice
        limit = table(codec)[largest].item()
        return torch.where(nan, 0x7F, values.float().clamp(-limit, limit).to(_FLOAT8[codec]).view(torch.uint8))
    grid = table(codec, values.device)[: largest + 1]
    midpoints = (grid[1:] + grid[:-1]) / 2  # exact: neighbours differ in one bit below the mantissa
    magnitude = values.double().abs()
    below = torch.bucketize(magnitude, midpoints)  # a tie counts as below ...
    above = torch.bucketize(magnitude, midpoints, right=True)  # ... or above
    code = torch.where(below % 2 == 0, below, above) | (torch.signbit(values).long() << (exponent_bits + mantissa_bits))
    return torch.where(nan, 0x7F, code).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes 0..15 -> uint8 [N, K/2], the even column in the low nibble."""
    if codes.shape[1] % 2:
        raise ValueError(f"K={codes.shape[1]}: 4-bit weights need an even number of in-features")
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2] -> uint8 [N, K]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)
