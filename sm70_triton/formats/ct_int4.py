"""compressed-tensors `pack-quantized` int4.   symmetric: w = (q - 8) * s      asymmetric: w = (q - z) * s

Tensors: `weight_packed` int32 [N, K/8] (sequential in K), `weight_scale` [N, G] in float16, bfloat16 or float32 (G = 1: per
channel), optional `weight_shape` int [2], `weight_zero_point` int32 [N/8, G] (sequential in N), `weight_g_idx` int32 [K]. The
library's signed codes are stored plus 8, zeros too.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from ._int4 import act_order, original_order, pack_int32, round_asymmetric, round_symmetric, unpack_int32
from .codecs import pack_nibbles, unpack_nibbles
from .packed import PackedWeight


def pack(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    check.take(
        "ct_int4", tensors, {"weight_packed": (2, check.I32), "weight_scale": (2, check.SCALES)},
        {"weight_shape": (1, check.INTS), "weight_zero_point": (2, check.I32), "weight_g_idx": (1, check.INTS)},
    )  # fmt: skip
    packed, stored_scale = tensors["weight_packed"], tensors["weight_scale"]
    n, k = packed.shape[0], 8 * packed.shape[1]
    if "weight_shape" in tensors and tensors["weight_shape"].tolist() != [n, k]:
        raise ValueError(f"ct_int4: weight_shape={tensors['weight_shape'].tolist()} does not match weight_packed, which holds [{n}, {k}]")
    groups = stored_scale.shape[1]
    group = check.group_of("ct_int4", "weight_scale", k, groups)
    check.shape("ct_int4", "weight_scale", stored_scale, (n, groups))
    codes, perm, zero = unpack_int32(packed), None, None
    if "weight_g_idx" in tensors:
        check.shape("ct_int4", "weight_g_idx", tensors["weight_g_idx"], (k,))
        perm = act_order("ct_int4", "weight_g_idx", tensors["weight_g_idx"], groups, group)
        if perm is not None:
            codes = codes[:, perm.long()]
    if "weight_zero_point" in tensors:
        check.shape("ct_int4", "weight_zero_point", tensors["weight_zero_point"], (check.words("ct_int4", "N", n), groups))
        zero = unpack_int32(tensors["weight_zero_point"].T).T.contiguous()
    scale, codec = check.kernel_scale(stored_scale)
    return PackedWeight(
        codec="u4b8" if zero is None else "u4", n=n, k=k, group_n=1, group_k=group, data=pack_nibbles(codes.contiguous()), scale=scale,
        scale_codec=codec, zero=zero, perm=perm,
        source={
            "layout": "ct_int4", "scale_name": "weight_scale", "dtype": stored_scale.dtype, "shape": tensors.get("weight_shape"),
            "g_idx": tensors.get("weight_g_idx"),
        },
    )  # fmt: skip


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, "ct_int4")
    codes = original_order(unpack_nibbles(weight.data), weight.perm)
    tensors = {"weight_packed": pack_int32(codes), "weight_scale": weight.scale.to(weight.source["dtype"])}
    if weight.zero is not None:
        tensors["weight_zero_point"] = pack_int32(weight.zero.T).T.contiguous()
    for name in ("shape", "g_idx"):
        if weight.source[name] is not None:
            tensors[f"weight_{name}"] = weight.source[name]
    return tensors


def quantize(w: torch.Tensor, group: int | None = 128, symmetric: bool = True) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest; group None means one scale per out-feature."""
    n, k = w.shape
    group = k if group is None else group
    check.groups_of("ct_int4", k, group)
    check.words("ct_int4", "K", k)
    if symmetric:
        codes, scale = round_symmetric(w, group)
        zero_point = {}
    else:
        check.words("ct_int4", "N", n)
        codes, zeros, scale = round_asymmetric(w, group)
        zero_point = {"weight_zero_point": pack_int32(zeros.T).T.contiguous()}
    return {"weight_packed": pack_int32(codes), "weight_scale": scale, **zero_point, "weight_shape": torch.tensor([n, k], device=w.device)}
