"""Translates a growing sequence from the target's token ids into the draft model's, and finds draft
tokens that extend the last one.

A translation depends on the sequence alone, not on the steps or draft tokens that led to it. If the
draft model's vocabulary has a token "time,", the model has never seen "time" followed by a comma.
So its logits one token earlier are used too (token healing): all its tokens that begin with the
last one's bytes are candidates, in proportion to their probabilities there.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Self

from torch import Tensor

from foretoken.models.vocabularies.vocabulary import VocabularyMap

MAX_WORD_TOKENS = 32  # a word is translated as a whole


class Translation:
    """One sequence, in target ids and draft ids. It is split into words, at tokens that begin with
    a space, and each word is encoded by the draft's tokenizer. So a new token changes the draft ids
    of the last word only, and the draft's KV cache of all others stays valid."""

    def __init__(self, vocabularies: VocabularyMap) -> None:
        self.vocabularies = vocabularies
        self.ids: list[int] = []
        # draft ids of all words but the last
        self._closed_draft_ids: list[int] = list(vocabularies.draft.prefix_ids)
        # of each word, the index of its first id in both, and whether any text precedes it
        self._cuts = [(0, len(self._closed_draft_ids), False)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append target ids."""
        for token in tokens:
            start, _, _ = self._cuts[-1]
            if len(self.ids) > start and self._starts_word(token, len(self.ids) - start):
                has_text = self._has_text_before or bool(self.last_word)
                self._closed_draft_ids += self._get_last_word_draft_ids()
                self._cuts.append((len(self.ids), len(self._closed_draft_ids), has_text))
            self.ids.append(token)

    def cut(self, length: int) -> None:
        """Truncate to `length` target ids."""
        while len(self._cuts) > 1 and self._cuts[-1][0] >= length:
            self._cuts.pop()
        del self.ids[length:], self._closed_draft_ids[self._cuts[-1][1] :]

    @property
    def draft_ids(self) -> list[int]:
        """The whole sequence in draft ids, at least one."""
        return [*self._closed_draft_ids, *self._get_last_word_draft_ids()] or [
            self.vocabularies.draft.eos_id or 0
        ]

    @property
    def last_draft_id(self) -> int | None:
        """The last draft token if it belongs to the last word and other draft tokens extend it,
        else None. If set, the logits before it are needed too."""
        word = self._get_last_word_draft_ids() if self._last_spelled_ids else []
        draft = self.vocabularies.draft
        return (
            word[-1]
            if word and word[-1] in draft.spellings and draft.find_longer(word[-1])
            else None
        )

    @property
    def last_word_ids(self) -> list[int]:
        """The target ids of the last word."""
        return self.ids[self._cuts[-1][0] :]

    @property
    def last_word(self) -> bytes:
        """The last word's bytes, without the space that the target's tokenizer may add before the
        first word."""
        text = self.vocabularies.target.to_bytes(self.last_word_ids)
        return text if self._has_text_before else self.vocabularies.target.strip_space(text)

    def to_target_tokens(self, written: Sequence[int], longer: bytes = b"") -> list[int]:
        """Return generated draft tokens as target tokens; an end of sequence is translated too.
        longer: bytes before them, by which the last draft token was extended."""
        target, draft = self.vocabularies.target, self.vocabularies.draft
        new = longer + draft.to_bytes(written)
        tokens = self.tokenize_continuation(
            new if self._has_text_before or self.last_word else draft.strip_space(new)
        )
        if not written or written[-1] != draft.eos_id or target.eos_id is None:
            return tokens
        return [*tokens, target.eos_id] if tokens or not new else []

    def tokenize_continuation(self, new: bytes) -> list[int]:
        """Return the target's tokens of bytes that follow the sequence; [] if together with the
        last word they would be tokenized otherwise."""
        target, spelling = self.vocabularies.target, self._last_spelled_ids
        text = self.last_word + new
        tokens = target.tokenize(text if self._has_text_before else target.add_space(text))
        return list(tokens[len(spelling) :]) if list(tokens[: len(spelling)]) == spelling else []

    def copy(self) -> Self:
        """Return a copy that can be extended independently."""
        other = copy(self)
        other.ids, other._closed_draft_ids, other._cuts = (
            [*self.ids],
            [*self._closed_draft_ids],
            [*self._cuts],
        )
        return other

    @property
    def _last_spelled_ids(self) -> list[int]:
        """The last word's target ids, [] if it is a special token."""
        return [
            token for token in self.last_word_ids if token in self.vocabularies.target.spellings
        ]

    @property
    def _has_text_before(self) -> bool:
        """True if there is text before the last word."""
        return self._cuts[-1][2]

    def _starts_word(self, token: int, length: int) -> bool:
        """Return whether a token begins a new word; the last one has `length` tokens."""
        spellings = self.vocabularies.target.spellings
        word, before = spellings.get(token), spellings.get(self.ids[-1])
        # a special token, which has no spelling, is a word of its own
        if word is None or before is None or length >= MAX_WORD_TOKENS:
            return True
        return word.startswith(b" ") and not before[-1:].isspace()

    def _get_last_word_draft_ids(self) -> Sequence[int]:
        """Return the last word in draft ids."""
        tokens, draft = self.last_word_ids, self.vocabularies.draft
        if len(tokens) == 1 and tokens[0] not in self.vocabularies.target.spellings:
            special = self.vocabularies.special.get(tokens[0])
            opening = (
                draft.prefix_ids
                and self._closed_draft_ids == draft.prefix_ids
                and special in (*draft.prefix_ids, draft.eos_id)
            )
            return [] if special is None or opening else [special]
        text = self.last_word
        return draft.tokenize(text if self._has_text_before else draft.add_space(text))


MIN_CONTINUATION_SHARE = 0.01  # of the candidates' probability; less probable ones are ignored


class Continuation(NamedTuple):
    """A draft token that extends the last one."""

    token: int
    share: float  # of the probability of all candidates, the last token itself included
    suffix: bytes  # the bytes that it adds
    target_token: int  # the target's first token of these


def find_continuations(text: Translation, previous_logits: Tensor) -> list[Continuation]:
    """Return the draft tokens that extend the last one and leave the target's tokens of the last
    word as they are, most probable first. previous_logits: the draft's logits `[V]` before its last
    token."""
    last, draft = text.last_draft_id, text.vocabularies.draft
    if last is None:
        return []
    tokens = [last, *draft.find_longer(last)]
    shares: list[float] = previous_logits[tokens].softmax(-1).tolist()
    probable = [
        (share, i)
        for share, i in zip(shares[1:], tokens[1:], strict=True)
        if share > MIN_CONTINUATION_SHARE
    ]
    length, continuations = len(draft.spellings[last]), list[Continuation]()
    for share, token in sorted(probable, reverse=True):
        suffix = draft.spellings[token][length:]
        target_tokens = text.tokenize_continuation(suffix)
        continuations += (
            [Continuation(token, share, suffix, target_tokens[0])] if target_tokens else []
        )
    total = shares[0] + sum(each.share for each in continuations)
    return [each._replace(share=each.share / total) for each in continuations]
