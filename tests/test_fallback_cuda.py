"""CUDA C++ kernels: compiled for sm_70 by NVRTC 12 without a GPU, right on one."""
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from fallback_cuda import module

SOURCES = sorted(file.name for file in module.FOLDER.glob("*.cu"))


@pytest.fixture
def nvrtc():
    """NVRTC 12 comes with the [cuda] extra; a machine with CUDA 13 only cannot run these."""
    version = module.nvrtc_version()
    if not version.startswith("12."):
        pytest.skip(f"NVRTC {version} no longer knows sm_70")


@pytest.mark.parametrize("source", SOURCES)
def test_compiles_to_volta_tensor_core_code(source, nvrtc, tmp_path):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(module.compile_cubin(source, 70))
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    sass = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert sass.count("HMMA.884.F32.F32.STEP") >= 4 and "STL" not in sass


def test_a_bad_source_is_refused_with_the_compilers_log(nvrtc, tmp_path, monkeypatch):
    (tmp_path / "bad.cu").write_text("__global__ void k() { nonsense; }")
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    with pytest.raises(module.CompileError, match="(?s)bad.cu for sm_70.*nonsense"):
        module.compile_cubin("bad.cu", 70)


@pytest.mark.gpu
def test_mma_probe_multiplies_one_tile_per_quadpair(seed):
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, (4, 8, 4), generator=g).half().cuda() for _ in "ab")  # small integers: every sum is exact
    c = torch.full((4, 8, 8), float("nan"), device="cuda")
    major, minor = torch.cuda.get_device_capability()
    import cupy

    kernel = module.load("mma_probe.cu", "mma_probe", 10 * major + minor)
    kernel((1,), (32,), tuple(cupy.uint64(t.data_ptr()) for t in (a, b, c)))
    torch.cuda.synchronize()
    assert torch.equal(c, a.float() @ b.float().mT)
