"""A model of another vocabulary as one of the target's, in both ways of Timor et al. 2025
(arXiv 2502.05202).

By its distribution over the words that both have (token-level intersection): words that the target
lacks have no mass, and what is left is a distribution once it is standardized, which happens behind
this model, as with any other. So q is the distribution that draft tokens are drawn from.

By its text (string-level exact match): it writes on in its own tokens, always the likeliest, and
what it has written is read in the target's. Draft tokens follow from the text alone, so any way to
cut it into tokens is exact.

In both, longer tokens than the last one of the text are ways on (`find_continuations`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.models.base import Blocks, Capabilities, Model, TextDraft
from foretoken.models.prefix_cache import count_shared_tokens
from foretoken.models.row_slots import list_remaining_rows
from foretoken.models.vocabularies.translation import Continuation, Translation, find_continuations
from foretoken.models.vocabularies.vocabulary import VocabularyMap


class SlidingContext:
    """The rows of a decoder-only `model`. It reads the end of a text that has outgrown
    its context: so much that half of the context is free, whenever it is full."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._cached: list[list[int]] = []
        self._rewind = math.inf if model.max_rewind is None else model.max_rewind  # tokens

    def start(self, texts: list[list[int]]) -> None:
        """Rows join, with these texts read."""
        ends = [self._get_tail(text) for text in texts]
        self.model.start(ends)
        self._cached += ends

    def score(self, texts: list[list[int] | None], need: list[int]) -> Tensor:
        """Read each row's text, in one pass; None: as it is. Logits `[B, max(need), V]` as
        `Model.score`, behind the last need[b] tokens, of which the model must hold as many."""
        return self.model.score(self._take_missing(texts, need), need)

    def read(self, texts: list[list[int] | None]) -> None:
        """The same without logits."""
        if any(blocks := self._take_missing(texts, [0] * len(texts))):
            self.model.score(blocks, [0] * len(blocks))

    def _take_missing(self, texts: list[list[int] | None], need: list[int]) -> list[list[int]]:
        """Return the tokens to read of every row, the cache being cut back to the text it
        follows."""
        blocks: list[list[int]] = []
        lengths: list[int] = []
        for b, (text, needed) in enumerate(zip(texts, need, strict=True)):
            end = self._cached[b] if text is None else self._get_tail(text)
            length = min(count_shared_tokens(self._cached[b], end), len(end) - needed)
            # cut into other tokens, a text may part from what was read before states reach
            lengths.append(length if len(self._cached[b]) - length <= self._rewind else 0)
            blocks.append(end[lengths[b] :])
            self._cached[b] = end
        self.model.set_lengths(lengths)
        return blocks

    def permute(self, rows: list[int]) -> None:
        self._cached = [list(self._cached[row]) for row in rows]
        self.model.permute(rows)

    def leave(self, rows: list[int]) -> None:
        self._cached = [self._cached[b] for b in list_remaining_rows(len(self._cached), rows)]
        self.model.leave(rows)

    def holds(self, text: list[int]) -> int:
        """Return how much of a text the model reads."""
        return len(self._get_tail(text))

    def _get_tail(self, text: list[int]) -> list[int]:
        """Return as much of a text's end as the model can hold: a function of its length, so that
        it begins at the same place for long."""
        context = self.model.context
        if context is None or len(text) <= context:
            return list(text)
        half = max(1, context // 2)
        return text[-(-(len(text) - context) // half) * half :]


MIN_SHARE = 1e-30  # a share that rounding has made 0 or less


class TextDrafting(NamedTuple):
    """Where to guess by a draft's text."""

    greedy: bool = True  # rows that take the target's likeliest token
    sampled: bool = False


class TranslatedModel(Model):
    """`model`, which is decoder-only, in the ids of a target of `V` tokens. It holds texts of any
    length: of those that outgrow its context it reads the end."""

    capabilities = Capabilities(text=True, memory=True)
    has_own_speed = True  # without an identity its speed is not known from others'

    def __init__(
        self, model: Model, dictionary: VocabularyMap, V: int, by_text: TextDrafting | None = None
    ) -> None:
        self.dictionary, self.vocab_size, self.holds = dictionary, V, (model,)
        self.by_text = TextDrafting() if by_text is None else by_text
        self.device, self.runtime, self.compute_dtype = (
            model.device,
            model.runtime,
            model.compute_dtype,
        )
        if model.identity is not None:
            self.identity = f"{model.identity} in other words, {self.by_text}"
        self._context = SlidingContext(model)
        self._translations: list[Translation] = []
        self._shared_target_ids, self._shared_draft_ids = (
            torch.tensor(ids, dtype=torch.long, device=model.device)
            for ids in (dictionary.target_ids, dictionary.draft_ids)
        )
        spellings, end = dictionary.draft.spellings, dictionary.draft.eos_id
        sayable = sorted({*spellings, *([] if end is None else [end])})
        self._text_ids = torch.tensor(sayable, dtype=torch.long, device=model.device)

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        texts = [Translation(self.dictionary) for _ in prompts]
        for text, prompt in zip(texts, prompts, strict=True):
            text.extend(prompt)
        self._context.start([text.draft_ids if text.ids else [] for text in texts])
        self._translations += texts

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """Do as `Model.score`, with a forward for every position of a block that is needed, because
        a word may be other tokens once it goes on."""
        assert isinstance(blocks, list)
        if not any(need):
            changed = self._extend(blocks)
            self._context.read(changed)
            return torch.zeros(len(blocks), 0, self.vocab_size, device=self.device)
        first = [len(block) - max(0, n - 1) for block, n in zip(blocks, need, strict=True)]
        logits: list[Tensor] = []
        for i in range(max(need)):
            each = zip(blocks, first, strict=True)
            new = [x[:n] if i == 0 else x[n + i - 1 : n + i] for x, n in each]
            extended = self._extend(new)
            counts = self._count_needed(extended, [i < n for n in need])
            own = self._context.score(extended, counts)
            logits.append(
                torch.stack([self._to_target_logits(b, n, own[b]) for b, n in enumerate(counts)])
            )
        self.padding = self._context.model.padding
        return torch.stack(logits, 1)

    def drafts_from_text(self, *, greedy: bool) -> bool:
        return self.by_text.greedy if greedy else self.by_text.sampled

    def draft_from_text(self, blocks: list[list[int]], counts: list[int]) -> TextDraft:
        """Do as `Model.write`, with a forward for every token that it writes, counts[b] of them in
        row b."""
        self._context.read(self._extend(blocks, [not n for n in counts]))
        texts = [
            text.draft_ids if n else None
            for text, n in zip(self._translations, counts, strict=True)
        ]
        new: list[list[int]] = [[] for _ in counts]
        longer = [b""] * len(counts)  # what a text's last token says more, made longer
        calls, end = 0, self.dictionary.draft.eos_id
        while any(text is not None for text in texts):
            writing = [text is not None for text in texts]
            needs = [int(on) for on in writing] if calls else self._count_needed(texts, writing)
            logits = self._context.score(texts, needs)
            for b, text in enumerate(texts):
                if text is None:
                    continue
                last = logits[b, needs[b] - 1]
                ways = (
                    find_continuations(self._translations[b], logits[b, 0]) if needs[b] == 2 else []
                )
                if ways and ways[0].share > _compute_remaining_share(ways) * float(
                    last.softmax(-1).amax()
                ):
                    text[-1], longer[b] = ways[0].token, ways[0].suffix
                else:
                    new[b].append(int(self._text_ids[last[self._text_ids].argmax()]))
                    text.append(new[b][-1])
                complete = len(new[b]) + bool(longer[b]) == counts[b] or text[-1] == end
                texts[b] = None if complete else text
            calls += 1
        each = zip(self._translations, longer, new, counts, strict=True)
        return TextDraft([text.to_target_tokens(x, more)[:n] for text, more, x, n in each], calls)

    def measure_coverage(self, texts: list[list[int]]) -> list[float]:
        """Return the share of the draft's mass, after each of the texts, on words that both have.
        For a model without rows."""
        self.start([[] for _ in texts])
        extended = self._extend(texts)
        shares = self._context.score(extended, [1] * len(texts))[:, 0].float().softmax(-1)
        self.leave(list(range(len(texts))))
        return shares[:, self._shared_draft_ids].sum(-1).tolist()

    def set_lengths(self, lengths: list[int]) -> None:
        for text, length in zip(self._translations, lengths, strict=True):
            text.cut(length)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        """Return the model's own memory, counted by itself: a token may be two of the draft's."""
        return self._context.model.memory(lengths, sources)

    def permute(self, rows: list[int]) -> None:
        self._translations = [self._translations[row].copy() for row in rows]
        self._context.permute(rows)

    def leave(self, rows: list[int]) -> None:
        self._translations = [
            self._translations[b] for b in list_remaining_rows(len(self._translations), rows)
        ]
        self._context.leave(rows)

    def _extend(
        self, blocks: list[list[int]], read: list[bool] | None = None
    ) -> list[list[int] | None]:
        """The texts that go on, in the draft's ids; of those that are to be read."""
        extended: list[list[int] | None] = []
        for b, (text, block) in enumerate(zip(self._translations, blocks, strict=True)):
            text.extend(block)
            extended.append(text.draft_ids if block and (read is None or read[b]) else None)
        return extended

    def _count_needed(self, extended: list[list[int] | None], needed: list[bool]) -> list[int]:
        """Behind how many of a text's tokens the draft must say what follows."""
        counts = [int(on) for on in needed]
        for b, text in enumerate(extended):
            if needed[b] and text is not None and self._translations[b].last_draft_id is not None:
                counts[b] = min(2, self._context.holds(text))
        return counts

    def _to_target_logits(self, b: int, count: int, own: Tensor) -> Tensor:
        """Row b's logits `[V]` at the target's ids, before anything is normalized, from the draft's
        behind its last `count` tokens, `[.., draft's V]`."""
        ways = find_continuations(self._translations[b], own[0]) if count == 2 else []
        last = own[max(0, count - 1)]
        if ways:
            last = last.log_softmax(-1) + math.log(_compute_remaining_share(ways))
        logits = last.new_full((self.vocab_size,), -torch.inf)
        logits[self._shared_target_ids] = last[self._shared_draft_ids]
        for way in ways:
            share = logits.new_tensor(math.log(way.share))
            logits[way.target_token] = torch.logaddexp(logits[way.target_token], share)
        return logits if count else logits.nan_to_num()  # what is not needed is finite


def _compute_remaining_share(continuations: list[Continuation]) -> float:
    """The share of the last token as it is."""
    return max(MIN_SHARE, 1 - sum(way.share for way in continuations))
