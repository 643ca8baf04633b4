"""Compare what an op wrote with its float64 reference. Tests, tuning and the GPU records all go through here."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from . import registry
from .types import Case, Op


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`worst` is the largest error divided by its bound (1 is the limit); `relative_l2` is ||out - ref|| / ||ref||."""

    ok: bool
    worst: float
    relative_l2: float
    detail: str


def clone(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose tensors can be written without touching the original; strides are kept."""
    memo: dict[int, Any] = {}

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                memo[id(value)] = new.copy_(value)
            return memo[id(value)]
        return copy.copy(value) if isinstance(value, (list, dict)) else value

    return {name: one(value) for name, value in inputs.items()}


def compare(op: Op, inputs: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> Check:
    """Check the op's outputs inside `inputs` (already written) against `expected`, elementwise within `op.tolerance`."""
    bounds = op.tolerance(inputs, expected)
    ok, worst, relative, detail = True, 0.0, 0.0, ""
    for name, want in expected.items():
        got, bound = inputs[name], bounds[name]
        if got.shape != want.shape:
            return Check(ok=False, worst=float("inf"), relative_l2=float("inf"), detail=f"{name}: shape {tuple(got.shape)} != {tuple(want.shape)}")
        if got.numel() == 0:
            continue
        if bound is None:
            same = (got == want) | ((got != got) & (want != want))
            if not bool(same.all()):
                index = tuple(int(i) for i in (~same).nonzero()[0])
                ok, worst = False, float("inf")
                detail = f"{name}{list(index)} is {got[index].item()!r}, must be exactly {want[index].item()!r} ({int((~same).sum())} differ)"
            continue
        got64, want64 = got.double(), want.double()
        both_nan = got64.isnan() & want64.isnan()
        both_inf = got64.isinf() & (got64 == want64)
        error = torch.where(both_nan | both_inf, torch.zeros_like(want64), (got64 - want64).abs())
        ratio = torch.where(error == 0, error, error / bound.clamp_min(1e-300)).nan_to_num(nan=float("inf"), posinf=float("inf"))
        peak = float(ratio.max())
        finite = want64.isfinite() & got64.isfinite()
        norm = float(want64[finite].norm())
        relative = max(relative, float(error[finite].norm()) / norm if norm else 0.0)
        if peak > worst:
            worst = peak
            index = tuple(int(i) for i in (ratio == ratio.max()).nonzero()[0])
            detail = f"{name}{list(index)} is {got[index].item()!r}, must be {want[index].item()!r} +- {bound.expand_as(want)[index].item():.3g}"
        ok = ok and peak <= 1.0
    return Check(ok=ok, worst=worst, relative_l2=relative, detail=detail)


def run_case(op: Op, case: Case, *, impl: str | None, device: str, seed: int) -> Check:
    """Run one case with one implementation (forced: a fallback would prove nothing) and compare with the reference."""
    inputs = op.make_inputs(case.geometry, seed=seed, device=device, **case.options)
    expected = op.reference(**clone(inputs))
    with registry.override(op.name, impl):
        op.call(**inputs)
    return compare(op, inputs, expected)
