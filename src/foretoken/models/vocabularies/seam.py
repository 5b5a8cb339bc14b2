"""Where a text ends within what a draft would say as one token.

A draft that reads "time" has never seen the comma of its own token "time," behind it. So what it
says next is looked up one token earlier too: all its tokens that begin as the last one does are
ways on, each in proportion to its probability there, the last one's own distribution being one of
them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from foretoken.models.vocabularies.translation import Translation

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
