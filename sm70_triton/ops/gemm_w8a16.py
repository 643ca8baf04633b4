"""Activations in 16 bits times weights in 8: FP8 per tensor, per channel and per 128 x 128 block, INT8 per channel.

    out[m, n] = act(sum_k x[m, k] * w[n, k] + bias[n])             w[n, k] = decode(data[n, k]) * scale[n // group_n, k // group_k]

Codes are E4M3, E5M2 or INT8 bytes, scales multiply (also the `weight_scale_inv` of FP8 block checkpoints). A scale per tensor is
stored once a row, so the parts of a fused projection keep their own. With an activation the rows of `w` are [gate; up] and
out = act(gate) * up. float32 throughout, one rounding to x.dtype at the end. Format equations: formats/.
"""
from __future__ import annotations

import torch

from ..formats import PackedWeight
from ..registry import op
from . import _gemm

_CHANNEL = {"codec": "e4m3", "scale_codec": "f32", "group_n": 1, "group_k": -1, "fixed_group": True}


class W8Geometry(_gemm.GemmGeometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    FORMATS = {
        "fp8": _CHANNEL,
        "fp8_channel": _CHANNEL,
        "fp8_tensor": _CHANNEL,
        "fp8_block": {"codec": "e4m3", "scale_codec": "f32", "group_n": 128, "group_k": 128, "fixed_group": True},
        "fp8_e5m2": {**_CHANNEL, "codec": "e5m2"},
        "int8": {**_CHANNEL, "codec": "int8"},
    }


def _case(name, *args, **kwargs):
    return _gemm.case(W8Geometry, name, *args, **kwargs)


CASES = [
    _case("empty", 0, 40, 64, "fp8"),
    _case("fp8_m1_k576", 1, 136, 576, "fp8"),
    _case("fp8_m3_odd_k77", 3, 41, 77, "fp8", bias="fp32"),
    _case("fp8_m33_strided", 33, 104, 136, "fp8", strided=True, bias="fp16"),
    _case("fp8_m2_nan_code", 2, 40, 64, "fp8", nan=True),
    _case("fp8_m2_activations_1e5", 2, 40, 192, "fp8", act_dtype="bf16", amplitude=1e5, bias="bf16"),
    _case("fp8_m64_silu", 64, 136, 96, "fp8_tensor", gated="silu"),
    _case("fp8_m1_silu_k576_bf16", 1, 72, 576, "fp8_channel", gated="silu", act_dtype="bf16"),
    _case("block_m1_ragged", 1, 200, 320, "fp8_block"),
    _case("block_m7_ragged_k77", 7, 136, 77, "fp8_block", exponents=(-6, 6)),
    _case("block_m16", 16, 256, 256, "fp8_block", bias="bf16"),
    _case("block_m33_ragged_gelu_bf16", 33, 264, 200, "fp8_block", gated="gelu_tanh", act_dtype="bf16"),
    _case("e5m2_m8", 8, 40, 130, "fp8_e5m2"),
    _case("e5m2_m31_bf16", 31, 72, 96, "fp8_e5m2", act_dtype="bf16"),
    _case("int8_m2_k90", 2, 40, 90, "int8"),
    _case("int8_m16_bias", 16, 72, 160, "int8", bias="fp32"),
    _case("int8_m3_gelu", 3, 40, 104, "int8", gated="gelu_tanh"),
    # Weights that went through a checkpoint's layout; fused parts differ in size by 8, so in their scales.
    _case("tensor_m3_fused", 3, 120, 96, "fp8_tensor", layout="fp8_tensor", parts=3),
    _case("channel_m8_fused_silu_bf16", 8, 80, 77, "fp8_channel", gated="silu", act_dtype="bf16", layout="fp8_channel", parts=2),
    _case("block_m2_fused", 2, 256, 200, "fp8_block", layout="fp8_block", parts=2),
    _case("ct_int8_m7", 7, 41, 96, "int8", layout="int8"),
    # Local projections of 8B and 27B dense models over several splits.
    _case("fp8_m1_n28672_k4096_silu", 1, 28672, 4096, "fp8", gated="silu", production=True),
    _case("fp8_m8192_n6144_k4096", 8192, 6144, 4096, "fp8", production=True),
    _case("fp8_m16_n4096_k14336_bf16", 16, 4096, 14336, "fp8", act_dtype="bf16", production=True),
    _case("block_m1_n6144_k4096", 1, 6144, 4096, "fp8_block", production=True),
    _case("block_m512_n17408_k5120_silu", 512, 17408, 5120, "fp8_block", gated="silu", production=True),
    _case("block_m8_n5120_k2176", 8, 5120, 2176, "fp8_block", production=True),
    _case("int8_m1_n1280_k5120", 1, 1280, 5120, "int8", production=True),
    _case("int8_m512_n3072_k4096", 512, 3072, 4096, "int8", production=True),
]


def run(x, data, scale, zero, global_scale, perm, bias, codec, scale_codec, group_n, group_k, activation, out) -> None:
    _gemm.serve(OP, x, data, scale, zero, global_scale, perm, bias, codec, scale_codec, group_n, group_k, activation, out)


def gemm_w8a16(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T (+ bias) with an 8-bit weight; with an activation, act(gate) * up (formula: module docstring).

    Args:
        x: [M, K] float16 or bfloat16; rows may be strided. M may be 0.
        weight: a `PackedWeight` with codec "e4m3", "e5m2" or "int8", on x's device.
        bias: [N] float16, bfloat16 or float32.
        activation: None, "silu" or "gelu_tanh": the weight's rows are then [gate; up], N even.
        out: [M, N], or [M, N / 2] with an activation, of x's dtype, not x itself; allocated if None.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, stride or device; the text names it.
    """
    return _gemm.call(run, torch.ops.sm70_triton.gemm_w8a16, x, weight, bias, activation, out)


OP = op(
    "gemm_w8a16",
    geometry=W8Geometry,
    schema=_gemm.SCHEMA,
    outputs=("out",),
    call=gemm_w8a16,
    run=run,
    reference=_gemm.reference,
    cases=CASES,
    make_inputs=_gemm.make_inputs,
    tolerance=_gemm.tolerance,
    work=_gemm.work,
)
_gemm.implement(OP)
