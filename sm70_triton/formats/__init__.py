"""Checkpoint layouts to the one packed layout that kernels read, and back bit for bit.

    weight = formats.pack("awq", {"qweight": ..., "qzeros": ..., "scales": ...})
    formats.unpack(weight)        # the same tensors
    formats.dequantize(weight)    # the real weight [N, K] in float64
    formats.quantize("awq", w)    # round a float weight to nearest, in the layout's tensors

`LAYOUTS` names them all; each module's docstring gives its tensors and its equation.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from . import awq, ct_int4, fp8, gptq, int8, mxfp4, nvfp4
from .packed import PackedWeight, concat, dequantize

__all__ = ["LAYOUTS", "Layout", "PackedWeight", "concat", "dequantize", "pack", "quantize", "unpack"]


class Layout(NamedTuple):
    """One checkpoint layout: tensors -> PackedWeight, PackedWeight -> the same tensors, float weight -> rounded tensors."""

    pack: Callable[..., PackedWeight]
    unpack: Callable[[PackedWeight], dict[str, torch.Tensor]]
    quantize: Callable[..., dict[str, torch.Tensor]]


LAYOUTS: dict[str, Layout] = {
    "awq": Layout(awq.pack, awq.unpack, awq.quantize),
    "ct_int4": Layout(ct_int4.pack, ct_int4.unpack, ct_int4.quantize),
    "fp8_block": Layout(fp8.pack_block, fp8.unpack_block, fp8.quantize_block),
    "fp8_channel": Layout(fp8.pack_channel, fp8.unpack_channel, fp8.quantize_channel),
    "fp8_tensor": Layout(fp8.pack_tensor, fp8.unpack_tensor, fp8.quantize_tensor),
    "gptq": Layout(gptq.pack, gptq.unpack, gptq.quantize),
    "int8": Layout(int8.pack, int8.unpack, int8.quantize),
    "mxfp4": Layout(mxfp4.pack, mxfp4.unpack, mxfp4.quantize),
    "nvfp4_compressed_tensors": Layout(nvfp4.pack_compressed_tensors, nvfp4.unpack_compressed_tensors, nvfp4.quantize_compressed_tensors),
    "nvfp4_modelopt": Layout(nvfp4.pack_modelopt, nvfp4.unpack_modelopt, nvfp4.quantize_modelopt),
}


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is not known; accepted: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def pack(layout: str, tensors: Mapping[str, torch.Tensor], **options: Any) -> PackedWeight:
    """Checkpoint tensors of one linear layer -> PackedWeight. Raises ValueError or TypeError naming the tensor at fault."""
    return _layout(layout).pack(tensors, **options)


def unpack(weight: PackedWeight) -> dict[str, torch.Tensor]:
    """The checkpoint tensors that `weight` was packed from, bit for bit. Raises ValueError for a weight made otherwise (`concat`)."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}; a PackedWeight is accepted")
    name = weight.source.get("layout")
    if name not in LAYOUTS:
        raise ValueError(f"this weight came from {name!r}, not from a checkpoint layout; unpack the parts before joining them")
    # Provenance stays where the checkpoint was read; the tensors go where the weight is.
    return {key: tensor.to(weight.data.device) for key, tensor in LAYOUTS[name].unpack(weight).items()}


def quantize(layout: str, w: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Round a float weight [N, K] to nearest, in the checkpoint tensors of `layout`: for tests and demonstrations."""
    if w.ndim != 2 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"w has dtype {w.dtype} and shape {tuple(w.shape)}; a float [N, K] with N, K > 0 is accepted")
    if not bool(w.float().isfinite().all()):
        raise ValueError("w holds NaN, or values that are infinite in float32, which cannot be quantised")
    return _layout(layout).quantize(w.float(), **options)
