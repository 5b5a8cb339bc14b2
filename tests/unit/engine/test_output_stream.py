"""What is shown of a row: every token once, with its logprobs and its text."""

from __future__ import annotations

from foretoken.engine.output_stream import OutputStream
from foretoken.request import Request, SequenceState
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.logprobs import Logprobs
from foretoken.sampling.params import SamplingParams
from foretoken.text.decoding import StoppingDetokenizer, TokenText
from tiny import byte_level


def row(**sampling: int) -> SequenceState:
    return SequenceState.from_request(
        Request([3], 9, SequenceKey(0, 0), params=SamplingParams(**sampling))
    )


def test_every_token_once() -> None:
    shown = row()
    output = OutputStream(shown, None, 4)
    assert output.take_piece() is None
    shown.commit([5, 6])
    piece = output.take_piece()
    assert piece is not None and output.take_piece() is None
    assert (piece.text, piece.tokens, piece.logprobs, piece.row) == (None, [5, 6], None, 4)
    shown.commit([7])
    assert (piece := output.take_piece()) is not None and piece.tokens == [7]


def test_text_and_logprobs_come_with_their_tokens() -> None:
    tokenizer = byte_level()
    ids = tokenizer(" was the first").input_ids
    shown = row(logprobs=0)
    transcript = StoppingDetokenizer(tokenizer, [3])
    shown.stop_conditions.append(transcript)
    output, text, likelihoods = OutputStream(shown, transcript), "", list[Logprobs]()
    for token in ids:
        shown.commit([token])
        shown.logprobs.append(Logprobs(token, -1.0, []))
        piece = output.take_piece()
        assert piece is not None and piece.text is not None and piece.logprobs is not None
        text, likelihoods = text + piece.text, [*likelihoods, *piece.logprobs]
    shown.close()
    assert text + transcript.take_text() == transcript.text and likelihoods == shown.logprobs


def test_every_token_has_its_piece() -> None:
    """An end that is not read has that of the text's end; one behind the limit has none."""
    tokenizer = byte_level()
    ids = tokenizer(" was \U0001f40b").input_ids
    for limit, tokens in ((9, [*ids, 0]), (len(ids), ids), (len(ids) - 1, ids)):
        shown = SequenceState.from_request(Request([3], limit, SequenceKey(0, 0), frozenset({0})))
        transcript = StoppingDetokenizer(tokenizer, [3])
        shown.stop_conditions.append(transcript)
        output, pieces, text = OutputStream(shown, transcript), list[TokenText](), ""
        for block in (tokens[:2], tokens[2:]):
            shown.commit(block)
            piece = output.take_piece()
            assert piece is not None and len(output.pieces) == len(piece.tokens)
            pieces, text = [*pieces, *output.pieces], text + (piece.text or "")
        assert "".join(each.text for each in pieces) == text == transcript.text
        assert [each.offset for each in pieces][-1] == (len(text) if limit == 9 else 5)
