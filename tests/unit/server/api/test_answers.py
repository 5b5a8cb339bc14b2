"""Steps as answers show them."""

from __future__ import annotations

import pytest

from foretoken.records import StepRecord
from foretoken.server.api.answers import shown_step


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
    told = shown_step(step, {token: f"<{token}>" for token in (*draft_tokens, *kept)})
    assert [token["source"] for token in told["tokens"]] == sources
    assert [token["id"] for token in told["tokens"]] == list(kept)
    assert [token["id"] for token in told["rejected"]] == rejected
    assert told["predicted"] is False and all(
        token["text"] == "<6>" for token in told["rejected"][-1:]
    )
