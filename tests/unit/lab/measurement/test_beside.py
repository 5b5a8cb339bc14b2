"""Engines at work beside a measurement begin before it and are gone after it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from foretoken.errors import RefusedError
from foretoken.lab.measurement.result import MeasureOptions
from foretoken.lab.measurement.serving import beside
from served import LOADING, pair


def options(target: str, draft: str) -> MeasureOptions:
    return MeasureOptions(target, draft, "p.txt", "0", max_new_tokens=4, **LOADING)


def test_they_work_for_as_long_as_the_block_runs(tmp_path: Path) -> None:
    with beside(1, options(*pair(tmp_path)), ["a prompt", "another"], 2):
        (worker,) = multiprocessing.active_children()
        assert worker.is_alive()
    assert not multiprocessing.active_children()


@pytest.mark.prove  # a process takes seconds to begin
def test_one_that_cannot_work_is_told_of(tmp_path: Path) -> None:
    target, _ = pair(tmp_path)
    refusal = pytest.raises(RefusedError, match="beside the measured one cannot work: .*nothing")
    with refusal, beside(1, options(target, str(tmp_path / "nothing")), ["a"], 2):
        pytest.fail("the measurement began")
    assert not multiprocessing.active_children()


def test_none_is_no_process() -> None:
    with beside(0, options("t", "d"), ["a"], 2):
        assert not multiprocessing.active_children()
