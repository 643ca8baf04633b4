"""AWQ.   w[n, k] = (q - z) * s

Tensors: `qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` float16 [K/g, N]. Nibble i of a word holds column
(0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from ._int4 import pack_int32, round_asymmetric, unpack_int32
from .codecs import pack_nibbles, unpack_nibbles
from .packed import PackedWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
I32 = (torch.int32,)


def pack(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    check.take("awq", tensors, {"qweight": (2, I32), "qzeros": (2, I32), "scales": (2, (torch.float16,))})
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    groups = qzeros.shape[0]
    if groups < 1 or k % groups:
        raise ValueError(f"awq: qzeros.shape={tuple(qzeros.shape)}: {groups} groups do not divide K={k}")
    check.shape("awq", "qzeros", qzeros, (groups, n // 8))
    check.shape("awq", "scales", scales, (groups, n))
    return PackedWeight(
        codec="u4", n=n, k=k, group_n=1, group_k=k // groups, data=pack_nibbles(unpack_int32(qweight, ORDER).T.contiguous()),
        scale=scales.T.contiguous(), scale_codec="f16", zero=unpack_int32(qzeros, ORDER).T.contiguous(), source={"layout": "awq"},
    )  # fmt: skip


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, "awq")
    assert weight.zero is not None  # the codec is u4
    return {
        "qweight": pack_int32(unpack_nibbles(weight.data).T, ORDER), "qzeros": pack_int32(weight.zero.T, ORDER), "scales": weight.scale.T.contiguous(),
    }  # fmt: skip


def quantize(w: torch.Tensor, group: int = 128) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest (no activation-aware scaling)."""
    if w.shape[0] % 8:
        raise ValueError(f"awq: N={w.shape[0]} is not a multiple of 8, the columns in one word")
    check.groups_of("awq", w.shape[1], group)
    codes, zeros, scale = round_asymmetric(w, group)
    return {"qweight": pack_int32(codes.T, ORDER), "qzeros": pack_int32(zeros.T, ORDER), "scales": scale.T.contiguous()}
