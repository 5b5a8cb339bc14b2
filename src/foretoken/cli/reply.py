"""Types for the replies of `foretoken chat`, from a model in this process or a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from foretoken.errors import ForetokenError

ChatPrompt = str | list[dict[str, Any]]  # a string to continue, or messages


class ReplyError(ForetokenError):
    """One reply failed; the session can continue."""


class ReplyToken(NamedTuple):
    """A decoded token of a reply, and its source."""

    text: str
    # "accepted": a draft token; "corrected" or "bonus": the target's own token after draft tokens;
    # "plain": a token of a step without draft tokens
    fate: str


class ReplyPart(NamedTuple):
    """New text of a reply, and the tokens of the steps since the last part.

    `tokens` may be ahead of `text`, in which a possible beginning of a stop string is delayed.
    """

    text: str
    tokens: list[ReplyToken]


@dataclass(slots=True)
class ChatReply:
    """A reply, as far as it has been generated: its text and statistics."""

    text: str = ""
    tokens: int = 0
    num_forwards: int = 0  # of the target; 0 if the source does not report it
    overlaps: list[float] = field(default_factory=list[float])  # sum min(p, q) of each draft token
    bias: float = 0.0  # sum over all tokens; 0 if the source does not report it
    seconds: float = 0.0
    first_token_seconds: float = 0.0  # included in `seconds`
    plain_seconds_per_token: float | None = None  # measured before the reply
    finish_reason: str | None = None  # None: not finished
