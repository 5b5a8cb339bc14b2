"""Ways run in turn: who writes when, and the figures by hand."""

from __future__ import annotations

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.records import Stats, StepRecord
from foretoken.request import Completion
from foretoken.speculator import Speculator
from oracle import random_model
from reproduction.experiments.beyond import in_turn, seconds_per_token, tokens_per_call
from table import TableModel

V = 6
P, Q = random_model(1, V), random_model(2, V)


def test_every_way_in_turn_after_a_short_run_that_does_not_count():
    asked: list[tuple[int, int, int, int]] = []

    class Noting(Speculator):
        def generate(self, prompts, *args, **options):
            ((first,),) = prompts
            asked.append((options["gamma"], first, options["seed"], options["max_new_tokens"]))
            return super().generate(prompts, *args, **options)

    spec = Noting(TableModel(P, V), LMDrafter(TableModel(Q, V), V))
    ways = {name: (spec, {"gamma": g, "temperature": 1.0}) for name, g in (("a", 0), ("b", 2))}
    runs = in_turn(ways, [[1], [2]], repeats=2, tokens=20, seed=7)
    order = [0, 2]
    warm = [(gamma, prompt, 7, 8) for prompt in (1, 2) for gamma in order]
    first = [*((gamma, 1, 7, 20) for gamma in order), *((gamma, 2, 7, 20) for gamma in order[::-1])]
    then = [*((gamma, 1, 8, 20) for gamma in order[::-1]), *((gamma, 2, 8, 20) for gamma in order)]
    assert asked == warm + first + then
    assert all(len(text.tokens) == 20 for own in runs.values() for texts in own for text in texts)
    (again,) = spec.generate([[2]], gamma=2, temperature=1.0, seed=8, max_new_tokens=20)
    assert runs["b"][1][1].tokens == again.tokens
    assert tokens_per_call(runs["a"]) == 1 < tokens_per_call(runs["b"])


def text(tokens: int, seconds: float) -> Completion:
    """A step of one token and nine seconds, which does not count, and one of these."""
    times = 9 + seconds, 8.0, 9.0
    stats = Stats(2, 0, 0, 0, 2, None, None, None, *times, "", "", prefill_end_seconds=9.0)
    first, rest = (
        StepRecord(0, (), 0, (0,) * n, (), 0, 0.0, 0.0, 0.0, rows=1) for n in (1, tokens)
    )
    return Completion(None, [0] * (1 + tokens), "length", (0, 0), stats, [first, rest])


def test_figures_by_hand():
    runs = [[text(2, 1.0), text(1, 3.0)], [text(2, 2.0), text(2, 1.0)], [text(2, 9.0)] * 2]
    assert seconds_per_token(runs) == pytest.approx(4 / 3)  # of 4 / 3, 3 / 4 and 18 / 4
    assert tokens_per_call(runs) == 17 / 12


def test_an_interruption_is_no_result():
    spec = Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V))

    class Impatient(TableModel):
        def score(self, blocks, need):
            raise KeyboardInterrupt

    broken = Speculator(Impatient(P, V), LMDrafter(TableModel(Q, V), V))
    with pytest.raises(KeyboardInterrupt):
        in_turn({"a": (spec, {}), "b": (broken, {})}, [[1]], repeats=1, tokens=4)
