"""NVFP4: E2M1 codes, one E4M3 scale per 16 columns, one float32 global scale.

    compressed-tensors  w = e2m1 * e4m3 / weight_global_scale         (weight_packed, weight_scale, weight_global_scale)
    ModelOpt            w = e2m1 * e4m3 * weight_scale_2              (weight, weight_scale, weight_scale_2)

The caller names the convention; it is never guessed from magnitudes, since exports with a global of 1 and tiny block scales exist
in both. The packed layout holds a multiplier, 1/global in float32 for compressed-tensors, as vLLM computes it.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch

from . import _checks as check
from .codecs import decode, encode, pack_nibbles
from .packed import PackedWeight

GROUP = 16
E4M3 = (torch.float8_e4m3fn,)


def _pack(layout: str, names: tuple[str, str, str], tensors: Mapping[str, torch.Tensor], input_name: str, divisor: bool) -> PackedWeight:
    codes_name, scale_name, global_name = names
    required = {codes_name: (2, (torch.uint8,)), scale_name: (2, E4M3), global_name: (None, check.F32)}
    check.take(layout, tensors, required, {input_name: (None, check.SCALES)})
    data, scale = tensors[codes_name].contiguous(), tensors[scale_name].contiguous()
    n, k = data.shape[0], 2 * data.shape[1]
    check.shape(layout, scale_name, scale, (n, check.groups_of(layout, k, GROUP)))
    stored = check.scalar(layout, global_name, tensors[global_name])
    multiplier = 1.0 / stored if divisor else stored
    if stored.device.type != "meta" and not bool(multiplier.isfinite()):
        raise ValueError(f"{layout}: {global_name}={stored.item()!r}: its reciprocal is beyond float32")
    source = {"layout": layout, "scale_name": scale_name, "global": tensors[global_name], "input": tensors.get(input_name)}
    return PackedWeight(
        codec="e2m1", n=n, k=k, group_n=1, group_k=GROUP, data=data, scale=scale.view(torch.uint8), scale_codec="e4m3",
        global_scale=multiplier.expand(n).contiguous(), source=source,
    )  # fmt: skip


def _unpack(weight: PackedWeight, layout: str, names: tuple[str, str, str], input_name: str) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, layout)
    tensors = {names[0]: weight.data, names[1]: weight.scale.view(torch.float8_e4m3fn), names[2]: weight.source["global"]}
    if weight.source["input"] is not None:
        tensors[input_name] = weight.source["input"]
    return tensors


_CT = ("weight_packed", "weight_scale", "weight_global_scale")
_MODELOPT = ("weight", "weight_scale", "weight_scale_2")


def pack_compressed_tensors(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    """weight_packed uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], weight_global_scale float32 [1] (a divisor)."""
    return _pack("nvfp4_compressed_tensors", _CT, tensors, "input_global_scale", divisor=True)


def unpack_compressed_tensors(weight: PackedWeight) -> dict[str, torch.Tensor]:
    return _unpack(weight, "nvfp4_compressed_tensors", _CT, "input_global_scale")


def pack_modelopt(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    """weight uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], weight_scale_2 float32 [] (a multiplier)."""
    return _pack("nvfp4_modelopt", _MODELOPT, tensors, "input_scale", divisor=False)


def unpack_modelopt(weight: PackedWeight) -> dict[str, torch.Tensor]:
    return _unpack(weight, "nvfp4_modelopt", _MODELOPT, "input_scale")


def _quantize(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K/2], E4M3 scales [N, K/16], multiplier []: amax / (6 * 448), so that the largest block scale is 448.

    Each block's largest weight becomes 6 or 4, whichever makes the smaller squared error: E2M1 has nothing between them.
    """
    n, k = w.shape
    blocks = w.float().reshape(n, check.groups_of("nvfp4", k, GROUP), GROUP)
    amax = blocks.abs().amax(-1)
    multiplier = (amax.max() / (6 * 448)).clamp(min=torch.finfo(torch.float32).tiny)

    def rounded(peak: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale = encode(amax / peak / multiplier, "e4m3").view(torch.float8_e4m3fn)
        step = (scale.float() * multiplier)[..., None]
        codes = encode(torch.where(step > 0, blocks / step, 0.0), "e2m1")
        return codes, scale, (decode(codes, "e2m1", torch.float32) * step - blocks).square().sum(-1)

    codes, scale, error = rounded(6)
    codes_4, scale_4, error_4 = rounded(4)
    better = error_4 < error
    scale = torch.where(better, scale_4.view(torch.uint8), scale.view(torch.uint8)).view(torch.float8_e4m3fn)
    codes = torch.where(better[..., None], codes_4, codes)
    return pack_nibbles(codes.reshape(n, k)), scale, multiplier


def quantize_modelopt(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest, in ModelOpt's tensors."""
    return dict(zip(_MODELOPT, _quantize(w), strict=True))


def quantize_compressed_tensors(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """Round float [N, K] to nearest, in compressed-tensors' tensors."""
    data, scale, multiplier = _quantize(w)
    return dict(zip(_CT, (data, scale, (1.0 / multiplier).reshape(1)), strict=True))
