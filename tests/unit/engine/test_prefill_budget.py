"""How much is read beside rows that run."""

from __future__ import annotations

import pytest

from foretoken.engine.prefill_budget import (
    FIRST_CHUNK_TOKENS,
    MAX_CHUNK_TOKENS,
    MAX_STEP_SLOWDOWN,
    MIN_CHUNK_TOKENS,
    UNNOTICED_STEP_SECONDS,
    PrefillBudget,
)
from foretoken.request import Request, SequenceState
from foretoken.sampling.keys import SequenceKey


def row(behind: int) -> SequenceState:
    state = SequenceState.from_request(Request([1] * 5000, 9, SequenceKey(0, 0)))
    state.num_pending, state.in_batch = behind, True
    return state


def after(base: float, each: float, token: float, rows: range = range(1, 5)) -> PrefillBudget:
    """A pace that has seen steps of some rows, which read nothing or 50 tokens."""
    pace = PrefillBudget()
    for count in rows:
        pace.record_step([1] * count, base + each * count)
        pace.record_step([1] * count + [50], base + each * count + 50 * token)
    return pace


def test_rows_that_run_read_their_last_token_and_the_first_to_come_reads_most() -> None:
    pace = PrefillBudget()
    assert pace.schedule_tokens([row(1), row(1)]) == [1, 1]
    assert pace.schedule_tokens([row(1), row(40), row(40), row(40)]) == [
        1,
        40,
        FIRST_CHUNK_TOKENS - 40,
        0,
    ]
    assert pace.schedule_tokens([row(600), row(7)]) == [MAX_CHUNK_TOKENS, 0]  # nobody waits


def test_what_was_read_already_counts() -> None:
    pace = PrefillBudget()
    assert pace.schedule_tokens([row(1), row(40), row(40)], already_prefilled=20) == [
        1,
        40,
        FIRST_CHUNK_TOKENS - 60,
    ]
    assert pace.schedule_tokens([row(1), row(40)], already_prefilled=FIRST_CHUNK_TOKENS) == [
        1,
        MIN_CHUNK_TOKENS,
    ]


def test_a_step_takes_so_many_times_as_long_as_one_that_reads_nothing() -> None:
    pace = after(base=0.1, each=0.02, token=0.002)
    for running in (1, 4, 9):  # also where no such step was seen
        assert pace.compute_budget(running, 1) == pytest.approx(
            (MAX_STEP_SLOWDOWN - 1) * (0.1 + 0.02 * running) / 0.002, abs=1.01
        )


def test_a_long_prompt_does_not_make_plain_steps_forgotten() -> None:
    pace = after(base=0.1, each=0.02, token=0.002)
    for _ in range(200):
        pace.record_step([1] * 4 + [50], 0.18 + 50 * 0.002)
    assert pace.compute_budget(4, 1) == pytest.approx(
        (MAX_STEP_SLOWDOWN - 1) * 0.18 / 0.002, abs=1.01
    )


def test_each_prompt_has_its_share() -> None:
    pace = after(base=0.1, each=0.02, token=0.02)
    for reading in (6, 15):
        longer = (MAX_STEP_SLOWDOWN - 1) * 0.12 * reading
        assert pace.compute_budget(1, reading) == pytest.approx(longer / 0.02, abs=1.01)


def test_short_steps_may_grow_to_what_nobody_notices() -> None:
    pace = after(base=0.001, each=0.0005, token=0.0002)
    assert pace.compute_budget(2, 2) == pytest.approx(
        (UNNOTICED_STEP_SECONDS - 0.002) / 0.0002, abs=1.01
    )


def test_a_step_that_takes_many_times_as_long_as_its_like_changes_little() -> None:
    pace = after(base=0.1, each=0.02, token=0.002, rows=range(1, 9))
    before = pace.compute_budget(4, 1)
    pace.record_step([1] * 4 + [50], 5.0)
    assert pace.compute_budget(4, 1) == pytest.approx(before, rel=0.2)


def test_rows_that_begin_to_run_while_others_read_are_told_from_what_is_read() -> None:
    """No step reads nothing meanwhile: what is known of those of one row would make others' share
    look like the cost of reading."""
    pace = PrefillBudget()
    pace.record_step([1], 0.12)
    for _ in range(3):
        for count in range(1, 16):
            pace.record_step([1] * count + [20], 0.1 + 0.02 * count + 20 * 0.002)
    for read in (MIN_CHUNK_TOKENS, 40):
        pace.record_step([1] * 15 + [read], 0.4 + read * 0.002)
    assert pace.compute_budget(15, 1) == pytest.approx(
        (MAX_STEP_SLOWDOWN - 1) * 0.4 / 0.002, rel=0.05
    )


def test_noise_does_not_leave_all_to_what_is_read() -> None:
    """The machine grew slow as more rows ran: as if a row took 13 ms and a step without them less
    than nothing. A token would seem to take 9 ms, and so few would be read that none tells more."""
    pace = PrefillBudget()
    for _ in range(16):
        pace.record_step([1] * 16, 0.03)
    for rows, seconds in ((6, 0.04), (9, 0.08), (12, 0.12)):
        pace.record_step([1] * rows + [MIN_CHUNK_TOKENS], seconds)
    assert pace.compute_budget(6, 10) > 2 * MIN_CHUNK_TOKENS
    for _ in range(20):
        read = pace.compute_budget(6, 10)
        pace.record_step([1] * 6 + [read], 0.02 + 0.0012 * read)
    right = (MAX_STEP_SLOWDOWN - 1) * 0.02 * 10 / 0.0012
    assert right / 1.5 < pace.compute_budget(6, 10) < right * 1.5


def test_it_reads_something_and_never_all_at_once() -> None:
    assert after(base=0.1, each=0.0, token=1.0).compute_budget(1, 1) == MIN_CHUNK_TOKENS
    assert after(base=0.1, each=0.0, token=1e-9).compute_budget(1, 1) == MAX_CHUNK_TOKENS
    assert PrefillBudget().compute_budget(0, 5) == MAX_CHUNK_TOKENS
