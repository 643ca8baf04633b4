"""Linear layers of the demo in FP16 or one of the package's packed formats.

Weights are rounded to nearest, with no calibration data. Real checkpoints are quantised better than this, above all AWQ ones,
which this shares a layout with but not the activation-aware scaling; what the demo shows is the arithmetic.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

import sm70_triton
from sm70_triton import formats

QUANTS = ("fp16", "fp8", "nvfp4", "awq")
GEMM = {"fp8": "gemm_w8a16", "nvfp4": "gemm_w4a16", "awq": "gemm_w4a16"}  # the operation that serves each format
AWQ_GROUP = 64  # SmolLM2's hidden size, 576, is no multiple of 128
_TINY = torch.finfo(torch.float32).tiny  # keeps an all-zero row or block from dividing by zero


class Linear:
    """y = x @ weight.T with the weights of `parts` (FP16 [N_i, K]) stacked. `quant` is one of QUANTS.

    On a CPU the FP16 product is made in float32 and rounded, from a float32 copy of the weights: torch's FP16 CPU path is slow.
    """

    def __init__(self, parts: Sequence[torch.Tensor], quant: str, device: torch.device) -> None:
        if quant == "fp16":
            weight = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
            self.nbytes = weight.nbytes
            self.weight = weight.to(device) if device.type == "cuda" else weight.float()
            self.op = None
            return
        self.packed = formats.concat([_pack(part, quant) for part in parts])
        self.nbytes = self.packed.nbytes
        self.op = getattr(sm70_triton, GEMM[quant])

    def __call__(self, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        """x [M, K] FP16 -> [M, N]; with activation "silu" the rows are [gate; up] and the result is silu(gate) * up."""
        if self.op is not None:
            return self.op(x, self.packed, activation=activation)
        y = functional.linear(x.to(self.weight.dtype), self.weight).half()
        if activation is None:
            return y
        gate, up = y.chunk(2, -1)
        return functional.silu(gate) * up


def _pack(weight: torch.Tensor, quant: str) -> formats.PackedWeight:
    n, k = weight.shape
    if quant == "fp8":
        codes, scale = fp8_channel(weight)
        return formats.PackedWeight(codec="e4m3", n=n, k=k, group_n=1, group_k=k, data=codes.view(torch.uint8), scale=scale, scale_codec="f32")
    if quant == "nvfp4":
        pairs, scale, multiplier = nvfp4(weight)
        return formats.PackedWeight(
            codec="e2m1", n=n, k=k, group_n=1, group_k=16, data=pairs, scale=scale.view(torch.uint8), scale_codec="e4m3",
            global_scale=multiplier.expand(n).contiguous(),
        )
    codes, zero, scale = int4(weight)
    return formats.PackedWeight(
        codec="u4", n=n, k=k, group_n=1, group_k=AWQ_GROUP, data=codes[:, 0::2] | (codes[:, 1::2] << 4), scale=scale, scale_codec="f16", zero=zero,
    )


def fp8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [N, K] and one float32 scale a row [N, 1]; the largest weight of a row becomes 448."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 448).clamp(min=_TINY)
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E2M1 codes in pairs [N, K/2] (even k in the low nibble), E4M3 scale of each 16 [N, K/16], float32 multiplier [].

    Each block's largest weight becomes 6 or 4, whichever makes the smaller squared error: E2M1 has nothing between them.
    """
    n, k = weight.shape
    blocks = weight.float().view(n, k // 16, 16)
    size, top = blocks.abs(), blocks.abs().amax(-1, keepdim=True)
    multiplier = (top.max() / (6 * 448)).clamp(min=_TINY)

    def encode(peak: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = (top / (peak * multiplier)).clamp(max=448).to(torch.float8_e4m3fn)
        step = scale.float() * multiplier
        ratio = size / step.clamp(min=_TINY)
        spacing = 0.5 + 0.5 * (ratio >= 2) + (ratio >= 4)  # of E2M1: 0 .5 1 1.5 2 3 4 6
        value = ((ratio / spacing).round() * spacing).clamp(max=6)
        return value, scale.view(torch.uint8), (value * step - size).square().sum(-1, keepdim=True)

    value, scale, error = encode(6)
    value4, scale4, error4 = encode(4)
    better = error4 < error
    value, scale = torch.where(better, value4, value), torch.where(better, scale4, scale)
    # Scaled by 2^-14, an E2M1 value has its code in bits 9 to 11 of the FP16.
    codes = ((value * 2.0**-14).half().view(torch.int16) >> 9).to(torch.uint8) | ((blocks < 0).to(torch.uint8) << 3)
    codes = codes.view(n, k)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale[..., 0].view(torch.float8_e4m3fn), multiplier


def int4(weight: torch.Tensor, group: int = AWQ_GROUP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes 0..15 [N, K] uint8, zero points [N, K/group] uint8 and FP16 scales [N, K/group]; weight = (code - zero) * scale."""
    n, k = weight.shape
    groups = weight.float().view(n, k // group, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=2.0**-24).half()  # the smallest FP16
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.to(torch.uint8).view(n, k), zero.to(torch.uint8), scale
