"""Helpers that several test files use."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sm70_triton import registry, verify
from sm70_triton.types import Case, Op

ROOT = Path(__file__).resolve().parent.parent


def cli(*args: str, env: dict[str, str] | None = None, timeout: float = 600) -> tuple[int, Any, str]:
    """Run `python -m sm70_triton ARGS --json` in a process where Triton compiles instead of interpreting: (code, JSON, stderr)."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | (env or {})
    done = subprocess.run([sys.executable, "-m", "sm70_triton", *args, "--json"], capture_output=True, text=True, env=clean, timeout=timeout, cwd=ROOT)
    try:
        return done.returncode, json.loads(done.stdout), done.stderr
    except json.JSONDecodeError:
        raise AssertionError(f"not JSON (exit {done.returncode}):\n{done.stdout}\n{done.stderr}") from None


def schema_call(op: Op, inputs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """(operator, arguments) of the `torch.ops.sm70_triton` call behind a public function: `run` takes the schema's arguments."""
    with mock.patch.object(sys.modules[op.call.__module__], "run") as run:
        op.call(**inputs)
    (call,) = run.call_args_list
    assert not call.kwargs
    return getattr(torch.ops.sm70_triton, op.name).default, call.args


def capture_and_replay(op: Op, case: Case, impl: str, seed: int) -> list[verify.Check]:
    """Capture one call in a CUDA graph, then replay it twice with other tensors (values, lengths, page tables, slots) in the same
    buffers and compare with the reference. What is not a tensor (weights, sizes, switches) stays. Stops at a seed that changes a shape.
    """
    static = op.make_inputs(case.geometry, seed=seed, device="cuda", **case.options)
    with registry.override(op.name, impl):
        op.call(**verify.clone(static))  # compiles; nothing may compile during capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.call(**static)
    checks = []
    for step in (1, 2):
        fresh = op.make_inputs(case.geometry, seed=seed + step, device="cuda", **case.options)
        fresh = {name: fresh[name] if isinstance(value, torch.Tensor) else value for name, value in static.items()}
        tensors = [(value, fresh[name]) for name, value in static.items() if isinstance(value, torch.Tensor)]
        if any(old.shape != new.shape for old, new in tensors):
            break
        for old, new in tensors:
            old.copy_(new)
        expected = op.reference(**verify.clone(fresh))
        graph.replay()
        torch.cuda.synchronize()
        checks.append(verify.compare(op, static, expected))
    return checks
