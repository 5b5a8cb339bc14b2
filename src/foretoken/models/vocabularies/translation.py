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

from foretoken.models.vocabularies.words import Dictionary

LONGEST = 32  # tokens of a word, which are read together


class Translation:
    """One text. It is cut before words, where a token begins with a space, and told word by word:
    each one as the draft's own tokenizer would have it. So a new token changes the last word
    alone, and what the draft has read before it stays."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary
        self.ids: list[int] = []
        self._told: list[int] = list(dictionary.draft.head)  # of all words but the last
        self._cuts = [(0, len(self._told), False)]  # each word's place in both; text before it?

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            start, _, _ = self._cuts[-1]
            if len(self.ids) > start and self._apart(token, len(self.ids) - start):
                behind = self._behind or bool(self.last)
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

    @property
    def last_told(self) -> int | None:
        """The draft's last token, where it is one of the last word's and has longer ones; a pass
        must then show what is said before it too."""
        word = self._word() if self._spelled_open else []
        draft = self.dictionary.draft
        return word[-1] if word and word[-1] in draft.spelled and draft.longer(word[-1]) else None

    @property
    def open(self) -> list[int]:
        """The tokens of the last word."""
        return self.ids[self._cuts[-1][0] :]

    @property
    def last(self) -> bytes:
        """The last word, without the space that the target's tokens may put before a text."""
        text = self.dictionary.target.text(self.open)
        return text if self._behind else self.dictionary.target.plain(text)

    def guesses(self, written: Sequence[int], longer: bytes = b"") -> list[int]:
        """The target's tokens of what a draft has written behind the text, as `behind`; where it
        ends the text, so do they. longer: what its last token, made longer, says before that."""
        target, draft = self.dictionary.target, self.dictionary.draft
        new = longer + draft.text(written)
        tokens = self.after(new if self._behind or self.last else draft.plain(new))
        if not written or written[-1] != draft.end or target.end is None:
            return tokens
        return [*tokens, target.end] if tokens or not new else []

    def after(self, new: bytes) -> list[int]:
        """The target's tokens of what follows the text; none where they would not leave the last
        word's as they are."""
        target, spelling = self.dictionary.target, self._spelled_open
        text = self.last + new
        tokens = target.tokens(text if self._behind else target.first(text))
        return list(tokens[len(spelling) :]) if list(tokens[: len(spelling)]) == spelling else []

    def copy(self) -> Self:
        """The same text, to go on otherwise."""
        other = copy(self)
        other.ids, other._told, other._cuts = [*self.ids], [*self._told], [*self._cuts]
        return other

    @property
    def _spelled_open(self) -> list[int]:
        """The last word's tokens; none of a special one, behind which a text begins anew."""
        return [token for token in self.open if token in self.dictionary.target.spelled]

    @property
    def _behind(self) -> bool:
        """Tell whether there is text before the last word."""
        return self._cuts[-1][2]

    def _apart(self, token: int, length: int) -> bool:
        """Tell whether a token begins another word than the last one's, of `length` tokens."""
        spelled = self.dictionary.target.spelled
        word, before = spelled.get(token), spelled.get(self.ids[-1])
        if word is None or before is None or length >= LONGEST:  # a special token stands alone
            return True
        return word.startswith(b" ") and not before[-1:].isspace()

    def _word(self) -> Sequence[int]:
        """The last word in the draft's ids."""
        tokens, draft = self.open, self.dictionary.draft
        if len(tokens) == 1 and tokens[0] not in self.dictionary.target.spelled:
            special = self.dictionary.special.get(tokens[0])
            opening = (
                draft.head and self._told == draft.head and special in (*draft.head, draft.end)
            )
            return [] if special is None or opening else [special]
        text = self.last
        return draft.tokens(text if self._behind else draft.first(text))


LEAST = 0.01  # of the probability of all tokens that begin so: the least of one that is weighed


class WayOn(NamedTuple):
    """A longer token of the draft's in place of the last one."""

    token: int
    share: float  # of the probability of all ways, the last token as it is included
    more: bytes  # what is longer in it
    guess: int  # the target's first token of that


def ways_on(text: Translation, before: Tensor) -> list[WayOn]:
    """The longer tokens that go on from the text without another cut of its last word, likeliest
    first; `before`: the draft's logits `[V]` one token before its end."""
    last, draft = text.last_told, text.dictionary.draft
    if last is None:
        return []
    tokens = [last, *draft.longer(last)]
    shares: list[float] = before[tokens].softmax(-1).tolist()
    likely = [(share, i) for share, i in zip(shares[1:], tokens[1:], strict=True) if share > LEAST]
    length, ways = len(draft.spelled[last]), list[WayOn]()
    for share, token in sorted(likely, reverse=True):
        continuation = draft.spelled[token][length:]
        draft_tokens = text.after(continuation)
        ways += [WayOn(token, share, continuation, draft_tokens[0])] if draft_tokens else []
    total = shares[0] + sum(way.share for way in ways)
    return [way._replace(share=way.share / total) for way in ways]
