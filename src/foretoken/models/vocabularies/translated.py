"""Uses a draft model with another vocabulary than the target's, by both methods of Timor et al.
2025 (arXiv 2502.05202).

Token-level intersection: target tokens that the draft model's vocabulary has too get the draft
model's logits, and all other target tokens get -inf. As for any other draft model, the caller
computes q as the softmax of these logits and samples draft tokens from it.

String-level exact match: the draft model generates greedily in its own tokens, and the resulting
string is tokenized for the target. These draft tokens depend only on the sequence, so the output is
exact with any tokenization.

Both methods also consider draft tokens that extend the last draft token (`find_continuations`).
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
    """The sequences of a decoder-only `model`. If a sequence is longer than the model's context,
    the model gets only a tail of the sequence; whenever the context is full, the tail is shortened
    by half a context."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._cached: list[list[int]] = []
        self._rewind = math.inf if model.max_rewind is None else model.max_rewind  # tokens

    def start(self, texts: list[list[int]]) -> None:
        """Add these sequences and prefill them."""
        ends = [self._get_tail(text) for text in texts]
        self.model.start(ends)
        self._cached += ends

    def score(self, texts: list[list[int] | None], need: list[int]) -> Tensor:
        """Replace each sequence b by texts[b], in one forward pass; None leaves the sequence
        unchanged. Returns logits `[B, max(need), V]` of the last need[b] tokens, as `Model.score`
        does."""
        return self.model.score(self._take_missing(texts, need), need)

    def prefill(self, texts: list[list[int] | None]) -> None:
        """Replace each sequence b by texts[b] as `score` does, without computing logits."""
        if any(blocks := self._take_missing(texts, [0] * len(texts))):
            self.model.score(blocks, [0] * len(blocks))

    def _take_missing(self, texts: list[list[int] | None], need: list[int]) -> list[list[int]]:
        """Truncate the cache of each sequence to the prefix that it shares with its new tail
        texts[b], and return the rest of each tail. The rest has at least need[b] tokens."""
        blocks: list[list[int]] = []
        lengths: list[int] = []
        for b, (text, needed) in enumerate(zip(texts, need, strict=True)):
            end = self._cached[b] if text is None else self._get_tail(text)
            length = min(count_shared_tokens(self._cached[b], end), len(end) - needed)
            # a new token may change ids further back than recurrent states can be rewound
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
        """Return how many of the last tokens of a sequence the model gets."""
        return len(self._get_tail(text))

    def _get_tail(self, text: list[int]) -> list[int]:
        """Return a tail of a sequence that fits the context, at least half as long. Its start
        depends only on the sequence's length and moves in steps of half a context, so the cache
        usually stays valid."""
        context = self.model.context
        if context is None or len(text) <= context:
            return list(text)
        half = max(1, context // 2)
        return text[-(-(len(text) - context) // half) * half :]


MIN_SHARE = 1e-30  # replaces a share that is 0 or less by rounding


class TextDrafting(NamedTuple):
    """Specifies for which sampling params to draft by `draft_from_text`: greedy params, other
    params, or both."""

    greedy: bool = True
    sampled: bool = False


class TranslatedModel(Model):
    """A decoder-only draft model `model`, with the vocabulary of a target as its interface. A
    sequence may outgrow the context of `model`, which then gets only the sequence's tail. `V`: the
    target's vocabulary size; `by_text`: when to draft by `draft_from_text`."""

    capabilities = Capabilities(text=True, memory=True)
    has_own_speed = True  # its speed differs from that of `model`

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
        text_ids = sorted({*spellings, *([] if end is None else [end])})
        self._text_ids = torch.tensor(text_ids, dtype=torch.long, device=model.device)

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        new = [Translation(self.dictionary) for _ in prompts]
        for translation, prompt in zip(new, prompts, strict=True):
            translation.extend(prompt)
        self._context.start([each.draft_ids if each.ids else [] for each in new])
        self._translations += new

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """Return logits as `Model.score` does. This runs a forward pass for each position whose
        logits are needed, since a target token may change the draft ids of its whole word."""
        assert isinstance(blocks, list)
        if not any(need):
            changed = self._extend(blocks)
            self._context.prefill(changed)
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
        """Draft tokens as `Model.draft_from_text` does. This runs one forward pass for each
        draft-model token; the model generates at most counts[b] tokens for sequence b."""
        self._context.prefill(self._extend(blocks, [not n for n in counts]))
        seqs = [
            translation.draft_ids if n else None
            for translation, n in zip(self._translations, counts, strict=True)
        ]
        new: list[list[int]] = [[] for _ in counts]
        # the bytes by which each sequence's last draft token was extended
        suffixes = [b""] * len(counts)
        calls, end = 0, self.dictionary.draft.eos_id
        while any(seq is not None for seq in seqs):
            running = [seq is not None for seq in seqs]
            needs = [int(on) for on in running] if calls else self._count_needed(seqs, running)
            logits = self._context.score(seqs, needs)
            for b, seq in enumerate(seqs):
                if seq is None:
                    continue
                last = logits[b, needs[b] - 1]
                found = (
                    find_continuations(self._translations[b], logits[b, 0]) if needs[b] == 2 else []
                )
                if found and found[0].share > _compute_remaining_share(found) * float(
                    last.softmax(-1).amax()
                ):
                    seq[-1], suffixes[b] = found[0].token, found[0].suffix
                else:
                    new[b].append(int(self._text_ids[last[self._text_ids].argmax()]))
                    seq.append(new[b][-1])
                complete = len(new[b]) + bool(suffixes[b]) == counts[b] or seq[-1] == end
                seqs[b] = None if complete else seq
            calls += 1
        each = zip(self._translations, suffixes, new, counts, strict=True)
        draft_tokens = [
            translation.to_target_tokens(ids, suffix)[:n] for translation, suffix, ids, n in each
        ]
        return TextDraft(draft_tokens, calls)

    def measure_coverage(self, texts: list[list[int]]) -> list[float]:
        """Return, for each of these sequences in target ids, the total probability that the draft
        model gives to tokens of both vocabularies as the next token. The model must have no
        sequences."""
        self.start([[] for _ in texts])
        extended = self._extend(texts)
        shares = self._context.score(extended, [1] * len(texts))[:, 0].float().softmax(-1)
        self.leave(list(range(len(texts))))
        return shares[:, self._shared_draft_ids].sum(-1).tolist()

    def set_lengths(self, lengths: list[int]) -> None:
        for translation, length in zip(self._translations, lengths, strict=True):
            translation.cut(length)

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        """Return the bytes for one draft id per target token, although a target token may take
        several draft ids."""
        return self._context.model.compute_cache_bytes(lengths, sources)

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
        """Append the blocks. Returns, for each sequence b, the whole sequence in draft ids, or None
        if block b is empty or read[b] is False."""
        extended: list[list[int] | None] = []
        for b, (translation, block) in enumerate(zip(self._translations, blocks, strict=True)):
            translation.extend(block)
            extended.append(translation.draft_ids if block and (read is None or read[b]) else None)
        return extended

    def _count_needed(self, extended: list[list[int] | None], needed: list[bool]) -> list[int]:
        """Return, for each sequence, the number of its last draft ids at which logits are needed:
        0, 1, or 2 if the last draft token may be extended."""
        counts = [int(on) for on in needed]
        for b, seq in enumerate(extended):
            if needed[b] and seq is not None and self._translations[b].last_draft_id is not None:
                counts[b] = min(2, self._context.holds(seq))
        return counts

    def _to_target_logits(self, b: int, count: int, own: Tensor) -> Tensor:
        """Return logits `[V]` for sequence b in the target's vocabulary, not normalized. own: the
        draft model's logits after the last `count` draft ids, `[.., draft's V]`."""
        found = find_continuations(self._translations[b], own[0]) if count == 2 else []
        last = own[max(0, count - 1)]
        if found:
            last = last.log_softmax(-1) + math.log(_compute_remaining_share(found))
        logits = last.new_full((self.vocab_size,), -torch.inf)
        logits[self._shared_target_ids] = last[self._shared_draft_ids]
        for each in found:
            share = logits.new_tensor(math.log(each.share))
            logits[each.target_token] = torch.logaddexp(logits[each.target_token], share)
        return logits if count else logits.nan_to_num()  # padding must be finite


def _compute_remaining_share(continuations: list[Continuation]) -> float:
    """Return the share of probability that the last draft token has without an extension."""
    return max(MIN_SHARE, 1 - sum(each.share for each in continuations))
