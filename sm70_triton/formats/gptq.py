"""GPTQ, 4 bits.   w[n, k] = (q - zero) * s[g_idx[k]]

Tensors: `qweight` int32 [K/8, N] (sequential in K), `qzeros` int32 [G, N/8], `scales` float16 [G, N], optional `g_idx` int32 [K].
Version 1 checkpoints (checkpoint_format "gptq") store zero - 1, version 2 ("gptq_v2") zero itself. With act-order the columns of a
group are scattered: they are gathered here, and `perm` says where each packed column came from.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from ._int4 import pack_int32, round_asymmetric, unpack_int32
from .codecs import pack_nibbles, unpack_nibbles
from .packed import PackedWeight

I32 = (torch.int32,)


def pack(tensors: Mapping[str, torch.Tensor], version: int = 1) -> PackedWeight:
    if version not in (1, 2):
        raise ValueError(f"gptq: version={version!r}; 1 (zeros stored minus one) and 2 are accepted")
    check.take("gptq", tensors, {"qweight": (2, I32), "qzeros": (2, I32), "scales": (2, (torch.float16,))}, {"g_idx": (1, (torch.int32, torch.int64))})
    qweight, qzeros, scales, g_idx = (tensors.get(name) for name in ("qweight", "qzeros", "scales", "g_idx"))
    assert qweight is not None and qzeros is not None and scales is not None  # checked above
    k, n = 8 * qweight.shape[0], qweight.shape[1]
    groups = scales.shape[0]
    if groups < 1 or k % groups:
        raise ValueError(f"gptq: scales.shape={tuple(scales.shape)}: {groups} groups do not divide K={k}")
    group = k // groups
    check.shape("gptq", "scales", scales, (groups, n))
    check.shape("gptq", "qzeros", qzeros, (groups, n // 8))
    perm = None
    if g_idx is not None:
        check.shape("gptq", "g_idx", g_idx, (k,))
        counts = torch.bincount(g_idx.long().clamp(0, groups - 1), minlength=groups)
        if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups or not bool((counts == group).all()):
            raise ValueError(f"gptq: g_idx must give each of the {groups} groups exactly {group} columns")
        order = torch.argsort(g_idx.long(), stable=True)
        if not bool((order == torch.arange(k, device=order.device)).all()):
            perm = order.to(torch.int32)
    codes = unpack_int32(qweight.T)  # [N, K]
    if perm is not None:
        codes = codes[:, perm.long()]
    # Stored zeros of version 1 run 0..15 and mean 1..16; 16 does not fit a nibble, the packed layout gives it a byte.
    zero = unpack_int32(qzeros).T + (1 if version == 1 else 0)
    return PackedWeight(
        codec="u4", n=n, k=k, group_n=1, group_k=group, data=pack_nibbles(codes.contiguous()), scale=scales.T.contiguous(), scale_codec="f16",
        zero=zero.contiguous(), perm=perm, source={"layout": "gptq", "version": version, "g_idx": g_idx},
    )  # fmt: skip


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, "gptq")
    assert weight.zero is not None  # the codec is u4
    codes = unpack_nibbles(weight.data)
    if weight.perm is not None:
        ordered = torch.empty_like(codes)
        ordered[:, weight.perm.long()] = codes
        codes = ordered
    zero = weight.zero - (1 if weight.source["version"] == 1 else 0)
    tensors = {"qweight": pack_int32(codes).T.contiguous(), "qzeros": pack_int32(zero.T), "scales": weight.scale.T.contiguous()}
    if weight.source["g_idx"] is not None:
        tensors["g_idx"] = weight.source["g_idx"]
    return tensors


def quantize(w: torch.Tensor, group: int = 128, act_order: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest, in version 1 tensors. `act_order` is a permutation of K whose runs of `group` share a scale."""
    n, k = w.shape
    if n % 8:
        raise ValueError(f"gptq: N={n} is not a multiple of 8, the columns in one word of qzeros")
    groups = check.groups_of("gptq", k, group)
    order = torch.arange(k, device=w.device) if act_order is None else act_order.long()
    codes, zeros, scale = round_asymmetric(w[:, order], group, lowest_zero=1)  # version 1 keeps zero - 1 in a nibble
    original = torch.empty_like(codes)
    original[:, order] = codes
    g_idx = torch.empty(k, dtype=torch.int32, device=w.device)
    g_idx[order] = torch.arange(groups, dtype=torch.int32, device=w.device).repeat_interleave(group)
    return {"qweight": pack_int32(original).T.contiguous(), "qzeros": pack_int32((zeros - 1).T), "scales": scale.T.contiguous(), "g_idx": g_idx}
