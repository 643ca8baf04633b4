"""Checks on checkpoint tensors, shared by the layouts."""
from __future__ import annotations

from collections.abc import Mapping

import torch

F32 = (torch.float32,)
I32 = (torch.int32,)
INTS = (torch.int32, torch.int64)
SCALES = (torch.float16, torch.bfloat16, torch.float32)


def take(layout: str, tensors: Mapping[str, torch.Tensor], required: Mapping[str, tuple[int | None, tuple[torch.dtype, ...]]],
         optional: Mapping[str, tuple[int | None, tuple[torch.dtype, ...]]] | None = None) -> None:
    """Check names, dtypes, number of axes and device; a name maps to (axes or None for any, accepted dtypes).

    Raises ValueError or TypeError, naming the tensor.
    """
    allowed = {**required, **(optional or {})}
    missing = [name for name in required if name not in tensors]
    if missing:
        got = ", ".join(tensors) or "nothing"
        raise ValueError(f"{layout}: {missing[0]!r} is missing; it needs {', '.join(required)}, it got {got}")
    device = None
    for name, tensor in tensors.items():
        if name not in allowed:
            raise ValueError(f"{layout}: {name!r} is not one of its tensors; accepted: {', '.join(allowed)}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{layout}: {name} is a {type(tensor).__name__}; a tensor is accepted")
        axes, dtypes = allowed[name]
        if tensor.dtype not in dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{layout}: {name}.dtype={tensor.dtype}; accepted: {accepted}")
        if axes is not None and tensor.ndim != axes:
            raise ValueError(f"{layout}: {name}.shape={tuple(tensor.shape)}; {axes} axes are accepted")
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(f"{layout}: {name} is on {tensor.device}, the others on {device}; all must be on one device")


def shape(layout: str, name: str, tensor: torch.Tensor, *accepted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in accepted:
        raise ValueError(f"{layout}: {name}.shape={tuple(tensor.shape)}; accepted: {' or '.join(map(str, accepted))}")


def scalar(layout: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A one-element tensor as shape [] that must be finite and positive."""
    if tensor.numel() != 1:
        raise ValueError(f"{layout}: {name}.shape={tuple(tensor.shape)}; one element is accepted")
    value = tensor.reshape(())
    if value.device.type != "meta" and not (bool(value.isfinite()) and bool(value > 0)):
        raise ValueError(f"{layout}: {name}={value.item()!r}; a finite positive number is accepted")
    return value


def layout_of(weight_source: Mapping[str, object], *accepted: str) -> None:
    found = weight_source.get("layout")
    if found not in accepted:
        raise ValueError(f"this weight came from layout {found!r}; unpacking is for {', '.join(accepted)}")


def groups_of(layout: str, k: int, group: int) -> int:
    if group < 1 or k % group:
        raise ValueError(f"{layout}: K={k} is not a multiple of the group of {group}")
    return k // group


def group_of(layout: str, name: str, k: int, groups: int) -> int:
    """Columns in a group, from the number of groups that tensor `name` has."""
    if groups < 1 or k % groups:
        raise ValueError(f"{layout}: {name} has {groups} groups, which do not divide K={k}")
    return k // groups


def words(layout: str, axis: str, size: int) -> int:
    """Words of eight 4-bit codes along an axis."""
    if size % 8:
        raise ValueError(f"{layout}: {axis}={size} is not a multiple of 8, the codes in one int32")
    return size // 8


def kernel_scale(scale: torch.Tensor) -> tuple[torch.Tensor, str]:
    """A scale as kernels take it: float16 stays, bfloat16 widens to float32 without loss."""
    if scale.dtype == torch.float16:
        return scale.contiguous(), "f16"
    return scale.float().contiguous(), "f32"
