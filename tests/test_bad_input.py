"""Bad input gives an error that names the argument, its value and what is accepted, before any kernel starts; never a crash."""
import re
import sys

import pytest
import torch

from sm70_triton import env, registry
from sm70_triton.formats import PackedWeight

OPS = registry.discover()


def inputs_of(name, case=None, device="cpu"):
    op = OPS[name]
    case = next(c for c in op.cases if (c.name == case if case else not c.production and "empty" not in c.name))
    return op, op.make_inputs(case.geometry, seed=1, device=device, **case.options)


def refuse(op, inputs, message, kind=(ValueError, TypeError)):
    before = {n: inputs[n].clone() for n in op.outputs if isinstance(inputs.get(n), torch.Tensor) and not inputs[n].is_meta}
    with pytest.raises(kind, match=message):
        op.call(**inputs)
    for name, value in before.items():
        got = inputs[name]
        assert got.is_meta or got.shape != value.shape or torch.equal(got.nan_to_num(), value.nan_to_num()), f"{name} was written before the refusal"


TENSORS = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name in OPS
    for argument, value in inputs_of(name)[1].items()
    if isinstance(value, torch.Tensor)
]


@pytest.mark.parametrize("name, argument", TENSORS)
def test_wrong_dtype(name, argument):
    op, inputs = inputs_of(name)
    inputs[argument] = torch.zeros(inputs[argument].shape, dtype=torch.complex64)
    refuse(op, inputs, argument.replace("workspace", "workspace|out").replace("v_cache", "v_cache"))


@pytest.mark.parametrize("name, argument", TENSORS)
def test_mixed_devices(name, argument):
    op, inputs = inputs_of(name)
    inputs[argument] = inputs[argument].to("meta")
    refuse(op, inputs, "device|on cpu|on meta")


@pytest.mark.parametrize("name, argument", TENSORS)
def test_wrong_number_of_axes(name, argument):
    op, inputs = inputs_of(name)
    if argument in ("k_scale", "v_scale", "workspace"):
        pytest.skip("any number of axes is fine")
    inputs[argument] = inputs[argument][None]
    refuse(op, inputs, r"shape|axes|x\b")


@pytest.mark.parametrize("name, argument", [p for p in TENSORS if p.values[1] in ("q", "x", "key", "value", "k_cache", "v_cache", "out")])
def test_last_axis_must_be_contiguous(name, argument):
    op, inputs = inputs_of(name)
    value = inputs[argument]
    wide = torch.zeros((*value.shape[:-1], 2 * value.shape[-1]), dtype=value.dtype)
    inputs[argument] = wide[..., ::2]
    refuse(op, inputs, f"{argument}.*contiguous")


@pytest.mark.parametrize("name", [n for n in OPS if n.startswith("attn")])
@pytest.mark.parametrize(
    "argument, value, message",
    [
        ("seq_lens", -1, "seq_lens.*-1"),
        ("seq_lens", 10**6, "seq_lens.*1000000"),
        ("block_table", 10**6, "block_table.*1000000"),
        ("block_table", -1, "block_table.*-1"),
    ],
)
def test_values_out_of_range(name, argument, value, message):
    op, inputs = inputs_of(name)
    spoiled = inputs[argument].clone()
    spoiled.flatten()[0] = value
    inputs[argument] = spoiled
    refuse(op, inputs, message)


@pytest.mark.parametrize("name", [n for n in OPS if n.startswith("attn")])
@pytest.mark.parametrize(
    "argument, value, message",
    [
        ("window", -1, "window=-1"),
        ("window", 0, "window=0"),
        ("softcap", -1.0, "softcap=-1"),
        ("softcap", float("nan"), "softcap=nan"),
        ("scale", float("inf"), "scale=inf"),
        ("max_seqlen_k", -5, "max_seqlen_k=-5"),
        ("kv_dtype", "int3", "kv_dtype='int3'"),
    ],
)
def test_scalars_out_of_range(name, argument, value, message):
    op, inputs = inputs_of(name)
    inputs[argument] = value
    refuse(op, inputs, message)


def test_prefill_lengths_must_ascend():
    op, inputs = inputs_of("attn_prefill")
    spoiled = inputs["cu_seqlens_q"].clone()
    spoiled[-1] = -1
    inputs["cu_seqlens_q"] = spoiled
    refuse(op, inputs, "cu_seqlens_q")


def test_debug_mode_checks_slots(monkeypatch):
    op, inputs = inputs_of("kv_write")
    inputs["slot_mapping"] = inputs["slot_mapping"].clone()
    inputs["slot_mapping"][0] = 10**9
    op.call(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})  # skipped, like padding
    monkeypatch.setenv("SM70_TRITON_DEBUG", "1")
    env.reload()
    refuse(op, inputs, "slot_mapping holds 1000000000; the cache has")


def test_a_uint8_cache_needs_its_format():
    op, inputs = inputs_of("kv_write", "e4m3")
    inputs["kv_dtype"] = None
    refuse(op, inputs, "kv_dtype=None: a uint8 cache needs")


def test_an_fp16_cache_has_no_scale():
    op, inputs = inputs_of("kv_write", "odd_sizes")
    inputs["k_scale"] = torch.ones(1)
    refuse(op, inputs, "k_scale was given with an FP16 cache")


@pytest.mark.parametrize("change, message", [
    ({"key": None}, "key is a NoneType"),
    ({"v_cache": None}, "v_cache is a NoneType"),
    ({"k_scale": 2.0}, "k_scale is a float; a float32 tensor or None"),
    ({"k_cache": torch.zeros(1, 16, 2, 64, dtype=torch.uint8).expand(9, 16, 2, 64), "v_cache": torch.zeros(9, 16, 2, 64, dtype=torch.uint8)},
     "k_cache.shape=.*must not be expanded"),
])  # fmt: skip
def test_kv_write_arguments(change, message):
    op, inputs = inputs_of("kv_write", "e4m3")
    refuse(op, {**inputs, **change}, message)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("impl", ["torch", "simt"])
def test_nothing_around_a_call_changes_it(name, impl):
    """Autocast would take the matrix products of an implementation in torch to bfloat16; nothing here is differentiable."""
    op, inputs = inputs_of(name)
    plain, inside = ({n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()} for _ in range(2))
    for n in {"q", "x", "key", "value", *op.outputs} & inside.keys():
        if inside[n] is not None and inside[n].is_floating_point():
            inside[n].requires_grad_()
    with registry.override(name, impl):
        op.call(**plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            op.call(**inside)
    for n in op.outputs:
        if inside.get(n) is not None:
            assert inside[n].is_leaf and torch.equal(inside[n].detach().contiguous().view(torch.uint8), plain[n].contiguous().view(torch.uint8)), n


@pytest.mark.parametrize("name", OPS)
def test_a_launch_goes_to_the_device_of_the_tensors(name, monkeypatch):
    """`registry.launch` makes that device current; a kernel launched without it would run on another GPU."""
    op, inputs = inputs_of(name)
    module = sys.modules[op.call.__module__]
    seen = []
    for owner in (module, getattr(module, "_gemm", None)):
        if hasattr(owner, "launch"):
            monkeypatch.setattr(owner, "launch", lambda route, geometry, device, **tensors: seen.append(device))
    op.call(**inputs)
    assert seen == [torch.device("cpu")]


@pytest.mark.parametrize("name", [n for n in OPS if n.startswith("gemm")])
def test_gemm_shapes(name):
    op, inputs = inputs_of(name)
    refuse(op, {**inputs, "x": inputs["x"][:, :-1]}, "x.*K|K.*x|x.shape")
    refuse(op, {**inputs, "activation": "relu"}, "activation='relu'.*silu")
    refuse(op, {**inputs, "weight": inputs["x"]}, "weight", kind=(TypeError, ValueError, AttributeError))


def test_gemm_refuses_the_other_width():
    for name, other in (("gemm_w4a16", "gemm_w8a16"), ("gemm_w8a16", "gemm_w4a16")):
        op, inputs = inputs_of(name)
        foreign = inputs_of(other)[1]["weight"]
        assert isinstance(foreign, PackedWeight)
        x = torch.zeros(2, foreign.k, dtype=torch.float16)
        refuse(op, {**inputs, "x": x, "weight": foreign, "out": None, "bias": None}, re.escape(foreign.codec))
