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

from sm70_triton.types import Op

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
