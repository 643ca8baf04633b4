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
LAYOUT: dict[str, tuple[str, dict[str, int]]] = {
    "fp8": ("fp8_channel", {}),
    "nvfp4": ("nvfp4_modelopt", {}),
    "awq": ("awq", {"group": 64}),  # the hidden size, 576, is no multiple of 128
}


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
        layout, options = LAYOUT[quant]
        self.packed = formats.concat([formats.pack(layout, formats.quantize(layout, part, **options)) for part in parts])
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
