"""`sm70-triton demo`: a real language model, SmolLM2-135M-Instruct, answering through this package's operations."""
from __future__ import annotations

import os
import resource
import time

import msgspec
import torch

from .. import registry
from .gguf_model import ModelError, Progress, find_model, read_gguf
from .model import KV, PagedCache, SmolLM
from .model import perplexity as perplexity_of
from .prose import TEXT
from .tokenizer import ChatTokenizer
from .weights import GEMM, QUANTS

__all__ = ["KV", "QUANTS", "DemoResult", "ModelError", "run_demo"]


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `run_demo` found.

    * `tokens`: generated ids; the last one is the model's end mark unless `max_tokens` cut it short. `text` leaves marks out.
    * `prefill_tok_s`: prompt tokens a second until the first token; `decode_tok_s`: tokens a second after the second one
      (on a GPU that one captures the CUDA graph), None if there are none.
    * `implementations`: {op: {implementation: distinct geometries}} that served this process.
    * `perplexity`: of the built-in text (`perplexity_tokens` long) with `quant` weights and `kv` cache; `perplexity_fp16` with FP16
      weights and cache; `ratio` = the first by the second; None if not asked for. `perplexities`: {quant: perplexity}, all if asked for.
    * `weights_bytes`: all parameters as served. `peak_memory_bytes`: of the GPU's allocator, or the process's resident set.
    """

    prompt: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    quant: str
    kv: str
    device: str
    model: str
    prefill_tok_s: float
    decode_tok_s: float | None
    implementations: dict[str, dict[str, int]]
    perplexity: float | None
    perplexity_fp16: float | None
    ratio: float | None
    perplexity_tokens: int
    perplexities: dict[str, float]
    weights_bytes: int
    peak_memory_bytes: int

    def summary(self) -> str:
        """What was measured, as a few lines of text."""
        speed = f"prefill {self.prefill_tok_s:.1f} tok/s" + ("" if self.decode_tok_s is None else f", decode {self.decode_tok_s:.1f} tok/s")
        lines = [
            f"{self.prompt_tokens} + {len(self.tokens)} tokens on {self.device}: {speed}",
            f"weights {self.quant} {self.weights_bytes / 1e6:.0f} MB, KV cache {self.kv}, peak memory {self.peak_memory_bytes / 1e6:.0f} MB",
            "served by " + ", ".join(f"{op}: {'+'.join(impls)}" for op, impls in self.implementations.items()),
        ]
        if self.perplexity_fp16 is not None:
            lines += [
                f"perplexity {name} {value:.2f} ({value / self.perplexity_fp16:.3f} x FP16) on {self.perplexity_tokens} tokens"
                for name, value in self.perplexities.items()
            ]
        return "\n".join(lines)


def run_demo(
    prompt: str = "What is the capital of France?",
    *,
    quant: str = "fp16",
    kv: str = "fp16",
    device: str | None = None,
    max_tokens: int = 64,
    model_path: str | os.PathLike[str] | None = None,
    perplexity: bool = True,
    all_quants: bool = False,
    progress: Progress | None = None,
) -> DemoResult:
    """Answer `prompt` greedily with SmolLM2-135M-Instruct and measure it.

    * `quant`: "fp16", "fp8", "nvfp4" or "awq", the format of the linear layers. `kv`: "fp16" or "e4m3", that of the cache.
    * `device`: "cuda[:n]" or "cpu"; None takes a GPU if there is one. `model_path`: see `gguf_model.find_model`.
    * `perplexity`: measure it for FP16 and `quant` (seconds on a CPU); `all_quants`: for every format.
    * `progress(stage, done, total)` is called as work advances.

    Raises ValueError for a bad argument and ModelError for a missing or damaged model file.
    """
    for name, value, accepted in (("quant", quant, QUANTS), ("kv", kv, tuple(KV))):
        if value not in accepted:
            raise ValueError(f"{name}={value!r} is not known; accepted: {', '.join(accepted)}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if not prompt.strip():
        raise ValueError("prompt is empty; say something to the model")
    place = _device(device)
    path = find_model(model_path, progress=progress)
    checkpoint = read_gguf(path, progress=progress)
    tokenizer = ChatTokenizer(checkpoint)
    ids = tokenizer.chat(prompt)
    if len(ids) + max_tokens > checkpoint.config.context:
        raise ValueError(f"prompt has {len(ids)} tokens and max_tokens={max_tokens}; together the model takes {checkpoint.config.context}")

    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    text_ids = tokenizer.encode(TEXT)
    wanted = () if not perplexity else QUANTS if all_quants else (quant,)
    others = [name for name in QUANTS if name != quant and (name in wanted or (perplexity and name == "fp16"))]
    found: dict[str, float] = {}
    baseline = None
    model: SmolLM | None = None
    with torch.inference_mode():
        for name in [*others, quant]:  # the one that answers is made last
            model = None  # frees the last one before the next is made
            model = SmolLM(checkpoint, name, place, progress)
            if perplexity and progress:
                progress(f"perplexity {name}", 0, 1)
            if perplexity and name == "fp16":
                baseline = perplexity_of(model, text_ids, "fp16")
            if name in wanted:
                found[name] = baseline if baseline and (name, kv) == ("fp16", "fp16") else perplexity_of(model, text_ids, kv)
            if perplexity and progress:
                progress(f"perplexity {name}", 1, 1)
        assert model is not None
        if place.type == "cuda":  # kernels of the decode step are compiled before the clock starts
            list(model.generate(ids, PagedCache(model.config, kv, len(ids) + max_tokens, place), 2))
        cache = PagedCache(model.config, kv, len(ids) + max_tokens, place)
        tokens: list[int] = []
        times = [time.perf_counter()]
        for token in model.generate(ids, cache, max_tokens):
            tokens.append(token)
            times.append(time.perf_counter())
            if progress:
                progress("generate", len(tokens), max_tokens)
    served = registry.served()
    used = {"kv_write", "attn_prefill", "attn_decode", GEMM.get(quant)}
    return DemoResult(
        prompt=prompt, text=tokenizer.decode(tokens), tokens=tokens, prompt_tokens=len(ids), quant=quant, kv=kv, device=_describe(place),
        model=str(path), prefill_tok_s=len(ids) / (times[1] - times[0]),
        decode_tok_s=(len(tokens) - 2) / (times[-1] - times[2]) if len(tokens) > 2 else None,
        implementations={op: impls for op, impls in sorted(served.items()) if op in used},
        perplexity=found.get(quant), perplexity_fp16=baseline, ratio=found[quant] / baseline if baseline else None,
        perplexity_tokens=len(text_ids), perplexities={name: found[name] for name in QUANTS if name in found}, weights_bytes=model.weights_bytes,
        peak_memory_bytes=torch.cuda.max_memory_allocated(place) if place.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not known; accepted: cpu, cuda, cuda:0, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r} is not there: torch sees {torch.cuda.device_count()} GPUs; use cpu or see sm70-triton doctor")
    return device


def _describe(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"
