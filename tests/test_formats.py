"""Checkpoint formats: the packed layout means exactly what each format's own equation says, and gives the tensors back bit for bit.

The equations here are written out element by element from the formats' descriptions and share no code with the package.
"""
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70_triton import formats
from sm70_triton.formats import PackedWeight, codecs

SEEDS = st.integers(0, 2**31 - 1)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


# --- the formats, literally -------------------------------------------------------------------------------------------


def e4m3(byte):
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e5m2(byte):
    return struct.unpack("<e", bytes([0, byte]))[0]


def e2m1(code):
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e8m0(byte):
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def nibble(word, i):
    return ((word & 0xFFFFFFFF) >> (4 * i)) & 15


def byte_of(tensor, *index):
    return tensor.view(torch.uint8)[index].item()


def same(a, b):
    return a == b or (a != a and b != b)


def check_values(weight, value, rows, columns):
    """dequantize(weight)[n, k] must equal value(n, k), exactly."""
    real = formats.dequantize(weight)
    assert real.shape == (rows, columns) and real.dtype == torch.float64
    for n in range(rows):
        for k in range(columns):
            assert same(real[n, k].item(), value(n, k)), (n, k, real[n, k].item(), value(n, k))


def check_round_trip(tensors, weight):
    back = formats.unpack(weight)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape, name
        assert torch.equal(back[name].reshape(-1).contiguous().view(torch.uint8), tensor.reshape(-1).contiguous().view(torch.uint8)), name


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_bytes(shape, g, top=256):
    return torch.randint(0, top, shape, generator=g, dtype=torch.int64).to(torch.uint8)


def random_words(shape, g):
    return torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int64).to(torch.int32)


def random_e4m3_scales(shape, g):
    codes = torch.randint(0, 0x7F, shape, generator=g).to(torch.uint8)  # every finite non-negative code
    return codes.view(torch.float8_e4m3fn)


# --- every code, bit for bit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec, size, formula", [("e2m1", 16, e2m1), ("e4m3", 256, e4m3), ("e5m2", 256, e5m2), ("e8m0", 256, e8m0)])
def test_every_code_decodes_to_its_formula(codec, size, formula):
    codes = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    for dtype in (torch.float64, torch.float32):
        values = codecs.decode(codes, codec, dtype)
        for code in range(size):
            got, want = values[code].item(), formula(code)
            assert same(got, want) and (got != got or math.copysign(1, got) == math.copysign(1, want)), (codec, code)


@pytest.mark.parametrize("codec, size", [("e2m1", 16), ("e4m3", 256), ("e5m2", 256)])
def test_every_finite_code_survives_encoding(codec, size):
    codes = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    values = codecs.decode(codes, codec)
    finite = values.isfinite()
    back = codecs.encode(values[finite], codec)
    assert torch.equal(codecs.decode(back, codec), values[finite])
    keep = values[finite] != 0 if codec == "e2m1" else torch.ones(int(finite.sum()), dtype=torch.bool)  # -0 becomes +0 in e2m1
    assert torch.equal(back[keep], codes[finite][keep])


@pytest.mark.parametrize("codec, largest", [("e2m1", 6.0), ("e4m3", 448.0), ("e5m2", 57344.0)])
def test_encoding_is_nearest_even_and_saturates(codec, largest):
    size = 8 if codec == "e2m1" else 128
    grid = codecs.decode(torch.arange(size, dtype=torch.int64).to(torch.uint8), codec)
    grid = grid[grid.isfinite()]
    middle = (grid[:-1] + grid[1:]) / 2
    even = torch.arange(len(middle)) % 2 == 0
    assert torch.equal(codecs.decode(codecs.encode(middle, codec), codec), torch.where(even, grid[:-1], grid[1:]))
    for nudge, want in ((1 + 1e-6, grid[1:]), (1 - 1e-6, grid[:-1])):
        assert torch.equal(codecs.decode(codecs.encode(middle * nudge, codec), codec), want)
    beyond = torch.tensor([largest * 1.5, -largest * 1e6, float("inf"), -float("inf")])
    assert codecs.decode(codecs.encode(beyond, codec), codec).tolist() == [largest, -largest, largest, -largest]


# --- each layout: its equation, and the way back ----------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 5), blocks=st.integers(1, 3), modelopt=st.booleans(), extra=st.booleans())
def test_nvfp4(seed, n, blocks, modelopt, extra):
    g, k = generator(seed), 16 * blocks
    codes, scale = random_bytes((n, k // 2), g), random_e4m3_scales((n, blocks), g)
    stored = torch.exp2(torch.rand(1, generator=g) * 28 - 20)
    if modelopt:
        tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": stored[0], **({"input_scale": torch.tensor(0.5)} if extra else {})}
        multiplier = stored.item()
    else:
        tensors = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": stored, **({"input_global_scale": torch.tensor([9.0])} if extra else {})}
        multiplier = (1.0 / stored).item()
    weight = formats.pack("nvfp4_modelopt" if modelopt else "nvfp4_compressed_tensors", tensors)
    check_round_trip(tensors, weight)
    check_values(weight, lambda r, c: e2m1((codes[r, c // 2].item() >> (4 * (c % 2))) & 15) * e4m3(byte_of(scale, r, c // 16)) * multiplier, n, k)


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 5), blocks=st.integers(1, 3), blocked=st.booleans())
def test_mxfp4(seed, n, blocks, blocked):
    g, k = generator(seed), 32 * blocks
    codes, scale = random_bytes((n, k // 2), g), random_bytes((n, blocks), g, 255)
    scale[0, 0] = 0  # 2^-127, a float32 subnormal
    tensors = {"blocks": codes.view(n, blocks, 16), "scales": scale} if blocked else {"weight": codes, "weight_scale": scale}
    weight = formats.pack("mxfp4", tensors)
    check_round_trip(tensors, weight)
    check_values(weight, lambda r, c: e2m1((codes[r, c // 2].item() >> (4 * (c % 2))) & 15) * e8m0(scale[r, c // 32].item()), n, k)


def random_fp8(n, k, g):
    return random_bytes((n, k), g).view(torch.float8_e4m3fn)  # NaN codes included


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 6), k=st.integers(1, 9), bf16=st.booleans(), flat=st.booleans())
def test_fp8_channel(seed, n, k, bf16, flat):
    g = generator(seed)
    scale = torch.randn(n, 1, generator=g).to(torch.bfloat16 if bf16 else torch.float32)
    tensors = {"weight": random_fp8(n, k, g), "weight_scale": scale[:, 0] if flat else scale}
    weight = formats.pack("fp8_channel", tensors)
    check_round_trip(tensors, weight)
    check_values(weight, lambda r, c: e4m3(byte_of(tensors["weight"], r, c)) * scale[r, 0].item(), n, k)


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, rows=st.lists(st.integers(1, 4), min_size=1, max_size=3), k=st.integers(1, 9))
def test_fp8_tensor_with_a_scale_per_fused_part(seed, rows, k):
    g, n = generator(seed), sum(rows)
    scale = torch.rand(len(rows), generator=g) + 0.1
    tensors = {"weight": random_fp8(n, k, g), "weight_scale": scale, "input_scale": torch.tensor(1.5)}
    weight = formats.pack("fp8_tensor", tensors, parts=rows)
    check_round_trip(tensors, weight)
    part = [i for i, count in enumerate(rows) for _ in range(count)]
    check_values(weight, lambda r, c: e4m3(byte_of(tensors["weight"], r, c)) * scale[part[r]].item(), n, k)


@settings(max_examples=6, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 9), k=st.integers(1, 9), bf16=st.booleans())
def test_fp8_block_multiplies_by_its_inv_scale(seed, n, k, bf16):
    g = generator(seed)
    inverse = (torch.rand(-(-n // 4), -(-k // 3), generator=g) + 0.1).to(torch.bfloat16 if bf16 else torch.float32)
    tensors = {"weight": random_fp8(n, k, g), "weight_scale_inv": inverse}
    weight = formats.pack("fp8_block", tensors, block=(4, 3))
    check_round_trip(tensors, weight)
    check_values(weight, lambda r, c: e4m3(byte_of(tensors["weight"], r, c)) * inverse[r // 4, c // 3].item(), n, k)


def test_fp8_block_ragged_128():
    g = generator(1)
    tensors = {"weight": random_bytes((130, 200), g, 0x7F).view(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(2, 2, generator=g) + 0.1}
    real = formats.dequantize(formats.pack("fp8_block", tensors))
    for r, c in ((0, 0), (127, 127), (127, 128), (128, 127), (129, 199)):
        assert real[r, c].item() == e4m3(byte_of(tensors["weight"], r, c)) * tensors["weight_scale_inv"][r // 128, c // 128].item()


@settings(max_examples=6, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 6), k=st.integers(1, 9))
def test_int8(seed, n, k):
    g = generator(seed)
    tensors = {"weight": random_bytes((n, k), g).view(torch.int8), "weight_scale": torch.randn(n, 1, generator=g)}
    weight = formats.pack("int8", tensors)
    check_round_trip(tensors, weight)
    check_values(weight, lambda r, c: tensors["weight"][r, c].item() * tensors["weight_scale"][r, 0].item(), n, k)


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, words=st.integers(1, 2), groups=st.integers(1, 3), group=st.sampled_from([2, 8, 10]))
def test_awq(seed, words, groups, group):
    g, n, k = generator(seed), 8 * words, groups * group
    tensors = {"qweight": random_words((k, words), g), "qzeros": random_words((groups, words), g), "scales": torch.rand(groups, n, generator=g).half()}
    weight = formats.pack("awq", tensors)
    check_round_trip(tensors, weight)
    where = {column: i for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}  # column -> nibble

    def value(r, c):
        q = nibble(tensors["qweight"][c, r // 8].item(), where[r % 8])
        z = nibble(tensors["qzeros"][c // group, r // 8].item(), where[r % 8])
        return (q - z) * tensors["scales"][c // group, r].item()

    check_values(weight, value, n, k)


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, groups=st.integers(1, 3), group=st.sampled_from([8, 16]), version=st.sampled_from([1, 2]), order=st.sampled_from(["none", "trivial", "act"]))
def test_gptq(seed, groups, group, version, order):
    g, n, k = generator(seed), 8, groups * group
    tensors = {"qweight": random_words((k // 8, n), g), "qzeros": random_words((groups, n // 8), g), "scales": torch.rand(groups, n, generator=g).half()}
    g_idx = torch.arange(groups, dtype=torch.int32).repeat_interleave(group)
    if order == "act":
        g_idx = g_idx[torch.randperm(k, generator=g)]
    if order != "none":
        tensors["g_idx"] = g_idx
    weight = formats.pack("gptq", tensors, version=version)
    check_round_trip(tensors, weight)

    def value(r, c):
        q = nibble(tensors["qweight"][c // 8, r].item(), c % 8)
        z = nibble(tensors["qzeros"][g_idx[c], r // 8].item(), r % 8) + (1 if version == 1 else 0)
        return (q - z) * tensors["scales"][g_idx[c], r].item()

    check_values(weight, value, n, k)


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, groups=st.integers(1, 3), zeros=st.booleans(), act=st.booleans(), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_compressed_tensors_int4(seed, groups, zeros, act, dtype):
    g, n, group = generator(seed), 8, 16
    k = groups * group
    tensors = {"weight_packed": random_words((n, k // 8), g), "weight_scale": torch.rand(n, groups, generator=g).to(dtype), "weight_shape": torch.tensor([n, k])}
    if zeros:
        tensors["weight_zero_point"] = random_words((n // 8, groups), g)
    g_idx = torch.arange(groups, dtype=torch.int32).repeat_interleave(group)
    if act:
        g_idx = g_idx[torch.randperm(k, generator=g)]
        tensors["weight_g_idx"] = g_idx
    weight = formats.pack("ct_int4", tensors)
    check_round_trip(tensors, weight)

    def value(r, c):
        q = nibble(tensors["weight_packed"][r, c // 8].item(), c % 8)
        z = nibble(tensors["weight_zero_point"][r // 8, g_idx[c]].item(), r % 8) if zeros else 8
        return (q - z) * tensors["weight_scale"][r, g_idx[c]].item()

    check_values(weight, value, n, k)


@pytest.mark.parametrize("layout", formats.LAYOUTS)
@pytest.mark.parametrize("content", ["normal", "zeros", "one_huge", "tiny"])
def test_quantize_rounds_to_nearest(layout, content, seed):
    w = torch.randn(24, 256, generator=generator(seed))
    w = {"normal": w, "zeros": torch.zeros_like(w), "tiny": w * 1e-6, "one_huge": w.index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(300.0))}[content]
    tensors = formats.quantize(layout, w)
    weight = formats.pack(layout, tensors)
    check_round_trip(tensors, weight)
    real = formats.dequantize(weight)
    if content == "zeros":
        assert not real.any()
    elif content == "normal":
        step = {"int8": 0.02, "fp8": 0.05}.get(layout[:4] if layout == "int8" else layout[:3], 0.2)
        assert (real - w).norm() / w.norm() < step
    assert real.isfinite().all()


# --- traps ------------------------------------------------------------------------------------------------------------


def nvfp4_tensors(global_scale=1.0, scale_code=0x38):
    return {"weight": torch.full((2, 16), 0x21, dtype=torch.uint8), "weight_scale": torch.full((2, 2), scale_code, dtype=torch.uint8).view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(global_scale)}  # fmt: skip


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_scale_bytes_are_refused_by_name(code):
    tensors = nvfp4_tensors()
    tensors["weight_scale"].view(torch.uint8)[1, 0] = code
    with pytest.raises(ValueError, match=r"scale holds 1 values that are not finite, the first at \[1, 0\]: nan"):
        formats.pack("nvfp4_modelopt", tensors)


def test_e8m0_nan_is_refused():
    with pytest.raises(ValueError, match="scale holds 1 values"):
        formats.pack("mxfp4", {"weight": torch.zeros(1, 16, dtype=torch.uint8), "weight_scale": torch.tensor([[255]], dtype=torch.uint8)})


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_global_scales_are_refused(value):
    with pytest.raises(ValueError, match="weight_scale_2=.*finite positive"):
        formats.pack("nvfp4_modelopt", nvfp4_tensors(value))
    tensors = nvfp4_tensors()
    renamed = {"weight_packed": tensors["weight"], "weight_scale": tensors["weight_scale"], "weight_global_scale": torch.tensor([value])}
    with pytest.raises(ValueError, match="weight_global_scale=.*finite positive"):
        formats.pack("nvfp4_compressed_tensors", renamed)


def test_swapped_conventions_differ_by_the_global_squared():
    tensors = nvfp4_tensors(0.25)
    multiplied = formats.dequantize(formats.pack("nvfp4_modelopt", tensors))
    renamed = {"weight_packed": tensors["weight"], "weight_scale": tensors["weight_scale"], "weight_global_scale": tensors["weight_scale_2"]}
    divided = formats.dequantize(formats.pack("nvfp4_compressed_tensors", renamed))
    assert torch.equal(divided, multiplied / 0.25**2) and multiplied.any()


@pytest.mark.parametrize("code", [0x01, 0x08, 0x38, 0x7E])
@pytest.mark.parametrize("global_scale", [2.0**-20, 1.0, 2.0**8])
def test_the_global_scale_is_always_applied_whatever_the_magnitudes(code, global_scale):
    """Exports with a global of 1 and tiny block scales exist; dropping or guessing the factor is a known bug."""
    real = formats.dequantize(formats.pack("nvfp4_modelopt", nvfp4_tensors(global_scale, code)))
    assert real[0, 0].item() == e2m1(1) * e4m3(code) * global_scale
    assert real[0, 1].item() == e2m1(2) * e4m3(code) * global_scale


def test_fused_parts_keep_their_own_global():
    parts = [formats.pack("nvfp4_modelopt", nvfp4_tensors(s)) for s in (0.5, 2.0, 8.0)]
    fused = formats.concat(parts)
    assert fused.global_scale is not None and fused.global_scale.tolist() == [0.5, 0.5, 2.0, 2.0, 8.0, 8.0]
    assert torch.equal(formats.dequantize(fused), torch.cat([formats.dequantize(p) for p in parts]))


def test_weight_nan_codes_stay_nan():
    tensors = {"weight": torch.tensor([[0x7F, 0xFF, 0x7E]], dtype=torch.uint8).view(torch.float8_e4m3fn), "weight_scale": torch.ones(1, 1)}
    real = formats.dequantize(formats.pack("fp8_channel", tensors))
    assert real[0, :2].isnan().all() and real[0, 2] == 448


def test_gptq_zero_sixteen_fits():
    """Version 1 stores zero - 1, so a stored 15 means 16, which no nibble holds."""
    tensors = {"qweight": torch.zeros(1, 8, dtype=torch.int32), "qzeros": torch.tensor([[-1]], dtype=torch.int32), "scales": torch.ones(1, 8).half()}
    assert (formats.dequantize(formats.pack("gptq", tensors)) == -16).all()
    assert (formats.dequantize(formats.pack("gptq", tensors, version=2)) == -15).all()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", formats.LAYOUTS)
def test_missing_extra_and_mistyped_tensors_are_named(layout):
    tensors = formats.quantize(layout, torch.randn(16, 128))
    first = next(iter(tensors))
    with pytest.raises(ValueError, match=f"'{first}' is missing"):
        formats.pack(layout, {k: v for k, v in tensors.items() if k != first})
    with pytest.raises(ValueError, match="'bias2' is not one of its tensors"):
        formats.pack(layout, {**tensors, "bias2": torch.zeros(1)})
    with pytest.raises(TypeError, match=rf"{first}.dtype=torch.float64"):
        formats.pack(layout, {**tensors, first: torch.zeros(tensors[first].shape, dtype=torch.float64)})
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name != first:  # one more row of the codes alone can be a legitimate weight
            with pytest.raises(ValueError, match="shape|groups"):
                formats.pack(layout, {**tensors, name: torch.cat([tensor.view(torch.uint8), tensor.view(torch.uint8)[:1]]).view(tensor.dtype)})


def test_unknown_layout_lists_names():
    for call in (lambda: formats.pack("nvfp5", {}), lambda: formats.quantize("nvfp5", torch.zeros(1, 1))):
        with pytest.raises(ValueError, match="layout 'nvfp5' is not known; accepted: awq, ct_int4"):
            call()


@pytest.mark.parametrize("layout, group, k", [("awq", 100, 256), ("gptq", 128, 200), ("ct_int4", 32, 40)])
def test_k_must_be_a_multiple_of_the_group(layout, group, k):
    with pytest.raises(ValueError, match=f"K={k} is not a multiple of the group of {group}"):
        formats.quantize(layout, torch.randn(8, k), group=group)


def test_scattered_groups_must_be_whole():
    tensors = formats.quantize("gptq", torch.randn(8, 32), group=16)
    tensors["g_idx"] = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(ValueError, match="g_idx must give each of the 2 groups exactly 16 columns"):
        formats.pack("gptq", tensors)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"codec": "int3"}, "codec='int3'"),
        ({"k": 7}, "k=7"),
        ({"group_k": 24}, "k=32 is not a multiple of the group of 24"),
        ({"data": torch.zeros(2, 15, dtype=torch.uint8)}, r"data.shape=\(2, 15\); \(2, 16\) is accepted"),
        ({"data": torch.zeros(2, 16)}, "data.dtype=torch.float32"),
        ({"zero": torch.zeros(2, 2, dtype=torch.uint8)}, "zero belongs to u4"),
        ({"global_scale": torch.tensor([1.0, 0.0])}, "global_scale holds 1 values"),
        ({"perm": torch.zeros(32, dtype=torch.int32)}, "perm does not name each of the 32 columns once"),
    ],
)
def test_packed_weight_checks_itself(change, message):
    weight = formats.pack("nvfp4_modelopt", nvfp4_tensors())
    fields = {f: getattr(weight, f) for f in ("codec", "n", "k", "group_n", "group_k", "data", "scale", "scale_codec", "zero", "global_scale", "perm")}
    with pytest.raises((ValueError, TypeError), match=message):
        PackedWeight(**{**fields, **change})


def test_concat_refuses_what_does_not_fit():
    a = formats.pack("fp8_block", formats.quantize("fp8_block", torch.randn(130, 128)))
    b = formats.pack("fp8_channel", formats.quantize("fp8_channel", torch.randn(8, 128)))
    with pytest.raises(ValueError, match=r"parts\[0\].n=130 is not a multiple of its block of 128 rows"):
        formats.concat([a, a])
    with pytest.raises(ValueError, match=r"parts\[1\].group_n=128 differs from parts\[0\].group_n=1"):
        formats.concat([b, a])
    with pytest.raises(ValueError, match="parts is empty"):
        formats.concat([])
    with pytest.raises(ValueError, match="not from a checkpoint layout"):
        formats.unpack(formats.concat([b, b]))


def test_traces_in_a_compiled_function():
    weight = formats.pack("fp8_channel", formats.quantize("fp8_channel", torch.randn(8, 16)))

    def rows(w):
        return w.data.float().sum(1) * w.scale[:, 0] + w.n

    assert torch.equal(torch.compile(rows, fullgraph=True, backend="eager")(weight), rows(weight))
