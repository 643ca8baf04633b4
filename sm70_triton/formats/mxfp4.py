"""MXFP4: E2M1 codes and one E8M0 scale per 32 columns.   w = e2m1 * 2^(scale - 127)

Tensors: `weight` (Quark) or `weight_packed` (compressed-tensors) uint8 [N, K/2] with `weight_scale` uint8 [N, K/32]; or, as gpt-oss stores
one expert's `*_blocks` and `*_scales`, `blocks` uint8 [N, K/32, 16] with `scales` uint8 [N, K/32]. Small scales give float32
subnormals, which stay.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from .codecs import decode, encode, pack_nibbles
from .packed import PackedWeight

GROUP = 32
U8 = (torch.uint8,)


def pack(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    name = next((name for name in ("blocks", "weight_packed") if name in tensors), "weight")
    scale_name = "scales" if name == "blocks" else "weight_scale"
    check.take("mxfp4", tensors, {name: (3 if name == "blocks" else 2, U8), scale_name: (2, U8)})
    data, scale = tensors[name], tensors[scale_name]
    if name == "blocks" and data.shape[2] != GROUP // 2:
        raise ValueError(f"mxfp4: blocks.shape={tuple(data.shape)}; [N, K/32, 16] is accepted")
    data = data.flatten(1).contiguous()
    n, k = data.shape[0], 2 * data.shape[1]
    check.shape("mxfp4", scale_name, scale, (n, check.groups_of("mxfp4", k, GROUP)))
    return PackedWeight(codec="e2m1", n=n, k=k, group_n=1, group_k=GROUP, data=data, scale=scale.contiguous(), scale_codec="e8m0",
                        source={"layout": "mxfp4", "name": name, "scale_name": scale_name})  # fmt: skip


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, "mxfp4")
    name = weight.source["name"]
    data = weight.data.view(weight.n, weight.k // GROUP, GROUP // 2) if name == "blocks" else weight.data
    return {name: data, weight.source["scale_name"]: weight.scale}


def quantize(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest; scale 2^(floor(log2 amax) - 2), as the Microscaling specification proposes."""
    n, k = w.shape
    blocks = w.float().reshape(n, check.groups_of("mxfp4", k, GROUP), GROUP)
    exponent = torch.frexp(blocks.abs().amax(-1))[1] - 1 - 2
    scale = (exponent + 127).clamp(0, 254).to(torch.uint8)
    codes = encode(blocks.double() / decode(scale, "e8m0")[..., None], "e2m1")
    return {"weight": pack_nibbles(codes.reshape(n, k)), "weight_scale": scale}
