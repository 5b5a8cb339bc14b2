"""A model of another vocabulary as one of the target's, by its distribution over the words that
both have: the token-level intersection of Timor et al. 2025 (arXiv 2502.05202).

Words that the target lacks have no mass, and what is left is a distribution once it is
standardized, which happens behind this model, as with any other. So q is the distribution that
draft tokens are drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from foretoken.models.base import Blocks, Model, Sized
from foretoken.models.rows import staying
from foretoken.models.vocabularies.words import Dictionary

LONGEST = 32  # tokens of a word, which are read together


class Translation:
    """A text in a target's ids, as it grows and shrinks, in those of a draft: a function of the
    text alone, not of the steps in which it came.

    It is cut before words, where a token begins with a space, and told word by word: each one as
    the draft's own tokenizer would have it. So a new token changes the last word alone, and what
    the draft has read before it stays.
    """

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary
        self.ids: list[int] = []
        self._told: list[int] = list(dictionary.draft.head)  # of all words but the last
        self._cuts = [(0, len(self._told), False)]  # each word's place in both; text before it?

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            start, _, behind = self._cuts[-1]
            if len(self.ids) > start and self._apart(token, len(self.ids) - start):
                behind = behind or bool(self._last)
                self._told += self._word()
                self._cuts.append((len(self.ids), len(self._told), behind))
            self.ids.append(token)

    def cut(self, length: int) -> None:
        """Keep so many tokens."""
        while len(self._cuts) > 1 and self._cuts[-1][0] >= length:
            self._cuts.pop()
        del self.ids[length:], self._told[self._cuts[-1][1] :]

    @property
    def told(self) -> list[int]:
        """All of the text in the draft's ids: one at least."""
        return [*self._told, *self._word()] or [self.dictionary.draft.end or 0]

    def copy(self) -> Self:
        """The same text, to go on otherwise."""
        other = copy(self)
        other.ids, other._told, other._cuts = [*self.ids], [*self._told], [*self._cuts]
        return other

    @property
    def _open(self) -> list[int]:
        """The tokens of the last word."""
        return self.ids[self._cuts[-1][0] :]

    @property
    def _last(self) -> bytes:
        """The last word, without the space that the target's tokens may put before a text."""
        text = self.dictionary.target.text(self._open)
        return text if self._cuts[-1][2] else self.dictionary.target.plain(text)

    def _apart(self, token: int, length: int) -> bool:
        """Tell whether a token begins another word than the last one's, of `length` tokens."""
        spelled = self.dictionary.target.spelled
        word, before = spelled.get(token), spelled.get(self.ids[-1])
        if word is None or before is None or length >= LONGEST:  # a special token stands alone
            return True
        return word.startswith(b" ") and not before[-1:].isspace()

    def _word(self) -> Sequence[int]:
        """The last word in the draft's ids."""
        tokens, draft = self._open, self.dictionary.draft
        if len(tokens) == 1 and tokens[0] not in self.dictionary.target.spelled:
            special = self.dictionary.special.get(tokens[0])
            opening = (
                draft.head and self._told == draft.head and special in (*draft.head, draft.end)
            )
            return [] if special is None or opening else [special]
        text = self._last
        return draft.tokens(text if self._cuts[-1][2] else draft.first(text))


class Following:
    """The rows of a decoder-only `model`. Of a text that has outgrown its context it reads the
    end: so much that half of the context is free, whenever it is full."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._cached: list[list[int]] = []

    def start(self, texts: list[list[int]]) -> None:
        """Rows join, with these texts read."""
        ends = [self._end(text) for text in texts]
        self.model.start(ends)
        self._cached += ends

    def score(self, texts: list[list[int] | None], need: list[int]) -> Tensor:
        """Read each row's text, in one pass; None: as it is. Logits `[B, max(need), V]` as
        `Model.score`, behind the last need[b] tokens, of which the model must hold as many."""
        return self.model.score(self._unread(texts, need), need)

    def read(self, texts: list[list[int] | None]) -> None:
        """The same without logits."""
        if any(blocks := self._unread(texts, [0] * len(texts))):
            self.model.score(blocks, [0] * len(blocks))

    def _unread(self, texts: list[list[int] | None], need: list[int]) -> list[list[int]]:
        """Return the tokens to read of every row, the cache being cut back to the text it
        follows."""
        blocks: list[list[int]] = []
        lengths: list[int] = []
        for b, (text, needed) in enumerate(zip(texts, need, strict=True)):
            end = self._cached[b] if text is None else self._end(text)
            lengths.append(min(agreed(self._cached[b], end), len(end) - needed))
            blocks.append(end[lengths[b] :])
            self._cached[b] = end
        self.model.set_lengths(lengths)
        return blocks

    def permute(self, rows: list[int]) -> None:
        self._cached = [list(self._cached[row]) for row in rows]
        self.model.permute(rows)

    def leave(self, rows: list[int]) -> None:
        self._cached = [self._cached[b] for b in staying(len(self._cached), rows)]
        self.model.leave(rows)

    def _end(self, text: list[int]) -> list[int]:
        """Return as much of a text's end as the model can hold: a function of its length, so that
        it begins at the same place for long."""
        context = self.model.context
        if context is None or len(text) <= context:
            return list(text)
        half = max(1, context // 2)
        return text[-(-(len(text) - context) // half) * half :]


def agreed(one: list[int], other: list[int]) -> int:
    """Return how many of their first tokens are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class TranslatedModel:
    """`model`, which is decoder-only, in the ids of a target of `V` tokens. It holds texts of any
    length: of those that outgrow its context it reads the end."""

    takes_tensors = False
    encoder_decoder = False
    context: int | None = None
    source_context: int | None = None
    source_vocab_size: int | None = None
    singular = True  # without an identity its speed is not known from others'

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
    def identity(self) -> str | None:
        """A string that determines its speed, where the model has one."""
        identity = getattr(self._following.model, "identity", None)
        return f"{identity} in other words" if isinstance(identity, str) else None

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
        """Do as `Model.score`, with a forward for every position of a block that is needed, because
        a word may be other tokens once it goes on."""
        assert isinstance(blocks, list)  # as takes_tensors says
        if not any(need):
            self._following.read(self._extended(blocks))
            return torch.zeros(len(blocks), 0, self.vocab_size, device=self.device)
        first = [len(block) - max(0, n - 1) for block, n in zip(blocks, need, strict=True)]
        logits: list[Tensor] = []
        for i in range(max(need)):
            each = zip(blocks, first, strict=True)
            new = [x[:n] if i == 0 else x[n + i - 1 : n + i] for x, n in each]
            needed = [int(i < n) for n in need]
            own = self._following.score(self._extended(new), needed)[:, 0]
            ours = own.new_full((len(blocks), self.vocab_size), -torch.inf)
            ours[:, self._ours] = own[:, self._theirs]
            ours[[b for b, n in enumerate(needed) if not n]] = 0  # finite
            logits.append(ours)
        return torch.stack(logits, 1)

    def set_lengths(self, lengths: list[int]) -> None:
        for text, length in zip(self._texts, lengths, strict=True):
            text.cut(length)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        """Return the model's own memory, counted by itself: a token may be two of the draft's."""
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
        for text, block in zip(self._texts, blocks, strict=True):
            text.extend(block)
        pairs = zip(self._texts, blocks, strict=True)
        return [text.told if block else None for text, block in pairs]
