"""Ways run in turn: who writes when, and the figures by hand."""

from __future__ import annotations

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.models.table import TableModel
from foretoken.records import Stats, StepRecord
from foretoken.request import Completion
from foretoken.speculator import Speculator
from foretoken_lab.experiments.beyond import (
    by_prompt,
    in_turn,
    seconds_per_token,
    tokens_per_call,
    way,
)
from oracle import random_model

V = 6
P, Q = random_model(1, V), random_model(2, V)


def test_every_way_in_turn_after_a_short_run_that_does_not_count():
    spec = Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V))
    asked: list[tuple[str, int, int, int]] = []

    def noted(name: str, gamma: int):
        write = way(spec, gamma=gamma, temperature=1.0)

        def noting(prompt, seed, tokens):
            asked.append((name, prompt[0], seed, tokens))
            return write(prompt, seed, tokens)

        return noting

    ways = {"plain": noted("plain", 0), "fast": noted("fast", 2)}
    runs = in_turn(ways, [[1], [2]], repeats=2, tokens=20, seed=7)
    order = ["plain", "fast"]
    warm = [(name, prompt, 7, 8) for prompt in (1, 2) for name in order]
    first = [*((name, 1, 7, 20) for name in order), *((name, 2, 7, 20) for name in order[::-1])]
    then = [*((name, 1, 8, 20) for name in order[::-1]), *((name, 2, 8, 20) for name in order)]
    assert asked == warm + first + then
    assert all(len(text.tokens) == 20 for own in runs.values() for texts in own for text in texts)
    again = way(spec, gamma=2, temperature=1.0)([2], 8, 20)
    assert runs["fast"][1][1].tokens == again.tokens
    assert tokens_per_call(runs["plain"]) == 1 < tokens_per_call(runs["fast"])


def text(tokens: int, seconds: float) -> Completion:
    """A step of one token and nine seconds, which does not count, and one of these."""
    stats = Stats(2, 0, 0, 0, 2, None, None, None, 9 + seconds, 8.0, 9.0, "", "")
    first, rest = (
        StepRecord(0, (), 0, (0,) * n, (), 0, 0.0, 0.0, 0.0, rows=1) for n in (1, tokens)
    )
    return Completion(None, [0] * (1 + tokens), "length", (0, 0), stats, [first, rest])


def test_figures_by_hand():
    runs = [[text(2, 1.0), text(1, 3.0)], [text(2, 2.0), text(2, 1.0)], [text(2, 9.0)] * 2]
    assert by_prompt(runs) == [[0.5, 1.0, 4.5], [3.0, 0.5, 4.5]]
    assert seconds_per_token(runs) == pytest.approx(4 / 3)  # of 4 / 3, 3 / 4 and 18 / 4
    assert tokens_per_call(runs) == 17 / 12


def test_an_interruption_is_no_result():
    spec = Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V))

    class Impatient(TableModel):
        def score(self, blocks, need):
            raise KeyboardInterrupt

    broken = Speculator(Impatient(P, V), LMDrafter(TableModel(Q, V), V))
    with pytest.raises(KeyboardInterrupt):
        in_turn({"a": way(spec), "b": way(broken)}, [[1]], repeats=1, tokens=4)
