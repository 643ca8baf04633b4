"""The package as a whole: documented, light to import, complete in a wheel, clean under the linters, README in step."""
import inspect
import os
import re
import subprocess
import sys
import zipfile

import pytest
import readme
from support import ROOT

import sm70_triton
from sm70_triton import env, registry


def _public():
    for name in sm70_triton.__all__:
        if not name.startswith("__"):
            yield name, getattr(sm70_triton, name)


@pytest.mark.parametrize("name, value", list(_public()))
def test_every_exported_name_is_documented(name, value):
    doc = inspect.getdoc(value)
    assert doc and len(doc) > 60
    if name in registry.discover():
        module_doc = inspect.getdoc(sys.modules[value.__module__])
        assert module_doc and len(module_doc) > 200, "the op file states formula, layout and limits"
        for parameter in inspect.signature(value).parameters:
            assert re.search(rf"\b{parameter}\b", doc), f"{name}: argument {parameter} is not documented"
        assert "Raises" in doc
    readme_text = readme.README.read_text()
    assert f"`{name}`" in readme_text, f"{name} is not in the README"


def test_every_module_and_variable_is_documented():
    for file in [*(ROOT / "sm70_triton").rglob("*.py"), *(ROOT / "fallback_cuda").glob("*.py")]:
        text = file.read_text().lstrip()
        assert text.startswith('"""') or file.name == "__main__.py", f"{file} has no module docstring"
    for name in env.NAMES:
        assert name in (env.Env.__doc__ or "") and name in readme.README.read_text()


def test_import_is_light_and_touches_no_gpu():
    code = (
        "import time, sys; started = time.perf_counter(); import sm70_triton; took = time.perf_counter() - started\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules and 'cupy' not in sys.modules\n"
        "assert took < 0.1, took\n"
        "sm70_triton.kv_write\n"
        "import torch; assert not torch.cuda.is_initialized(); assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_wheel_holds_everything(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sm70_triton/py.typed" in names and "fallback_cuda/mma_probe.cu" in names
    configs = [n for n in names if n.startswith("sm70_triton/autotune_configs/sm70/") and n.endswith(".json")]
    on_disk = list((ROOT / "autotune_configs").rglob("*.json"))
    assert len(configs) == len(on_disk) > 0
    assert not [n for n in names if n.startswith("tests")]
    # Unpacked, as pip would: the configs are found inside the package.
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = "from sm70_triton import configs; root = configs.shipped_root(); assert root.parent.name == 'sm70_triton' and list(root.rglob('*.json')), root"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)})


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["pyright", "--pythonpath", sys.executable], ["lint-imports", "--no-logo"]], ids=lambda c: c[0])
def test_linters(command):
    done = subprocess.run([os.path.join(os.path.dirname(sys.executable), command[0]), *command[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_tables_come_from_the_records():
    assert readme.rendered() == readme.README.read_text(), "run: python tests/readme.py render"


def test_ci_runs_the_readme_command():
    assert 'eval "$(python3 tests/readme.py command tests)"' in (ROOT / ".ci/run").read_text()
    assert "pytest" in readme.command("tests") and "sm70-triton demo" in readme.command("demo")


def test_top_level_is_fixed():
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    allowed = {"sm70_triton", "fallback_cuda", "tests", "autotune_configs", "pyproject.toml", "README.md"}
    assert {name.split("/")[0] for name in tracked if not name.startswith(".")} <= allowed
