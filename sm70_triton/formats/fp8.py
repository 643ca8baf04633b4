"""FP8 weights, E4M3.   w = code * scale

    fp8_tensor   weight float8_e4m3fn [N, K], weight_scale float32: one element, or one per fused part (`parts` gives their rows)
    fp8_channel  weight float8_e4m3fn [N, K], weight_scale [N, 1] or [N]
    fp8_block    weight float8_e4m3fn [N, K], weight_scale_inv [ceil(N/128), ceil(K/128)]: multiplied, despite its name
                 (compressed-tensors calls the same scales weight_scale)

Scales may be float32, bfloat16 or float16. Weight bytes 0x7f and 0xff are NaN, and stay NaN.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from . import _checks as check
from .codecs import encode
from .packed import PackedWeight

WEIGHT = {"weight": (2, (torch.float8_e4m3fn,))}
INPUT = {"input_scale": (None, check.SCALES)}


def _packed(layout: str, tensors: Mapping[str, torch.Tensor], name: str, scale: torch.Tensor, group_n: int, group_k: int) -> PackedWeight:
    weight = tensors["weight"].contiguous()
    values, codec = check.kernel_scale(scale)
    return PackedWeight(
        codec="e4m3", n=weight.shape[0], k=weight.shape[1], group_n=group_n, group_k=group_k, data=weight.view(torch.uint8), scale=values,
        scale_codec=codec, source={"layout": layout, "scale_name": name, "scale": tensors[name], "input": tensors.get("input_scale")},
    )  # fmt: skip


def _unpack(weight: PackedWeight, layout: str) -> dict[str, torch.Tensor]:
    check.layout_of(weight.source, layout)
    tensors = {"weight": weight.data.view(torch.float8_e4m3fn), weight.source["scale_name"]: weight.source["scale"]}
    if weight.source["input"] is not None:
        tensors["input_scale"] = weight.source["input"]
    return tensors


def pack_tensor(tensors: Mapping[str, torch.Tensor], parts: Sequence[int] | None = None) -> PackedWeight:
    """One scale for the tensor, or one per fused part; the scale is spread over rows so that parts keep their own."""
    check.take("fp8_tensor", tensors, {**WEIGHT, "weight_scale": (None, check.SCALES)}, INPUT)
    n, k = tensors["weight"].shape
    scale = tensors["weight_scale"].reshape(-1)
    rows = [n] if parts is None else list(parts)
    if not rows or sum(rows) != n or min(rows) < 1:
        raise ValueError(f"fp8_tensor: parts={rows} must be positive and add up to N={n}")
    check.shape("fp8_tensor", "weight_scale", scale, (len(rows),))
    spread = scale.repeat_interleave(torch.tensor(rows, device=scale.device))[:, None]
    return _packed("fp8_tensor", tensors, "weight_scale", spread, 1, k)


def unpack_tensor(weight: PackedWeight) -> dict[str, torch.Tensor]:
    return _unpack(weight, "fp8_tensor")


def pack_channel(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    check.take("fp8_channel", tensors, {**WEIGHT, "weight_scale": (None, check.SCALES)}, INPUT)
    n, k = tensors["weight"].shape
    check.shape("fp8_channel", "weight_scale", tensors["weight_scale"], (n, 1), (n,))
    return _packed("fp8_channel", tensors, "weight_scale", tensors["weight_scale"].reshape(n, 1), 1, k)


def unpack_channel(weight: PackedWeight) -> dict[str, torch.Tensor]:
    return _unpack(weight, "fp8_channel")


def _block(block: tuple[int, int]) -> tuple[int, int]:
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"fp8_block: block={block}; two positive sizes, rows and columns, are accepted")
    return block


def pack_block(tensors: Mapping[str, torch.Tensor], block: tuple[int, int] = (128, 128)) -> PackedWeight:
    """`block` is (rows, columns) per scale, `weight_block_size` in the checkpoint's config."""
    name = "weight_scale" if "weight_scale" in tensors and "weight_scale_inv" not in tensors else "weight_scale_inv"
    check.take("fp8_block", tensors, {**WEIGHT, name: (2, check.SCALES)}, INPUT)
    n, k = tensors["weight"].shape
    rows, columns = _block(block)
    check.shape("fp8_block", name, tensors[name], (-(-n // rows), -(-k // columns)))
    return _packed("fp8_block", tensors, name, tensors[name], rows, columns)


def unpack_block(weight: PackedWeight) -> dict[str, torch.Tensor]:
    return _unpack(weight, "fp8_block")


def _codes(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return encode(w.float() / scale, "e4m3").view(torch.float8_e4m3fn)


def _scale(amax: torch.Tensor) -> torch.Tensor:
    """The scale that maps the largest magnitude to 448; 1 for a block of zeros."""
    scale = amax / 448
    return torch.where(scale > 0, scale, 1.0)


def quantize_tensor(w: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = _scale(w.abs().max())
    return {"weight": _codes(w, scale), "weight_scale": scale}


def quantize_channel(w: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = _scale(w.abs().amax(1, keepdim=True))
    return {"weight": _codes(w, scale), "weight_scale": scale}


def quantize_block(w: torch.Tensor, block: tuple[int, int] = (128, 128)) -> dict[str, torch.Tensor]:
    n, k = w.shape
    rows, columns = _block(block)
    padded = torch.zeros(-(-n // rows) * rows, -(-k // columns) * columns, dtype=torch.float32, device=w.device)
    padded[:n, :k] = w
    scale = _scale(padded.reshape(-(-n // rows), rows, -(-k // columns), columns).abs().amax((1, 3)))
    spread = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return {"weight": _codes(w, spread), "weight_scale_inv": scale}
