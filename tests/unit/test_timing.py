"""Turns, round after round; medians and quartiles."""

from __future__ import annotations

from time import sleep

from foretoken.timing import Spread, measure_seconds, summarize, take_turns, time_in_turns


def test_median_and_quartiles():
    assert summarize([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert summarize([2.0]) == Spread(2.0, 2.0, 2.0, 1)


def test_contestants_take_turns_and_the_first_rounds_warm_up():
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) or len(called) for name in "ab"}
    rounds = take_turns(calls, 2, warm_up=1)
    assert next(rounds) == {"a": 3, "b": 4} and called == list("abab")
    assert list(rounds) == [{"a": 5, "b": 6}] and called == list("ababab")


def test_seconds_of_each_round():
    assert measure_seconds(lambda: sleep(0.002)) >= 0.002
    seconds = time_in_turns({"slow": lambda: sleep(0.002), "quick": int}, 3, warm_up=0)
    assert [len(each) for each in seconds.values()] == [3, 3]
    assert min(seconds["slow"]) >= 0.002 > min(seconds["quick"])


def test_a_rest_comes_before_each_turn():
    assert measure_seconds(lambda: list(take_turns({1: int, 2: int}, 1, rest=0.002))) >= 0.008
