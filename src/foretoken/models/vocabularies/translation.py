"""A text in a target's ids, as it grows and shrinks, in those of a draft; and its end within what
the draft would say as one token.

A translation is a function of the text alone: neither of the steps in which it came nor of what the
draft guessed. A draft that reads "time" has never seen the comma of its own token "time," behind
it. So what it says next is looked up one token earlier too: all its tokens that begin as the last
one does are ways on, each in proportion to its probability there, the last one included.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Self

from torch import Tensor

from foretoken.models.vocabularies.vocabulary import VocabularyMap

MAX_WORD_TOKENS = 32  # tokens of a word, which are read together


class Translation:
    """One text. It is cut before words, where a token begins with a space, and told word by word:
    each one as the draft's own tokenizer would have it. So a new token changes the last word
    alone, and what the draft has read before it stays."""

    def __init__(self, vocabularies: VocabularyMap) -> None:
        self.vocabularies = vocabularies
        self.ids: list[int] = []
        self._closed_draft_ids: list[int] = list(
            vocabularies.draft.prefix_ids
        )  # of all words but the last
        self._cuts = [
            (0, len(self._closed_draft_ids), False)
        ]  # each word's place in both; text before it?

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            start, _, _ = self._cuts[-1]
            if len(self.ids) > start and self._starts_word(token, len(self.ids) - start):
                behind = self._has_text_before or bool(self.last_word)
                self._closed_draft_ids += self._get_last_word_draft_ids()
                self._cuts.append((len(self.ids), len(self._closed_draft_ids), behind))
            self.ids.append(token)

    def cut(self, length: int) -> None:
        """Keep so many tokens."""
        while len(self._cuts) > 1 and self._cuts[-1][0] >= length:
            self._cuts.pop()
        del self.ids[length:], self._closed_draft_ids[self._cuts[-1][1] :]

    @property
    def draft_ids(self) -> list[int]:
        """All of the text in the draft's ids: one at least."""
        return [*self._closed_draft_ids, *self._get_last_word_draft_ids()] or [
            self.vocabularies.draft.eos_id or 0
        ]

    @property
    def last_draft_id(self) -> int | None:
        """The draft's last token, where it is one of the last word's and has longer ones; a pass
        must then show what is said before it too."""
        word = self._get_last_word_draft_ids() if self._last_spelled_ids else []
        draft = self.vocabularies.draft
        return (
            word[-1]
            if word and word[-1] in draft.spellings and draft.find_longer(word[-1])
            else None
        )

    @property
    def last_word_ids(self) -> list[int]:
        """The tokens of the last word."""
        return self.ids[self._cuts[-1][0] :]

    @property
    def last_word(self) -> bytes:
        """The last word, without the space that the target's tokens may put before a text."""
        text = self.vocabularies.target.to_bytes(self.last_word_ids)
        return text if self._has_text_before else self.vocabularies.target.strip_space(text)

    def to_target_tokens(self, written: Sequence[int], longer: bytes = b"") -> list[int]:
        """The target's tokens of what a draft has written behind the text, as `behind`; where it
        ends the text, so do they. longer: what its last token, made longer, says before that."""
        target, draft = self.vocabularies.target, self.vocabularies.draft
        new = longer + draft.to_bytes(written)
        tokens = self.tokenize_continuation(
            new if self._has_text_before or self.last_word else draft.strip_space(new)
        )
        if not written or written[-1] != draft.eos_id or target.eos_id is None:
            return tokens
        return [*tokens, target.eos_id] if tokens or not new else []

    def tokenize_continuation(self, new: bytes) -> list[int]:
        """The target's tokens of what follows the text; none where they would not leave the last
        word's as they are."""
        target, spelling = self.vocabularies.target, self._last_spelled_ids
        text = self.last_word + new
        tokens = target.tokenize(text if self._has_text_before else target.add_space(text))
        return list(tokens[len(spelling) :]) if list(tokens[: len(spelling)]) == spelling else []

    def copy(self) -> Self:
        """The same text, to go on otherwise."""
        other = copy(self)
        other.ids, other._closed_draft_ids, other._cuts = (
            [*self.ids],
            [*self._closed_draft_ids],
            [*self._cuts],
        )
        return other

    @property
    def _last_spelled_ids(self) -> list[int]:
        """The last word's tokens; none of a special one, behind which a text begins anew."""
        return [
            token for token in self.last_word_ids if token in self.vocabularies.target.spellings
        ]

    @property
    def _has_text_before(self) -> bool:
        """Tell whether there is text before the last word."""
        return self._cuts[-1][2]

    def _starts_word(self, token: int, length: int) -> bool:
        """Tell whether a token begins another word than the last one's, of `length` tokens."""
        spelled = self.vocabularies.target.spellings
        word, before = spelled.get(token), spelled.get(self.ids[-1])
        if (
            word is None or before is None or length >= MAX_WORD_TOKENS
        ):  # a special token stands alone
            return True
        return word.startswith(b" ") and not before[-1:].isspace()

    def _get_last_word_draft_ids(self) -> Sequence[int]:
        """The last word in the draft's ids."""
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


MIN_CONTINUATION_SHARE = (
    0.01  # of the probability of all tokens that begin so: the least of one that is weighed
)


class Continuation(NamedTuple):
    """A longer token of the draft's in place of the last one."""

    token: int
    share: float  # of the probability of all ways, the last token as it is included
    suffix: bytes  # what is longer in it
    target_token: int  # the target's first token of that


def find_continuations(text: Translation, previous_logits: Tensor) -> list[Continuation]:
    """The longer tokens that go on from the text without another cut of its last word, likeliest
    first; `before`: the draft's logits `[V]` one token before its end."""
    last, draft = text.last_draft_id, text.vocabularies.draft
    if last is None:
        return []
    tokens = [last, *draft.find_longer(last)]
    shares: list[float] = previous_logits[tokens].softmax(-1).tolist()
    likely = [
        (share, i)
        for share, i in zip(shares[1:], tokens[1:], strict=True)
        if share > MIN_CONTINUATION_SHARE
    ]
    length, continuations = len(draft.spellings[last]), list[Continuation]()
    for share, token in sorted(likely, reverse=True):
        continuation = draft.spellings[token][length:]
        draft_tokens = text.tokenize_continuation(continuation)
        continuations += (
            [Continuation(token, share, continuation, draft_tokens[0])] if draft_tokens else []
        )
    total = shares[0] + sum(way.share for way in continuations)
    return [way._replace(share=way.share / total) for way in continuations]
