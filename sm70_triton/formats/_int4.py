"""Eight 4-bit codes in an int32, activation order, and round-to-nearest quantisation, shared by AWQ, GPTQ and compressed-tensors."""
from __future__ import annotations

from collections.abc import Sequence

import torch

SEQUENTIAL = (0, 1, 2, 3, 4, 5, 6, 7)


def unpack_int32(packed: torch.Tensor, order: Sequence[int] = SEQUENTIAL) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8 C]; nibble i (from the low end) of a word holds column order[i] of its eight."""
    columns = torch.empty((*packed.shape, 8), dtype=torch.uint8, device=packed.device)
    for nibble, column in enumerate(order):
        columns[..., column] = ((packed >> (4 * nibble)) & 15).to(torch.uint8)
    return columns.flatten(-2)


def pack_int32(codes: torch.Tensor, order: Sequence[int] = SEQUENTIAL) -> torch.Tensor:
    """The inverse of unpack_int32."""
    columns = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    words = torch.zeros(columns.shape[:-1], dtype=torch.int32, device=codes.device)
    for nibble, column in enumerate(order):
        words |= columns[..., column].to(torch.int32) << (4 * nibble)  # the top nibble lands in the sign bit, as it should
    return words


def act_order(layout: str, name: str, g_idx: torch.Tensor, groups: int, group: int) -> torch.Tensor | None:
    """int32 [K]: the columns gathered group by group, or None where they are in order already. g_idx [K] is the group of each column."""
    counts = torch.bincount(g_idx.long().clamp(0, groups - 1), minlength=groups)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups or not bool((counts == group).all()):
        raise ValueError(f"{layout}: {name} must give each of the {groups} groups exactly {group} columns; it runs from "
                         f"{int(g_idx.min())} to {int(g_idx.max())} and the groups get {counts.min()} to {counts.max()}")  # fmt: skip
    if bool((g_idx[1:] >= g_idx[:-1]).all()):
        return None
    return torch.argsort(g_idx.long(), stable=True).to(torch.int32)


def original_order(codes: torch.Tensor, perm: torch.Tensor | None) -> torch.Tensor:
    """Undo a permutation of columns: packed column j goes back to perm[j]."""
    if perm is None:
        return codes
    ordered = torch.empty_like(codes)
    ordered[:, perm.long()] = codes
    return ordered


def round_asymmetric(w: torch.Tensor, group: int, lowest_zero: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [N, K], zeros uint8 [N, G], float16 scales [N, G]) with w ~ (code - zero) * scale; zero is always a code."""
    n, k = w.shape
    blocks = w.float().reshape(n, k // group, group)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scale = _float16_scale(high / 15 - low / 15)
    zero = (-low / scale.float()).round().clamp(lowest_zero, 15)
    codes = (blocks / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.to(torch.uint8).reshape(n, k), zero.to(torch.uint8), scale


def round_symmetric(w: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [N, K] with zero at 8, float16 scales [N, G])."""
    n, k = w.shape
    blocks = w.float().reshape(n, k // group, group)
    scale = _float16_scale(blocks.abs().amax(-1) / 7)
    codes = (blocks / scale.float()[..., None]).round().clamp(-8, 7) + 8
    return codes.to(torch.uint8).reshape(n, k), scale


def _float16_scale(scale: torch.Tensor) -> torch.Tensor:
    half = scale.half()
    if bool(half.isinf().any()):
        raise ValueError(f"w needs a scale of {scale.max().item()!r}, beyond float16 (65504)")
    return torch.where(half > 0, half, torch.ones_like(half))
