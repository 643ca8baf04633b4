"""Without a GPU the kernels run in Triton's interpreter, on CPU tensors; with one they run natively. Set before Triton is imported."""
import os
import secrets

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)  # pytest-xdist gives each core a worker; tiny tensors only lose by more threads

import pytest  # noqa: E402

from sm70_triton import env, registry  # noqa: E402


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(skip)


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def seed() -> int:
    """Fresh for every test and every run; printed, so pytest shows it when the test fails. SEED=... repeats one."""
    value = int(os.environ.get("SEED", secrets.randbits(31)))
    print(f"SEED={value}")
    return value


@pytest.fixture(autouse=True)
def private_settings(tmp_path, monkeypatch):
    """No test sees, or leaves, configs in the real user's cache."""
    for name in env.NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SM70_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    env.reload()
    registry.clear()
    yield
    monkeypatch.undo()
    env.reload()
    registry.clear()
