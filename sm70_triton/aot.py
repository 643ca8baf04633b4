"""Compile for a card that is not here, through the very launch code that users run.

Inside `target(70)` Triton's driver is replaced by one that answers "sm_70" and, instead of launching, records each launch.
An op called on `meta` tensors then compiles exactly the kernels, specialisations and options that a V100 would compile, into
Triton's own disk cache, and hands back PTX, machine code, grid and arguments.
"""
from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from . import probe, registry
from .types import Case, Geometry, Op, Plan, Sm70Error

#: Shared memory one CTA can use, in bytes, by compute capability x 10 (CUDA programming guide, "Compute capabilities").
SHARED_MEMORY = {70: 98304, 72: 98304, 75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448}


class AotError(Sm70Error, RuntimeError):
    """A kernel could not be compiled for the target; the text says which and why."""


class Launch(msgspec.Struct, kw_only=True, eq=False):
    """One recorded kernel launch. `params` are (Triton type, value) of the arguments that the machine code takes, in order."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    ptx: str
    cubin: bytes
    params: tuple[tuple[str, Any], ...]


def _driver(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.backends.nvidia.driver import ty_to_cpp

    class RecordingDriver(DriverBase):
        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty_to_cpp(ty)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return -arch  # a key of its own in every kernel's cache, so a real device's kernels are never mixed up with these

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("meta")

        def get_benchmarker(self) -> Any:
            raise AotError("nothing can be timed on a target that is not here")

        def get_device_interface(self) -> Any:
            raise AotError("the target is not here")

    return RecordingDriver()


@contextmanager
def target(arch: int) -> Iterator[list[Launch]]:
    """Compile and record every Triton launch inside the block for compute capability `arch` (x 10), running nothing.

    The driver is replaced for the whole process: no other thread may launch a kernel meanwhile.
    """
    if probe.interpreting():
        raise AotError("TRITON_INTERPRET=1 is set: kernels of this process are interpreted and cannot be compiled; unset it")
    import triton
    from triton.runtime import driver
    from triton.runtime.errors import PTXASError
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    shared_memory = SHARED_MEMORY.get(arch, 98304)
    original_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel: Any = original_run(self, *args, grid=grid, warmup=True, **kwargs)
        if hasattr(kernel, "result"):
            kernel = kernel.result()
        meta, signature = kernel.metadata, kernel.src.signature
        bound = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        shape: Any = grid(bound) if callable(grid) else grid
        if meta.shared > shared_memory:
            raise AotError(f"{meta.name} needs {meta.shared} bytes of shared memory, {probe.arch_name(arch)} has {shared_memory}")
        x, y, z = (*shape, 1, 1)[:3]
        launches.append(
            Launch(name=meta.name, grid=(int(x), int(y), int(z)), num_warps=meta.num_warps, shared_bytes=meta.shared, ptx=kernel.asm["ptx"],
                   cubin=kernel.asm["cubin"], params=tuple((signature[n], bound[n]) for n in self.arg_names if signature[n] != "constexpr")))
        return kernel

    previous = driver._active
    driver.set_active(_driver(arch))
    JITFunction.run = run
    try:
        with probe.assume_arch(arch):
            yield launches
    except (triton.CompilationError, PTXASError) as error:
        raise AotError(f"a kernel does not compile for {probe.arch_name(arch)}: {error}") from error
    finally:
        JITFunction.run = original_run
        driver._active = previous


def compile(op: Op, geometry: Geometry, arch: int = 70, *, impl: str | None = None, plan: Plan | None = None,
            options: dict[str, Any] | None = None) -> tuple[registry.Route, list[Launch]]:
    """Compile what a call of `op` at `geometry` would launch on `arch`. No GPU and no memory for the tensors is needed."""
    inputs = op.make_inputs(geometry, seed=0, device="meta", **(options or {}))
    with target(arch) as launches, registry.override(op.name, impl, plan=plan):
        route = registry.resolve(op, geometry, arch)
        op.call(**inputs)
    return route, launches


def compile_case(op: Op, case: Case, arch: int = 70, *, impl: str | None = None) -> tuple[registry.Route, list[Launch]]:
    return compile(op, case.geometry, arch, impl=impl, options=dict(case.options))


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine code of one kernel uses. `stack_bytes` per thread are spills (no kernel here has arrays of its own);
    `loop_spills` counts the local-memory loads and stores inside loops, which are the ones that cost.

    Instruction counts are static; None where the disassembler at hand no longer knows the target (Triton 3.7 and later carry
    nvdisasm 13, which refuses sm_70).
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    loop_spills: int | None
    hmma: int | None
    ffma: int | None
    instructions: int | None


def usage(launch: Launch) -> Usage:
    """Read the machine code with the cuobjdump and nvdisasm in Triton's wheel. Raises AotError."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    for tool in ("cuobjdump", "nvdisasm"):
        if not (tools / tool).is_file():
            raise AotError(f"{launch.name} compiled, but Triton's {tool} is not at {tools / tool}: reinstall triton from PyPI")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(launch.cubin)
        resources = subprocess.run([tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True)
        sass = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True)
    counts = re.search(r"REG:(\d+) STACK:(\d+)", resources.stdout)
    if counts is None:
        raise AotError(f"{launch.name}: cuobjdump printed no resource line: {resources.stdout + resources.stderr!r}")
    opcodes: list[str] | None = None
    in_loops: set[int] = set()
    if sass.returncode == 0:
        opcodes, in_loops = _instructions(sass.stdout)
    elif "deprecated" not in sass.stderr:
        raise AotError(f"{launch.name}: nvdisasm failed: {sass.stderr.strip()}")
    return Usage(
        registers=int(counts[1]), stack_bytes=int(counts[2]), shared_bytes=launch.shared_bytes,
        loop_spills=sum(opcodes[i] in ("LDL", "STL") for i in in_loops) if opcodes is not None else None,
        hmma=opcodes.count("HMMA") if opcodes is not None else None,
        ffma=opcodes.count("FFMA") if opcodes is not None else None,
        instructions=len(opcodes) if opcodes is not None else None,
    )  # fmt: skip


def _instructions(sass: str) -> tuple[list[str], set[int]]:
    """(opcodes in order, indices of those inside a loop: between a label and a later branch back to it)."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    in_loops: set[int] = set()
    for line in sass.splitlines():
        label = re.match(r"(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(opcodes)
            continue
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_]+)(.*)", line)
        if not found:
            continue
        opcodes.append(found[1])
        branch = re.search(r"`\((\.L_\w+)\)", found[2]) if found[1] == "BRA" else None
        if branch and branch[1] in labels:
            in_loops.update(range(labels[branch[1]], len(opcodes)))
    return opcodes, in_loops
