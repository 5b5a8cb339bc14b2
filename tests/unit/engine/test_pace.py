"""How much is read beside rows that run."""

from __future__ import annotations

from foretoken.engine.pace import LEAST, LONGEST, MOST, Pace
from foretoken.request import Request, Row
from foretoken.sampling.keys import RowKey


def row(behind: int) -> Row:
    made = Row.of(Request([1] * 5000, 9, RowKey(0, 0)))
    made.behind = behind
    return made


def test_rows_that_run_read_their_last_token_and_the_first_to_come_reads_most() -> None:
    pace = Pace()
    assert pace.reads([row(1), row(1)]) == [1, 1]
    assert pace.reads([row(1), row(40), row(40), row(40)]) == [1, 40, pace.most - 40, 0]
    assert pace.reads([row(600), row(7)]) == [MOST, 0]  # nobody waits


def test_a_step_takes_so_many_times_as_long_as_one_that_reads_nothing() -> None:
    pace = Pace()
    for _ in range(50):
        pace.see([1, 1], 0.1)
        pace.see([1, 1, 100], 0.1 + 100 * 0.002)
    assert pace.most == int((LONGEST - 1) * 0.1 / 0.002 + 1e-6)


def test_it_reads_something_and_never_all_at_once() -> None:
    slow, fast = Pace(), Pace()
    for pace, token in ((slow, 1.0), (fast, 1e-9)):
        pace.see([1], 0.1)
        pace.see([1, 64], 0.1 + 64 * token)
    assert slow.most == LEAST and fast.most == MOST


def test_a_pass_without_rows_that_run_says_nothing_of_those() -> None:
    pace = Pace()
    pace.see([1], 0.1)
    before = pace.most
    pace.see([512], 9.0)
    assert pace.most == before
