"""Translates a growing sequence from the target's token ids into the draft model's, and finds draft
tokens that extend the last draft token.

A translation depends only on the sequence, not on the steps or draft tokens that led to it. The
last draft token may be a poor input: if the draft model's vocabulary has a token "time,", the model
has never seen the token "time" followed by a comma. So the logits before the last draft token are
used too (token healing): all draft tokens that begin with the last draft token's bytes are
candidates to replace the last draft token, in proportion to their probabilities in those logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Self

from torch import Tensor

from foretoken.models.vocabularies.vocabulary import VocabularyMap

MAX_WORD_TOKENS = 32  # maximum length of a word, which is translated as a whole


class Translation:
    """One sequence, in target ids and in draft ids. The sequence is split into words before each
    token that begins with a space, and the draft model's tokenizer encodes each word. So a new
    target token changes the draft ids of the last word only, and the draft model's KV cache of all
    earlier words stays valid."""

    def __init__(self, vocabularies: VocabularyMap) -> None:
        self.vocabularies = vocabularies
        self.ids: list[int] = []
        # draft ids of all words except the last
        self._closed_draft_ids: list[int] = list(vocabularies.draft.prefix_ids)
        # for each word: the index of its first target id and of its first draft id, and whether any
        # text precedes the word
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
        """The whole sequence in draft ids; at least one id."""
        return [*self._closed_draft_ids, *self._get_last_word_draft_ids()] or [
            self.vocabularies.draft.eos_id or 0
        ]

    @property
    def last_draft_id(self) -> int | None:
        """The last draft token if it belongs to the last word and the draft vocabulary has tokens
        that extend it; None otherwise. If there is such a token, the logits before this token are
        needed too."""
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
        """The bytes of the last word. For the first word, the bytes do not include the space that
        the target's tokenizer may add before it."""
        text = self.vocabularies.target.to_bytes(self.last_word_ids)
        return text if self._has_text_before else self.vocabularies.target.strip_space(text)

    def to_target_tokens(self, written: Sequence[int], longer: bytes = b"") -> list[int]:
        """Return generated draft tokens as target tokens, including an end of sequence.

        written: The generated draft tokens.
        longer: The bytes by which the draft token before `written` was extended.
        """
        target, draft = self.vocabularies.target, self.vocabularies.draft
        new = longer + draft.to_bytes(written)
        tokens = self.tokenize_continuation(
            new if self._has_text_before or self.last_word else draft.strip_space(new)
        )
        if not written or written[-1] != draft.eos_id or target.eos_id is None:
            return tokens
        return [*tokens, target.eos_id] if tokens or not new else []

    def tokenize_continuation(self, new: bytes) -> list[int]:
        """Return the target's tokens for bytes `new` that follow the sequence. Returns [] if the
        tokenizer would split the last word differently when the bytes follow it."""
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
        """The last word's target ids; [] if the word is a special token."""
        return [
            token for token in self.last_word_ids if token in self.vocabularies.target.spellings
        ]

    @property
    def _has_text_before(self) -> bool:
        return self._cuts[-1][2]

    def _starts_word(self, token: int, length: int) -> bool:
        """Return whether a token begins a new word after the last word, which has `length`
        tokens."""
        spellings = self.vocabularies.target.spellings
        word, before = spellings.get(token), spellings.get(self.ids[-1])
        # a special token, which has no spelling, is a word of its own
        if word is None or before is None or length >= MAX_WORD_TOKENS:
            return True
        return word.startswith(b" ") and not before[-1:].isspace()

    def _get_last_word_draft_ids(self) -> Sequence[int]:
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


MIN_CONTINUATION_SHARE = 0.01  # continuations with a smaller share of the probability are ignored


class Continuation(NamedTuple):
    """A draft token that extends the last draft token."""

    token: int
    share: float  # its probability, divided by the sum for all candidates and the last draft token
    suffix: bytes  # the bytes that this token adds to the last draft token
    target_token: int  # the first target token of these bytes


def find_continuations(text: Translation, previous_logits: Tensor) -> list[Continuation]:
    """Return the tokens of the draft's vocabulary that begin with the characters of the last
    draft token, most probable first. Tokens after which the target would tokenize the last word
    differently are left out. previous_logits: the draft model's logits `[V]` for the position
    of its last token.
    """
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
