"""A reply of `foretoken chat`, part by part, from any source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foretoken.errors import ForetokenError

ChatPrompt = str | list[dict[str, Any]]  # a string to continue, or messages


class ReplyError(ForetokenError):
    """The failure of one reply; the session continues."""


class ReplyToken(NamedTuple):
    """A decoded token, and the fate of the draft token at its position."""

    text: str
    fate: str  # accepted; corrected or bonus: the target's own; plain: no draft token


class ReplyPart(NamedTuple):
    """New text of a reply, and the tokens of the steps since the last part.

    Tokens may be ahead of the text: text that may begin a stop string is held back.
    """

    text: str
    tokens: list[ReplyToken]


@dataclass(slots=True)
class ChatReply:
    """A reply so far: its text and counts of its steps."""

    text: str = ""
    tokens: int = 0
    num_forwards: int = 0  # of the target; 0 if the source does not report it
    overlaps: list[float] = field(default_factory=list[float])  # sum min(p, q), by draft token
    bias: float = 0.0  # of all tokens; 0 if the source does not report it
    seconds: float = 0.0
    first_token_seconds: float = 0.0  # included in `seconds`
    plain_seconds_per_token: float | None = None  # measured before the reply
    finish_reason: str | None = None  # None: not finished
