"""config.json -> local geometries: what one rank of a split model calls."""
import json

import pytest

from sm70_triton import geometry, registry

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072}
WIDE = {"hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408, "max_position_embeddings": 262144,
        "dtype": "bfloat16", "hidden_act": "silu", "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}  # fmt: skip


def _first(calls, **match):
    return next(c for c in calls if all(getattr(c, k) == v for k, v in match.items()))


@pytest.mark.parametrize("tp, q_heads, kv_heads", [(1, 32, 8), (2, 16, 4), (8, 4, 1), (16, 2, 1)])
def test_heads_are_divided_and_kv_heads_replicated(tp, q_heads, kv_heads):
    keys = _first(geometry.layer_calls(LLAMA, tp=tp), op="attn_decode").keys
    assert (keys["q_heads"], keys["kv_heads"], keys["head_dim"]) == (q_heads, kv_heads, 128)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_projections_of_a_quantised_model(tp):
    calls = geometry.layer_calls(WIDE, tp=tp)
    shapes = {c.layer: (c.keys["N"], c.keys["K"]) for c in calls if c.op == "gemm_w4a16"}
    assert shapes == {
        "qkv_proj": ((24 + 2 * 4) * 256 // tp, 5120), "o_proj": (5120, 24 * 256 // tp),
        "gate_up_proj": (2 * 17408 // tp, 5120), "down_proj": (5120, 17408 // tp),
    }  # fmt: skip
    assert _first(calls, layer="gate_up_proj").keys["gated"] == "silu"
    assert _first(calls, layer="down_proj").keys["act_dtype"] == "bf16"


def test_every_call_is_a_geometry_that_a_v100_serves():
    for config in (LLAMA, WIDE):
        for call in geometry.layer_calls(config, tp=2):
            op = registry.get(call.op)
            assert registry.resolve(op, op.geometry.from_keys(call.keys), 70).impl.name == "simt"


@pytest.mark.parametrize(
    "quant, expected",
    [
        (None, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, {"op": "gemm_w4a16", "format": "awq", "group": 128}),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, {"op": "gemm_w4a16", "format": "gptq", "group": 32}),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, {"op": "gemm_w8a16", "format": "fp8_block"}),
        ({"quant_method": "fp8"}, {"op": "gemm_w8a16", "format": "fp8_tensor"}),
        ({"quant_method": "mxfp4"}, {"op": "gemm_w4a16", "format": "mxfp4"}),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
            {"op": "gemm_w4a16", "format": "nvfp4"},
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}},
            {"op": "gemm_w4a16", "format": "int4", "group": 32},
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
            {"op": "gemm_w8a16", "format": "fp8_channel"},
        ),
    ],
)
def test_weight_formats(quant, expected):
    assert geometry.weight_format({"quantization_config": quant}) == expected


@pytest.mark.parametrize(
    "change, options, message",
    [
        ({"hidden_size": None}, {}, "hidden_size=None"),
        ({"num_attention_heads": 0}, {}, "num_attention_heads=0"),
        ({}, {"tp": 3}, "tp=3 does not divide num_attention_heads=32"),
        ({}, {"tp": 0}, "tp=0"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}},
            {},
            "strategy=None with 8-bit floats; block, channel and tensor are served",
        ),
        ({"quantization_config": {"quant_method": "aqlm"}}, {}, "quant_method='aqlm' is not served; accepted: awq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, {}, "bits=3"),
        ({"quantization_config": "awq"}, {}, "quantization_config='awq'; an object is expected"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": None}}, {}, "group_size=None"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}}, {}, "group_size=0"),
        ({"quantization_config": {"quant_method": "modelopt", "quantization": None}}, {}, "quantization_config.quantization=None"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}}, {}, r"config_groups=\[1\]"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": 1}}}, {}, "config_groups.a=1"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": [1]}}}}, {}, "config_groups.a.weights"),
        ({"sliding_window": "wide"}, {}, "sliding_window='wide'"),
    ],
)
def test_bad_configs(change, options, message):
    with pytest.raises(ValueError, match=message):
        geometry.layer_calls({**LLAMA, **change}, **options)


def test_expert_layers_are_left_out_and_named(caplog):
    calls = geometry.layer_calls({**WIDE, "num_experts": 128})
    assert {c.layer for c in calls} == {"attention", "qkv_proj", "o_proj"}
    assert "num_experts=128" in caplog.text


def test_loading(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        geometry.load_config(tmp_path)
    file = tmp_path / "config.json"
    for text in ("{", "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"):
        file.write_text(text)
        with pytest.raises(ValueError, match="is not JSON"):
            geometry.load_config(tmp_path)
    with pytest.raises(ValueError, match="cannot be read: File name too long"):
        geometry.load_config("x" * 1000)
    file.write_text(json.dumps({"text_config": LLAMA, "quantization_config": {"quant_method": "fp8"}}))
    loaded = geometry.load_config(file)
    assert loaded["hidden_size"] == 4096 and loaded["quantization_config"]["quant_method"] == "fp8"
