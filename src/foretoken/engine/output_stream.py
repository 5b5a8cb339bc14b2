"""Output of a row as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.inputs import transcript as read_text
from foretoken.records import Begun, StepRecord
from foretoken.request import Piece, Row
from foretoken.text.decoding import TokenText, Transcript, continued

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class OutputStream:
    """A row, and how much of it has been shown. The pieces' texts and tokens concatenate to the
    completion's; between two of them no step may run."""

    row: Row
    transcript: Transcript | None  # among the row's endings; None without a tokenizer
    number: int = 0  # of the row among those that are shown together
    sent: int = 0  # tokens
    told: int = 0  # steps
    before: int = 0  # tokens that were written elsewhere
    pieces: list[TokenText] = field(default_factory=list[TokenText])  # of the last tokens

    def resume(self, begun: Begun) -> None:
        """The fresh row goes on behind what was written of it elsewhere."""
        tokens = [token for step in begun.steps for token in step.kept]
        self.row.commit(tokens)
        self.row.records += begun.steps
        self.sent = self.before = len(tokens)
        self.told = len(begun.steps)
        if self.transcript is not None:
            self.transcript.pieces()  # were shown there

    def piece(self) -> Piece | None:
        """Return the new tokens and their text; None where there are none."""
        tokens = self.row.new_tokens[self.sent :]
        if not tokens:
            return None
        wanted = self.row.request.params.logprobs is not None
        likelihoods = self.row.logprobs[self.sent - self.before :] if wanted else None
        self.sent += len(tokens)
        return Piece(self.text(len(tokens)), tokens, likelihoods, self.number)

    def text(self, count: int = 0) -> str | None:
        """Return the new text that may be shown, of `count` new tokens; None without a
        tokenizer."""
        if self.transcript is None:
            return None
        *pieces, last = self.transcript.pieces() or [TokenText("", 0)]
        if len(pieces) >= max(1, count):  # the end is no token
            pieces[-1] = TokenText(pieces[-1].text + last.text, pieces[-1].offset)
        else:
            pieces.append(last)
        self.pieces = pieces
        return "".join(piece.text for piece in pieces)

    def records(self) -> list[StepRecord]:
        """The steps that are new."""
        fresh = self.row.records[self.told :]
        self.told += len(fresh)
        return fresh


def output_stream(
    row: Row, tokenizer: PreTrainedTokenizerBase | None, number: int = 0
) -> OutputStream:
    """Return the stream of a fresh row, whose text is read from now on."""
    transcript = transcript_of(row)
    if transcript is None and tokenizer is not None:
        transcript = read_text(row.request, tokenizer)
        row.endings.append(transcript)
    return OutputStream(row, transcript, number)


def text_of(row: Row, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the text that new tokens add to the prompt's; None without a tokenizer."""
    if tokenizer is None:
        return None
    transcript = transcript_of(row)
    if transcript is not None and row.finish_reason is not None:
        return transcript.text
    return continued(tokenizer, row.request.prompt, row.visible)


def transcript_of(row: Row) -> Transcript | None:
    """Return the reader of a row's text for stop strings."""
    return next((each for each in row.endings if isinstance(each, Transcript)), None)
