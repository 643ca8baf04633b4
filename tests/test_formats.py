"""formats/: every layout against its checkpoint equation, written out here element by element in exact rational numbers.

Nothing in the equations below uses the package: they read single tensor elements with Python integers and fractions.
"""
from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sm70_triton import formats
from sm70_triton.formats import PackedWeight, _int4, codecs

FEW = settings(max_examples=25, deadline=None)
NAN = "nan"

# ---- the formats, literally ----------------------------------------------------------------------------------------------

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6", "0", "-1/2", "-1", "-3/2", "-2", "-3", "-4", "-6")]


def e4m3(byte: int) -> Fraction | str:
    """OCP FP8: S.EEEE.MMM, bias 7, all ones is NaN, no infinity."""
    sign, exponent, mantissa = -1 if byte >= 128 else 1, byte // 8 % 16, byte % 8
    if exponent == 15 and mantissa == 7:
        return NAN
    if exponent == 0:
        return sign * Fraction(mantissa, 8) / 2**6
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def e8m0(byte: int) -> Fraction:
    return Fraction(2) ** (byte - 127)


def nibble(word: int, i: int) -> int:
    return (word >> (4 * i)) & 15


def as_bytes(tensor: torch.Tensor) -> list:
    return tensor.view(torch.uint8).tolist()


def float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


class Checkpoint(NamedTuple):
    layout: str
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    n: int
    k: int
    element: Callable[[int, int], Fraction | str]

    def pack(self) -> PackedWeight:
        return formats.pack(self.layout, self.tensors, **self.options)


class Source:
    """Random tensors from a seed that hypothesis draws (and prints when a test fails)."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.g = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1), label="seed"))

    def pick(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=dtype, generator=self.g)

    def words(self, *shape: int) -> torch.Tensor:
        return self.ints(-(2**31), 2**31, *shape, dtype=torch.int32)

    def scales(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=self.g) + 0.01).mul(2.0 ** self.pick(-20, -7, 0, 9)).to(dtype)

    def perm(self, k: int) -> torch.Tensor:
        return torch.randperm(k, generator=self.g)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def nvfp4(s: Source, layout: str) -> Checkpoint:
    n, k = s.pick(1, 3, 8), s.pick(16, 48, 64)
    data, scale = s.ints(0, 256, n, k // 2), s.ints(0, 0x7F, n, k // 16).view(torch.float8_e4m3fn)
    value = float32(s.draw(st.floats(2.0**-40, 2.0**40, width=32)))
    d, sc = data.tolist(), as_bytes(scale)
    ct = layout == "nvfp4_compressed_tensors"
    multiplier = Fraction(float32(1.0 / value)) if ct else Fraction(value)

    def element(row, col):
        return E2M1[nibble(d[row][col // 2], col % 2)] * e4m3(sc[row][col // 16]) * multiplier

    names = ("weight_packed", "weight_global_scale", "input_global_scale") if ct else ("weight", "weight_scale_2", "input_scale")
    tensors = {names[0]: data, "weight_scale": scale, names[1]: torch.full((1,) if ct else (), value)}
    if s.pick(True, False):
        tensors[names[2]] = torch.tensor([0.125])
    return Checkpoint(layout, tensors, {}, n, k, element)


def mxfp4(s: Source, layout: str) -> Checkpoint:
    n, k, name = s.pick(1, 5), s.pick(32, 96), s.pick("weight", "weight_packed", "blocks")
    data, scale = s.ints(0, 256, n, k // 2), s.ints(0, 255, n, k // 32)
    scale[0, 0] = s.pick(0, 1, 127, 254)
    blocks, sc = data.view(n, k // 32, 16).tolist(), scale.tolist()

    def element(row, col):
        return E2M1[nibble(blocks[row][col // 32][col % 32 // 2], col % 2)] * e8m0(sc[row][col // 32])

    tensors = {"blocks": data.view(n, k // 32, 16), "scales": scale} if name == "blocks" else {name: data, "weight_scale": scale}
    return Checkpoint(layout, tensors, {}, n, k, element)


def fp8(s: Source, layout: str) -> Checkpoint:
    n, k = s.pick(1, 4, 7, 13), s.pick(1, 5, 24)
    weight = s.ints(0, 256, n, k).view(torch.float8_e4m3fn)
    dtype, options, name = s.pick(*FLOATS), {}, "weight_scale"
    if layout == "fp8_tensor":
        if n > 1 and s.pick(True, False):
            options = {"parts": (1, n - 1)}
        scale = s.scales(dtype, *((2,) if options else s.pick((), (1,))))
        flat = scale.reshape(-1).tolist()
        scale_at = lambda row, col: flat[1 if options and row >= 1 else 0]  # noqa: E731
    elif layout == "fp8_channel":
        scale = s.scales(dtype, *s.pick((n, 1), (n,)))
        flat = scale.reshape(-1).tolist()
        scale_at = lambda row, col: flat[row]  # noqa: E731
    else:
        name, block = s.pick("weight_scale_inv", "weight_scale"), s.pick((128, 128), (4, 3), (1, 8))
        if block != (128, 128):
            options = {"block": block}
        scale = s.scales(dtype, math.ceil(n / block[0]), math.ceil(k / block[1]))
        table = scale.tolist()
        scale_at = lambda row, col: table[row // block[0]][col // block[1]]  # noqa: E731
    w = as_bytes(weight)

    def element(row, col):
        code = e4m3(w[row][col])
        return NAN if code == NAN else code * Fraction(scale_at(row, col))

    tensors = {"weight": weight, name: scale}
    if s.pick(True, False):
        tensors["input_scale"] = torch.tensor(0.5)
    return Checkpoint(layout, tensors, options, n, k, element)


def int8(s: Source, layout: str) -> Checkpoint:
    n, k = s.pick(1, 6), s.pick(1, 9, 32)
    weight, scale = s.ints(-128, 128, n, k, dtype=torch.int8), s.scales(s.pick(*FLOATS), *s.pick((n, 1), (n,)))
    w, sc = weight.tolist(), scale.reshape(-1).tolist()
    tensors = {"weight": weight, "weight_scale": scale}
    if s.pick(True, False):
        tensors |= {"input_scale": torch.tensor([0.5]), "input_zero_point": torch.tensor([3], dtype=torch.int8)}
    return Checkpoint(layout, tensors, {}, n, k, lambda row, col: w[row][col] * Fraction(sc[row]))


def awq(s: Source, layout: str) -> Checkpoint:
    n, groups, group = s.pick(8, 24), s.pick(1, 3), s.pick(2, 6, 32)
    k = groups * group
    qweight, qzeros, scales = s.words(k, n // 8), s.words(groups, n // 8), s.scales(s.pick(*FLOATS), groups, n)
    q, z, sc = qweight.tolist(), qzeros.tolist(), scales.tolist()
    place = (0, 4, 1, 5, 2, 6, 3, 7)  # of column c in its word: the inverse of "nibble i holds column (0,2,4,6,1,3,5,7)[i]"

    def element(row, col):
        g, c = col // group, place[row % 8]
        return (nibble(q[col][row // 8], c) - nibble(z[g][row // 8], c)) * Fraction(sc[g][row])

    return Checkpoint(layout, {"qweight": qweight, "qzeros": qzeros, "scales": scales}, {}, n, k, element)


def gptq(s: Source, layout: str) -> Checkpoint:
    n, groups, group, version = s.pick(8, 16), s.pick(1, 3), s.pick(8, 16), s.pick(1, 2)
    k = groups * group
    qweight, qzeros, scales = s.words(k // 8, n), s.words(groups, n // 8), s.scales(s.pick(*FLOATS), groups, n)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    order = s.pick("none", "trivial", "act")
    column_group = [c // group for c in range(k)]
    if order == "act":
        column_group = [column_group[c] for c in s.perm(k).tolist()]
    if order != "none":
        tensors["g_idx"] = torch.tensor(column_group, dtype=s.pick(torch.int32, torch.int64))
    q, z, sc = qweight.tolist(), qzeros.tolist(), scales.tolist()

    def element(row, col):
        g = column_group[col]
        zero = nibble(z[g][row // 8], row % 8) + (1 if version == 1 else 0)
        return (nibble(q[col // 8][row], col % 8) - zero) * Fraction(sc[g][row])

    options = {} if version == 1 and s.pick(True, False) else {"version": version}
    return Checkpoint(layout, tensors, options, n, k, element)


def ct_int4(s: Source, layout: str) -> Checkpoint:
    n, groups, group = s.pick(8, 16), s.pick(1, 3), s.pick(8, 16)
    k = groups * group
    packed, scale = s.words(n, k // 8), s.scales(s.pick(*FLOATS), n, groups)
    if s.pick(True, False):
        scale[0] *= -1  # AutoRound's symmetric exports have negative scales
    tensors = {"weight_packed": packed, "weight_scale": scale}
    if s.pick(True, False):
        tensors["weight_shape"] = torch.tensor([n, k], dtype=s.pick(torch.int32, torch.int64))
    column_group = [c // group for c in range(k)]
    if s.pick(True, False):
        column_group = [column_group[c] for c in s.perm(k).tolist()]
        tensors["weight_g_idx"] = torch.tensor(column_group, dtype=torch.int32)
    zeros = None
    if s.pick(True, False):
        tensors["weight_zero_point"] = s.words(n // 8, groups)
        zeros = tensors["weight_zero_point"].tolist()
    q, sc = packed.tolist(), scale.tolist()

    def element(row, col):
        g = column_group[col]
        zero = 8 if zeros is None else nibble(zeros[row // 8][g], row % 8)
        return (nibble(q[row][col // 8], col % 8) - zero) * Fraction(sc[row][g])

    return Checkpoint(layout, tensors, {}, n, k, element)


MAKERS = {
    "awq": awq, "ct_int4": ct_int4, "fp8_block": fp8, "fp8_channel": fp8, "fp8_tensor": fp8, "gptq": gptq, "int8": int8, "mxfp4": mxfp4,
    "nvfp4_compressed_tensors": nvfp4, "nvfp4_modelopt": nvfp4,
}  # fmt: skip
every_layout = pytest.mark.parametrize("layout", sorted(MAKERS))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> torch.Tensor:
        return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)

    return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(raw(a), raw(b))


def assert_element(value: float, expected: Fraction | str, where: Any) -> None:
    if expected == NAN:
        assert math.isnan(value), f"{where}: {value!r} should be NaN"
    else:
        assert math.isfinite(value) and Fraction(value) == expected, f"{where}: {value!r} should be {float(expected)!r}"


def assert_weight(w: torch.Tensor, n: int, k: int, element: Callable[[int, int], Fraction | str]) -> None:
    assert w.dtype == torch.float64 and tuple(w.shape) == (n, k)
    for row, values in enumerate(w.tolist()):
        for col, value in enumerate(values):
            assert_element(value, element(row, col), (row, col))


def test_every_layout_has_an_equation_here():
    assert set(MAKERS) == set(formats.LAYOUTS)


@every_layout
@FEW
@given(data=st.data())
def test_dequantize_is_the_checkpoint_equation(layout, data):
    checkpoint = MAKERS[layout](Source(data.draw), layout)
    assert_weight(formats.dequantize(checkpoint.pack()), checkpoint.n, checkpoint.k, checkpoint.element)


@every_layout
@FEW
@given(data=st.data())
def test_pack_then_unpack_is_bit_for_bit(layout, data):
    checkpoint = MAKERS[layout](Source(data.draw), layout)
    kept = {name: t.clone() for name, t in checkpoint.tensors.items()}
    back = formats.unpack(checkpoint.pack())
    assert set(back) == set(kept)
    for name, tensor in kept.items():
        assert same_bits(back[name], tensor), name
        assert same_bits(checkpoint.tensors[name], tensor), f"pack changed {name}"


@every_layout
@FEW
@given(data=st.data())
def test_strided_checkpoint_tensors(layout, data):
    """A view of a fused or transposed tensor packs like a copy of it."""
    checkpoint = MAKERS[layout](Source(data.draw), layout)

    def strided(t: torch.Tensor) -> torch.Tensor:
        if t.ndim < 2:
            return t
        wide = torch.empty((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]

    weight = formats.pack(layout, {name: strided(t) for name, t in checkpoint.tensors.items()}, **checkpoint.options)
    assert torch.equal(formats.dequantize(weight).nan_to_num(9), formats.dequantize(checkpoint.pack()).nan_to_num(9))
    assert all(same_bits(t, checkpoint.tensors[name]) for name, t in formats.unpack(weight).items())


# ---- codecs: every code --------------------------------------------------------------------------------------------------


def bits64(x: torch.Tensor) -> list[int]:
    """Bits of float64 values, NaN made one: the sign of zero counts, the payload of NaN does not."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int64).tolist()


ALL = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("codec, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_all_256_fp8_codes_bit_for_bit(codec, dtype):
    assert bits64(codecs.decode(ALL, codec)) == bits64(ALL.view(dtype).double())


def test_all_256_e4m3_codes_by_formula():
    for byte, value in enumerate(codecs.decode(ALL, "e4m3").tolist()):
        assert_element(value, e4m3(byte), hex(byte))
        assert math.isnan(value) == (byte in (0x7F, 0xFF))
        assert math.isnan(value) or math.copysign(1, value) == (-1 if byte >= 128 else 1)


def test_all_256_e5m2_codes_are_the_upper_half_of_a_float16():
    for byte, value in enumerate(codecs.decode(ALL, "e5m2").tolist()):
        half = struct.unpack("<e", bytes((0, byte)))[0]
        assert (math.isnan(value) and math.isnan(half)) or (value == half and math.copysign(1, value) == math.copysign(1, half)), hex(byte)


def test_all_16_e2m1_codes_bit_for_bit():
    for code, value in enumerate(codecs.decode(ALL[:16], "e2m1").tolist()):
        assert Fraction(value) == E2M1[code] and math.copysign(1, value) == (-1 if code >= 8 else 1), code


def test_all_256_e8m0_codes_bit_for_bit():
    """As float32 exponent fields; code 0 has no such field, it is the subnormal 2^-127."""
    values = codecs.decode(ALL, "e8m0", torch.float32)
    for code, value in enumerate(values.view(torch.int32).tolist()):
        assert value == (0x00400000 if code == 0 else code << 23) or (code == 255 and math.isnan(values[255])), code
        if code < 255:
            assert Fraction(codecs.decode(ALL[code], "e8m0").item()) == e8m0(code)


def test_float32_holds_every_code():
    for codec in codecs.CODECS:
        codes = ALL[: len(codecs.table(codec))]
        assert bits64(codecs.decode(codes, codec, torch.float32).double()) == bits64(codecs.decode(codes, codec))


def nearest_code(x: float, codec: str) -> int:
    """By search over all codes: the nearest value, the even code when two are equally near."""
    sign = math.copysign(1, x) < 0
    magnitudes = [m for m in codecs.table(codec).tolist()[: 8 if codec == "e2m1" else 128] if math.isfinite(m)]
    x = min(abs(x), magnitudes[-1])
    best = min(range(len(magnitudes)), key=lambda code: (abs(Fraction(magnitudes[code]) - Fraction(x)), code % 2))
    return best | (sign << (3 if codec == "e2m1" else 7))


@pytest.mark.parametrize("codec", ["e2m1", "e4m3", "e5m2"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_encode_is_the_nearest_code(codec, data):
    values = [v for v in codecs.table(codec).tolist() if math.isfinite(v)]
    middle = st.integers(0, len(values) - 2).map(lambda i: (values[i] + values[i + 1]) / 2)  # a tie
    beside = st.tuples(middle, st.sampled_from((-math.inf, math.inf))).map(lambda t: math.nextafter(*t))
    x = data.draw(st.one_of(st.floats(allow_nan=False), st.floats(-1, 1), st.floats(-500, 500), middle, beside))
    for dtype in (torch.float64, *FLOATS):
        value = torch.tensor([x], dtype=dtype)
        assert codecs.encode(value, codec).item() == nearest_code(value.item(), codec), dtype


@pytest.mark.parametrize("codec", ["e2m1", "e4m3", "e5m2"])
def test_encode_in_bulk(codec, seed):
    """Every float32 exponent, in float32 and float64, against torch's cast (which knows no E2M1 and does not saturate)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int32, generator=g).view(torch.float32)
    x = torch.cat((x[~x.isnan()], 3 * torch.randn(10_000, generator=g), torch.tensor([0.0, -0.0, math.inf, -math.inf])))
    assert torch.equal(codecs.encode(x, codec), codecs.encode(x.double(), codec))
    if codec != "e2m1":
        dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[codec]
        assert torch.equal(codecs.encode(x.double(), codec), x.clamp(-largest, largest).to(dtype).view(torch.uint8))


def test_encode_undoes_decode():
    for codec in ("e2m1", "e4m3", "e5m2"):
        values = codecs.table(codec)
        keep = values.isfinite()
        assert torch.equal(codecs.encode(values[keep], codec), ALL[: len(values)][keep])


def test_encode_rounds_once():
    """1.0625 is midway between the E4M3 neighbours 1 and 1.125. A float64 a hair above it must not become float32 first."""
    above, below = 1.0625 * (1 + 2.0**-50), 1.1875 * (1 - 2.0**-50)
    assert codecs.encode(torch.tensor([1.0625, above, below, 1.1875], dtype=torch.float64), "e4m3").tolist() == [0x38, 0x39, 0x39, 0x3A]


def test_encode_nan():
    for nan in (torch.tensor([math.nan, -math.nan]), torch.tensor([math.nan, -math.nan], dtype=torch.float64)):
        assert codecs.encode(nan, "e4m3").tolist() == [0x7F, 0x7F] == codecs.encode(nan, "e5m2").tolist()
    with pytest.raises(ValueError, match="NaN, which e2m1 cannot express"):
        codecs.encode(nan, "e2m1")


@pytest.mark.parametrize("call", [lambda: codecs.table("e3m2"), lambda: codecs.encode(torch.ones(1), "e8m0")])
def test_unknown_codec(call):
    with pytest.raises(ValueError, match=r"codec 'e\dm\d'.*e2m1, e4m3, e5m2"):
        call()


@FEW
@given(data=st.data(), order=st.permutations(range(8)))
def test_int32_words_round_trip(data, order):
    words = Source(data.draw).words(3, 2)
    words[0, 0], words[1, 1] = -1, -(2**31)
    columns = _int4.unpack_int32(words, order)
    assert torch.equal(_int4.pack_int32(columns, order), words)
    for i in range(8):
        assert columns[2, 8 + order[i]] == nibble(words[2, 1].item(), i)


# ---- traps of ../shared/reference/peers.md, section 3 --------------------------------------------------------------------

NVFP4 = ("nvfp4_compressed_tensors", "nvfp4_modelopt")
both_conventions = pytest.mark.parametrize("layout", NVFP4)


def nvfp4_tensors(layout: str, data: torch.Tensor, scale: torch.Tensor, global_: float) -> dict[str, torch.Tensor]:
    names = ("weight_packed", "weight_global_scale") if layout == NVFP4[0] else ("weight", "weight_scale_2")
    return {names[0]: data, "weight_scale": scale.view(torch.float8_e4m3fn), names[1]: torch.tensor([global_])}


@both_conventions
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_scale_bytes_are_refused(layout, byte):
    scale = torch.full((3, 4), 0x38, dtype=torch.uint8)
    scale[1, 2] = scale[2, 0] = byte
    with pytest.raises(ValueError, match=rf"weight_scale holds 2 of 12 values that are not finite and not negative.*0x00 to 0x7e.*first at \[1, 2\]: 0x{byte:02x}"):
        formats.pack(layout, nvfp4_tensors(layout, torch.zeros(3, 32, dtype=torch.uint8), scale, 1.0))


@both_conventions
def test_negative_scale_bytes_are_refused(layout):
    for byte in range(0x81, 0x100):
        with pytest.raises(ValueError, match=rf"weight_scale holds 1 of 1 values .* the first at \[0, 0\]: 0x{byte:02x}"):
            formats.pack(layout, nvfp4_tensors(layout, torch.zeros(1, 8, dtype=torch.uint8), torch.full((1, 1), byte, dtype=torch.uint8), 1.0))


@both_conventions
def test_every_scale_byte_is_exact(layout):
    """Subnormal scale bytes too: no kernel trick that drops them (Marlin's S0E5M3) has this as its specification."""
    scale = torch.arange(0x7F, dtype=torch.uint8)[:, None]
    data = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8).expand(0x7F, 8)
    w = formats.dequantize(formats.pack(layout, nvfp4_tensors(layout, data, scale, 0.5)))
    multiplier = 2 if layout == NVFP4[0] else Fraction(1, 2)
    assert_weight(w, 0x7F, 16, lambda row, col: E2M1[col] * e4m3(row) * multiplier)


def test_swapping_the_nvfp4_conventions_is_an_error_of_global_squared(seed):
    g = torch.Generator().manual_seed(seed)
    data, scale = torch.randint(0, 256, (4, 16), dtype=torch.uint8, generator=g), torch.randint(1, 0x7F, (4, 2), dtype=torch.uint8, generator=g)
    ct, modelopt = (formats.dequantize(formats.pack(layout, nvfp4_tensors(layout, data, scale, 64.0))) for layout in NVFP4)
    assert ct.abs().max() > 0 and torch.equal(modelopt, ct * 64.0**2)


@pytest.mark.parametrize("layout, other", [NVFP4, NVFP4[::-1]])
def test_a_convention_refuses_the_other_ones_tensors(layout, other):
    tensors = formats.quantize(other, torch.randn(2, 32))
    with pytest.raises(ValueError, match=f"{layout}: '\\w+' is missing; it needs .*, it got "):
        formats.pack(layout, tensors)


@both_conventions
def test_global_of_one_with_tiny_block_scales(layout):
    """Such exports exist in both conventions (GLM-4.7-Flash): the magnitudes say nothing about which one it is."""
    data, scale = torch.full((2, 8), 0x72, dtype=torch.uint8), torch.tensor([[0x01], [0x08]], dtype=torch.uint8)
    w = formats.dequantize(formats.pack(layout, nvfp4_tensors(layout, data, scale, 1.0)))
    assert_weight(w, 2, 16, lambda row, col: (6 if col % 2 else 1) * Fraction(1, 2 ** (9 - 3 * row)))


@both_conventions
def test_fused_parts_keep_their_own_global_scale(layout, seed):
    """vllm #54150: one global for gate and up, taken from either, is wrong for the other by their ratio."""
    g = torch.Generator().manual_seed(seed)
    gate, up = torch.randn(3, 32, generator=g), 1000 * torch.randn(5, 32, generator=g)
    parts = [formats.pack(layout, formats.quantize(layout, w)) for w in (gate, up)]
    fused = formats.concat(parts)
    assert fused.n == 8 and fused.global_scale.unique().numel() == 2
    assert torch.equal(formats.dequantize(fused), torch.cat([formats.dequantize(p) for p in parts]))
    shared = dataclasses.replace(fused, global_scale=fused.global_scale.max().expand(8).contiguous())
    assert (formats.dequantize(shared)[:3].norm() / gate.norm()) > 100


@both_conventions
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_global_scale_must_be_finite_and_positive(layout, value):
    """An infinite divisor (compressed-tensors PR #595) would make every weight zero, a zero one infinite."""
    tensors = nvfp4_tensors(layout, torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), value)
    with pytest.raises(ValueError, match=rf"{layout}: weight_\w+={value!r}; a finite positive number is accepted"):
        formats.pack(layout, tensors)


def test_a_divisor_whose_reciprocal_overflows():
    tensors = nvfp4_tensors(NVFP4[0], torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), 2.0**-140)
    with pytest.raises(ValueError, match="weight_global_scale=.*its reciprocal is beyond float32"):
        formats.pack(NVFP4[0], tensors)


@FEW
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_the_divisor_costs_one_rounding(value):
    """w = code * scale / global, to half a unit of float32."""
    tensors = nvfp4_tensors(NVFP4[0], torch.full((1, 8), 0x55, dtype=torch.uint8), torch.full((1, 1), 0x3C, dtype=torch.uint8), value)
    exact = 3 * Fraction(3, 2) / Fraction(value)
    assert abs(Fraction(formats.dequantize(formats.pack(NVFP4[0], tensors))[0, 0].item()) - exact) <= exact / 2**24


@pytest.mark.parametrize("global_, largest", [(1.0, 3.998), (0.01, 399.8)])
def test_fp16_scales_overflow_where_ours_do_not(global_, largest):
    """1Cat 907c210b03: half(e4m3) * half(global * 2^14) is infinite once e4m3 > 65504 / (16384 global); float32 is not."""
    scale = torch.arange(0x7F, dtype=torch.uint8)[:, None]
    weight = formats.pack(NVFP4[1], nvfp4_tensors(NVFP4[1], torch.full((0x7F, 8), 0x77, dtype=torch.uint8), scale, global_))
    values = codecs.decode(scale[:, 0], "e4m3")
    fp16 = values.half() * torch.tensor(global_ * 2**14).half()
    assert torch.equal(fp16.isinf(), values > largest) and fp16.isinf().any()
    product = codecs.decode(weight.scale, "e4m3", torch.float32) * weight.global_scale[:, None]  # what a kernel forms
    exact = values[:, None] * weight.global_scale.double()[:, None]
    assert product.isfinite().all() and ((product.double() - exact).abs() <= exact * 2.0**-24).all()
    assert torch.equal(formats.dequantize(weight)[:, :1], 6 * exact)


def test_e8m0_scale_of_zero_is_a_float32_subnormal():
    """1Cat 2f0a5056f: the exponent field alone would make byte 0 a zero."""
    scale = torch.tensor([[0], [1], [254]], dtype=torch.uint8)
    weight = formats.pack("mxfp4", {"weight": torch.full((3, 16), 0x71, dtype=torch.uint8), "weight_scale": scale})
    assert_weight(formats.dequantize(weight), 3, 32, lambda row, col: (6 if col % 2 else Fraction(1, 2)) * e8m0((0, 1, 254)[row]))
    assert formats.dequantize(weight, torch.float32)[0, 0].item() == 2.0**-128


def test_e8m0_nan_is_refused():
    tensors = {"blocks": torch.zeros(2, 3, 16, dtype=torch.uint8), "scales": torch.full((2, 3), 127, dtype=torch.uint8)}
    tensors["scales"][1, 2] = 0xFF
    with pytest.raises(ValueError, match=r"scales holds 1 of 6 values that are not finite \(E8M0 bytes 0x00 to 0xfe\), the first at \[1, 2\]: 0xff"):
        formats.pack("mxfp4", tensors)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_weight_scale_inv_multiplies(name):
    weight = torch.full((130, 129), 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 2.0
    scale = torch.tensor([[0.25, 3.0], [5.0, 7.0]], dtype=torch.bfloat16)
    w = formats.dequantize(formats.pack("fp8_block", {"weight": weight, name: scale}))
    assert (w[:128, :128] == 0.5).all() and (w[:128, 128:] == 6).all() and (w[128:, :128] == 10).all() and (w[128:, 128:] == 14).all()


@pytest.mark.parametrize("layout, name", [("fp8_tensor", "weight_scale"), ("fp8_channel", "weight_scale"), ("fp8_block", "weight_scale_inv")])
def test_fp8_weight_bytes_that_are_nan_stay_nan(layout, name):
    scale = torch.ones({"fp8_tensor": (1,), "fp8_channel": (1, 1), "fp8_block": (1, 2)}[layout])
    w = formats.dequantize(formats.pack(layout, {"weight": ALL[None].view(torch.float8_e4m3fn), name: scale}))[0]
    assert w.isnan().nonzero()[:, 0].tolist() == [0x7F, 0xFF]


def test_fp8_fused_parts_keep_their_own_scale():
    weight = torch.full((6, 2), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.0
    scales = torch.tensor([0.5, 3.0, 100.0])
    fused = formats.pack("fp8_tensor", {"weight": weight, "weight_scale": scales}, parts=[1, 3, 2])
    assert formats.dequantize(fused)[:, 1].tolist() == [0.5, 3, 3, 3, 100, 100]
    joined = formats.concat([formats.pack("fp8_tensor", {"weight": weight[a:b], "weight_scale": s}) for a, b, s in zip((0, 1, 4), (1, 4, 6), scales, strict=True)])
    assert torch.equal(formats.dequantize(joined), formats.dequantize(fused))


@pytest.mark.parametrize("parts", [(), (6, 1), (7, -1), (3, 3, 0)])
def test_fp8_parts_must_add_up(parts):
    tensors = {"weight": torch.zeros(6, 2).to(torch.float8_e4m3fn), "weight_scale": torch.ones(len(parts))}
    with pytest.raises(ValueError, match=r"fp8_tensor: parts=\[.*\] must be positive and add up to N=6"):
        formats.pack("fp8_tensor", tensors, parts=parts)


def test_gptq_version_1_stores_zero_minus_one():
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32), "qzeros": torch.tensor([[-0x0123_4568]], dtype=torch.int32),  # 0xfedcba98
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }  # fmt: skip
    v1, v2 = (formats.pack("gptq", tensors, version=version) for version in (1, 2))
    assert v1.zero.flatten().tolist() == [9, 10, 11, 12, 13, 14, 15, 16]  # 16 fits no nibble
    assert v2.zero.flatten().tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert torch.equal(formats.dequantize(v2) - formats.dequantize(v1), torch.full((8, 8), 0.5, dtype=torch.float64))
    with pytest.raises(ValueError, match="gptq: version=3; 1 .* and 2 are accepted"):
        formats.pack("gptq", tensors, version=3)


def test_gptq_act_order_gathers_columns_by_group():
    """Columns 0 2 4 ... belong to group 1: code k mod 8, scales 1 and 100."""
    column = torch.arange(16, dtype=torch.uint8) % 8
    tensors = {
        "qweight": _int4.pack_int32(column.expand(8, 16)).T.contiguous(), "qzeros": torch.zeros(2, 1, dtype=torch.int32),
        "scales": torch.tensor([[1.0], [100.0]], dtype=torch.float16).expand(2, 8).contiguous(),
        "g_idx": torch.tensor([1, 0] * 8, dtype=torch.int32),
    }  # fmt: skip
    weight = formats.pack("gptq", tensors, version=2)
    assert weight.perm.tolist() == [*range(1, 16, 2), *range(0, 16, 2)]
    assert formats.dequantize(weight)[3].tolist() == [(k % 8) * (1 if k % 2 else 100) for k in range(16)]
    # A kernel multiplies packed column j by activation column perm[j]:
    x = torch.arange(16.0, dtype=torch.float64)
    packed = formats.dequantize(dataclasses.replace(weight, perm=None))
    assert torch.equal(packed @ x[weight.perm.long()], formats.dequantize(weight) @ x)


def test_gptq_static_groups_need_no_permutation_when_in_order():
    tensors = formats.quantize("gptq", torch.randn(8, 32), group=16)
    assert formats.pack("gptq", tensors).perm is None
    assert same_bits(formats.unpack(formats.pack("gptq", tensors))["g_idx"], tensors["g_idx"])


@pytest.mark.parametrize("g_idx", [[0] * 16, [0] * 8 + [2] * 8, [-1] * 8 + [1] * 8, [0] * 9 + [1] * 7])
@pytest.mark.parametrize("layout, name", [("gptq", "g_idx"), ("ct_int4", "weight_g_idx")])
def test_group_index_must_fill_every_group(layout, name, g_idx):
    tensors = formats.quantize(layout, torch.randn(8, 16), group=8) | {name: torch.tensor(g_idx, dtype=torch.int32)}
    with pytest.raises(ValueError, match=f"{layout}: {name} must give each of the 2 groups exactly 8 columns"):
        formats.pack(layout, tensors)


def test_awq_column_order():
    """The word 0x75316420 holds 0, 1, ... 7 in columns 0, 1, ... 7."""
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    tensors = {"qweight": word.expand(2, 1), "qzeros": torch.zeros(1, 1, dtype=torch.int32), "scales": torch.ones(1, 8).half()}
    assert formats.dequantize(formats.pack("awq", tensors))[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    tensors = {"qweight": torch.zeros(2, 1, dtype=torch.int32), "qzeros": word, "scales": torch.ones(1, 8).half()}
    assert formats.dequantize(formats.pack("awq", tensors))[:, 1].tolist() == [0, -1, -2, -3, -4, -5, -6, -7]


def test_bfloat16_scales_widen_without_loss():
    scale = torch.tensor([[2.0**-130], [2.0**-60], [3.0e38]]).bfloat16()  # none of them fits float16; the first is a subnormal
    weight = formats.pack("fp8_channel", {"weight": torch.ones(3, 1).to(torch.float8_e4m3fn), "weight_scale": scale})
    assert weight.scale_codec == "f32" and formats.dequantize(weight).flatten().tolist() == scale.double().flatten().tolist()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("layout, name", [("awq", "scales"), ("gptq", "scales"), ("ct_int4", "weight_scale"), ("int8", "weight_scale"), ("fp8_channel", "weight_scale"), ("fp8_block", "weight_scale_inv")])
def test_float_scales_must_be_finite(layout, name, value):
    tensors = formats.quantize(layout, torch.randn(8, 128))
    tensors[name].view(-1)[-1] = value
    with pytest.raises(ValueError, match=rf"{name}.* holds 1 of \d+ values that are not finite, the first at \[\d, 0\]: {value!r}"):
        formats.pack(layout, tensors)


# ---- rounding ------------------------------------------------------------------------------------------------------------

CASES = [
    ("awq", {"group": 32}), ("ct_int4", {"group": 32}), ("ct_int4", {"group": None}), ("ct_int4", {"group": 32, "symmetric": False}),
    ("fp8_block", {}), ("fp8_block", {"block": (5, 24)}), ("fp8_channel", {}), ("fp8_tensor", {}), ("gptq", {"group": 32}),
    ("gptq", {"group": 32, "version": 2}), ("gptq", {"group": 32, "symmetric": True}), ("gptq", {"group": 32, "act_order": True}), ("int8", {}),
    ("mxfp4", {}), ("nvfp4_compressed_tensors", {}), ("nvfp4_modelopt", {}),
]  # fmt: skip
cases = pytest.mark.parametrize("layout, options", CASES, ids=[f"{layout}-{'-'.join(map(str, options.values()))}" for layout, options in CASES])


def quantized(layout: str, options: dict[str, Any], w: torch.Tensor, g: torch.Generator) -> PackedWeight:
    options = dict(options)
    if "act_order" in options:
        options["act_order"] = torch.randperm(w.shape[1], generator=g)
    tensors = formats.quantize(layout, w, **options)
    return formats.pack(layout, tensors, **{key: value for key, value in options.items() if key in ("block", "version")})


@cases
@pytest.mark.parametrize("kind", ["normal", "wide", "outlier", "tiny"])
def test_quantize_rounds_to_the_nearest_code(layout, options, kind, seed):
    """No code of the weight's own scale is nearer, to the roundings of one float32 quotient; and the scale fits the block."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 96, generator=g)
    w *= {"normal": 1.0, "wide": torch.exp2(torch.randint(-10, 10, (16, 1), generator=g).float()), "outlier": 1.0, "tiny": 1e-6}[kind]
    if kind == "outlier":
        w[3, 7] = 100.0
    w[1] = 0
    weight = quantized(layout, options, w, g)
    codes = {"e2m1": [float(v) for v in E2M1], "u4": range(16), "u4b8": range(-8, 8), "int8": range(-127, 128)}
    codes = torch.tensor([*codes[weight.codec]] if weight.codec in codes else [v for v in codecs.table("e4m3").tolist() if v == v], dtype=torch.float64)
    unit = dataclasses.replace(  # each weight's own step: dequantize a weight whose codes are all one
        weight, data=torch.full_like(weight.data, {"e2m1": 0x22, "u4": 0x11, "u4b8": 0x99, "int8": 1, "e4m3": 0x38}[weight.codec]),
        zero=None if weight.zero is None else torch.zeros_like(weight.zero),
    )  # fmt: skip
    step = formats.dequantize(unit)
    if weight.zero is not None:
        zeros = formats.dequantize(dataclasses.replace(weight, data=torch.zeros_like(weight.data)))  # -zero * step
        candidates = codes * step[..., None] + zeros[..., None]
    else:
        candidates = codes * step[..., None]
    best = (candidates - w.double()[..., None]).abs().amin(-1)
    error = (formats.dequantize(weight) - w.double()).abs()
    slack = 2.0**-22 * (w.double().abs() + (15 * step if weight.zero is not None else 0))
    assert (error <= best + slack).all()
    assert (formats.dequantize(weight)[1] == 0).all()
    if kind == "normal" and weight.codec not in ("e2m1", "e4m3"):
        # Nothing is clipped: half a step at worst, and what rounding the scale to float16 takes off the end of 15 steps.
        assert (error <= step * (0.5 + 15 * 2.0**-11 + 2.0**-20)).all()


@cases
def test_quantized_tensors_round_trip(layout, options, seed):
    g = torch.Generator().manual_seed(seed)
    weight = quantized(layout, options, torch.randn(16, 96, generator=g), g)
    tensors = formats.unpack(weight)
    again = formats.pack(layout, tensors, **{key: value for key, value in options.items() if key in ("block", "version")})
    assert torch.equal(formats.dequantize(again), formats.dequantize(weight))


@pytest.mark.parametrize("layout, options", [case for case in CASES if "act_order" not in case[1]], ids=str)
def test_quantize_keeps_a_weight_that_the_format_holds(layout, options, seed):
    """Any codes, with the largest (and for zeros the smallest) in every group, so that the scale must come out exact: nothing is lost."""
    g = torch.Generator().manual_seed(seed)
    codec = quantized(layout, options, torch.ones(16, 96), g).codec
    symmetric = codec == "u4b8" or options.get("symmetric")
    values = {"e2m1": map(float, E2M1), "e4m3": filter(math.isfinite, codecs.table("e4m3").tolist()), "int8": range(-127, 128)}
    values = torch.tensor([*values.get(codec, range(-7 if symmetric else -8, 8))], dtype=torch.float32)
    w = values[torch.randint(0, len(values), (16, 96), generator=g)]
    w[:, ::8] = values.max()
    if not symmetric:
        w[:, 1::8] = values.min()
    # NVFP4's largest block scale is 448, and its global scale a float32: 7/8 = 448 * 2^-9 is a step that both hold.
    step = 0.875 if layout.startswith("nvfp4") else 1.0
    assert torch.equal(formats.dequantize(quantized(layout, options, w * step, g)), (w * step).double())


@pytest.mark.parametrize(
    "w, message",
    [
        (torch.ones(4), r"w has dtype torch.float32 and shape \(4,\)"), (torch.ones(4, 4, dtype=torch.int32), "w has dtype torch.int32"),
        (torch.ones(0, 32), r"shape \(0, 32\)"), (torch.full((8, 32), math.nan), "w holds NaN"), (torch.full((8, 32), 1e300, dtype=torch.float64), "infinite in float32"),
    ],
)  # fmt: skip
def test_quantize_refuses(w, message):
    with pytest.raises(ValueError, match=message):
        formats.quantize("mxfp4", w)


@pytest.mark.parametrize(
    "layout, shape, options, message",
    [
        ("mxfp4", (1, 48), {}, "mxfp4: K=48 is not a multiple of the group of 32"), ("nvfp4_modelopt", (1, 24), {}, "nvfp4: K=24 is not a multiple of the group of 16"),
        ("awq", (12, 32), {"group": 32}, "awq: N=12 is not a multiple of 8"), ("awq", (8, 32), {"group": 24}, "awq: K=32 is not a multiple of the group of 24"),
        ("gptq", (8, 12), {"group": 4}, "gptq: K=12 is not a multiple of 8"), ("gptq", (8, 32), {"group": 0}, "gptq: K=32 is not a multiple of the group of 0"),
        ("ct_int4", (8, 20), {"group": None}, "ct_int4: K=20 is not a multiple of 8"), ("ct_int4", (9, 16), {"group": None, "symmetric": False}, "ct_int4: N=9"),
        ("fp8_block", (8, 32), {"block": (0, 4)}, r"fp8_block: block=\(0, 4\); two positive sizes"),
    ],
)  # fmt: skip
def test_quantize_refuses_sizes(layout, shape, options, message):
    with pytest.raises(ValueError, match=message):
        formats.quantize(layout, torch.ones(shape), **options)


def test_a_scale_beyond_float16_is_refused():
    with pytest.raises(ValueError, match="w needs a scale of .*, beyond float16"):
        formats.quantize("awq", torch.full((8, 128), 3e6))


# ---- bad checkpoints -----------------------------------------------------------------------------------------------------


def test_unknown_layout_lists_the_known_ones():
    for call in (lambda: formats.pack("marlin", {}), lambda: formats.quantize("marlin", torch.ones(8, 128))):
        with pytest.raises(ValueError, match="layout 'marlin' is not known; accepted: " + ", ".join(formats.LAYOUTS)):
            call()


def good(layout: str) -> dict[str, torch.Tensor]:
    return formats.quantize(layout, torch.randn(16, 128))


NAMES = [(layout, name) for layout in sorted(MAKERS) for name in good(layout)]
every_tensor = pytest.mark.parametrize("layout, name", NAMES)
OPTIONAL = ("g_idx", "weight_shape")


@every_tensor
def test_missing_tensor(layout, name):
    tensors = good(layout)
    del tensors[name]
    if name in OPTIONAL:
        formats.pack(layout, tensors)
        return
    with pytest.raises(ValueError, match=f"{layout}: '{name}' is missing; it needs .*{name}"):
        formats.pack(layout, tensors)


@every_layout
def test_extra_tensor(layout):
    with pytest.raises(ValueError, match=f"{layout}: 'bias' is not one of its tensors; accepted: "):
        formats.pack(layout, good(layout) | {"bias": torch.zeros(1)})


@every_tensor
def test_wrong_dtype(layout, name):
    tensors = good(layout)
    tensors[name] = tensors[name].to(torch.float64)
    with pytest.raises(TypeError, match=f"{layout}: {name}.dtype=torch.float64; accepted: "):
        formats.pack(layout, tensors)


@every_tensor
def test_not_a_tensor(layout, name):
    with pytest.raises(TypeError, match=f"{layout}: {name} is a list; a tensor is accepted"):
        formats.pack(layout, good(layout) | {name: [1, 2]})


@every_tensor
def test_wrong_shape(layout, name):
    """One more row, more axes, no element at all; columns are below, since for some tensors any number of them is right."""
    tensor = good(layout)[name]
    bad = [tensor[None, None, None], tensor.reshape(-1)[:0]]
    if tensor.ndim and (layout, name) not in (("fp8_tensor", "weight"), ("fp8_block", "weight")):  # one scale fits any N up to 128
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        bad.append(torch.cat((raw, raw[-1:])).view(tensor.dtype))
    if name in ("weight_global_scale", "weight_scale_2") or (layout, name) == ("fp8_tensor", "weight_scale"):
        bad.pop(0)  # one element is fine in any shape
    for wrong in bad:
        with pytest.raises(ValueError, match=rf"^({layout}: .*(shape=|K=|N=|groups)|K=129: 4-bit)"):
            formats.pack(layout, good(layout) | {name: wrong})


@every_tensor
def test_tensors_on_two_devices(layout, name):
    tensors = good(layout)
    with pytest.raises(ValueError, match=f"{layout}: .* is on (cpu|meta), the others on (cpu|meta); all must be on one device"):
        formats.pack(layout, tensors | {name: tensors[name].to("meta")})


@pytest.mark.parametrize(
    "layout, tensors, message",
    [
        ("nvfp4_modelopt", {"weight": torch.zeros(2, 20, dtype=torch.uint8)}, "K=40 is not a multiple of the group of 16"),
        ("mxfp4", {"weight": torch.zeros(16, 24, dtype=torch.uint8)}, "K=48 is not a multiple of the group of 32"),
        ("awq", {"qweight": torch.zeros(96, 2, dtype=torch.int32), "qzeros": torch.zeros(5, 2, dtype=torch.int32), "scales": torch.ones(5, 16).half()}, "qzeros has 5 groups, which do not divide K=96"),
        ("gptq", {"scales": torch.ones(3, 16).half()}, "scales has 3 groups, which do not divide K=128"),
        ("gptq", {"qweight": torch.zeros(16, 12, dtype=torch.int32), "scales": torch.ones(1, 12).half()}, "N=12 is not a multiple of 8"),
        ("ct_int4", {"weight_scale": torch.ones(16, 3)}, "weight_scale has 3 groups, which do not divide K=128"),
        ("ct_int4", {"weight_shape": torch.tensor([16, 127])}, r"weight_shape=\[16, 127\] does not match weight_packed, which holds \[16, 128\]"),
        ("fp8_block", {"weight_scale_inv": torch.ones(2, 1)}, r"weight_scale_inv.shape=\(2, 1\); accepted: \(1, 1\)"),
        ("fp8_tensor", {"weight_scale": torch.ones(3)}, r"weight_scale.shape=\(3,\); accepted: \(1,\)"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(layout, tensors, message):
    with pytest.raises(ValueError, match=f"{layout}: {message}"):
        formats.pack(layout, good(layout) | tensors)


def test_gpt_oss_blocks_have_16_bytes():
    tensors = {"blocks": torch.zeros(2, 3, 8, dtype=torch.uint8), "scales": torch.zeros(2, 3, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"mxfp4: blocks.shape=\(2, 3, 8\); \[N, K/32, 16\] is accepted"):
        formats.pack("mxfp4", tensors)


# ---- PackedWeight --------------------------------------------------------------------------------------------------------


def plain(**changes: Any) -> PackedWeight:
    fields: dict[str, Any] = {
        "codec": "u4", "n": 4, "k": 8, "group_n": 1, "group_k": 4, "data": torch.zeros(4, 4, dtype=torch.uint8), "scale": torch.ones(4, 2),
        "scale_codec": "f32", "zero": torch.zeros(4, 2, dtype=torch.uint8), "global_scale": torch.ones(4), "perm": torch.arange(8, dtype=torch.int32),
    }  # fmt: skip
    return PackedWeight(**(fields | changes))


U8 = torch.uint8


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        (ValueError, {"codec": "fp6"}, "codec='fp6'; accepted: e2m1, u4"),
        (ValueError, {"scale_codec": "bf16"}, "scale_codec='bf16'; accepted: e4m3, e8m0, f16, f32"),
        (ValueError, {"n": 0}, "n=0, .* must all be positive"), (ValueError, {"group_k": -4}, "group_k=-4 must all be positive"),
        (ValueError, {"k": 7}, "k=7: 4-bit weights need an even number"), (ValueError, {"group_k": 3}, "k=8 is not a multiple of the group of 3"),
        (ValueError, {"data": torch.zeros(4, 8, dtype=U8)}, r"data.shape=\(4, 8\); \(4, 4\) is accepted"),
        (TypeError, {"data": torch.zeros(4, 4)}, "data.dtype=torch.float32; torch.uint8 is accepted"),
        (TypeError, {"data": None}, "data is a NoneType; a tensor is accepted"), (TypeError, {"scale": 1.0}, "scale is a float"),
        (TypeError, {"scale": torch.ones(4, 2).half()}, "scale.dtype=torch.float16; torch.float32 is accepted"),
        (ValueError, {"scale": torch.ones(4, 1)}, r"scale.shape=\(4, 1\); \(4, 2\) is accepted"),
        (ValueError, {"scale": torch.ones(2, 4).T}, r"scale.stride\(\)=\(1, 4\): it must be contiguous"),
        (ValueError, {"scale": torch.ones(4, 2, device="meta")}, "scale is on meta, data on cpu"),
        (ValueError, {"zero": None}, "codec='u4' with zero=None"), (ValueError, {"codec": "u4b8"}, "codec='u4b8' with zero=a tensor"),
        (TypeError, {"zero": torch.zeros(4, 2, dtype=torch.int32)}, "zero.dtype=torch.int32"),
        (ValueError, {"global_scale": torch.ones(1)}, r"global_scale.shape=\(1,\); \(4,\) is accepted"),
        (ValueError, {"global_scale": torch.tensor([1, 0, math.inf, 1])}, r"global_scale holds 2 of 4 values .* finite and positive, the first at \[1\]: 0.0"),
        (ValueError, {"global_scale": torch.tensor([1, 1, 1, -1.0])}, r"global_scale holds 1 of 4 .* \[3\]: -1.0"),
        (ValueError, {"global_scale": torch.tensor([1, 1, math.nan, 1])}, r"global_scale holds 1 of 4 .* \[2\]: nan"),
        (ValueError, {"scale": torch.full((4, 2), math.inf)}, r"scale holds 8 of 8 values that are not finite, the first at \[0, 0\]: inf"),
        (TypeError, {"perm": torch.arange(8)}, "perm.dtype=torch.int64; torch.int32 is accepted"),
        (ValueError, {"perm": torch.tensor([0, 1, 2, 3, 4, 5, 6, 6], dtype=torch.int32)}, "perm is not a permutation: each of 0 to 7"),
        (ValueError, {"perm": torch.arange(1, 9, dtype=torch.int32)}, "perm is not a permutation"),
    ],
)  # fmt: skip
def test_packed_weight_checks_itself(kind, changes, message):
    with pytest.raises(kind, match=message):
        plain(**changes)


def test_packed_weight_accepts():
    """Scales that are zero, negative (float) or minus zero (E4M3), and ragged edges of 8-bit blocks."""
    plain(scale=torch.tensor([[0.0, -1.0]] * 4))
    plain(scale=torch.full((4, 2), 0x80, dtype=U8), scale_codec="e4m3")
    PackedWeight("e5m2", 5, 7, 4, 3, torch.zeros(5, 7, dtype=U8), torch.ones(2, 3), "f32")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain().n = 3  # type: ignore[misc]


def test_e5m2_codes_dequantize():
    w = formats.dequantize(PackedWeight("e5m2", 1, 256, 1, 256, ALL[None], torch.full((1, 1), 2.0), "f32"))
    assert bits64(w[0]) == bits64(ALL.view(torch.float8_e5m2).double() * 2)


def test_nbytes_counts_every_tensor():
    assert plain().nbytes == 16 + 32 + 8 + 16 + 32
    assert plain(global_scale=None, perm=None).nbytes == 16 + 32 + 8


def test_to_moves_every_tensor():
    moved = plain().to("meta")
    assert all(getattr(moved, f).device.type == "meta" for f in ("data", "scale", "zero", "global_scale", "perm"))
    assert (moved.codec, moved.n, moved.k, moved.group_k) == ("u4", 4, 8, 4)
    assert torch.equal(plain().to("cpu").data, plain().data)


@every_layout
def test_unpack_gives_tensors_where_the_weight_is(layout):
    tensors = good(layout)
    back = formats.unpack(formats.pack(layout, tensors).to("meta"))
    assert {name: (t.device.type, t.dtype, t.shape) for name, t in back.items()} == {name: ("meta", t.dtype, t.shape) for name, t in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dequantize_dtype(dtype, seed):
    weight = formats.pack("ct_int4", formats.quantize("ct_int4", torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)), group=32))
    assert torch.equal(formats.dequantize(weight, dtype), formats.dequantize(weight).to(dtype)) and formats.dequantize(weight, dtype).dtype == dtype


def test_unpack_needs_a_checkpoint():
    weight = formats.pack("int8", good("int8"))
    for made in (formats.concat([weight, weight]), plain()):
        with pytest.raises(ValueError, match="this weight came from (None|'concat'), not from a checkpoint layout"):
            formats.unpack(made)
    with pytest.raises(TypeError, match="weight is a dict; a PackedWeight is accepted"):
        formats.unpack(good("int8"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="came from layout 'int8'; unpacking is for awq"):
        formats.awq.unpack(weight)


# ---- concat --------------------------------------------------------------------------------------------------------------


@every_layout
@FEW
@given(data=st.data())
def test_concat_stacks_rows(layout, data):
    """Whatever the checkpoint, q/k/v stacked dequantise to the three stacked."""
    checkpoint = MAKERS[layout](Source(data.draw), layout)
    part = checkpoint.pack()
    if part.n % part.group_n:
        return
    scaled = dataclasses.replace(part, global_scale=(part.global_scale if part.global_scale is not None else torch.ones(part.n)) * 3)
    fused = formats.concat([part, scaled, part])
    assert torch.equal(formats.dequantize(fused).nan_to_num(0.123), torch.cat([formats.dequantize(p) for p in (part, scaled, part)]).nan_to_num(0.123))


def other(layout: str, shape: tuple[int, int] = (16, 128), **options: Any) -> PackedWeight:
    return formats.pack(layout, formats.quantize(layout, torch.randn(shape), **options))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: [other("int8"), other("fp8_channel")], "parts\\[1\\].codec='e4m3' differs from parts\\[0\\].codec='int8'"),
        (lambda: [other("int8"), other("int8", (16, 64))], "parts\\[1\\].k=64 differs from parts\\[0\\].k=128"),
        (lambda: [other("awq"), other("awq", group=64)], "parts\\[1\\].group_k=64 differs"),
        (lambda: [other("mxfp4"), other("nvfp4_modelopt")], "parts\\[1\\].group_k=16 differs"),
        (lambda: [other("fp8_channel"), other("fp8_block")], "parts\\[1\\].group_n=128 differs"),
        (lambda: [other("ct_int4"), other("ct_int4", symmetric=False)], "codec='u4' differs"),
        (lambda: [plain(), plain(scale=torch.ones(4, 2).half(), scale_codec="f16")], "scale_codec='f16' differs"),
        (lambda: [plain(), plain(perm=None)], "parts\\[1\\].perm differs from parts\\[0\\].perm: their columns are in another order"),
        (lambda: [plain(), plain(perm=torch.arange(8, dtype=torch.int32).flip(0))], "parts\\[1\\].perm differs"),
        (lambda: [other("fp8_block"), other("fp8_block")], "parts\\[0\\].n=16 is not a multiple of its block of 128 rows"),
        (lambda: [plain(), plain().to("meta")], "parts\\[1\\] is on meta, parts\\[0\\] on cpu"),
        (lambda: [], "parts is empty"),
    ],
)  # fmt: skip
def test_concat_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        formats.concat(make())


def test_concat_refuses_tensors():
    with pytest.raises(TypeError, match=r"parts\[1\] is a Tensor; a PackedWeight is accepted"):
        formats.concat([plain(), torch.ones(1)])  # type: ignore[list-item]


def test_concat_lets_the_last_block_be_ragged():
    a, b = (other("fp8_block", (n, 130)) for n in (128, 40))
    assert torch.equal(formats.dequantize(formats.concat([a, b])), torch.cat([formats.dequantize(a), formats.dequantize(b)]))


# ---- torch.compile -------------------------------------------------------------------------------------------------------


def test_packed_weight_under_torch_compile(seed):
    """An argument of a fullgraph-compiled function; another weight of the same form needs no new graph."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    @torch.compile(fullgraph=True, backend=backend)
    def rows(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        scale = weight.scale.float().sum(1) * weight.n
        return x * scale if weight.zero is None else x * scale + weight.zero.float().sum(1) + weight.data.float().sum(1)

    g = torch.Generator().manual_seed(seed)
    for _ in range(2):
        weight = formats.pack("awq", formats.quantize("awq", torch.randn(16, 64, generator=g), group=32))
        x = torch.randn(16, generator=g)
        expected = x * (weight.scale.float().sum(1) * 16) + weight.zero.float().sum(1) + weight.data.float().sum(1)
        torch.testing.assert_close(rows(x, weight), expected)
    assert len(graphs) == 1


def test_packed_weight_made_under_torch_compile():
    """Its checks of values would break the graph; they belong to weights that are loaded."""
    weight = other("awq")

    @torch.compile(fullgraph=True, backend="eager")
    def doubled(weight: PackedWeight) -> torch.Tensor:
        twice = dataclasses.replace(weight, scale=weight.scale * 2)
        return formats.concat([twice, weight]).scale

    assert torch.equal(doubled(weight), torch.cat((weight.scale * 2, weight.scale)))


# ---- on a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_layout
@FEW
@given(data=st.data())
def test_a_gpu_gives_what_the_cpu_gives(layout, data):
    """pack, dequantize and unpack, bit for bit. Not `quantize`: torch divides by a Python number in another way there."""
    checkpoint = MAKERS[layout](Source(data.draw), layout)
    here = checkpoint.pack()
    there = formats.pack(layout, {name: t.cuda() for name, t in checkpoint.tensors.items()}, **checkpoint.options)
    assert there.data.is_cuda
    for name, tensor in formats.unpack(there).items():
        assert tensor.is_cuda and same_bits(tensor.cpu(), checkpoint.tensors[name]), name
    assert bits64(formats.dequantize(there).cpu()) == bits64(formats.dequantize(here))
    for name in ("data", "scale", "zero", "global_scale", "perm"):
        a, b = getattr(there, name), getattr(here, name)
        assert (a is None and b is None) or same_bits(a.cpu(), b), name


def test_nvfp4_blocks_take_the_better_peak(seed):
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
    w[2, :16] = torch.tensor([4.0, -3.0, 2.0, 1.0] * 4)  # exact with its largest at 4, not at 6
    w[4, 5] = 6 * 7  # the largest of the tensor: its block scale is 448
    weight = formats.pack("nvfp4_modelopt", formats.quantize("nvfp4_modelopt", w))
    real = formats.dequantize(weight)
    torch.testing.assert_close(real[2, :16] / real[2, 0], w[2, :16].double() / 4, rtol=1e-12, atol=0)
    assert weight.scale.max() == 0x7E and real[4, 5] == pytest.approx(42, rel=1e-6)
