"""What this machine can do, found by trying. Cheap questions only import; `toolchain()` really compiles for sm_70."""
from __future__ import annotations

import contextvars
import functools
import importlib.metadata
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Compute capability x 10 that dispatch should assume, whatever card is present: set while compiling ahead of time.
_assumed_arch: contextvars.ContextVar[int | None] = contextvars.ContextVar("sm70_triton_assumed_arch", default=None)


@contextmanager
def assume_arch(arch: int) -> Iterator[None]:
    """Make `arch_of` answer `arch` for every device inside the block."""
    token = _assumed_arch.set(arch)
    try:
        yield
    finally:
        _assumed_arch.reset(token)


@functools.cache
def _cuda_arch(index: int) -> int:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def arch_of(device: Any) -> int:
    """Compute capability x 10 of a torch device; 0 for a CPU."""
    assumed = _assumed_arch.get()
    if assumed is not None:
        return assumed
    if device.type == "cuda":
        if device.index is None:  # the current device, as for torch
            import torch

            return _cuda_arch(torch.cuda.current_device())
        return _cuda_arch(device.index)
    if device.type == "cpu":
        return 0
    raise ValueError(f"device {str(device)!r} is not served; accepted: cuda and cpu tensors")


def parse_arch(text: str) -> int:
    """`sm70`, `sm_70`, `70` or `cpu` -> 70 or 0."""
    match = re.fullmatch(r"(?:sm_?)?([1-9][0-9]{1,2})", text.strip().lower())
    if text.strip().lower() == "cpu":
        return 0
    if not match:
        raise ValueError(f"arch {text!r} is not understood; use sm70, sm75, sm80, sm90 ... or cpu")
    return int(match.group(1))


def arch_name(arch: int) -> str:
    return f"sm{arch}" if arch else "cpu"


@functools.cache
def package_version(name: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1), which executes them on CPU tensors."""
    if not has_module("triton"):
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def missing(packages: tuple[str, ...]) -> str | None:
    """Why the packages an implementation needs are not usable, or None."""
    for package in packages:
        if not has_module(package):
            return f"the package {package} is not installed"
    return None


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def ptxas_for(arch: int) -> str:
    """Path of the ptxas that Triton will run for `arch` (TRITON_PTXAS_PATH included)."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return get_ptxas(arch).path
    except TypeError:  # Triton 3.7 and later pick one assembler for all targets
        return get_ptxas().path  # pyright: ignore[reportCallIssue]


_PTX = """.version 6.4
.target sm_70
.address_size 64
.visible .entry probe() { ret; }
"""


@functools.cache
def ptxas() -> dict[str, Any]:
    """{"path", "version", "sm70", "error"}: does Triton's ptxas assemble for sm_70? Tried, not read from a version."""
    try:
        path = ptxas_for(70)
    except Exception as error:
        return {"path": None, "version": None, "sm70": False, "error": str(error)}
    _, text = _run([path, "--version"])
    version = re.search(r"V(\d+\.\d+\.\d+)", text)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.ptx")
        source.write_text(_PTX)
        code, text = _run([path, "-arch=sm_70", str(source), "-o", str(Path(folder, "probe.cubin"))])
    return {"path": path, "version": version.group(1) if version else None, "sm70": code == 0, "error": text if code else None}


@functools.cache
def nvrtc() -> dict[str, Any]:
    """{"version", "sm70", "error"}: does the NVRTC that CuPy would use compile `mma.sync.m8n8k4` for sm_70?"""
    from fallback_cuda import module

    try:
        version = module.nvrtc_version()
    except module.Unavailable as error:
        return {"version": None, "sm70": False, "error": str(error)}
    try:
        module.compile_cubin("mma_probe.cu", arch=70)
    except Exception as error:  # a half-installed CuPy meets anything; the doctor has to survive it
        return {"version": version, "sm70": False, "error": str(error) or type(error).__name__}
    return {"version": version, "sm70": True, "error": None}


def gpus() -> list[dict[str, Any]]:
    """Name, arch and memory in bytes of every visible CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({"index": index, "name": properties.name, "arch": arch_name(_cuda_arch(index)), "memory_bytes": properties.total_memory})
    return found


def doctor() -> dict[str, Any]:
    """The report behind `sm70-triton doctor`; `fix` holds one sentence and install line per problem, `ok` is "no problem found"."""
    import torch

    arch_list = torch.cuda.get_arch_list() if torch.cuda.is_available() else _compiled_arch_list()
    cards = gpus()
    volta = [card for card in cards if card["arch"] == "sm70"]
    assembler, compiler = ptxas(), nvrtc()
    cupy = package_version("cupy-cuda12x") or package_version("cupy-cuda13x") or package_version("cupy")
    fix: list[str] = []
    if not assembler["sm70"]:
        gone = assembler["version"] and int(assembler["version"].split(".")[0]) >= 13
        why = "does not know sm_70 (CUDA 13 removed it)" if gone else f"does not assemble for sm_70 ({_last_line(assembler['error'])})"
        fix.append(
            f"ptxas {assembler['version'] or '(none)'} at {assembler['path']} {why}: unset TRITON_PTXAS_PATH, or "
            "pip install 'triton>=3.6,<4', whose wheel brings a ptxas 12 that does"
        )
    if compiler["version"] and not compiler["sm70"]:
        gone = int(compiler["version"].split(".")[0]) >= 13
        why = "CUDA 13 removed it" if gone else _last_line(compiler["error"])
        fix.append(
            f"NVRTC {compiler['version']} does not compile for sm_70 ({why}): pip uninstall -y cupy-cuda13x; pip install 'sm70-triton[cuda]', "
            "which brings cupy-cuda12x and NVRTC 12"
        )
    if package_version("cupy-cuda13x"):
        fix.append("cupy-cuda13x is built for CUDA 13, which no longer knows sm_70: pip uninstall -y cupy-cuda13x; pip install 'sm70-triton[cuda]'")
    if (volta or arch_list) and "sm_70" not in arch_list:
        fix.append(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) holds no sm_70 code (arch list: {' '.join(arch_list) or 'none'}): "
            "pip install torch==2.10.0, the last PyPI wheel with Volta in it, or take a cu126 wheel from PyTorch's own index"
        )
    return {
        "ok": not fix,
        "torch": {"version": str(torch.__version__), "arch_list": arch_list},
        "triton": {"version": package_version("triton"), "ptxas": assembler["version"], "sm70": assembler["sm70"]},
        "nvrtc": {"version": compiler["version"], "sm70": compiler["sm70"], "error": compiler["error"]},
        "cupy": cupy,
        "vllm": package_version("vllm"),
        "gpus": cards,
        "fix": fix,
    }


def _last_line(text: str | None) -> str:
    return (text or "no output").strip().splitlines()[-1]


def _compiled_arch_list() -> list[str]:
    """torch.cuda.get_arch_list() answers [] without a GPU; the flags compiled into the wheel are still there."""
    import torch

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return flags.split() if flags else []
