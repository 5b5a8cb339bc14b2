"""Rows: what is committed, where they end, and what their records sum up to."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.errors import ControlError
from foretoken.records import StepRecord
from foretoken.request import (
    Completion,
    Request,
    SequenceState,
    compute_stats,
    require_uninterrupted,
)
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams


def row(limit: int = 5, eos: tuple[int, ...] = (9,)) -> SequenceState:
    return SequenceState.from_request(Request([1, 2], limit, SequenceKey(0, 0), frozenset(eos)))


def record(**changes) -> StepRecord:
    values = {
        "gamma": 2,
        "draft_tokens": (3, 4),
        "accepted": 1,
        "new_tokens": (3, 5),
        "overlaps": (0.5, 0.25),
        "draft_calls": 2,
        "draft_seconds": 0.1,
        "score_seconds": 0.2,
        "verify_seconds": 0.3,
        "rows": 1,
    }
    return StepRecord(**{**values, **changes})


def test_a_fresh_row():
    fresh = row()
    assert (fresh.tokens, fresh.new_tokens, fresh.num_remaining) == ([1, 2], [], 5)
    fresh.commit([3])
    assert fresh.request.prompt == [1, 2]  # not the same list


def test_commit_ends_at_the_first_end_of_sequence():
    r = row(eos=(9, 8))
    assert r.commit([3, 8, 9, 4]) == [3, 8]
    assert (r.new_tokens, r.finish_reason) == ([3, 8], "stop")


def test_an_end_of_sequence_in_the_prompt_is_none():
    r = SequenceState.from_request(Request([9], 5, SequenceKey(0, 0), frozenset({9})))
    assert r.commit([3]) == [3]
    assert r.finish_reason is None


def test_stats_sum_up_the_records():
    r = row(limit=9)
    r.commit([3, 5])
    r.commit([6])
    r.records = [
        record(),
        record(draft_tokens=(), new_tokens=(6,), accepted=0, overlaps=(), draft_calls=0),
    ]
    s = compute_stats(r, "table", "none")
    assert (s.target_calls, s.draft_calls, s.drafted, s.accepted) == (2, 2, 2, 1)
    # of the distributions, where accepted / drafted is 1 / 2
    assert s.alpha == pytest.approx(0.375)
    assert s.accepted_per_drafted == 0.5
    assert s.tokens_per_call == 1.5
    assert json.loads(json.dumps(s.to_dict()))["runtime"] == "table"


def test_a_completion_is_shown_in_a_line():
    fresh = row(limit=500)
    for _ in range(200):
        fresh.records.append(record())
        fresh.commit([3, 5])
    stats_of = compute_stats(fresh, "table", "table")
    long = Completion("It was, " * 300, fresh.new_tokens, "length", (0, 0), stats_of, fresh.records)
    assert repr(long) == (
        "Completion(text='It was, It was, It was, It was, It was, It was, It was, ..., 400 tokens, "
        "finish_reason='length', alpha=0.38, tokens_per_call=2.00)"
    )
    stats_of = compute_stats(row(), "table", "table")
    bare = Completion(None, [3, 5], "stop", (0, 0), stats_of, [])
    assert repr(bare) == "Completion(tokens=[3, 5], 2 tokens, finish_reason='stop')"
    assert repr([bare]) == f"[{bare!r}]"


class Third:
    """Ends a text with its third new token, or as it closes."""

    def __init__(self, late: bool = False) -> None:
        self.late, self.read_so_far, self.closed = late, [], 0

    def append_token(self, token: int) -> str | None:
        self.read_so_far.append(token)
        return "third" if len(self.read_so_far) == 3 and not self.late else None

    def close(self) -> str | None:
        self.closed += 1
        return "late" if self.late else None


def test_the_reason_of_a_stop_is_the_id() -> None:
    r = row()
    assert r.commit([3, 9]) == [3, 9]
    assert (r.finish_reason, r.stop_reason, r.visible_tokens) == ("stop", 9, [3])


def test_an_id_is_shown_where_it_is_to_be_included() -> None:
    r = row()
    params = SamplingParams(include_stop_string=True, stop_token_ids=(9,))
    r.request, r.stop_conditions = replace(r.request, params=params), [Third()]
    r.commit([3, 9])
    assert r.visible_tokens == [3, 9] and r.stop_conditions[0].read_so_far == [3, 9]


def test_what_else_ends_a_text_is_asked_token_by_token() -> None:
    r = row(limit=9)
    r.stop_conditions = [Third()]
    assert r.commit([1, 2]) == [1, 2] and r.finish_reason is None
    assert r.commit([3, 4]) == [3]
    assert (r.finish_reason, r.stop_reason, r.visible_tokens) == ("stop", "third", [1, 2, 3])
    assert r.stop_conditions[0].closed == 1
    assert r.commit([5]) == []  # nothing follows


def test_what_could_not_be_read_before_may_end_it_at_the_limit() -> None:
    r = row(limit=2)
    r.stop_conditions = [Third(late=True)]
    r.commit([1, 2])
    assert (r.finish_reason, r.stop_reason) == ("stop", "late")


def test_an_ending_that_fails_fails_its_row() -> None:
    class Broken(Third):
        def append_token(self, token: int) -> str | None:
            raise ControlError("stopping Broken raised ValueError: no")

    r, late = row(), Third(late=True)
    r.stop_conditions = [Broken(), late]
    assert r.commit([1, 2]) == [1]
    assert r.finish_reason == "error" and "Broken" in str(r.error)
    assert late.read_so_far == [1] and late.closed == 1 and r.stop_reason is None


def test_interrupted_rows_raise():
    whole: Any = [SimpleNamespace(finish_reason="length"), SimpleNamespace(finish_reason="eos")]
    assert require_uninterrupted(whole) is whole and require_uninterrupted([]) == []
    with pytest.raises(KeyboardInterrupt):
        require_uninterrupted([*whole, SimpleNamespace(finish_reason="interrupted")])
