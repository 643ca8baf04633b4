"""Kernels that let stock PyTorch and vLLM run today's models on Volta (sm_70) GPUs.

Importing the package touches no GPU. The public functions are loaded on first use.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "attn_decode": "ops.attn_decode",
    "attn_decode_workspace": "ops.attn_decode",
    "attn_prefill": "ops.attn_prefill",
    "gemm_w4a16": "ops.gemm_w4a16",
    "gemm_w8a16": "ops.gemm_w8a16",
    "kv_write": "ops.kv_write",
    "override": "registry",
}
__all__ = ["__version__", "attn_decode", "attn_decode_workspace", "attn_prefill", "gemm_w4a16", "gemm_w8a16", "kv_write", "override"]

if TYPE_CHECKING:
    from .ops.attn_decode import attn_decode, attn_decode_workspace
    from .ops.attn_prefill import attn_prefill
    from .ops.gemm_w4a16 import gemm_w4a16
    from .ops.gemm_w8a16 import gemm_w8a16
    from .ops.kv_write import kv_write
    from .registry import override


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value
