"""Dispatch: precedence, refusals, overrides, admission by arithmetic, and that nothing in it knows how a model was split."""
import re
import time

import msgspec
import pytest
from support import ROOT

from sm70_triton import configs, env, probe, registry
from sm70_triton.ops import kv_write
from sm70_triton.types import Arithmetic, Needs, ResolveError

OP = registry.get("kv_write")
GEOMETRY = kv_write.KvWriteGeometry(kv_dtype="fp16", kv_heads=4, head_dim=128, page_size=16, tokens=64)
PLAN = kv_write.SimtPlan(block_t=2, num_warps=2)


def bucket(plan, tokens=64, rev=None, impl="simt"):
    evidence = configs.Model(model="test", triton="3.6.0")
    return configs.Bucket(at={"tokens": tokens}, impl=impl, rev=rev or OP.impls["simt"].rev, plan=msgspec.to_builtins(plan), evidence=evidence)


def plan(**fields):
    return kv_write.SimtPlan(**{"block_t": 2, "num_warps": 2, **fields})


def test_default_plan_on_a_v100():
    route = registry.resolve(OP, GEOMETRY, 70)
    assert (route.impl.name, route.source, route.file) == ("simt", "default", None)
    assert route.plan == OP.impls["simt"].default(GEOMETRY, 70)
    assert [r.impl for r in route.refused] == ["torch"]


def test_precedence(tmp_path, monkeypatch):
    def sources():
        registry.clear()
        route = registry.resolve(OP, GEOMETRY, 70)
        return route.source, route.plan, route.file

    shipped, directory = tmp_path / "shipped", tmp_path / "dir"
    monkeypatch.setattr(configs, "shipped_root", lambda: shipped)
    assert sources()[0] == "default"
    file = configs.write(70, "kv_write", GEOMETRY, bucket(plan(block_t=1)), root=shipped)
    assert sources() == ("shipped", plan(block_t=1), str(file))
    file = configs.write(70, "kv_write", GEOMETRY, bucket(plan(block_t=4)))
    assert sources() == ("user", plan(block_t=4), str(file))
    file = configs.write(70, "kv_write", GEOMETRY, bucket(plan(block_t=8)), root=directory)
    monkeypatch.setenv("SM70_TRITON_CONFIG_DIR", str(directory))
    env.reload()
    assert sources() == ("config_dir", plan(block_t=8), str(file))
    monkeypatch.setenv("SM70_TRITON_IMPL", "kv_write=torch")
    env.reload()
    assert sources() == ("env", kv_write.TorchPlan(), None)
    with registry.override("kv_write", "simt"):  # the plan still comes from the configs
        assert sources() == ("override", plan(block_t=8), str(file))
    with registry.override("kv_write", "simt", plan=plan(block_t=16)):
        assert sources() == ("override", plan(block_t=16), None)


def test_nearest_bucket_in_log_space():
    for tokens, block in ((1, 1), (64, 2), (1024, 8)):
        configs.write(70, "kv_write", GEOMETRY, bucket(plan(block_t=block), tokens))
    for tokens, block in ((1, 1), (7, 1), (9, 2), (200, 2), (300, 8), (100000, 8)):
        shape = msgspec.structs.replace(GEOMETRY, tokens=tokens)
        assert registry.resolve(OP, shape, 70).plan.block_t == block, tokens


def test_unusable_buckets_are_passed_over(caplog):
    configs.write(70, "kv_write", GEOMETRY, bucket(plan(block_t=4), 64, rev=99))
    configs.write(70, "kv_write", GEOMETRY, bucket(plan(block_t=4096, num_warps=1), 63))
    configs.write(70, "kv_write", GEOMETRY, bucket(plan(block_t=8), 256))
    route = registry.resolve(OP, GEOMETRY, 70)
    assert route.plan.block_t == 8
    assert "rev 99" in caplog.text and "would spill" in caplog.text


def test_refusals_name_every_candidate_and_reason():
    with pytest.raises(ResolveError) as error, registry.override("kv_write", require=Arithmetic(cache_encode="rounded")):
        registry.resolve(OP, GEOMETRY, 70)
    for name in OP.impls:
        assert re.search(rf"^  {name}: cache_encode is 'exact', 'rounded' is required$", str(error.value), re.M), name


def test_forced_implementation_never_falls_back(monkeypatch):
    monkeypatch.setattr(probe, "interpreting", lambda: False)
    with registry.override("kv_write", "simt"), pytest.raises(ResolveError, match="simt: it needs a GPU"):
        registry.resolve(OP, GEOMETRY, 0)
    with registry.override("kv_write", "simt"), pytest.raises(ResolveError, match="simt: it needs sm70 or later, this is sm61"):
        registry.resolve(OP, GEOMETRY, 61)
    with registry.override("kv_write", "simt", plan=plan(block_t=4096, num_warps=1)), pytest.raises(ResolveError, match="would spill"):
        registry.resolve(OP, GEOMETRY, 70)


def test_the_reference_serves_a_cpu_and_no_gpu_by_itself():
    assert registry.resolve(OP, GEOMETRY, 0).impl.name == "torch"
    with registry.override("kv_write", "torch"):
        assert registry.resolve(OP, GEOMETRY, 70).impl.name == "torch"


@pytest.mark.parametrize(
    "setting, message",
    [
        ("kv_write", "is not op=impl"),
        ("kv_write=", "is not op=impl"),
        ("kv_writ=simt", "names the op 'kv_writ', which does not exist"),
        ("kv_write=fast", "names 'fast', which kv_write does not have; accepted: torch, simt"),
    ],
)
def test_bad_impl_variable(monkeypatch, setting, message):
    monkeypatch.setenv("SM70_TRITON_IMPL", setting)
    with pytest.raises((ValueError, ResolveError), match=message):
        env.reload()
        registry.resolve(OP, GEOMETRY, 70)
    monkeypatch.delenv("SM70_TRITON_IMPL")


def test_misspelled_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("SM70_TRITON_IMPLS", "x=y")
    with pytest.raises(ValueError, match="unknown environment variable SM70_TRITON_IMPLS"):
        env.reload()
    monkeypatch.delenv("SM70_TRITON_IMPLS")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("kv_writ",), "op 'kv_writ' does not exist; accepted: .*kv_write"),
        (("kv_write", "fast"), "impl='fast' is not an implementation of kv_write"),
    ],
)
def test_bad_override(arguments, message):
    with pytest.raises(ValueError, match=message), registry.override(*arguments):
        pass
    with pytest.raises(ValueError, match="name that one as impl"), registry.override("kv_write", "torch", plan=PLAN):
        pass


def test_overrides_nest_and_end():
    with registry.override("kv_write", "simt", plan=plan(block_t=4)):
        with registry.override("kv_write", "simt", plan=plan(block_t=8)):
            assert registry.resolve(OP, GEOMETRY, 70).plan.block_t == 8
        assert registry.resolve(OP, GEOMETRY, 70).plan.block_t == 4
    assert registry.resolve(OP, GEOMETRY, 70).source == "default"


def test_routes_are_reported_once_and_counted(caplog):
    caplog.set_level("INFO", "sm70_triton")
    for _ in range(3):
        registry.resolve(OP, GEOMETRY, 70)
    lines = [r.message for r in caplog.records if r.message.startswith("kv_write")]
    assert len(lines) == 1 and "-> simt (default)" in lines[0] and "torch: it is the reference" in lines[0]
    assert registry.served() == {"kv_write": {"simt": 1}}


def test_a_cached_lookup_reads_no_file_and_is_quick(monkeypatch):
    registry.resolve(OP, GEOMETRY, 70)
    monkeypatch.setattr(configs, "lookup", lambda *a: pytest.fail("a cached route looked at the disk"))
    started = time.perf_counter()
    for _ in range(1000):
        registry.resolve(OP, GEOMETRY, 70)
    assert (time.perf_counter() - started) / 1000 < 50e-6


def test_arithmetic_admission():
    assert Arithmetic(qk_accum_bits=16).refusal(Arithmetic(qk_accum_bits=32)) == "qk_accum_bits is 16, at least 32 is required"
    assert Arithmetic(weight_decode="rounded").refusal(Arithmetic(weight_decode="exact")) == "weight_decode is 'rounded', 'exact' is required"
    assert Arithmetic(accum_bits=32).refusal(Arithmetic(qk_accum_bits=32)) is None


def test_missing_package_is_a_reason():
    needs = Needs(min_arch=70, packages=("triton", "no_such_package"))
    candidate = msgspec.structs.replace(OP.impls["simt"], needs=needs)
    assert registry.refusal(candidate, GEOMETRY, 70) == "the package no_such_package is not installed"


def test_dispatch_knows_no_split_model_or_device_name():
    forbidden = re.compile(r"\b(tp|tp_size|tensor.parallel\w*|world_size|model_name|device_name|get_device_name)\b", re.I)
    package = ROOT / "sm70_triton"
    dispatch = [package / f"{name}.py" for name in ("types", "env", "configs", "registry", "aot")]
    for folder in ("ops", "lib", "formats"):
        dispatch += (package / folder).rglob("*.py")
    for file in [*dispatch, *(ROOT / "fallback_cuda").iterdir()]:
        found = forbidden.search(file.read_text()) if file.is_file() else None
        assert found is None, f"{file}: {found.group(0)}"


def test_only_env_py_reads_the_environment():
    for file in (ROOT / "sm70_triton").rglob("*.py"):
        if file.name != "env.py":
            assert not re.search(r"os\.environ|getenv", file.read_text()), file
    assert len(env.NAMES) <= 8
