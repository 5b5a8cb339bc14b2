"""Output of a row as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.inputs import make_transcript as read_text
from foretoken.records import PartialOutput, StepRecord
from foretoken.request import Piece, SequenceState
from foretoken.text.decoding import StoppingDetokenizer, TokenText, decode_continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class OutputStream:
    """A row, and how much of it has been shown. The pieces' texts and tokens concatenate to the
    completion's; between two of them no step may run."""

    seq: SequenceState
    transcript: StoppingDetokenizer | None  # among the row's endings; None without a tokenizer
    index: int = 0  # of the row among those that are shown together
    num_sent_tokens: int = 0  # tokens
    num_sent_steps: int = 0  # steps
    num_resumed_tokens: int = 0  # tokens that were written elsewhere
    pieces: list[TokenText] = field(default_factory=list[TokenText])  # of the last tokens

    def resume(self, begun: PartialOutput) -> None:
        """The fresh row goes on behind what was written of it elsewhere."""
        tokens = [token for step in begun.steps for token in step.new_tokens]
        self.seq.commit(tokens)
        self.seq.records += begun.steps
        self.num_sent_tokens = self.num_resumed_tokens = len(tokens)
        self.num_sent_steps = len(begun.steps)
        if self.transcript is not None:
            self.transcript.take_pieces()  # were shown there

    def take_piece(self) -> Piece | None:
        """Return the new tokens and their text; None where there are none."""
        tokens = self.seq.new_tokens[self.num_sent_tokens :]
        if not tokens:
            return None
        wanted = self.seq.request.params.logprobs is not None
        likelihoods = (
            self.seq.logprobs[self.num_sent_tokens - self.num_resumed_tokens :] if wanted else None
        )
        self.num_sent_tokens += len(tokens)
        return Piece(self.take_text(len(tokens)), tokens, likelihoods, self.index)

    def take_text(self, count: int = 0) -> str | None:
        """Return the new text that may be shown, of `count` new tokens; None without a
        tokenizer."""
        if self.transcript is None:
            return None
        *pieces, last = self.transcript.take_pieces() or [TokenText("", 0)]
        if len(pieces) >= max(1, count):  # the end is no token
            pieces[-1] = TokenText(pieces[-1].text + last.text, pieces[-1].offset)
        else:
            pieces.append(last)
        self.pieces = pieces
        return "".join(piece.text for piece in pieces)

    def take_records(self) -> list[StepRecord]:
        """The steps that are new."""
        fresh = self.seq.records[self.num_sent_steps :]
        self.num_sent_steps += len(fresh)
        return fresh


def make_output_stream(
    seq: SequenceState, tokenizer: PreTrainedTokenizerBase | None, index: int = 0
) -> OutputStream:
    """Return the stream of a fresh row, whose text is read from now on."""
    transcript = find_transcript(seq)
    if transcript is None and tokenizer is not None:
        transcript = read_text(seq.request, tokenizer)
        seq.stop_conditions.append(transcript)
    return OutputStream(seq, transcript, index)


def decode_output(seq: SequenceState, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the text that new tokens add to the prompt's; None without a tokenizer."""
    if tokenizer is None:
        return None
    transcript = find_transcript(seq)
    if transcript is not None and seq.finish_reason is not None:
        return transcript.text
    return decode_continuation(tokenizer, seq.request.prompt, seq.visible_tokens)


def find_transcript(seq: SequenceState) -> StoppingDetokenizer | None:
    """Return the reader of a row's text for stop strings."""
    return next(
        (each for each in seq.stop_conditions if isinstance(each, StoppingDetokenizer)), None
    )
