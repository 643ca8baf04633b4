"""Checks on checkpoint tensors, shared by the layouts."""
from __future__ import annotations

from collections.abc import Mapping

import torch


def take(layout: str, tensors: Mapping[str, torch.Tensor], required: Mapping[str, tuple[int | None, tuple[torch.dtype, ...]]],
         optional: Mapping[str, tuple[int | None, tuple[torch.dtype, ...]]] | None = None) -> None:
    """Check names, dtypes and number of axes. Maps a name to (axes or None for any, accepted dtypes). Raises ValueError, TypeError."""
    allowed = {**required, **(optional or {})}
    missing = [name for name in required if name not in tensors]
    if missing:
        raise ValueError(f"{layout}: {missing[0]!r} is missing; it needs {', '.join(required)}, it got {', '.join(tensors) or 'nothing'}")
    for name, tensor in tensors.items():
        if name not in allowed:
            raise ValueError(f"{layout}: {name!r} is not one of its tensors; accepted: {', '.join(allowed)}")
        axes, dtypes = allowed[name]
        if tensor.dtype not in dtypes:
            raise TypeError(f"{layout}: {name}.dtype={tensor.dtype}; accepted: {', '.join(str(d).removeprefix('torch.') for d in dtypes)}")
        if axes is not None and tensor.ndim != axes:
            raise ValueError(f"{layout}: {name}.shape={tuple(tensor.shape)}; {axes} axes are accepted")


def shape(layout: str, name: str, tensor: torch.Tensor, *accepted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in accepted:
        raise ValueError(f"{layout}: {name}.shape={tuple(tensor.shape)}; accepted: {' or '.join(map(str, accepted))}")


def scalar(layout: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A one-element tensor as shape []."""
    if tensor.numel() != 1:
        raise ValueError(f"{layout}: {name}.shape={tuple(tensor.shape)}; one element is accepted")
    return tensor.reshape(())


def layout_of(weight_source: Mapping[str, object], *accepted: str) -> None:
    found = weight_source.get("layout")
    if found not in accepted:
        raise ValueError(f"this weight came from layout {found!r}; unpacking is for {', '.join(accepted)}")


def groups_of(layout: str, k: int, group: int) -> int:
    if group < 1 or k % group:
        raise ValueError(f"{layout}: K={k} is not a multiple of the group of {group}")
    return k // group


F32 = (torch.float32,)
SCALES = (torch.float16, torch.bfloat16, torch.float32)


def kernel_scale(scale: torch.Tensor) -> tuple[torch.Tensor, str]:
    """A scale as kernels take it: float16 stays, bfloat16 widens to float32 without loss."""
    if scale.dtype == torch.float16:
        return scale.contiguous(), "f16"
    return scale.float().contiguous(), "f32"
