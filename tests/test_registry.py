"""Dispatch: precedence, refusals, overrides, admission by arithmetic, and that nothing in it knows how a model was split."""
import asyncio
import concurrent.futures
import os
import re
import subprocess
import sys
import threading
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
    for tokens, block in ((1, 1), (4, 1), (16, 2), (200, 2), (300, 8), (4096, 8)):
        shape = msgspec.structs.replace(GEOMETRY, tokens=tokens)
        assert registry.resolve(OP, shape, 70).plan.block_t == block, tokens
    for tokens in (6, 4097):  # more than two octaves from every bucket
        assert registry.resolve(OP, msgspec.structs.replace(GEOMETRY, tokens=tokens), 70).source == "default"


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
        ("kv_write=simt,kv_write=torch", "names two implementations of kv_write: simt and torch"),
    ],
)
def test_bad_impl_variable(monkeypatch, setting, message):
    monkeypatch.setenv("SM70_TRITON_IMPL", setting)
    with pytest.raises((ValueError, ResolveError), match=message):
        env.reload()
        registry.resolve(OP, GEOMETRY, 70)
    monkeypatch.delenv("SM70_TRITON_IMPL")


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.write_text("")], ids=["missing", "file"])
def test_a_config_folder_that_is_none_is_an_error(monkeypatch, tmp_path, make):
    make(tmp_path / "x")
    monkeypatch.setenv("SM70_TRITON_CONFIG_DIR", str(tmp_path / "x"))
    with pytest.raises(ValueError, match="SM70_TRITON_CONFIG_DIR=.* is not a folder"):
        env.reload()
    monkeypatch.delenv("SM70_TRITON_CONFIG_DIR")


def test_folders_may_start_with_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SM70_TRITON_CACHE_DIR", "~/c")
    monkeypatch.setenv("SM70_TRITON_CONFIG_DIR", "~")
    settings = env.reload()
    assert (settings.cache_dir, settings.config_dir) == (tmp_path / "c", tmp_path)


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


def test_a_rule_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="require='exact'"), registry.override("kv_write", require="exact"):
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


def test_lengths_that_change_with_every_token_cost_no_file_and_no_memory(monkeypatch, caplog):
    """A decode loop meets a new geometry at each step: files are read once, bad plans and routes reported once, routes bounded."""
    caplog.set_level("INFO", "sm70_triton")
    file = configs.write(70, "kv_write", GEOMETRY, bucket(plan(), rev=99))
    reads = []
    decode = configs.decode
    monkeypatch.setattr(configs, "decode", lambda f: reads.append(f) or decode(f))
    monkeypatch.setattr(registry, "_MOST_ROUTES", 8)
    for tokens in range(1, 50):
        assert registry.resolve(OP, msgspec.structs.replace(GEOMETRY, tokens=tokens), 70).source == "default"
    assert reads.count(file) == 1
    assert len(registry._routes) <= 8
    assert len([r for r in caplog.records if "rev 99" in r.message]) == 1
    assert len([r for r in caplog.records if "-> simt" in r.message]) == 1


def test_a_reload_of_the_environment_leaves_no_old_route(monkeypatch):
    assert registry.resolve(OP, GEOMETRY, 70).impl.name == "simt"
    monkeypatch.setenv("SM70_TRITON_IMPL", "kv_write=torch")
    env.reload()
    assert registry.resolve(OP, GEOMETRY, 70).impl.name == "torch"


def test_a_new_implementation_leaves_no_old_route(monkeypatch):
    old = registry.resolve(OP, GEOMETRY, 70)
    monkeypatch.setattr(OP, "impls", dict(OP.impls))
    register = registry.impl(OP, "better", rev=1, needs=Needs(min_arch=70), arithmetic=Arithmetic(cache_encode="exact"), plan=kv_write.TorchPlan,
                             default=lambda g, a: kv_write.TorchPlan(), candidates=lambda g, a: [], priority=99)  # fmt: skip
    register(lambda plan, geometry, **tensors: None)
    assert (old.impl.name, registry.resolve(OP, GEOMETRY, 70).impl.name) == ("simt", "better")


def test_the_variable_may_name_an_op_that_is_not_imported_yet():
    """Public functions import their own op file only."""
    code = "import sm70_triton as s, torch; c = torch.zeros(1, 1, 1, 4).half(); k = torch.ones(1, 1, 4).half(); s.kv_write(k, k, c, c, torch.zeros(1).long()); print(c.sum())"
    variables = {**os.environ, "SM70_TRITON_IMPL": "attn_decode=simt"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=variables)
    assert done.stdout.strip() == "tensor(4., dtype=torch.float16)", done.stderr


def test_overrides_are_of_one_thread_and_one_task():
    def name(tokens):
        return registry.resolve(OP, msgspec.structs.replace(GEOMETRY, tokens=tokens), 70).impl.name

    def work(wanted, barrier):
        with registry.override("kv_write", wanted):
            barrier.wait()
            return all(name(tokens) == wanted and registry.served() for tokens in range(200))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        barrier = threading.Barrier(4)
        assert all(pool.map(work, ["simt", "torch"] * 2, [barrier] * 4))

    async def task(wanted):
        with registry.override("kv_write", wanted):
            for tokens in range(20):
                await asyncio.sleep(0)
                assert name(tokens) == wanted

    async def tasks():
        await asyncio.gather(*map(task, ["simt", "torch"] * 3))

    asyncio.run(tasks())
    assert registry.resolve(OP, GEOMETRY, 70).source == "default"


@pytest.mark.parametrize("fields", [{"block_t": 0}, {"block_t": -2}, {"block_t": 3}, {"num_warps": 0}, {"num_warps": 3}, {"num_warps": 64}, {"block_t": 2**40}])
def test_a_plan_that_triton_cannot_take_is_refused(fields, caplog):
    with pytest.raises(ValueError, match=rf"{next(iter(fields))}={next(iter(fields.values()))}"):
        plan(**fields)
    bad = bucket(plan())
    configs.write(70, "kv_write", GEOMETRY, msgspec.structs.replace(bad, plan={**bad.plan, **fields}))
    assert registry.resolve(OP, GEOMETRY, 70).source == "default"
    assert "is ignored" in caplog.text


def test_arithmetic_admission():
    assert Arithmetic(qk_accum_bits=16).refusal(Arithmetic(qk_accum_bits=32)) == "qk_accum_bits is 16, at least 32 is required"
    assert Arithmetic(weight_decode="rounded").refusal(Arithmetic(weight_decode="exact")) == "weight_decode is 'rounded', 'exact' is required"
    assert Arithmetic(accum_bits=32).refusal(Arithmetic(qk_accum_bits=32)) is None


def test_missing_package_is_a_reason():
    needs = Needs(min_arch=70, packages=("triton", "no_such_package"))
    candidate = msgspec.structs.replace(OP.impls["simt"], needs=needs)
    assert registry.refusal(candidate, GEOMETRY, 70) == "the package no_such_package is not installed"


def test_a_last_card_and_an_unsupported_shape_are_reasons():
    old = msgspec.structs.replace(OP.impls["simt"], needs=Needs(min_arch=70, max_arch=72))
    assert registry.refusal(old, GEOMETRY, 72) is None
    assert registry.refusal(old, GEOMETRY, 75) == "it is for sm72 or earlier, this is sm75"
    picky = msgspec.structs.replace(OP.impls["simt"], supports=lambda geometry, arch: f"{geometry.head_dim} on {arch} is not served")
    assert registry.refusal(picky, GEOMETRY, 70) == "128 on 70 is not served"


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


def test_a_new_implementation_drops_only_its_own_ops_routes():
    other = registry.get("gemm_w4a16")
    registry.resolve(OP, GEOMETRY, 70)
    registry.resolve(other, other.geometry.from_keys({}), 70)
    simt = OP.impls["simt"]
    better = {name: getattr(simt, name) for name in ("rev", "needs", "arithmetic", "plan", "default", "candidates", "supports", "feasible")}
    registry.impl(OP, "better", **better, priority=99)(simt.launch)
    try:
        assert registry.served() == {"gemm_w4a16": {"simt": 1}}
        assert registry.resolve(OP, GEOMETRY, 70).impl.name == "better"
    finally:
        del OP.impls["better"]
        registry.clear()
