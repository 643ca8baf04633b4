"""AWQ.   w[n, k] = (q - z) * s

Tensors: `qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` [K/g, N] in float16 (bfloat16 and float32 are taken too).
Nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from ._int4 import pack_int32, round_asymmetric, unpack_int32
from .codecs import pack_nibbles, unpack_nibbles
from .packed import PackedWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

def pack(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    check.take("awq", tensors, {"qweight": (2, check.I32), "qzeros": (2, check.I32), "scales": (2, check.SCALES)})
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    groups = qzeros.shape[0]
    group = check.group_of("awq", "qzeros", k, groups)
    check.shape("awq", "qzeros", qzeros, (groups, n // 8))
    check.shape("awq", "scales", scales, (groups, n))
    scale, codec = check.kernel_scale(scales.T)
    return PackedWeight(
        codec="u4", n=n, k=k, group_n=1, group_k=group, data=pack_nibbles(unpack_int32(qweight, ORDER).T.contiguous()),
        scale=scale, scale_codec=codec, zero=unpack_int32(qzeros, ORDER).T.contiguous(),
        source={"layout": "awq", "scale_name": "scales (transposed)", "dtype": scales.dtype},
    )  # fmt: skip


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, "awq")
    assert weight.zero is not None  # the codec is u4
    return {
        "qweight": pack_int32(unpack_nibbles(weight.data).T, ORDER), "qzeros": pack_int32(weight.zero.T, ORDER),
        "scales": weight.scale.T.to(weight.source["dtype"]).contiguous(),
    }  # fmt: skip


def quantize(w: torch.Tensor, group: int = 128) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest (no activation-aware scaling)."""
    check.words("awq", "N", w.shape[0])
    check.groups_of("awq", w.shape[1], group)
    codes, zeros, scale = round_asymmetric(w, group)
    return {"qweight": pack_int32(codes.T, ORDER), "qzeros": pack_int32(zeros.T, ORDER), "scales": scale.T.contiguous()}
