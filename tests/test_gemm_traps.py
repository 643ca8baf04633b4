"""What the registry's suite cannot say about the quantised GEMMs: rows do not see each other, and the error bound catches real bugs."""
import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

from sm70_triton import formats, registry, verify
from sm70_triton.ops import _gemm, gemm_w4a16, gemm_w8a16

W4, W8 = gemm_w4a16.OP, gemm_w8a16.OP


@pytest.mark.parametrize("codec", _gemm.PER_BYTE)
def test_reference_decode_of_every_byte(codec):
    data = torch.arange(256, dtype=torch.uint8)[None]
    k = 256 * _gemm.PER_BYTE[codec]
    zero = torch.zeros(1, 1, dtype=torch.uint8) if codec == "u4" else None
    weight = formats.PackedWeight(codec, 1, k, 1, k, data, torch.ones(1, 1), "f32", zero)
    torch.testing.assert_close(_gemm.decode32(data, codec).double(), formats.dequantize(weight), rtol=0, atol=0, equal_nan=True)


def _plan(block_m: int, block_k: int = 32) -> _gemm.SimtPlan:
    return _gemm.SimtPlan(block_m=block_m, block_n=16, block_k=block_k, num_warps=4)


@pytest.mark.parametrize("block_m", [4, 16])
@pytest.mark.parametrize("op, keys", [(W4, {"format": "nvfp4", "gated": "silu"}), (W4, {"format": "gptq", "group": 32, "perm": True}), (W8, {"format": "int8"})])
def test_rows_alone_give_the_same_bits(op, keys, block_m, device, seed):
    """Within one plan: a request's tokens do not depend on what else is in the batch, nor on their place in it."""
    geometry = op.geometry.from_keys({"M": block_m + 3, "N": 40, "K": 96, **keys})
    inputs = op.make_inputs(geometry, seed=seed, device=device)
    with registry.override(op.name, "simt", plan=_plan(block_m)):
        together = op.call(**inputs).clone()
        for row in (0, 2, block_m, geometry.M - 1):
            alone = op.call(**{**inputs, "x": inputs["x"][row : row + 1], "out": None})
            assert torch.equal(alone[0].view(torch.int16), together[row].view(torch.int16)), f"row {row}"


@pytest.mark.parametrize("block_m, block_k", [(1, 256), (2, 16), (8, 32), (16, 64), (32, 16)])
@pytest.mark.parametrize("op, keys", [(W4, {"format": "nvfp4", "gated": "gelu_tanh"}), (W4, {"format": "awq", "group": 16}), (W8, {"format": "fp8_block"})])
def test_every_feasible_tile_is_right(op, keys, block_m, block_k, device, seed):
    """More groups in a step than one, exactly one, and less; more rows than tiles; a tail of K in every one."""
    geometry = op.geometry.from_keys({"M": 5, "N": 150, "K": 144, **keys})
    inputs = op.make_inputs(geometry, seed=seed, device=device, bias="fp32")
    expected = op.reference(**verify.clone(inputs))
    with registry.override(op.name, "simt", plan=_plan(block_m, block_k)):
        op.call(**inputs)
    check = verify.compare(op, inputs, expected)
    assert check.ok, check.detail


def _bugs(weight: formats.PackedWeight):
    """(name, weight as a buggy kernel would read it)."""
    swapped = weight.data >> 4 | weight.data << 4
    if weight.bits == 4:
        yield "nibbles swapped", dataclasses.replace(weight, data=swapped)
    else:
        yield "code off by one", dataclasses.replace(weight, data=weight.data ^ 1)
    if weight.global_scale is not None:
        yield "global applied twice", dataclasses.replace(weight, global_scale=weight.global_scale**2)
        yield "first part's global for every part", dataclasses.replace(weight, global_scale=weight.global_scale[:1].expand(weight.n).contiguous())
        yield "global forgotten", dataclasses.replace(weight, global_scale=None)
    if weight.zero is not None:
        yield "zero off by one", dataclasses.replace(weight, zero=weight.zero + 1)
    if weight.perm is not None:
        yield "perm ignored", dataclasses.replace(weight, perm=None)
        yield "perm inverted", dataclasses.replace(weight, perm=weight.perm.argsort().int())
    if weight.scale.shape[1] > 1:
        yield "groups shifted", dataclasses.replace(weight, scale=weight.scale.roll(1, 1))
    if weight.scale.shape[0] > 1:
        yield "scale rows shifted", dataclasses.replace(weight, scale=weight.scale.roll(1, 0))


@pytest.mark.parametrize("act_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("gated", [False, "silu"])
@pytest.mark.parametrize(
    "op, keys",
    [(W4, {"format": "nvfp4"}), (W4, {"format": "awq", "group": 64}), (W4, {"format": "gptq", "group": 32, "perm": True}),
     (W4, {"format": "int4", "group": -1}), (W4, {"format": "mxfp4"}), (W8, {"format": "fp8_block"}), (W8, {"format": "int8"})],
)  # fmt: skip
def test_bound_catches_planted_bugs(op, keys, gated, act_dtype, seed):
    geometry = op.geometry.from_keys({"M": 3, "N": 160, "K": 192, "gated": gated, "act_dtype": act_dtype, **keys})
    options = {"globals_": (-10, -12)} if geometry.global_scale else {}
    inputs = op.make_inputs(geometry, seed=seed, device="cpu", bias="fp16", **options)
    expected = op.reference(**inputs)

    def check(**changes):
        out = op.reference(**{**inputs, **changes})["out"].to(inputs["x"].dtype)
        return verify.compare(op, {**inputs, "out": out}, expected)

    right = check()
    assert right.ok and right.worst > 0.1, "a correctly rounded result uses up most of a tight bound"
    for name, wrong in _bugs(inputs["weight"]):
        assert not check(weight=wrong).ok, name
    tail = inputs["x"].clone()
    tail[:, -1] = 0
    assert not check(x=tail).ok, "last column skipped"
    assert not check(bias=None).ok, "bias forgotten"
    if gated:
        assert not check(activation="gelu_tanh").ok, "GELU for SiLU"
        swapped = dataclasses.replace(inputs["weight"], data=inputs["weight"].data.roll(geometry.N // 2, 0))
        assert not check(weight=swapped).ok, "gate and up swapped"


def test_accumulating_in_half_breaks_the_bound(seed):
    geometry = W4.geometry.from_keys({"M": 4, "N": 64, "K": 1024, "format": "nvfp4"})
    inputs = W4.make_inputs(geometry, seed=seed, device="cpu")
    weight = formats.dequantize(inputs["weight"]).half()
    acc = torch.zeros(4, 64, dtype=torch.float16)
    for k in range(0, 1024, 16):
        acc += (inputs["x"][:, k : k + 16].float() @ weight[:, k : k + 16].float().T).half()
    assert not verify.compare(W4, {**inputs, "out": acc}, W4.reference(**inputs)).ok


@pytest.mark.parametrize("impl", ["torch", "simt"])
@pytest.mark.parametrize("act_dtype", ["fp16", "bf16"])
def test_activations_at_the_ends_of_their_range(impl, act_dtype, device):
    """silu(g) up with g = -90: e^90 does not fit in float32, the result does fit in bfloat16. Large g: g^3 is infinite."""
    scale = torch.ones(2, 1, device=device)
    weight = formats.PackedWeight("int8", 2, 1, 1, 1, torch.tensor([[1], [100]], dtype=torch.uint8, device=device), scale, "f32")
    x = torch.tensor([[-90.0], [-20.0], [-1.0], [0.0], [0.1], [20.0], [250.0]], dtype=_gemm.ACT_DTYPES[act_dtype], device=device)
    if act_dtype == "bf16":
        x = torch.cat([x, torch.tensor([[1e13], [-1e13], [float("nan")]], dtype=x.dtype, device=device)])
    for activation in _gemm.ACTIVATIONS:
        inputs = {"x": x, "weight": weight, "activation": activation, "out": torch.full_like(x, float("nan"))}
        with registry.override("gemm_w8a16", impl):
            W8.call(**inputs)
        check = verify.compare(W8, inputs, W8.reference(**inputs))
        assert check.ok, f"{activation}: {check.detail}"


@pytest.mark.parametrize("impl", ["torch", "simt"])
def test_an_overflow_of_the_output_is_infinite(impl, device):
    weight = formats.PackedWeight("int8", 2, 1, 1, 1, torch.tensor([[100], [156]], dtype=torch.uint8, device=device), torch.ones(2, 1, device=device), "f32")
    with registry.override("gemm_w8a16", impl):
        out = gemm_w8a16.gemm_w8a16(torch.full((1, 1), 6e4, dtype=torch.float16, device=device), weight)
    assert out.tolist() == [[float("inf"), -float("inf")]]


@pytest.mark.parametrize("impl", ["torch", "simt"])
@pytest.mark.parametrize("codec", ["u4", "u4b8"])
def test_nothing_beyond_k_reaches_the_sum(codec, impl, device):
    """A code of 0 means -8 or -zero: beyond K, times a scale of 1e38, that is infinite, and 0 * inf is NaN."""
    zero = torch.full((2, 1), 8, dtype=torch.uint8, device=device) if codec == "u4" else None
    data = torch.full((2, 3), 0x99, dtype=torch.uint8, device=device)  # every value is 1
    weight = formats.PackedWeight(codec, 2, 6, 1, 6, data, torch.full((2, 1), 1e38, device=device), "f32", zero)
    for rows in (1, 16):
        x = torch.full((rows, 6), 2.0**-10, dtype=torch.bfloat16, device=device)
        with registry.override("gemm_w4a16", impl):
            out = gemm_w4a16.gemm_w4a16(x, weight)
        assert bool(((out.double() - 6e38 * 2.0**-10).abs() <= 6e38 * 2.0**-10 * 2.0**-8).all()), out


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_any_number_of_columns_makes_a_legal_grid(rows, monkeypatch):
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(_gemm, "_gemm_simt_kernel", Kernel())
    n = 600_000
    weight = formats.PackedWeight("int8", n, 1, 1, 1, torch.zeros(n, 1, dtype=torch.uint8), torch.ones(n, 1), "f32")
    with registry.override("gemm_w8a16", "simt"):
        W8.call(torch.zeros(rows, 1, dtype=torch.float16), weight)
    (grid,) = grids
    assert grid[0] < 2**31 and all(size <= 65535 for size in grid[1:])


def test_out_must_not_be_x_nor_expanded():
    weight = formats.PackedWeight("int8", 4, 4, 1, 4, torch.zeros(4, 4, dtype=torch.uint8), torch.ones(4, 1), "f32")
    x = torch.ones(3, 4, dtype=torch.float16)
    with pytest.raises(ValueError, match="out shares memory with x"):
        W8.call(x, weight, out=x)
    with pytest.raises(ValueError, match="out.shape=.*must not be expanded"):
        W8.call(x, weight, out=torch.empty(1, 4, dtype=torch.float16).expand(3, 4))
    both = torch.ones(3, 8, dtype=torch.float16)  # halves of one buffer are fine
    W8.call(both[:, :4], weight, out=both[:, 4:])
    assert both.tolist() == [[1.0] * 4 + [0.0] * 4] * 3


@pytest.mark.parametrize(
    "op, keys, message",
    [
        (W4, {"format": "nvfp5"}, "format='nvfp5'; accepted: nvfp4"),
        (W4, {"format": "fp8"}, "format='fp8'; accepted: nvfp4"),
        (W4, {"format": "nvfp4", "K": 100}, "K=100 is not a multiple of the group of 16"),
        (W4, {"format": "nvfp4", "group": 32}, "group=32 with format='nvfp4'; accepted: 16"),
        (W4, {"format": "int4", "group": -1, "K": 77}, "K=77.*must be even"),
        (W4, {"format": "awq", "group": 0}, "group_k"),
        (W4, {"M": -1}, "M"),
        (W4, {"N": 0}, "N"),
        (W4, {"N": 3, "gated": "silu"}, "N=3 with gated='silu'"),
        (W4, {"gated": "relu"}, "relu|gated"),
        (W4, {"act_dtype": "fp32"}, "fp32"),
        (W4, {"heads": 3}, "'heads' is not known; accepted: M, N, K, format"),
        (W8, {"format": "awq"}, "format='awq'; accepted: fp8"),
        (W8, {"format": "fp8_block", "group": 64}, "group=64 with format='fp8_block'; accepted: 128"),
    ],
)
def test_command_line_keys(op, keys, message):
    with pytest.raises(ValueError, match=message):
        op.geometry.from_keys(keys)


def test_a_geometry_survives_its_config_file():
    for op in (W4, W8):
        for case in op.cases:
            again = op.geometry.from_keys({**case.geometry.static(), **case.geometry.dynamic()})
            assert again == case.geometry


@pytest.mark.parametrize("op, case", [pytest.param(op, c, id=f"{op.name}-{c.name}") for op in (W4, W8) for c in op.cases if c.geometry.M and not c.production])
def test_a_call_has_the_geometry_of_its_case(op, case, monkeypatch):
    """Otherwise tuned plans, found by the geometry that command-line keys give, would never be used by a call."""
    seen = []
    monkeypatch.setattr(_gemm, "resolve", lambda declared, geometry, arch: seen.append(geometry) or registry.resolve(declared, geometry, arch))
    op.call(**op.make_inputs(case.geometry, seed=0, device="cpu", **case.options))
    assert seen == [case.geometry]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bias": torch.zeros(7)}, r"bias.shape=\(7,\); it must be \(40,\)"),
        ({"bias": torch.zeros(40, dtype=torch.float64)}, "bias.dtype"),
        ({"out": torch.zeros(2, 41, dtype=torch.float16)}, "out.shape"),
        ({"out": torch.zeros(2, 40)}, "out.dtype"),
        ({"x": torch.zeros(2, 160)}, "x.dtype"),
        ({"x": torch.zeros(160, dtype=torch.float16)}, "x.shape.*2 axes"),
        ({"x": torch.zeros(160, 2, dtype=torch.float16).T}, "x.stride.*last axis"),
        ({"x": torch.zeros(2, 160, dtype=torch.float16, device="meta")}, "every tensor must be on meta"),
    ],
)
def test_bad_arguments(change, message):
    geometry = W4.geometry.from_keys({"M": 2, "N": 40, "K": 160, "format": "gptq", "group": 32, "perm": True})
    inputs = W4.make_inputs(geometry, seed=0, device="cpu")
    with pytest.raises((TypeError, ValueError), match=message):
        W4.call(**{**inputs, **change})


def test_bad_permutation(seed):
    geometry = W4.geometry.from_keys({"M": 2, "N": 40, "K": 160, "format": "gptq", "group": 32, "perm": True})
    inputs = W4.make_inputs(geometry, seed=seed, device="cpu")
    inputs["weight"].perm[3] = 160
    with pytest.raises(ValueError, match=r"weight\.perm holds 160; accepted: 0 to 159"):
        W4.call(**inputs)


_COMPILE = """
import json
from sm70_triton import aot, registry
from sm70_triton.ops._gemm import SimtPlan
op = registry.get("gemm_w4a16")
geometry = op.geometry.from_keys({"M": 64, "N": 256, "K": 512, "format": "nvfp4"})
for m, k in ((16, 32), (64, 32), (1, 128), (8, 16)):
    (launch,) = aot.compile(op, geometry, impl="simt", plan=SimtPlan(block_m=m, block_n=16, block_k=k, num_warps=4))[1]
    print(json.dumps([m, k, launch.shared_bytes]))
"""


_COMPILE_TWICE = """
from sm70_triton import aot, registry
op = registry.get("gemm_w4a16")
a, b = (aot.compile(op, op.geometry.from_keys({"M": m, "N": 256, "K": 256}), impl="simt")[1][0].ptx for m in (33, 48))
assert a == b, "a kernel of its own for multiples of 16"
op = registry.get("kv_write")
a, b, c = (aot.compile(op, op.geometry.from_keys({"tokens": t}), impl="simt")[1][0].ptx for t in (1, 16, 33))
assert a == b == c
"""


def test_one_kernel_serves_every_batch_of_a_plan():
    """What `warmup` compiled is what a server needs: nothing is compiled for a number of tokens that comes up later."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _COMPILE_TWICE], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_feasible_knows_the_shared_memory():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _COMPILE], capture_output=True, text=True, env=env, check=True)
    for m, k, shared in map(json.loads, done.stdout.splitlines()):
        assert shared == 4 * (m + 16) * k if m >= 16 else shared <= 4 * max(m, 16) * k
    geometry = W4.geometry.from_keys({"M": 4096, "format": "awq"})
    wide = _gemm.SimtPlan(block_m=128, block_n=128, block_k=128, num_warps=8)
    assert "131072 bytes of shared memory; 98304 are there" in str(W4.impls["simt"].feasible(wide, geometry, 70))


@pytest.mark.parametrize("given, meant", [(True, "silu"), ("silu", "silu"), ("gelu_tanh", "gelu_tanh"), (False, False), (None, False)])
def test_gated_as_a_switch_means_silu(given, meant):
    assert W4.geometry.from_keys({"M": 1, "N": 64, "K": 64, "gated": given}).gated == meant
