"""A tiny model of a known distribution: no weights, no cache, float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.models.base import Blocks, Model

# text so far -> probability of each next token
Distribution = Callable[[tuple[int, ...]], Sequence[float]]


class TableModel(Model):
    """A Model over a function from the text so far to the distribution of the next token.

    `distribution(source + text)` where there is a source, so that it can stand for an
    encoder-decoder too.
    """

    runtime = "table"
    compute_dtype = "float64"

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        *,
        context: int | None = None,
        encoder_decoder: bool = False,
    ) -> None:
        self.distribution, self.vocab_size, self.context = distribution, vocab_size, context
        self.encoder_decoder = encoder_decoder
        self.source_vocab_size = vocab_size if encoder_decoder else None
        self._texts: list[list[int]] = []
        self._sources: list[list[int]] = []

    @classmethod
    def markov(cls, matrix: Sequence[Sequence[float]]) -> TableModel:
        """A first-order chain: row i of `matrix` is the distribution after token i."""
        return cls(lambda text: matrix[text[-1]], len(matrix))

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self._texts += [list(prompt) for prompt in prompts]
        self._sources += [list(s) for s in sources] if sources else [[] for _ in prompts]

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        logits = torch.zeros(len(blocks), max(need), self.vocab_size, dtype=torch.float64)
        for b, (block, n) in enumerate(zip(blocks, need, strict=True)):
            self._texts[b] += block
            text = (*self._sources[b], *self._texts[b])
            for i in range(n):
                logits[b, i] = self._logits(text[: len(text) - n + i + 1])
        return logits

    def _logits(self, text: tuple[int, ...]) -> Tensor:
        return torch.tensor(self.distribution(text), dtype=torch.float64).log()

    def set_lengths(self, lengths: list[int]) -> None:
        for text, length in zip(self._texts, lengths, strict=True):
            assert length <= len(text), "a length may not grow"
            del text[length:]

    def permute(self, rows: list[int]) -> None:
        self._texts = [list(self._texts[row]) for row in rows]
        self._sources = [self._sources[row] for row in rows]

    def leave(self, rows: list[int]) -> None:
        self.permute([b for b in range(len(self._texts)) if b not in rows])
