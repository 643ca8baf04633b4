"""The one layout that kernels read, whatever the checkpoint looked like."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ._int4 import original_order
from .codecs import decode, unpack_nibbles

CODECS = ("e2m1", "u4", "u4b8", "e4m3", "e5m2", "int8")
SCALE_CODECS = {"e4m3": torch.uint8, "e8m0": torch.uint8, "f16": torch.float16, "f32": torch.float32}


def _refuse(name: str, values: torch.Tensor, bad: torch.Tensor, accepted: str) -> None:
    """Refuse values that no honest checkpoint holds; looked for once, when a weight is made."""
    if bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        value = values[tuple(first)].item()
        stored = f"0x{value:02x}" if values.dtype == torch.uint8 else repr(value)
        count = f"{int(bad.sum())} of {bad.numel()} values"
        raise ValueError(f"{name} holds {count} that are not {accepted}, the first at {first}: {stored}")


@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A quantised weight [n out-features, k in-features]:  value = code * scale[row // group_n, column // group_k] * global_scale[row].

    Attributes:
        codec: "e2m1", "u4" (code - zero), "u4b8" (code - 8), "e4m3", "e5m2" or "int8".
        n, k: logical sizes. group_n, group_k: rows and columns that share a scale.
        data: uint8, [n, k/2] (the even column in the low nibble) or [n, k].
        scale: [ceil(n/group_n), ceil(k/group_k)]; its format is `scale_codec`: "e4m3" or "e8m0" (uint8), "f16" or "f32".
        zero: uint8 [n, ceil(k/group_k)] with codec "u4", else None.
        global_scale: float32 [n] multiplier, one per row so that fused parts keep their own, or None.
        perm: int32 [k] or None; packed column j multiplies activation column perm[j].
        source: what the layout's `unpack` needs to give the checkpoint's tensors back bit for bit.

    Raises:
        TypeError, ValueError: a field of the wrong type, dtype, shape or device; a scale that is NaN, infinite or, as an E4M3 byte,
            negative; a global scale that is not finite and positive; a perm that is no permutation. Negative float scales are
            legitimate: some INT4 quantisers pick the sign that uses the code -8. Scales of zero are, too: blocks of zeros have them.
    """

    codec: str
    n: int
    k: int
    group_n: int
    group_k: int
    data: torch.Tensor
    scale: torch.Tensor
    scale_codec: str
    zero: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    perm: torch.Tensor | None = None
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # it was checked when it was made
        if self.codec not in CODECS:
            raise ValueError(f"codec={self.codec!r}; accepted: {', '.join(CODECS)}")
        if self.scale_codec not in SCALE_CODECS:
            raise ValueError(f"scale_codec={self.scale_codec!r}; accepted: {', '.join(SCALE_CODECS)}")
        if self.n < 1 or self.k < 1 or self.group_n < 1 or self.group_k < 1:
            raise ValueError(f"n={self.n}, k={self.k}, group_n={self.group_n}, group_k={self.group_k} must all be positive")
        if self.bits == 4 and self.k % 2:
            raise ValueError(f"k={self.k}: 4-bit weights need an even number of in-features")
        if self.bits == 4 and self.k % self.group_k:
            raise ValueError(f"k={self.k} is not a multiple of the group of {self.group_k} columns")
        rows, groups = -(-self.n // self.group_n), -(-self.k // self.group_k)
        expected = {
            "data": ((self.n, self.k * self.bits // 8), torch.uint8),
            "scale": ((rows, groups), SCALE_CODECS[self.scale_codec]),
            "zero": ((self.n, groups), torch.uint8),
            "global_scale": ((self.n,), torch.float32),
            "perm": ((self.k,), torch.int32),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if tensor is None and name not in ("data", "scale"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; a tensor is accepted")
            if tensor.dtype != dtype:
                raise TypeError(f"{name}.dtype={tensor.dtype}; {dtype} is accepted")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}.shape={tuple(tensor.shape)}; {shape} is accepted")
            if not tensor.is_contiguous():
                raise ValueError(f"{name}.stride()={tensor.stride()}: it must be contiguous")
            if tensor.device != self.data.device:
                raise ValueError(f"{name} is on {tensor.device}, data on {self.data.device}; all must be on one device")
        if (self.codec == "u4") != (self.zero is not None):
            given = "None" if self.zero is None else "a tensor"
            raise ValueError(f"codec={self.codec!r} with zero={given}: zero belongs to u4 and only to u4")
        if self.data.device.type != "meta":
            self._check_values()

    def _check_values(self) -> None:
        name = self.source.get("scale_name", "scale")  # what the checkpoint calls it
        if self.scale_codec == "e4m3":  # NVFP4 means them as unsigned; -0 does no harm
            bad = ((self.scale & 0x7F) == 0x7F) | (self.scale > 0x80)
            _refuse(name, self.scale, bad, "finite and not negative (E4M3 bytes 0x00 to 0x7e)")
        elif self.scale_codec == "e8m0":
            _refuse(name, self.scale, self.scale == 0xFF, "finite (E8M0 bytes 0x00 to 0xfe)")
        else:
            _refuse(name, self.scale, ~self.scale.isfinite(), "finite")
        if self.global_scale is not None:
            bad = ~(self.global_scale.isfinite() & (self.global_scale > 0))
            _refuse("global_scale", self.global_scale, bad, "finite and positive")
        if self.perm is not None:
            expected = torch.arange(self.k, dtype=torch.int32, device=self.perm.device)
            if not torch.equal(self.perm.sort().values, expected):
                raise ValueError(f"perm is not a permutation: each of 0 to {self.k - 1} must be there once")

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 4 if self.codec in ("e2m1", "u4", "u4b8") else 8

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads: codes, scales, zeros, globals, permutation."""
        tensors = (self.data, self.scale, self.zero, self.global_scale, self.perm)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device (`source` stays where it is)."""
        moved = {f: t.to(device) for f in ("data", "scale", "zero", "global_scale", "perm") if (t := getattr(self, f)) is not None}
        return dataclasses.replace(self, **moved)


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The real weight [n, k] in the checkpoint's column order. float64 products are exact; other dtypes round at the end.

    The specification that kernels are checked against: value = code * scale * global_scale. NaN codes (FP8) give NaN.
    """
    if weight.bits == 4:
        codes = unpack_nibbles(weight.data)
        if weight.codec == "e2m1":
            values = decode(codes, "e2m1")
        elif weight.zero is not None:
            values = codes.double() - weight.zero.double().repeat_interleave(weight.group_k, 1)[:, : weight.k]
        else:
            values = codes.double() - 8
    elif weight.codec == "int8":
        values = weight.data.view(torch.int8).double()
    else:
        values = decode(weight.data, weight.codec)
    scale = decode(weight.scale, weight.scale_codec) if weight.scale.dtype == torch.uint8 else weight.scale.double()
    values *= scale.repeat_interleave(weight.group_n, 0)[: weight.n].repeat_interleave(weight.group_k, 1)[:, : weight.k]
    if weight.global_scale is not None:
        values *= weight.global_scale.double()[:, None]
    return original_order(values, weight.perm).to(dtype)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def concat(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Stack weights along their out-features (q/k/v, gate/up). Every part keeps its own global scale.

    Raises ValueError if the parts differ in format, in-features, groups or column order, or if a part's rows would make a
    block scale straddle two parts.
    """
    if not parts:
        raise ValueError("parts is empty; at least one weight is needed")
    first = parts[0]
    for index, part in enumerate(parts):
        if not isinstance(part, PackedWeight):
            raise TypeError(f"parts[{index}] is a {type(part).__name__}; a PackedWeight is accepted")
        if part.data.device != first.data.device:
            raise ValueError(f"parts[{index}] is on {part.data.device}, parts[0] on {first.data.device}; all must be on one device")
        for name in ("codec", "k", "group_n", "group_k", "scale_codec"):
            value, expected = getattr(part, name), getattr(first, name)
            if value != expected:
                raise ValueError(f"parts[{index}].{name}={value!r} differs from parts[0].{name}={expected!r}")
        if not _equal(part.perm, first.perm):
            raise ValueError(f"parts[{index}].perm differs from parts[0].perm: their columns are in another order")
        if index < len(parts) - 1 and part.n % part.group_n:
            raise ValueError(f"parts[{index}].n={part.n} is not a multiple of its block of {part.group_n} rows")
    has_global = any(p.global_scale is not None for p in parts)
    globals_ = [p.global_scale if p.global_scale is not None else torch.ones(p.n, device=p.data.device) for p in parts]
    return PackedWeight(
        codec=first.codec, n=sum(p.n for p in parts), k=first.k, group_n=first.group_n, group_k=first.group_k,
        data=torch.cat([p.data for p in parts]), scale=torch.cat([p.scale for p in parts]), scale_codec=first.scale_codec,
        zero=torch.cat([p.zero for p in parts if p.zero is not None]) if first.zero is not None else None,
        global_scale=torch.cat(globals_) if has_global else None, perm=first.perm,
        source={"layout": "concat"},
    )  # fmt: skip
