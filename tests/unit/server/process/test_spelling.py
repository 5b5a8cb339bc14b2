"""Tokens as text and bytes, for every kind of tokenizer."""

from __future__ import annotations

import pytest

from foretoken.records import StepRecord
from foretoken.server.api.answers import shown_step
from foretoken.server.process.spelling import Spelling
from tiny import TEXT, byte_level, metaspace


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_bytes_concatenate_to_the_text(make) -> None:
    tokenizer = make()
    words = Spelling(tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    spelled = b"".join(words.word(token)[1] for token in ids)
    assert spelled.decode().strip() == tokenizer.decode(ids).strip()


def test_a_token_within_a_character_is_shown_as_a_replacement() -> None:
    words = Spelling(byte_level())
    cut = [token for token in range(320) if words.text(token) == "\ufffd"]
    assert cut and all(len(words.word(token)[1]) >= 1 for token in cut)


def test_ids_stand_for_themselves_without_a_tokenizer() -> None:
    assert Spelling(None).word(7) == ("<7>", b"")


def test_ids_of_padding_have_no_text() -> None:
    assert Spelling(byte_level()).word(100_000) == ("", b"")


@pytest.mark.parametrize(
    ("draft_tokens", "accepted", "kept", "sources", "rejected"),
    [
        ((), 0, (5,), ["plain"], []),
        ((5, 6), 2, (5, 6, 7), ["accepted", "accepted", "bonus"], []),
        ((5, 6), 1, (5, 7), ["accepted", "corrected"], [6]),
        ((5, 6), 0, (7,), ["corrected"], [5, 6]),
        ((5, 6), 2, (5, 6), ["accepted", "accepted"], []),  # the text ended within the draft tokens
    ],
)
def test_where_tokens_come_from(draft_tokens, accepted, kept, sources, rejected) -> None:
    step = StepRecord(len(draft_tokens), draft_tokens, accepted, kept, (), 0, 0.0, 0.0, 0.0, 1)
    words = Spelling(None)
    told = shown_step(step, {token: words.text(token) for token in (*draft_tokens, *kept)})
    assert [token["source"] for token in told["tokens"]] == sources
    assert [token["id"] for token in told["tokens"]] == list(kept)
    assert [token["id"] for token in told["rejected"]] == rejected
    assert told["predicted"] is False and all(
        token["text"] == "<6>" for token in told["rejected"][-1:]
    )
