"""INT8 weights with one scale per out-feature (compressed-tensors, W8A16 and W8A8 checkpoints).   w = code * weight_scale

Tensors: `weight` int8 [N, K], `weight_scale` [N, 1] or [N] in float32, float16 or bfloat16. Static checkpoints
carry `input_scale` and `input_zero_point` for W8A8; they are kept for `unpack` and otherwise unused, since activations stay wide.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from .packed import PackedWeight


def pack(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    check.take("int8", tensors, {"weight": (2, (torch.int8,)), "weight_scale": (None, check.SCALES)},
               {"input_scale": (None, check.SCALES), "input_zero_point": (None, (torch.int8,))})  # fmt: skip
    weight = tensors["weight"].contiguous()
    n, k = weight.shape
    check.shape("int8", "weight_scale", tensors["weight_scale"], (n, 1), (n,))
    scale, codec = check.kernel_scale(tensors["weight_scale"].reshape(n, 1))
    kept = {name: tensor for name, tensor in tensors.items() if name != "weight"}
    return PackedWeight(
        codec="int8", n=n, k=k, group_n=1, group_k=k, data=weight.view(torch.uint8), scale=scale, scale_codec=codec,
        source={"layout": "int8", "scale_name": "weight_scale", "kept": kept},
    )  # fmt: skip


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, "int8")
    return {"weight": weight.data.view(torch.int8), **weight.source["kept"]}


def quantize(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest, symmetric: the largest magnitude of a row becomes 127."""
    amax = w.float().abs().amax(1, keepdim=True)
    scale = amax / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return {"weight": (w.float() / scale).round().clamp(-127, 127).to(torch.int8), "weight_scale": scale}
