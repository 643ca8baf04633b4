"""GPTQ, 4 bits.   w[n, k] = (q - zero) * s[g_idx[k]]

Tensors: `qweight` int32 [K/8, N] (sequential in K), `qzeros` int32 [G, N/8], `scales` [G, N] in float16 (bfloat16 and float32 are
taken too), optional `g_idx` int32 [K], the group of each column.
Version 1 checkpoints (checkpoint_format "gptq") store zero - 1, version 2 ("gptq_v2") zero itself. With act-order the columns of a
group are scattered: they are gathered here, and `perm` says where each packed column came from.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from ._int4 import act_order as group_order
from ._int4 import original_order, pack_int32, round_asymmetric, round_symmetric, unpack_int32
from .codecs import pack_nibbles, unpack_nibbles
from .packed import PackedWeight


def _version(version: int) -> None:
    if version not in (1, 2):
        raise ValueError(f"gptq: version={version!r}; 1 (zeros stored minus one) and 2 are accepted")


def pack(tensors: Mapping[str, torch.Tensor], version: int = 1) -> PackedWeight:
    """`version` is 1 or 2, from the checkpoint's config: nothing in the tensors tells them apart."""
    _version(version)
    required = {"qweight": (2, check.I32), "qzeros": (2, check.I32), "scales": (2, check.SCALES)}
    check.take("gptq", tensors, required, {"g_idx": (1, check.INTS)})
    qweight, qzeros, scales, g_idx = (tensors.get(name) for name in ("qweight", "qzeros", "scales", "g_idx"))
    assert qweight is not None and qzeros is not None and scales is not None  # checked above
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    groups = scales.shape[0]
    group = check.group_of("gptq", "scales", k, groups)
    check.shape("gptq", "scales", scales, (groups, n))
    check.shape("gptq", "qzeros", qzeros, (groups, check.words("gptq", "N", n)))
    perm = None
    if g_idx is not None:
        check.shape("gptq", "g_idx", g_idx, (k,))
        perm = group_order("gptq", "g_idx", g_idx, groups, group)
    codes = unpack_int32(qweight.T)  # [N, K]
    if perm is not None:
        codes = codes[:, perm.long()]
    # Stored zeros of version 1 run 0..15 and mean 1..16; 16 does not fit a nibble, the packed layout gives it a byte.
    zero = unpack_int32(qzeros).T + (1 if version == 1 else 0)
    scale, codec = check.kernel_scale(scales.T)
    return PackedWeight(
        codec="u4", n=n, k=k, group_n=1, group_k=group, data=pack_nibbles(codes.contiguous()),
        scale=scale, scale_codec=codec, zero=zero.contiguous(), perm=perm,
        source={"layout": "gptq", "scale_name": "scales (transposed)", "dtype": scales.dtype, "version": version, "g_idx": g_idx},
    )  # fmt: skip


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, "gptq")
    assert weight.zero is not None  # the codec is u4
    codes = original_order(unpack_nibbles(weight.data), weight.perm)
    zero = weight.zero - (1 if weight.source["version"] == 1 else 0)
    scales = weight.scale.T.to(weight.source["dtype"]).contiguous()
    tensors = {"qweight": pack_int32(codes).T.contiguous(), "qzeros": pack_int32(zero.T), "scales": scales}
    if weight.source["g_idx"] is not None:
        tensors["g_idx"] = weight.source["g_idx"]
    return tensors


def quantize(w: torch.Tensor, group: int = 128, act_order: torch.Tensor | None = None, version: int = 1,
             symmetric: bool = False) -> dict[str, torch.Tensor]:  # fmt: skip
    """Round float [N, K] to nearest. `act_order` is a permutation of K whose runs of `group` share a scale; `symmetric` makes
    every zero 8.
    """
    _version(version)
    n, k = w.shape
    check.words("gptq", "N", n)
    check.words("gptq", "K", k)
    groups = check.groups_of("gptq", k, group)
    order = torch.arange(k, device=w.device) if act_order is None else act_order.to(w.device, torch.int64)
    if symmetric:
        codes, scale = round_symmetric(w[:, order], group)
        zeros = torch.full_like(scale, 8, dtype=torch.uint8)
    else:
        codes, zeros, scale = round_asymmetric(w[:, order], group, lowest_zero=1 if version == 1 else 0)  # zero - 1 must fit a nibble
    g_idx = torch.empty(k, dtype=torch.int32, device=w.device)
    g_idx[order] = torch.arange(groups, dtype=torch.int32, device=w.device).repeat_interleave(group)
    return {
        "qweight": pack_int32(original_order(codes, order)).T.contiguous(), "qzeros": pack_int32((zeros - (1 if version == 1 else 0)).T),
        "scales": scale.T.contiguous(), "g_idx": g_idx,
    }  # fmt: skip
