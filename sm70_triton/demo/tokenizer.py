"""SmolLM2's tokenizer and chat layout, rebuilt from the token list and merges inside the GGUF."""
from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .gguf_model import Checkpoint, ModelError

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatTokenizer:
    """Byte-level BPE with each digit on its own (GGUF's pre-tokenizer "smollm").

    Control tokens are placed by id and never recognised in text, so a prompt that spells `<|im_end|>` stays a prompt.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.vocab = {token: i for i, token in enumerate(checkpoint.tokens)}
        self.control = frozenset(checkpoint.control)
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in checkpoint.merges)]
        self._bpe = Tokenizer(models.BPE(vocab=self.vocab, merges=merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        self._bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        try:
            self._start, self._end = self.vocab["<|im_start|>"], self.vocab["<|im_end|>"]
        except KeyError as missing:
            raise ModelError(f"the GGUF's vocabulary has no {missing}; the demo runs SmolLM2 instruct models") from None

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        return self._bpe.encode(text).ids

    def chat(self, prompt: str) -> list[int]:
        """Ids of SmolLM2's chat template: its default system message, one user message, and the header of the answer."""
        ids: list[int] = []
        for role, content in (("system", SYSTEM), ("user", prompt)):
            ids += [self._start, *self.encode(f"{role}\n{content}"), self._end, *self.encode("\n")]
        return [*ids, self._start, *self.encode("assistant\n")]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out. Bytes that end in the middle of a character show as U+FFFD."""
        return self._bpe.decode([i for i in ids if i not in self.control], skip_special_tokens=False)
