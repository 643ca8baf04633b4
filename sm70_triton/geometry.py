"""From a Hugging Face config.json and a tensor-parallel size to what one rank calls: (op, geometry keys) per layer.

This is the only place that knows how a model is split. Everything after it sees local sizes.
"""
from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("sm70_triton")

#: Tokens per call that a server commonly meets: decode batches, then prefill chunks.
TOKENS = (1, 2, 4, 8, 16, 32, 512, 2048, 8192)
KV_LENGTHS = (4096, 32768, 131072, 262144)


class LayerCall(msgspec.Struct, frozen=True, kw_only=True):
    """One op that a layer calls, with the geometry keys of `sm70-triton explain`."""

    layer: str
    op: str
    keys: dict[str, Any]


def load_config(path: str | Path) -> dict[str, Any]:
    """Read config.json from a model folder or from the file itself; the text model's part of a multimodal config."""
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "config.json"
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValueError(f"model {str(path)!r}: {file} does not exist; give a folder with a config.json, or the file") from None
    except OSError as error:
        raise ValueError(f"model {str(path)!r}: {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model {str(path)!r}: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model {str(path)!r}: {file} holds a {type(config).__name__}, an object is expected")
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**{k: v for k, v in config.items() if k == "quantization_config"}, **text}
    return config


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name}={value!r}; a positive integer is expected")
    return value


def _split(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"tp={ranks} does not divide {name}={size}")
    return size // ranks


def _is_object(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config{where}={value!r}; an object is expected")
    return value


def _group_size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value > 0):
        raise ValueError(f"quantization_config: group_size={value!r}; a positive integer, or -1 for whole rows, is expected")
    return value


def weight_format(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"op", "format", "group"} of the checkpoint's linear layers; None for an unquantised one."""
    quant = config.get("quantization_config")
    if not quant:
        return None
    _is_object("", quant)
    method = str(quant.get("quant_method", "")).lower()
    if method in ("awq", "gptq"):
        bits = quant.get("bits", quant.get("w_bit"))
        if bits != 4:
            raise ValueError(f"quantization_config.bits={bits!r} with {method}; 4 is served")
        return {"op": "gemm_w4a16", "format": method, "group": _group_size(quant.get("group_size", quant.get("q_group_size", 128)))}
    if method == "fp8":
        return {"op": "gemm_w8a16", "format": "fp8_block" if quant.get("weight_block_size") else "fp8_tensor"}
    if method == "mxfp4":
        return {"op": "gemm_w4a16", "format": "mxfp4"}
    if method in ("modelopt", "modelopt_fp4"):
        inner = _is_object(".quantization", quant.get("quantization", {}))
        algorithm = str(quant.get("quant_algo", inner.get("quant_algo", ""))).upper()
        if algorithm == "NVFP4":
            return {"op": "gemm_w4a16", "format": "nvfp4"}
        if algorithm == "FP8":
            return {"op": "gemm_w8a16", "format": "fp8_tensor"}
        raise ValueError(f"quantization_config.quant_algo={algorithm!r} of modelopt; NVFP4 and FP8 are served")
    if method == "compressed-tensors":
        for name, group in _is_object(".config_groups", quant.get("config_groups", {})).items():
            weights = _is_object(f".config_groups.{name}.weights", _is_object(f".config_groups.{name}", group).get("weights") or {})
            bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
            if (bits, kind) == (4, "float"):
                return {"op": "gemm_w4a16", "format": "nvfp4"}
            if (bits, kind) == (4, "int"):
                return {"op": "gemm_w4a16", "format": "int4", **({"group": _group_size(size)} if size else {})}
            if (bits, kind) == (8, "float"):
                strategy = weights.get("strategy")
                if strategy not in ("block", "channel", "tensor"):
                    raise ValueError(f"quantization_config strategy={strategy!r} with 8-bit floats; block, channel and tensor are served")
                return {"op": "gemm_w8a16", "format": f"fp8_{strategy}"}
            if (bits, kind) == (8, "int"):
                return {"op": "gemm_w8a16", "format": "int8"}
        raise ValueError("quantization_config.config_groups of compressed-tensors: no 4- or 8-bit weight group found")
    raise ValueError(
        f"quantization_config.quant_method={method!r} is not served; accepted: awq, gptq, fp8, mxfp4, modelopt, compressed-tensors"
    )


def layer_calls(
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    kv_dtype: str = "fp16",
    page_size: int = 16,
    tokens: Sequence[int] = TOKENS,
    kv_lengths: Sequence[int] = KV_LENGTHS,
) -> list[LayerCall]:
    """Every distinct op call of one rank of a dense decoder, over the given token counts and KV lengths.

    Heads are divided by `tp`; KV heads fewer than ranks are replicated, one per rank, as vLLM does.
    Raises ValueError for sizes that do not divide and for fields that are missing.
    """
    if tp < 1:
        raise ValueError(f"tp={tp}; a positive integer is expected")
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    head_dim = _positive(config, "head_dim", hidden // heads)
    intermediate = _positive(config, "intermediate_size")
    limit = _positive(config, "max_position_embeddings", max(kv_lengths))
    local_q = _split("num_attention_heads", heads, tp)
    local_kv = _split("num_key_value_heads", kv_heads, tp) if kv_heads >= tp else 1
    local_inter = _split("intermediate_size", intermediate, tp)
    window = _positive(config, "sliding_window") if config.get("sliding_window") and config.get("use_sliding_window", True) else None

    attention = {
        "q_heads": local_q, "kv_heads": local_kv, "head_dim": head_dim, "kv_dtype": kv_dtype, "page_size": page_size,
        "window": window or 0, "softcap": bool(config.get("attn_logit_softcapping")),
    }  # fmt: skip
    lengths = [n for n in kv_lengths if n <= limit] or [limit]
    calls = []
    for count in tokens:
        calls.append(LayerCall(layer="attention", op="kv_write", keys={**attention, "batch": count, "q_len": 1}))
        for length in lengths:
            if count <= 32:
                calls.append(LayerCall(layer="attention", op="attn_decode", keys={**attention, "batch": count, "kv_len": length}))
            elif count <= length:
                keys = {**attention, "batch": 1, "q_len": count, "kv_len": length}
                calls.append(LayerCall(layer="attention", op="attn_prefill", keys=keys))
    quantised = weight_format(config)
    if quantised is not None:
        act = "bf16" if "bfloat16" in str(config.get("dtype", config.get("torch_dtype", ""))) else "fp16"
        activation = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
        gate = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}.get(activation)
        shapes = {
            "qkv_proj": ((local_q + 2 * local_kv) * head_dim, hidden, None),
            "o_proj": (hidden, local_q * head_dim, None),
        }
        experts = next((name for name in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(name)), None)
        if experts is None:
            shapes |= {"gate_up_proj": (2 * local_inter, hidden, gate), "down_proj": (hidden, local_inter, None)}
        else:
            log.warning("config.json: %s=%s: a mixture of experts is not served yet, its expert layers are left out", experts, config[experts])
        base = {k: v for k, v in quantised.items() if k != "op"}
        for layer, (n, k, gated) in shapes.items():
            for count in tokens:
                keys = {**base, "M": count, "N": n, "K": k, "act_dtype": act, **({"gated": gated} if gated else {})}
                calls.append(LayerCall(layer=layer, op=quantised["op"], keys=keys))
    return calls
