"""Compile and load the `.cu` files beside this one. The only module of the project that imports CuPy, and only when asked."""
from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


class Unavailable(RuntimeError):
    """CuPy or NVRTC cannot be used here; the text says why and what to install."""


class CompileError(RuntimeError):
    """NVRTC refused a source; the text holds its log."""


def _nvrtc() -> Any:
    try:
        from cupy.cuda import nvrtc
    except Exception as error:  # a damaged or mismatched CuPy raises more than ImportError
        raise Unavailable(f"CuPy cannot be imported ({type(error).__name__}: {error}); pip install 'sm70-triton[cuda]'") from error
    return nvrtc


def nvrtc_version() -> str:
    """Version of the NVRTC library that CuPy loads, e.g. "12.9". Raises Unavailable."""
    nvrtc = _nvrtc()
    try:
        return ".".join(str(part) for part in nvrtc.getVersion())
    except Exception as error:  # CuPy raises RuntimeError, OSError or its own DynamicLibNotFoundError, by version
        raise Unavailable(f"CuPy cannot load NVRTC ({error}); pip install 'sm70-triton[cuda]'") from error


def _include_folders() -> list[str]:
    """Folders with cuda_fp16.h: pip's nvidia-cuda-runtime-cu12 or the toolkit that CuPy found."""
    import nvidia  # pyright: ignore[reportMissingImports]  # namespace package of NVIDIA's wheels

    return [str(path) for root in nvidia.__path__ for path in Path(root).glob("*/include") if (path / "cuda_fp16.h").is_file()]


@functools.cache
def compile_cubin(source: str, arch: int, options: tuple[str, ...] = ()) -> bytes:
    """Machine code of `source` (a file name in this folder) for compute capability `arch` (x 10). Needs no GPU.

    Raises Unavailable, or CompileError with the compiler's log.
    """
    nvrtc = _nvrtc()
    nvrtc_version()
    try:
        includes = _include_folders()
    except ImportError:
        includes = []
    flags = [f"-arch=sm_{arch}", "-std=c++17", *(f"-I{folder}" for folder in includes), *options]
    program = nvrtc.createProgram((FOLDER / source).read_text(), source, [], [])
    try:
        nvrtc.compileProgram(program, flags)
        cubin = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{source} for sm_{arch}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    # CuPy 14 drops the last byte, as it would for the terminating zero of a text; it is a zero in the ELF file too.
    return cubin + b"\0" * (-len(cubin) % 8)


def load(source: str, kernel: str, arch: int) -> Any:
    """The CuPy function `kernel` of `source`, compiled for `arch` and loaded on the current device."""
    return _load(compile_cubin(source, arch), ".cubin", kernel, _current_device())


def load_ptx(ptx: str, kernel: str) -> Any:
    """The CuPy function `kernel` of a PTX text, compiled by the driver for the current device, whatever the PTX's own target is."""
    return _load(ptx.encode(), ".ptx", kernel, _current_device())


def _current_device() -> int:
    import cupy

    return cupy.cuda.Device().id


@functools.cache
def _load(code: bytes, suffix: str, kernel: str, device: int) -> Any:
    """`device` is part of the key: a loaded module belongs to one device."""
    import cupy

    with tempfile.NamedTemporaryFile(suffix=suffix) as file:  # CuPy takes machine code and PTX by path only
        file.write(code)
        file.flush()
        return cupy.RawModule(path=file.name).get_function(kernel)
