"""SmolLM2 (Llama) over this package's public operations: paged KV cache, attention and quantised linear layers are ours.

Everything else is plain torch in float32, rounded to FP16 where a linear layer or an operation takes it. That is closer to exact
than rounding everywhere, and it has to be: in float64 the reference answers hang on as little as 0.003 of a logit, which is less
than one FP16 step of a logit.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

import sm70_triton

from .gguf_model import Checkpoint, Config, Progress
from .weights import Linear

PAGE = 16
#: name -> (dtype of the cache tensor, kv_dtype argument of the operations)
KV: dict[str, tuple[torch.dtype, str | None]] = {"fp16": (torch.float16, None), "e4m3": (torch.uint8, "e4m3")}


class PagedCache:
    """Keys and values of one sequence in pages of 16 tokens, in shuffled order so that the page table is really used."""

    def __init__(self, config: Config, kv: str, tokens: int, device: torch.device, seed: int = 0) -> None:
        dtype, self.kv_dtype = KV[kv]
        pages = -(-tokens // PAGE)
        shape = (config.layers, pages, PAGE, config.kv_heads, config.head_dim)
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.table = order.to(device=device, dtype=torch.int32)[None]
        self.capacity = pages * PAGE

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Slot of each position (int64), looked up on the device."""
        return self.table[0, positions // PAGE].long() * PAGE + positions % PAGE


@dataclass(frozen=True)
class Block:
    attn_norm: torch.Tensor
    qkv: Linear
    out: Linear
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (q, keys, values) of one layer -> [T, Hq, D]


class SmolLM:
    """The model, its linear layers in one of `weights.QUANTS`."""

    def __init__(self, checkpoint: Checkpoint, quant: str, device: torch.device, progress: Progress | None = None) -> None:
        self.config, self.device = checkpoint.config, device
        c, source = self.config, checkpoint.tensors
        self.embedding = source["token_embd.weight"].to(device)
        self.final_norm = source["output_norm.weight"].to(device)
        self.head = self.embedding.float()
        self.blocks: list[Block] = []
        for i in range(c.layers):

            def part(name: str, i: int = i) -> torch.Tensor:
                return source[f"blk.{i}.{name}.weight"].to(device)

            self.blocks.append(Block(
                attn_norm=part("attn_norm"), qkv=Linear([part("attn_q"), part("attn_k"), part("attn_v")], quant, device),
                out=Linear([part("attn_output")], quant, device), ffn_norm=part("ffn_norm"),
                gate_up=Linear([part("ffn_gate"), part("ffn_up")], quant, device), down=Linear([part("ffn_down")], quant, device),
            ))
            if progress:
                progress(f"weights to {quant}", i + 1, c.layers)
        inverse = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
        angles = torch.outer(torch.arange(c.context, dtype=torch.float32), inverse).repeat(1, 2)
        self.cos, self.sin = (angle.to(device)[:, None] for angle in (angles.cos(), angles.sin()))  # [context, 1, D]

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters as served; the tied embedding counts once, float32 working copies do not."""
        norms = [self.final_norm, *(n for b in self.blocks for n in (b.attn_norm, b.ffn_norm))]
        linears = [w for b in self.blocks for w in (b.qkv, b.out, b.gate_up, b.down)]
        return self.embedding.nbytes + sum(n.nbytes for n in norms) + sum(w.nbytes for w in linears)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.eps) * weight).half()

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, cache: PagedCache, attend: Attend) -> torch.Tensor:
        """Tokens [T] at their positions through all blocks; writes the cache; hidden states [T, hidden] before the head."""
        c, slots = self.config, cache.slots(positions)
        rows = (c.heads, c.kv_heads, c.kv_heads)
        cos, sin = self.cos[positions], self.sin[positions]
        x = self.embedding[ids].float()
        for i, block in enumerate(self.blocks):
            qkv = block.qkv(self._rms(x, block.attn_norm)).view(len(ids), -1, c.head_dim)
            q, k, v = qkv.split(rows, dim=1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            sm70_triton.kv_write(k, v, cache.keys[i], cache.values[i], slots, kv_dtype=cache.kv_dtype)
            x = x + block.out(attend(q, cache.keys[i], cache.values[i]).reshape(len(ids), -1))
            x = x + block.down(block.gate_up(self._rms(x, block.ffn_norm), activation="silu"))
        return self._rms(x, self.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [T, vocab] of hidden states [T, hidden]."""
        return torch.nn.functional.linear(hidden.float(), self.head)

    def prefill(self, ids: Sequence[int], cache: PagedCache) -> torch.Tensor:
        """Put a whole prompt into an empty cache; hidden states [T, hidden]."""
        n = len(ids)
        lengths = torch.tensor([n], dtype=torch.int32, device=self.device)
        bounds = torch.tensor([0, n], dtype=torch.int32, device=self.device)

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return sm70_triton.attn_prefill(q, keys, values, cache.table, lengths, bounds, max_seqlen_q=n, max_seqlen_k=n, kv_dtype=cache.kv_dtype)

        tokens = torch.tensor(ids, dtype=torch.int64, device=self.device)
        return self._run(tokens, torch.arange(n, device=self.device), cache, attend)

    def decode(self, token: torch.Tensor, position: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """One more token [1] at `position` [1] (int64 tensors, so that a CUDA graph can be replayed); the next token [1], greedy."""
        lengths = (position + 1).int()

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return sm70_triton.attn_decode(q, keys, values, cache.table, lengths, max_seqlen_k=cache.capacity, kv_dtype=cache.kv_dtype)

        return self.logits(self._run(token, position, cache, attend)).argmax(-1)

    def generate(self, ids: Sequence[int], cache: PagedCache, max_tokens: int) -> Iterator[int]:
        """Greedy continuation of a prompt, `max_tokens` at most; the last token is the end mark if the model set it."""
        token = self.logits(self.prefill(ids, cache)[-1:]).argmax(-1)
        step = None
        for made in range(1, max_tokens + 1):
            yield (value := int(token))
            if value == self.config.eos or made == max_tokens:
                return
            step = step or self._stepper(token, torch.tensor([len(ids)], device=self.device), cache)
            step()

    def _stepper(self, token: torch.Tensor, position: torch.Tensor, cache: PagedCache) -> Callable[[], None]:
        """A function that decodes one token and advances `token` and `position` in place; on a GPU the replay of a CUDA graph."""

        def step() -> None:
            token.copy_(self.decode(token, position, cache))
            position.add_(1)

        if self.device.type != "cuda":
            return step
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.decode(token, position, cache)  # compiles what is not compiled yet; writes the cache as the replay will again
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            step()
        return graph.replay


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves of a head paired (Hugging Face's order)."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).half()


def perplexity(model: SmolLM, ids: Sequence[int], kv: str = "fp16") -> float:
    """exp of the mean negative log likelihood (nats) of ids[1:], each given all before it, in one prefill."""
    hidden = model.prefill(ids, PagedCache(model.config, kv, len(ids), model.device))
    logits = model.logits(hidden[:-1])
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:], device=model.device)).exp())
