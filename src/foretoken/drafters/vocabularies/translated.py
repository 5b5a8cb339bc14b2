"""A model of another vocabulary as one of the target's: its law over the words that both have.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202): words that the target lacks have no
mass, and what is left is a law once it is standardized, which happens behind this model, as with
any other. So q is the law that guesses are drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.drafters.vocabularies.dictionary import Dictionary
from foretoken.drafters.vocabularies.following import Following
from foretoken.drafters.vocabularies.translation import Translation
from foretoken.models.base import Blocks, Model, Sized
from foretoken.models.rows import staying


class TranslatedModel:
    """`model`, which is decoder-only, in the ids of a target of `V` tokens. It holds texts of any
    length: of those that outgrow its context it reads the end."""

    takes_tensors = False
    encoder_decoder = False
    context: int | None = None
    source_context: int | None = None
    source_vocab_size: int | None = None
    singular = True  # its speed does not follow from its model alone

    def __init__(self, model: Model, dictionary: Dictionary, V: int) -> None:
        self.dictionary, self.vocab_size, self.holds = dictionary, V, (model,)
        self.device, self.runtime, self.computed = model.device, model.runtime, model.computed
        self._following = Following(model)
        self._texts: list[Translation] = []
        self._ours, self._theirs = (
            torch.tensor(ids, dtype=torch.long, device=model.device)
            for ids in (dictionary.ours, dictionary.theirs)
        )

    @property
    def padding(self) -> int:
        return self._following.model.padding

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        texts = [Translation(self.dictionary) for _ in prompts]
        for text, prompt in zip(texts, prompts, strict=True):
            text.extend(prompt)
        self._following.start([text.told if text.ids else [] for text in texts])
        self._texts += texts

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """As `Model.score`; a pass for every position of a block that is needed, because a word
        may be other tokens once it goes on."""
        assert isinstance(blocks, list)  # as takes_tensors says
        if not any(need):
            changed = self._extended(blocks)
            self._following.read(changed)
            return torch.zeros(len(blocks), 0, self.vocab_size, device=self.device)
        first = [len(block) - max(0, n - 1) for block, n in zip(blocks, need, strict=True)]
        logits: list[Tensor] = []
        for i in range(max(need)):
            new = [
                x[:n] if i == 0 else x[n + i - 1 : n + i]
                for x, n in zip(blocks, first, strict=True)
            ]
            wanted = [i < n for n in need]
            own = self._following.score(self._extended(new), wanted)
            logits.append(self._ours_of(own, wanted))
        return torch.stack(logits, 1)

    def covered(self, texts: list[list[int]]) -> list[float]:
        """Of the draft's mass behind each of the texts the share on words that both have. For a
        model without rows."""
        self.start([[] for _ in texts])
        told = self._extended(texts)
        own = self._following.score(told, [True] * len(texts)).float().softmax(-1)
        self.leave(list(range(len(texts))))
        return own[:, self._theirs].sum(-1).tolist()

    def set_lengths(self, lengths: list[int]) -> None:
        for text, length in zip(self._texts, lengths, strict=True):
            text.cut(length)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        """As the model's own, which is counted by itself: a token may be two of the draft's."""
        (model,) = self.holds
        return model.memory(lengths, sources) if isinstance(model, Sized) else 0

    def permute(self, rows: list[int]) -> None:
        self._texts = [self._texts[row].copy() for row in rows]
        self._following.permute(rows)

    def leave(self, rows: list[int]) -> None:
        self._texts = [self._texts[b] for b in staying(len(self._texts), rows)]
        self._following.leave(rows)

    def _extended(self, blocks: list[list[int]]) -> list[list[int] | None]:
        """The texts that go on, in the draft's ids."""
        told: list[list[int] | None] = []
        for text, block in zip(self._texts, blocks, strict=True):
            text.extend(block)
            told.append(text.told if block else None)
        return told

    def _ours_of(self, own: Tensor, wanted: list[bool]) -> Tensor:
        """The draft's logits at the target's ids, before anything is normalized."""
        logits = own.new_full((len(own), self.vocab_size), -torch.inf)
        logits[:, self._ours] = own[:, self._theirs]
        rest = [b for b, on in enumerate(wanted) if not on]
        logits[rest] = logits[rest].nan_to_num()  # what is not needed is finite
        return logits
