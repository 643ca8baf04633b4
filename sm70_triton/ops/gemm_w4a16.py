"""Activations in 16 bits times weights in 4: NVFP4, MXFP4, AWQ, GPTQ (with and without act-order), compressed-tensors INT4.

    out[m, n] = act(sum_k x[m, perm[k]] * w[n, k] + bias[n])       w[n, k] = (decode(data[n, k]) - zero[n, g]) * scale[n, g] * global[n]

g = k // group_k. Codes are E2M1 or 4-bit integers, two in a byte, the even column in the low nibble; scales are E4M3, E8M0, FP16 or
FP32. `global` is a multiplier of each row, so the parts of a fused projection keep their own. With an activation the rows of `w` are
[gate; up] and out = act(gate) * up. float32 throughout, one rounding to x.dtype at the end. Format equations: formats/.
"""
from __future__ import annotations

import torch

from ..formats import PackedWeight
from ..registry import op
from . import _gemm


class W4Geometry(_gemm.GemmGeometry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    FORMATS = {
        "nvfp4": {"codec": "e2m1", "scale_codec": "e4m3", "group_n": 1, "group_k": 16, "global_scale": True, "fixed_group": True},
        "mxfp4": {"codec": "e2m1", "scale_codec": "e8m0", "group_n": 1, "group_k": 32, "fixed_group": True},
        "awq": {"codec": "u4", "scale_codec": "f16", "group_n": 1, "group_k": 128, "zero": True},
        "gptq": {"codec": "u4", "scale_codec": "f16", "group_n": 1, "group_k": 128, "zero": True},
        "int4": {"codec": "u4b8", "scale_codec": "f16", "group_n": 1, "group_k": 128},
    }


def _case(name, *args, **kwargs):
    return _gemm.case(W4Geometry, name, *args, **kwargs)


CASES = [
    _case("empty", 0, 40, 64, "nvfp4"),
    _case("nvfp4_m1_k16", 1, 40, 16, "nvfp4"),
    _case("nvfp4_m1_k576", 1, 136, 576, "nvfp4"),
    _case("nvfp4_m7_fused_globals", 7, 96, 144, "nvfp4", globals_=(-10, -16, -20)),
    _case("nvfp4_m33_fused_globals_strided", 33, 200, 176, "nvfp4", globals_=(-10, -16, -12), strided=True, bias="fp16"),
    _case("nvfp4_m3_globals_2^-20_to_2^8_bf16", 3, 58, 256, "nvfp4", act_dtype="bf16", globals_=tuple(range(-20, 9))),
    _case("nvfp4_m16_globals_2^-20_to_2^8_fp16", 16, 58, 256, "nvfp4", amplitude=2.0**-12, globals_=tuple(range(-20, 9))),
    _case("nvfp4_m2_activations_1e5", 2, 40, 192, "nvfp4", act_dtype="bf16", amplitude=1e5, bias="bf16"),
    _case("nvfp4_m64_silu", 64, 160, 96, "nvfp4", gated="silu", globals_=(-10, -12)),
    _case("nvfp4_m1_silu_k576", 1, 144, 576, "nvfp4", gated="silu", globals_=(-10, -12)),
    _case("nvfp4_m8_gelu_bf16", 8, 40, 160, "nvfp4", gated="gelu_tanh", act_dtype="bf16", bias="fp32"),
    _case("nvfp4_m2_nan_scale", 2, 40, 64, "nvfp4", nan=True),
    _case("mxfp4_m3", 3, 40, 160, "mxfp4", bias="bf16"),
    _case("mxfp4_m31_tiny_scales", 31, 72, 96, "mxfp4", exponents=(-30, -14)),
    _case("mxfp4_m1_subnormal_scales_bf16", 1, 40, 96, "mxfp4", act_dtype="bf16", amplitude=1e5, exponents=(-127, -120)),
    _case("mxfp4_m2_nan_scale", 2, 40, 64, "mxfp4", nan=True),
    _case("mxfp4_m16_gelu", 16, 72, 64, "mxfp4", gated="gelu_tanh"),
    _case("awq_m1_g64_k576", 1, 96, 576, "awq", group=64),
    _case("awq_m8_g32_bias", 8, 40, 96, "awq", group=32, bias="fp16"),
    _case("awq_m16_g128", 16, 72, 384, "awq"),
    _case("awq_m33_g64_silu_bf16", 33, 80, 192, "awq", group=64, gated="silu", act_dtype="bf16", bias="bf16"),
    _case("gptq_m2_g32_act_order", 2, 40, 160, "gptq", group=32, perm=True),
    _case("gptq_m33_g128_act_order_strided", 33, 104, 256, "gptq", perm=True, strided=True),
    _case("gptq_m3_channel_k104", 3, 40, 104, "gptq", group=-1),
    _case("int4_m1_g128", 1, 200, 256, "int4"),
    _case("int4_m7_g32_act_order", 7, 40, 96, "int4", group=32, perm=True),
    _case("int4_m31_channel_k90_bf16", 31, 72, 90, "int4", group=-1, act_dtype="bf16"),
    _case("int4_m3_g48", 3, 40, 144, "int4", group=48),
    # Weights that went through a checkpoint's layout; fused parts differ in size by 8, so in their global scales.
    _case("ct_nvfp4_m3_fused", 3, 96, 192, "nvfp4", layout="nvfp4_compressed_tensors", parts=3),
    _case("modelopt_nvfp4_m8_fused_silu", 8, 80, 96, "nvfp4", gated="silu", layout="nvfp4_modelopt", parts=2),
    _case("mx_m2", 2, 40, 96, "mxfp4", layout="mxfp4"),
    _case("awq_m7_g64_fused", 7, 48, 192, "awq", group=64, layout="awq", parts=3),
    _case("gptq_m1_g32", 1, 40, 96, "gptq", group=32, layout="gptq"),
    _case("gptq_m16_g64_act_order", 16, 40, 192, "gptq", group=64, perm=True, layout="gptq"),
    _case("ct_int4_m2_g32_bf16", 2, 40, 96, "int4", group=32, act_dtype="bf16", layout="ct_int4", parts=2),
    _case("ct_int4_m3_channel", 3, 40, 104, "int4", group=-1, layout="ct_int4"),
    # Local projections of 8B and 27B dense models over several splits.
    _case("nvfp4_m1_n28672_k4096_silu", 1, 28672, 4096, "nvfp4", gated="silu", production=True),
    _case("nvfp4_m512_n28672_k4096_silu", 512, 28672, 4096, "nvfp4", gated="silu", production=True),
    _case("nvfp4_m1_n4096_k14336", 1, 4096, 14336, "nvfp4", production=True),
    _case("nvfp4_m16_n1280_k5120_bf16", 16, 1280, 5120, "nvfp4", act_dtype="bf16", production=True),
    _case("nvfp4_m8192_n5120_k4352", 8192, 5120, 4352, "nvfp4", production=True),
    _case("mxfp4_m8_n6144_k4096", 8, 6144, 4096, "mxfp4", production=True),
    _case("awq_m1_n6144_k4096", 1, 6144, 4096, "awq", production=True),
    _case("awq_m16_n8704_k5120_silu", 16, 8704, 5120, "awq", gated="silu", production=True),
    _case("awq_m512_n5120_k8704", 512, 5120, 8704, "awq", production=True),
    _case("awq_m8192_n6144_k4096", 8192, 6144, 4096, "awq", production=True),
    _case("gptq_m512_n4096_k14336_act_order", 512, 4096, 14336, "gptq", perm=True, production=True),
    _case("gptq_m1_n4096_k3584_act_order", 1, 4096, 3584, "gptq", perm=True, production=True),
    _case("int4_m4_n3072_k4096_g32_bf16", 4, 3072, 4096, "int4", group=32, act_dtype="bf16", production=True),
    _case("int4_m127_n17408_k5120_silu", 127, 17408, 5120, "int4", gated="silu", production=True),
]


def run(x, data, scale, zero, global_scale, perm, bias, codec, scale_codec, group_n, group_k, activation, out) -> None:
    _gemm.serve(OP, x, data, scale, zero, global_scale, perm, bias, codec, scale_codec, group_n, group_k, activation, out)


def gemm_w4a16(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T (+ bias) with a 4-bit weight; with an activation, act(gate) * up (formula: module docstring).

    Args:
        x: [M, K] float16 or bfloat16; rows may be strided. M may be 0.
        weight: a `PackedWeight` with codec "e2m1", "u4" or "u4b8", on x's device.
        bias: [N] float16, bfloat16 or float32.
        activation: None, "silu" or "gelu_tanh": the weight's rows are then [gate; up], N even.
        out: [M, N], or [M, N / 2] with an activation, of x's dtype, not x itself; allocated if None.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, stride or device; the text names it.
    """
    return _gemm.call(run, torch.ops.sm70_triton.gemm_w4a16, x, weight, bias, activation, out)


OP = op(
    "gemm_w4a16",
    geometry=W4Geometry,
    schema=_gemm.SCHEMA,
    outputs=("out",),
    call=gemm_w4a16,
    run=run,
    reference=_gemm.reference,
    cases=CASES,
    make_inputs=_gemm.make_inputs,
    tolerance=_gemm.tolerance,
    work=_gemm.work,
)
_gemm.implement(OP)
