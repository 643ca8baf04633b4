"""8- and 4-bit number formats: bit-exact decode of every code, and encode to nearest even.

E4M3 and E5M2: OCP 8-bit Floating Point Specification (E4M3 has no infinity; 0x7f and 0xff are NaN). E2M1 and E8M0: OCP
Microscaling Formats. Decoding is by table, built from the formats' formulas or from torch's own dtypes.
"""
from __future__ import annotations

import functools

import torch

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@functools.cache
def table(codec: str, device: torch.device = torch.device("cpu")) -> torch.Tensor:
    """float64 value of every code: 16 entries for e2m1, 256 for e4m3, e5m2 and e8m0."""
    if codec == "e2m1":
        values = torch.tensor([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], dtype=torch.float64)
    elif codec in _FLOAT8:
        values = torch.arange(256, dtype=torch.uint8).view(_FLOAT8[codec]).double()
    elif codec == "e8m0":
        values = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)
        values[255] = float("nan")
    else:
        raise ValueError(f"codec {codec!r} has no table; accepted: e2m1, e4m3, e5m2, e8m0")
    return values.to(device)


def decode(codes: torch.Tensor, codec: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values of uint8 codes in `dtype` (float32 holds every value of every format exactly)."""
    return table(codec, codes.device).to(dtype)[codes.long()]


def encode(values: torch.Tensor, codec: str) -> torch.Tensor:
    """Nearest code (ties to even mantissa), saturating to the largest finite value, as uint8. NaN is refused for e2m1."""
    limit = LARGEST[codec]
    if codec in _FLOAT8:
        return values.float().clamp(-limit, limit).to(_FLOAT8[codec]).view(torch.uint8)
    if bool(values.isnan().any()):
        raise ValueError("values hold NaN, which e2m1 cannot express")
    magnitude = values.double().abs().clamp(max=limit)
    grid = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device=values.device)
    upper = torch.searchsorted(grid, magnitude).clamp(max=7)
    lower = (upper - 1).clamp(min=0)
    to_lower, to_upper = magnitude - grid[lower], grid[upper] - magnitude
    nearest = torch.where((to_lower < to_upper) | ((to_lower == to_upper) & (lower % 2 == 0)), lower, upper)
    return (nearest + 8 * (torch.signbit(values) & (nearest > 0))).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes 0..15 -> uint8 [N, K/2], the even column in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2] -> uint8 [N, K]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)
