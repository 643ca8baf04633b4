"""What every op on a paged KV cache shares: cache dtypes, argument checks, quantisation in the reference, random caches."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

KV_DTYPES = ("fp16", "e4m3", "e5m2")
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def kv_dtype_of(cache: torch.Tensor, kv_dtype: str | None) -> str:
    """The cache's format. A uint8 cache does not say which FP8 it holds, so the caller must."""
    if cache.dtype == torch.uint8:
        if kv_dtype not in FLOAT8:
            raise ValueError(f"kv_dtype={kv_dtype!r}: a uint8 cache needs kv_dtype='e4m3' or 'e5m2'")
        return kv_dtype
    for name, dtype in (("fp16", torch.float16), *FLOAT8.items()):
        if cache.dtype == dtype:
            if kv_dtype not in (None, name):
                raise ValueError(f"kv_dtype={kv_dtype!r} contradicts the dtype of k_cache, {cache.dtype}")
            return name
    raise TypeError(f"k_cache.dtype={cache.dtype}; accepted: float16, float8_e4m3fn, float8_e5m2, or uint8 with kv_dtype")


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """An FP8 cache as bytes, so that Triton on sm_70 never sees a type it cannot cast."""
    return cache if cache.dtype in (torch.float16, torch.uint8) else cache.view(torch.uint8)


def require(condition: bool, message: str, kind: type[Exception] = ValueError) -> None:
    if not condition:
        raise kind(message)


def check_tensor(name: str, tensor: torch.Tensor, ndim: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a tensor is accepted")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}.dtype={tensor.dtype}; accepted: {', '.join(str(d).removeprefix('torch.') for d in dtypes)}")
    if tensor.ndim != ndim:
        raise ValueError(f"{name}.shape={tuple(tensor.shape)}: it must have {ndim} axes")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; every tensor must be on {device}")
    if ndim and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}.stride()={tensor.stride()}: the last axis must be contiguous")


def check_output(name: str, tensor: torch.Tensor) -> None:
    """Refuse an expanded tensor: programs would write the same element one over the other."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"{name}.shape={tuple(tensor.shape)} with stride {tensor.stride()}: a tensor that is written must not be expanded")


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_dtype: str | None, device: torch.device) -> str:
    """Check the two caches [pages, page_size, kv_heads, head_dim]; returns the format."""
    if not isinstance(k_cache, torch.Tensor):
        raise TypeError(f"k_cache is a {type(k_cache).__name__}; a tensor is accepted")
    name = kv_dtype_of(k_cache, kv_dtype)
    for label, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(label, cache, 4, (k_cache.dtype,), device)
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"v_cache.shape={tuple(v_cache.shape)} must equal k_cache.shape={tuple(k_cache.shape)}")
    if k_cache.shape[0] and k_cache.shape[1] < 1:
        raise ValueError(f"k_cache.shape={tuple(k_cache.shape)}: a page must hold at least one token")
    return name


def check_scale(name: str, scale: torch.Tensor | None, kv_heads: int, kv_dtype: str, device: torch.device) -> None:
    if scale is None:
        return
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is a {type(scale).__name__}; a float32 tensor or None is accepted")
    if kv_dtype == "fp16":
        raise ValueError(f"{name} was given with an FP16 cache, which has no scale; pass None")
    if scale.dtype != torch.float32 or scale.device != device or scale.numel() not in (1, kv_heads) or not scale.is_contiguous():
        raise ValueError(
            f"{name}: float32, contiguous, on {device}, with 1 or {kv_heads} elements is accepted; it is {scale.dtype}, "
            f"shape {tuple(scale.shape)}, on {scale.device}"
        )


def per_head(scale: torch.Tensor | None, kv_heads: int, like: torch.Tensor) -> torch.Tensor:
    """A scale as [kv_heads] float32."""
    if scale is None:
        return torch.ones(kv_heads, dtype=torch.float32, device=like.device)
    return scale.reshape(-1).expand(kv_heads)


def quantize(values: torch.Tensor, scale: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """[T, Hkv, D] float16 -> what the cache stores: float16 unchanged, or bytes of saturate(value / scale) in FP32."""
    if kv_dtype == "fp16":
        return values
    limit = LARGEST[kv_dtype]
    scaled = (values.float() / scale[:, None]).clamp(-limit, limit)
    return scaled.to(FLOAT8[kv_dtype]).view(torch.uint8).masked_fill(scaled.isnan(), 0x7F)  # torch may keep the sign of a NaN


def dequantize(cache: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """What a cache holds, as float64, before its scale."""
    return cache.double() if kv_dtype == "fp16" else as_bytes(cache).view(FLOAT8[kv_dtype]).double()


def random_normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, generator: torch.Generator) -> torch.Tensor:
    """N(0, 1), made on the CPU so that a seed means the same numbers everywhere; only a shape on `meta`."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)


def poison(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """NaN everywhere (the bytes of an integer tensor: 0x7f, which is NaN in both FP8 formats)."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    return torch.full(shape, 0x7F, dtype=dtype, device=device)


def like_a_kernel(launch: Callable[..., None]) -> Callable[..., None]:
    """For implementations in torch: nothing around a call changes what they compute. No gradients, no autocast to 16 bits."""

    @functools.wraps(launch)
    def plainly(plan: Any, geometry: Any, **tensors: Any) -> None:
        device = next(t.device for t in tensors.values() if isinstance(t, torch.Tensor))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            launch(plan, geometry, **tensors)

    return plainly
