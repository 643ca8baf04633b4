"""Every op x implementation x case of the registry: right against float64, repeatable, and a good citizen of torch.library."""
import pytest
import torch
from support import capture_and_replay, schema_call

from sm70_triton import probe, registry, verify

OPS = sorted(registry.discover().values(), key=lambda op: op.name)
CASES = [(op, case) for op in OPS for case in op.cases]
SMALL = [pytest.param(op, case, id=f"{op.name}-{case.name}") for op, case in CASES if not case.production]
ALL = [pytest.param(op, case, id=f"{op.name}-{case.name}", marks=[pytest.mark.gpu] if case.production else []) for op, case in CASES]


def _runs():
    for op, case in CASES:
        for impl in op.impls.values():
            marks = [pytest.mark.gpu] if case.production else []
            yield pytest.param(op, case, impl, id=f"{op.name}-{impl.name}-{case.name}", marks=marks)


def _require_capable(op, case, impl, device):
    arch = probe.arch_of(torch.device(device))
    reason = registry.refusal(impl, case.geometry, arch)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("op, case, impl", list(_runs()))
def test_matches_reference(op, case, impl, device, seed):
    _require_capable(op, case, impl, device)
    check = verify.run_case(op, case, impl=impl.name, device=device, seed=seed)
    assert check.ok, f"seed {seed}: {check.detail} (error / bound = {check.worst:.3g}, relative L2 {check.relative_l2:.3g})"


@pytest.mark.parametrize("op, case", SMALL)
def test_two_runs_give_the_same_bits(op, case, device, seed):
    inputs = op.make_inputs(case.geometry, seed=seed, device=device, **case.options)
    again = verify.clone(inputs)
    impl = "simt" if registry.refusal(op.impls["simt"], case.geometry, probe.arch_of(torch.device(device))) is None else None
    with registry.override(op.name, impl):
        op.call(**inputs)
        op.call(**again)
    for name in op.outputs:
        if inputs.get(name) is not None:
            assert torch.equal(inputs[name].contiguous().view(torch.uint8), again[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("op, case", ALL)
def test_opcheck(op, case, device, seed):
    operator, arguments = schema_call(op, op.make_inputs(case.geometry, seed=seed, device=device, **case.options))
    checks = ["test_schema", "test_faketensor"]
    if any(isinstance(a, torch.Tensor) and "float8" in str(a.dtype) for a in arguments):
        checks.remove("test_schema")  # torch's checker does arithmetic that it has not implemented for float8
    torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize("op, case", [pytest.param(op, next(c for c in op.cases if not c.production and c.name != "empty"), id=op.name) for op in OPS])
def test_compiles_into_one_graph(op, case, device, seed):
    inputs = op.make_inputs(case.geometry, seed=seed, device=device, **case.options)
    eager = verify.clone(inputs)
    op.call(**eager)
    torch.compile(op.call, fullgraph=True, backend="aot_eager")(**inputs)
    for name in op.outputs:
        if inputs.get(name) is not None:
            assert torch.equal(inputs[name].contiguous().view(torch.uint8), eager[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in OPS])
def test_states_its_arithmetic_and_has_odd_and_production_cases(op):
    names = {case.name for case in op.cases}
    assert len(names) == len(op.cases), "case names must differ"
    assert any(case.production for case in op.cases)
    assert {"torch", "simt"} <= op.impls.keys()
    for impl in op.impls.values():
        assert impl.arithmetic != type(impl.arithmetic)(), f"{impl.name} states no arithmetic"
        assert impl.rev >= 1
    for case in op.cases:
        work = op.work(case.geometry)
        assert work.bytes >= 0 and work.flops >= 0
        for impl in op.impls.values():
            plan = impl.default(case.geometry, 70)
            assert isinstance(plan, impl.plan)
            assert impl.feasible(plan, case.geometry, 70) is None
            assert list(impl.candidates(case.geometry, 70))


@pytest.mark.gpu
@pytest.mark.parametrize("op, case", SMALL)
def test_launch_allocates_nothing(op, case, device, seed):
    inputs = op.make_inputs(case.geometry, seed=seed, device=device, **case.options)
    if inputs.get("workspace", ...) is None:
        pytest.skip("this case leaves the workspace to the call, which then allocates it")
    with registry.override(op.name, "simt"):
        op.call(**inputs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        op.call(**inputs)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.parametrize("op, case", SMALL)
def test_captured_graph_replays_with_other_inputs(op, case, device, seed):
    """Other values, lengths, page tables and slots in the captured buffers; a graph without a kernel would leave the NaN."""
    checks = capture_and_replay(op, case, "simt", seed)
    assert checks, "no replay was possible"
    for check in checks:
        assert check.ok, f"seed {seed}: {check.detail}"
