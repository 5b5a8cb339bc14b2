"""What is shown of a row while it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.request import Piece, Row, StepRecord

if TYPE_CHECKING:
    from foretoken.text.transcript import Transcript


@dataclass(slots=True)
class Outbox:
    """A row, and how much of it has been shown. The pieces' texts and tokens concatenate to the
    completion's; between two of them no step may run."""

    row: Row
    transcript: Transcript | None  # among the row's endings; None without a tokenizer
    number: int = 0  # of the row among those that are shown together
    sent: int = 0  # tokens
    told: int = 0  # steps

    def piece(self) -> Piece | None:
        """What is new; None where there are no new tokens."""
        tokens = self.row.new_tokens[self.sent :]
        if not tokens:
            return None
        asked = self.row.request.params.logprobs is not None
        known = self.row.logprobs[self.sent :] if asked else None
        self.sent += len(tokens)
        return Piece(self.transcript and self.transcript.shown(), tokens, known, self.number)

    def records(self) -> list[StepRecord]:
        """The steps that are new."""
        fresh = self.row.records[self.told :]
        self.told += len(fresh)
        return fresh
