"""A replica on paper takes the very steps that the engine takes with models: same rows, same
guesses, same tokens kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.costing.costs import Costs
from foretoken.costing.gamma import Adaptive, Fixed
from foretoken.drafters.lm import LMDrafter
from foretoken.engine.scheduler import Scheduler, Task
from foretoken.lab.agreement import overlaps
from foretoken.lab.measurement.result import Serving
from foretoken.lab.measurement.serving import _expected, _Step
from foretoken.models.table import TableModel
from foretoken.request import Request, Row, StepRecord
from foretoken.sampling.judge import choose
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verify import block
from foretoken_lab.fleet.paper import PaperReplica as Replica
from foretoken_lab.fleet.paper import PaperText as Text
from oracle import random_model

V, ROWS = 6, 3
GREEDY = SamplingParams(temperature=0.0)
COSTS = Costs(
    draft=((0, 0.0), (1, 0.1), (8, 0.8)),
    score=((1, 1.0), (4, 1.1), (16, 2.0)),
    verify=((1, 0.1),),
    rows=((1, 1.0), (3, 1.5)),
)
SERVING = Serving(ROWS, COSTS, ((1, 1.0), (64, 2.0)), ((0, 0.0), (64, 0.5)), ((1, 0.1),), 0.2)
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, V - 1), min_size=1, max_size=12),  # prompt
        st.integers(1, 12),  # limit
        st.integers(0, 12),  # the step before which it comes
    ),
    min_size=1,
    max_size=7,
)


def models() -> tuple[TableModel, LMDrafter]:
    """A pair that agrees at some places."""
    target, draft = random_model(1, V), random_model(2, V)

    def mixed(text: tuple[int, ...]) -> Any:
        return (target(text) + draft(text)) / 2

    return TableModel(target, V), LMDrafter(TableModel(mixed, V), V)


def told(rows: Iterable[Row]) -> list[list[tuple[Any, ...]]]:
    def step(one: StepRecord) -> tuple[Any, ...]:
        return one.rows, one.gamma, one.drafted, one.accepted, len(one.kept)

    return [[step(one) for one in row.records] for row in rows]


def engine(requests: list[tuple[Request, int]], gamma: int | None) -> list[Row]:
    """What becomes of requests that come before given steps."""
    scheduler = Scheduler(*models(), ROWS, clock=lambda: 0.0)
    judge, policy = choose(block), Adaptive(COSTS) if gamma is None else Fixed(gamma)
    rows = [Row.of(request) for request, _ in requests]
    for step in range(200):
        due = [row for row, (_, before) in zip(rows, requests, strict=True) if before == step]
        scheduler.submit([Task(row, judge, policy) for row in due])
        scheduler.step()
    return rows


def paper(requests: list[tuple[Request, int]], gamma: int | None, texts: list[Text]) -> list[Row]:
    replica = Replica(texts, SERVING, gamma)
    served = {}
    for step in range(200):
        for text, (request, before) in zip(texts, requests, strict=True):
            if before == step:
                own = replace(request, prompt=text.ids)
                served[text.number] = replica.submit(own, replica.clock.seconds)
        replica.step()
    return [served[text.number].row for text in texts]


@pytest.mark.parametrize("gamma", [None, 2])
@given(REQUESTS)
@settings(max_examples=8, deadline=None)
def test_steps_are_those_of_an_engine_with_models(gamma: int | None, drawn: Any) -> None:
    """At temperature 0, where what `measure` sees of a text decides which guesses are kept."""
    requests = [
        (Request(prompt, limit, RowKey(0, i), params=GREEDY), before)
        for i, (prompt, limit, before) in enumerate(drawn)
    ]
    rows = engine(requests, gamma)
    assert all(row.finish_reason == "length" for row in rows)
    target, drafter = models()
    texts = [
        Text(i, len(row.request.prompt), tuple(betas(target, drafter, row)))
        for i, row in enumerate(rows)
    ]
    assert told(paper(requests, gamma, texts)) == told(rows)


def betas(target: TableModel, drafter: LMDrafter, row: Row) -> list[float | None]:
    return overlaps(target, drafter, row.request, row.new_tokens, GREEDY)


def test_a_step_takes_what_the_measurement_expects_of_it() -> None:
    """So what `joining` is measured as is what steps take beyond that."""
    serving = replace(SERVING, costs=replace(COSTS, change=0.3), passes=((1, 1.2), (3, 1.1)))
    texts = [Text(i, 5 + i, (1.0, 0.0, 1.0)) for i in range(3)]
    replica = Replica(texts, serving, 2)
    sizes = [0]

    def taken(joined: list[int]) -> None:
        requests = (Request(texts[i].ids, 9, RowKey(0, i), params=GREEDY) for i in joined)
        served = [replica.submit(request, replica.clock.seconds) for request in requests]
        before = replica.clock.seconds
        replica.step()
        records = [one.row.records[-1] for one in replica.open]
        step = _Step(0.0, records, [texts[i].prompt for i in joined], sizes[-1])
        sizes.append(step.size)
        spent = replica.clock.seconds - before - len(served) * serving.joining
        assert spent == pytest.approx(_expected(step, serving))

    taken([0])
    taken([1, 2])
