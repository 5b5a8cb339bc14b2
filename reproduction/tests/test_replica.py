"""A replica on paper takes the very steps that the engine takes with models: same rows, same
draft tokens, same tokens kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretoken.costing.costs import Costs
from foretoken.costing.gamma import AdaptiveGamma, FixedGamma
from foretoken.drafters.lm import LMDrafter
from foretoken.engine.core import EngineCore
from foretoken.engine.scheduler import SequenceTask
from foretoken.measurement.agreement import compute_overlaps
from foretoken.records import StepRecord
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verifier import make_verifier
from oracle import random_model
from reproduction.costs import ServingCosts
from reproduction.fleet import Clock, PaperReplica, PaperText
from reproduction.serving import _expected, _Step
from table import TableModel

V, ROWS = 6, 3
GREEDY = SamplingParams(temperature=0.0)
COSTS = Costs(
    draft=((0, 0.0), (1, 0.1), (8, 0.8)),
    score=((1, 1.0), (4, 1.1), (16, 2.0)),
    verify=((1, 0.1),),
    rows=((1, 1.0), (3, 1.5)),
)
SERVING = ServingCosts(ROWS, COSTS, ((1, 1.0), (64, 2.0)), ((0, 0.0), (64, 0.5)), ((1, 0.1),), 0.2)
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


def told(rows: Iterable[SequenceState]) -> list[list[tuple[Any, ...]]]:
    def step(one: StepRecord) -> tuple[Any, ...]:
        return one.rows, one.gamma, one.drafted, one.accepted, len(one.new_tokens)

    return [[step(one) for one in row.records] for row in rows]


def engine(
    requests: list[tuple[Request, int]], gamma: int | None, clock: Callable[[], float]
) -> list[SequenceState]:
    """What becomes of requests that come before given steps."""
    core = EngineCore(*models(), ROWS, clock=clock)
    verifier, policy = (
        make_verifier(block),
        AdaptiveGamma(COSTS) if gamma is None else FixedGamma(gamma),
    )
    rows = [SequenceState.from_request(request) for request, _ in requests]
    for step in range(200):
        due = [row for row, (_, before) in zip(rows, requests, strict=True) if before == step]
        core.add([SequenceTask(row, verifier, policy) for row in due])
        core.step()
    return rows


def paper(
    requests: list[tuple[Request, int]], gamma: int | None, texts: list[PaperText]
) -> tuple[list[SequenceState], list[float]]:
    """The same on paper, and what its scheduler saw each time it looked at the clock."""
    replica, served, seen = PaperReplica(texts, SERVING, gamma), {}, list[float]()

    def look(clock: Clock) -> float:
        seen.append(clock.seconds)
        return clock.seconds

    with patch.object(Clock, "__call__", look):
        for step in range(200):
            for text, (request, before) in zip(texts, requests, strict=True):
                if before == step:
                    own = replace(request, prompt=text.ids)
                    served[text.number] = replica.submit(own, replica.clock.seconds)
            replica.step()
    return [served[text.number].seq for text in texts], seen


@pytest.mark.parametrize("gamma", [None, 2])
@given(REQUESTS)
@example([([0, 0], 4, 6), ([0] * 7, 1, 7), ([0] * 12, 3, 7)])  # steps' times decide who joins when
@settings(max_examples=8, deadline=None)
def test_steps_are_those_of_an_engine_with_models(gamma: int | None, drawn: Any) -> None:
    """At temperature 0, where what `measure` sees of a text decides which draft tokens are kept.

    How much of a prompt is read beside others follows from the times of steps before: the engine
    gets those of the paper's, once its texts are known.
    """
    requests = [
        (Request(prompt, limit, SequenceKey(0, i), params=GREEDY), before)
        for i, (prompt, limit, before) in enumerate(drawn)
    ]
    rows = engine(requests, gamma, lambda: 0.0)
    assert all(row.finish_reason == "length" for row in rows)
    target, drafter = models()
    texts = [
        PaperText(i, len(row.request.prompt), tuple(betas(target, drafter, row)))
        for i, row in enumerate(rows)
    ]
    served, seen = paper(requests, gamma, texts)
    timed = engine(requests, gamma, iter(seen).__next__)
    assert told(served) == told(timed)
    assert [row.new_tokens for row in timed] == [row.new_tokens for row in rows]


def betas(target: TableModel, drafter: LMDrafter, row: SequenceState) -> list[float | None]:
    return compute_overlaps(target, drafter, row.request, row.new_tokens, GREEDY)


def test_a_step_takes_what_the_measurement_expects_of_it() -> None:
    """So what `joining` is measured as is what steps take beyond that."""
    serving = replace(SERVING, costs=replace(COSTS, change=0.3), passes=((1, 1.2), (3, 1.1)))
    texts = [PaperText(i, 5 + i, (1.0, 0.0, 1.0)) for i in range(3)]
    replica = PaperReplica(texts, serving, 2)
    sizes = [0]

    def taken(joined: list[int]) -> None:
        requests = (Request(texts[i].ids, 9, SequenceKey(0, i), params=GREEDY) for i in joined)
        served = [replica.submit(request, replica.clock.seconds) for request in requests]
        before = replica.clock.seconds
        replica.step()
        records = [one.seq.records[-1] for one in replica.open]
        step = _Step(0.0, records, [texts[i].prompt for i in joined], sizes[-1])
        sizes.append(step.size)
        spent = replica.clock.seconds - before - len(served) * serving.joining
        assert spent == pytest.approx(_expected(step, serving))

    taken([0])
    replica.step()  # in which the draft reads the first prompt
    sizes.append(sum(1 + one.seq.records[-1].drafted for one in replica.open))
    taken([1, 2])
