"""A reply of `foretoken chat`, part by part, from any source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foretoken.errors import ForetokenError

ChatPrompt = str | list[dict[str, Any]]  # text to continue, or messages


class ReplyError(ForetokenError):
    """One text failed; the next may not."""


class ReplyToken(NamedTuple):
    """A token as it is spelled after those before it, and the fate of its draft token."""

    text: str
    fate: str  # accepted; corrected or bonus: the target's own; plain: nothing was drafted


class ReplyPart(NamedTuple):
    """New text of a reply, and the tokens of the steps since the last part.

    Tokens may be ahead of the text, some of which is held back for a stop string.
    """

    text: str
    tokens: list[ReplyToken]


@dataclass(slots=True)
class ChatReply:
    """A reply so far: its text and counts of its steps."""

    text: str = ""
    tokens: int = 0
    num_forwards: int = 0  # target forwards; 0 where the source does not say
    overlaps: list[float] = field(default_factory=list[float])  # sum min(p, q), by draft token
    bias: float = 0.0  # of all tokens; 0 where the source does not say
    seconds: float = 0.0
    first_token_seconds: float = 0.0  # of these, until the first token
    plain_seconds_per_token: float | None = (
        None  # seconds a token by plain decoding, where known before the reply
    )
    finish_reason: str | None = None  # None: broken off
