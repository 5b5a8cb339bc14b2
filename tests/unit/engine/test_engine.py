"""Requests in, events out: what `generate` gives, whatever comes and goes beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest

from foretoken import Engine, Event, InputError, RefusedError, SamplingParams, Speculator
from foretoken.costing.costs import Costs
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import ForetokenError
from foretoken.generation_config import EndTokens
from foretoken.models.base import Capabilities
from foretoken.records import PartialOutput, StepRecord
from oracle import random_model
from table import TableModel
from tiny import byte_level

pytestmark = pytest.mark.daily

V = 320
P, Q = (random_model(seed, V) for seed in (1, 2))
SAMPLING = SamplingParams(1.0, max_new_tokens=12)


def speculator(tokenizer: bool = False, target=P) -> Speculator:
    spelling = byte_level() if tokenizer else None
    return Speculator(TableModel(target, V), LMDrafter(TableModel(Q, V), V), spelling, EndTokens())


def drained(engine: Engine, most: int = 500) -> list[Event]:
    events: list[Event] = []
    for _ in range(most):
        if not engine.running and not engine.waiting:
            return events
        events += engine.step()
    raise AssertionError("the engine never ends")


COSTS = Costs(((0, 0.0), (4, 0.004)), ((1, 0.01), (5, 0.012)), ((1, 0.0), (5, 0.0)))
WAYS = {
    "fixed gamma": {"gamma": 3},
    "plain": {"gamma": 0},
    "its own gamma": {"deterministic": True},
    "controls": {"gamma": 2, "presence_penalty": 0.7, "stop_strings": "e", "min_new_tokens": 9},
    "a grammar": {"gamma": 2, "structured": {"regex": "[a-z]{20}"}, "stop_token_ids": [0]},
    "logprobs": {"gamma": 2, "logprobs": 1, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_goes_on_in_another_engine_as_it_would_have_in_the_first(way: str) -> None:
    spec = speculator(tokenizer=True)
    spec.costing.measured |= {("sampled", rows): COSTS for rows in (1, 16)}
    sampling = {"temperature": 0.9, "max_new_tokens": 24, **WAYS[way]}
    prompt = "It was the way that long prompts go on and on"
    whole, parts = [], []
    with Engine(spec) as engine:
        engine.add(prompt, seed=5, **sampling)
        whole = drained(engine)
    assert len(whole) > 1
    for cut in range(1, len(whole), 3):
        parts = whole[:cut]
        with Engine(spec) as engine:
            engine.add("Others", seed=6, temperature=1.0, max_new_tokens=9, gamma=1)
            engine.step()
            steps = [step for event in parts for step in event.steps]
            id = engine.add(prompt, seed=5, begun=PartialOutput(steps), **sampling)
            parts = parts + [event for event in drained(engine) if event.id == id]
        last, unbroken = parts[-1].completion, whole[-1].completion
        assert [t for e in parts for t in e.tokens] == unbroken.tokens == last.tokens
        assert "".join(e.text for e in parts) == unbroken.text == last.text
        assert last.finish_reason == unbroken.finish_reason
        assert last.stats.target_calls == unbroken.stats.target_calls
        known = [[each for e in some for each in e.logprobs or ()] for some in (parts, whole)]
        assert known[0] == known[1] and len(known[0]) in (0, len(unbroken.tokens))
        assert last.prompt_logprobs == unbroken.prompt_logprobs


def test_a_request_may_have_the_callers_id() -> None:
    with Engine(speculator()) as engine:
        options: Any = {"gamma": 1, "max_new_tokens": 2}
        assert engine.add([1], id=1, **options) == 1
        with pytest.raises(InputError, match="id is 1; give a whole number that no other"):
            engine.add([1], id=1, **options)
        assert [engine.add([1], **options) for _ in range(2)] == [0, 2]
        ended = set[int]()
        while len(ended) < 3:
            ended |= {event.id for event in engine.step() if event.finish_reason}
        assert ended == {0, 1, 2} and engine.add([1], id=1, **options) == 1


def test_steps_that_end_a_text_are_not_gone_on_with() -> None:
    with Engine(speculator()) as engine:
        engine.add([1, 2], SAMPLING, gamma=1)
        (completion,) = [event.completion for event in drained(engine) if event.completion]
        with pytest.raises(InputError, match="begun is a finished output"):
            engine.add([1, 2], SAMPLING, gamma=1, begun=PartialOutput(completion.steps))


STEP = StepRecord(0, (), 0, (1,), (), 0, 0.0, 0.0, 0.0, 1)


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        (5, "begun is 5; give a foretoken.records.PartialOutput"),
        ([], r"begun is \[\]; give"),
        (PartialOutput(5), "begun's steps are 5; give the steps of a completion"),
        (PartialOutput([5]), r"begun's steps are \[5\]; give"),
        (
            PartialOutput([replace(STEP, new_tokens=(10**6,))]),
            "begun has the id 1000000; ids must be in",
        ),
    ],
)  # fmt: skip
def test_what_is_no_beginning_of_a_text(begun: Any, message: str) -> None:
    with Engine(speculator()) as engine:
        with pytest.raises(InputError, match=f"^{message}"):
            engine.add([1], max_new_tokens=2, begun=begun)
        assert engine.waiting == 0


WRONG: list[Any] = [5, -1, 1.5, float("nan"), True, "x", b"x", "", [], [5], ["x"], (1, 2, 3)]
WRONG += [{}, {"a": 1}, object(), int, [None], [[]], 10**30]
OF_ADD = [name for name in signature(Engine.add).parameters if name not in ("self", "controls")]
OF_GENERATE = [name for name in signature(Speculator.generate).parameters if name in OF_ADD]


@pytest.mark.parametrize("name", OF_ADD)
def test_values_of_any_type_are_taken_or_refused_in_a_line(name: str) -> None:
    """By `Engine.add` and by `generate`, for every parameter."""
    spec = speculator()
    for value in WRONG:
        given: dict[str, Any] = {"prompt": [1], "max_new_tokens": 2, name: value}
        if name == "params":
            del given["max_new_tokens"]
        with Engine(spec, 2) as engine, _refused_in_a_line():
            engine.add(**given)
            engine.step()
        if name in OF_GENERATE:
            with _refused_in_a_line():
                spec.generate(given.pop("prompt"), **given)


@contextmanager
def _refused_in_a_line() -> Iterator[None]:
    try:
        yield
    except ForetokenError as error:
        assert "\n" not in str(error)


def test_a_request_may_have_a_rule_of_its_own() -> None:
    """Coupled, a seed gives one text, whatever gamma: rows of two rules never share a step."""
    spec = speculator()
    sampling = {"temperature": 1.0, "max_new_tokens": 12, "seed": 3}
    rules = ("block", "coupled")
    expected = {rule: spec.generate([1], gamma=2, rule=rule, **sampling) for rule in rules}
    assert expected["block"][0].tokens != expected["coupled"][0].tokens
    with Engine(spec) as engine:
        ids = {engine.add([1], gamma=2, rule=rule, **sampling): rule for rule in expected}
        ends = {event.id: event.completion for event in drained(engine) if event.completion}
        with pytest.raises(InputError, match="rule is 'blok'"):
            engine.add([1], rule="blok")
    assert {ids[id]: end.tokens for id, end in ends.items()} == {
        rule: done.tokens for rule, (done,) in expected.items()
    }


def test_a_request_that_others_have_finished_still_has_its_events() -> None:
    """Whoever drains the engine goes on as long as something runs."""
    spec = speculator()
    with Engine(spec) as engine:
        engine.add([0], SAMPLING, gamma=2)
        spec.generate([1], SamplingParams(1.0, max_new_tokens=40), gamma=0)
        assert engine.running == 1 and not engine.waiting
        (event,) = drained(engine)
    assert event.completion is not None and len(event.tokens) == 12


def test_models_in_use_elsewhere_are_told() -> None:
    spec = speculator()
    other = Speculator(spec.target, LMDrafter(TableModel(Q, V), V), ends=EndTokens())
    pieces = other.stream([1], SAMPLING, gamma=2)
    next(pieces)
    with Engine(spec) as engine:
        engine.add([0], SAMPLING, gamma=2)
        (event,) = drained(engine)
        assert event.completion is not None and "is still open" in (event.completion.error or "")
        pieces.close()
        engine.add([0], SAMPLING, gamma=2)
        assert drained(engine)[-1].finish_reason == "length"


def test_a_drafter_that_cannot_start_a_row_fails_that_row_alone() -> None:
    spec = speculator()
    with Engine(spec) as engine:
        fine = engine.add([1], SAMPLING, gamma=2)
        engine.step(), engine.step()  # it joins the drafter behind its first step
        start = spec.drafter.start

        def refused(*_: object) -> None:
            raise RefusedError("not this one")

        spec.drafter.start = refused
        bad = engine.add([2], SAMPLING, gamma=2)
        events = [event for _ in range(2) for event in engine.step()]
        spec.drafter.start = start
        events += drained(engine)
    reasons = {event.id: event.finish_reason for event in events if event.finish_reason}
    assert reasons == {bad: "error", fine: "length"}


def test_what_is_refused() -> None:
    spec = speculator()
    with Engine(spec, 1, max_waiting=1) as engine:
        with pytest.raises(
            InputError, match="^these models have an engine; close that engine first"
        ):
            Engine(spec)
        engine.add([1], SAMPLING)
        engine.add([1], SAMPLING)
        with pytest.raises(InputError, match="^1 requests wait already; take steps first"):
            engine.add([1], SAMPLING)
        engine.abort(0)
        with pytest.raises(InputError, match="^a request has one prompt and one output, not 2"):
            engine.add([1], SamplingParams(1.0, num_return_sequences=2))
        with pytest.raises(InputError, match="not 2; add one request for each output"):
            engine.add([[1], [2]], SAMPLING)
        with pytest.raises(InputError, match="^temprature is not an option of add; did you mean"):
            engine.add([1], temprature=1.0)  # pyright: ignore[reportCallIssue]
    for call in (engine.step, lambda: engine.add([1], SAMPLING)):
        with pytest.raises(InputError, match="^the engine is closed; make another engine"):
            call()
    engine.close()
    with pytest.raises(InputError, match="^spec is 'gpt2'; give a Speculator"):
        Engine("gpt2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="^max_rows is 0; give a whole number from 1"):
        Engine(spec, 0)
    with pytest.raises(InputError, match="max_length is 7, but the target's context length is 6"):
        Engine(Speculator(TableModel(P, V, context=6), NoDrafter()), max_length=7)


def test_max_length_counts_the_prompt() -> None:
    spec = speculator()
    with Engine(spec, max_length=8) as engine:
        engine.add([1, 2, 3], SAMPLING)
        (last,) = (event for event in drained(engine) if event.completion)
        assert last.completion and len(last.completion.tokens) == 5
        with pytest.raises(
            InputError, match="has 8 tokens, so max_length=8 leaves no room for new"
        ):
            engine.add([1] * 8, SAMPLING)
        assert not engine.waiting


class Sized(TableModel):
    """A token is a byte."""

    capabilities = Capabilities(memory=True)

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        return sum(lengths)


def test_memory_is_stated_up_front() -> None:
    spec = Speculator(Sized(P, V), LMDrafter(Sized(Q, V), V), None, EndTokens())
    expected = [c.tokens for c in spec.generate([[1, i] for i in range(5)], SAMPLING, gamma=2)]
    with Engine(spec, kv_memory=64) as engine:
        ids = [engine.add([1, i], SAMPLING, gamma=2, seed=(0, i)) for i in range(5)]
        with pytest.raises(InputError, match="prompt of 30 tokens and up to 12 new tokens take 84"):
            engine.add([1] * 30, SAMPLING)
        texts = {e.id: e.completion.tokens for e in drained(engine) if e.completion}
        assert [texts[id] for id in ids] == expected
        assert engine.stats().finished == 5
    spec.generate([1] * 30, SAMPLING, gamma=0)  # the budget was the engine's
    with pytest.raises(RefusedError, match="TableModel does not report the memory"):
        Engine(speculator(), kv_memory=10**9)
    with Engine(spec, kv_memory=64), pytest.raises(InputError, match="have an engine"):
        Engine(spec)


def test_a_request_that_comes_while_the_engine_closes_is_dropped() -> None:
    spec = speculator()
    engine = Engine(spec)
    add = engine._core.add

    def closing(tasks) -> None:
        engine.close()
        add(tasks)

    engine._core.add = closing
    with pytest.raises(InputError, match="closed"):
        engine.add([1], SAMPLING)
    assert not spec.core.scheduler.waiting and not spec.core.scheduler.running


def test_a_close_that_was_broken_off_is_gone_on_with(monkeypatch) -> None:
    spec = speculator()
    engine = Engine(spec)
    engine.add([1], SAMPLING)
    with monkeypatch.context() as broken:

        def interrupted(rows) -> None:
            raise KeyboardInterrupt

        broken.setattr(engine._core, "abort", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    engine.close()
    with Engine(spec) as again:
        again.add([1], SAMPLING)
        assert drained(again)


def drained_of(engine: Engine, requests: int) -> list[Event]:
    """The last events of so many requests."""
    ends: list[Event] = []
    for _ in range(200):
        ends += [event for event in engine.step() if event.finish_reason]
        if len(ends) == requests:
            break
    return ends


def test_a_rule_that_raises_fails_its_own_rows() -> None:
    spec = speculator()
    expected = spec.generate([2], SAMPLING, gamma=2)[0].tokens

    def broken(p, q, x, lengths):
        raise ZeroDivisionError("no")

    with Engine(spec) as engine:
        bad = engine.add([1], SAMPLING, gamma=2, rule=broken)
        good = engine.add([2], SAMPLING, gamma=2)
        ends = {event.id: event for event in drained_of(engine, 2)}
    assert "ZeroDivisionError: no" in str(ends[bad].completion and ends[bad].completion.error)
    assert ends[good].completion is not None and ends[good].completion.tokens == expected


# Predictions

KINDS = {
    "none": NoDrafter,
    "lm": lambda: LMDrafter(TableModel(Q, V), V),
    "lookup": LookupDrafter,
}
COSTS = Costs(((0, 0.0), (8, 0.8)), ((1, 1.0), (8, 1.3)), ((1, 0.1),))
LENGTH = 40


def predicting(drafter: str) -> tuple[Speculator, Engine]:
    """With costs that nobody had to measure, of passes that hardly grow with their tokens."""
    spec = Speculator(TableModel(P, V), KINDS[drafter](), byte_level(), EndTokens())
    spec.costing.measured.update({("greedy", rows): COSTS for rows in (1, 2, 4, 8, 16)})
    return spec, Engine(spec)


@pytest.mark.parametrize("gamma", [None, 1, 4])
@pytest.mark.parametrize("drafter", KINDS)
def test_a_prediction_changes_no_text(drafter: str, gamma: int | None) -> None:
    """Greedy rows beside one another, with predictions that are right, edited, useless or none."""
    spec, engine = predicting(drafter)
    (own,) = spec.generate([1], gamma=0, max_new_tokens=LENGTH)
    edited = [*own.tokens[:9], 3, 3, *own.tokens[14:]]
    predictions = [own.tokens, edited, [7] * 50, None, []]
    with engine:
        ids = [
            engine.add([1], gamma=gamma, max_new_tokens=LENGTH, prediction=each)
            for each in predictions
        ]
        completions = {event.id: event.completion for event in drained(engine) if event.completion}
    right, near, useless, without, empty = (completions[id] for id in ids)
    assert {tuple(completions[id].tokens) for id in ids} == {tuple(own.tokens)}
    assert [step.new_tokens for step in empty.steps] == [step.new_tokens for step in without.steps]
    assert not any(step.predicted for step in without.steps)
    assert all(step.predicted for step in right.steps if step.drafted)
    least = -(-LENGTH // (16 if gamma is None else 1 + gamma))
    assert right.stats.target_calls <= least + 2 and right.stats.draft_calls == 0
    assert near.stats.target_calls < LENGTH * (0.4 if gamma != 1 else 0.8)
    assert sum(step.drafted for step in useless.steps if step.predicted) <= 16


def test_a_useless_prediction_leaves_the_drafter_its_work() -> None:
    """Sampled, so that the table's next token hardly ever is the prediction's."""
    spec, engine = predicting("lm")
    (own,) = spec.generate([1], SamplingParams(1.0, max_new_tokens=60), gamma=2)
    with engine:
        sampling = SamplingParams(1.0, max_new_tokens=60)
        id = engine.add([1], sampling, gamma=2, prediction=[5, 6, 5, 6, 7])
        completions = {event.id: event.completion for event in drained(engine) if event.completion}
    steps = completions[id].steps
    assert sum(step.predicted for step in steps) < 10
    assert sum(step.drafted for step in steps if not step.predicted) > own.stats.drafted / 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_earlier_outputs_guess_for_their_own_user(temperature: float) -> None:
    """Where no draft token can change the text; other users' steps are as if nothing had been
    said."""
    spec, engine = predicting("lookup")
    engine.close()
    (own,) = spec.generate([1], temperature=temperature, gamma=4, max_new_tokens=LENGTH)
    with Engine(spec) as engine:
        done = []
        for salt in ("a", "a", "b", None, None):
            engine.add(
                [1], temperature=temperature, gamma=4, max_new_tokens=LENGTH, cache_salt=salt
            )
            (last,) = (event.completion for event in drained(engine) if event.completion)
            done.append(last)
    first, again, *_ = done
    assert {tuple(each.tokens) for each in done} == {tuple(own.tokens)}
    kept = [[step.new_tokens for step in each.steps] for each in (own, *done)]
    assert kept[0] == kept[1] == kept[3] == kept[4]
    assert kept[2] == kept[5] and (kept[2] == kept[1]) == (temperature > 0)
    if not temperature:
        assert again.stats.target_calls < first.stats.target_calls / 2


def test_predictions_as_text_and_such_as_are_none() -> None:
    _, engine = predicting("none")
    with engine:
        ids = byte_level()("It was").input_ids
        begins = {"logit_bias": {ids[0]: 100.0}}  # nothing is drafted for the first token
        id = engine.add("It", gamma=3, max_new_tokens=8, prediction="It was", **begins)
        completions = {event.id: event.completion for event in drained(engine) if event.completion}
        first = next(step for step in completions[id].steps if step.predicted)
        assert list(first.draft_tokens) == ids[1:4]
        for prediction, said in (
            ([V], f"^prediction holds the id {V}; ids must be in 0..{V - 1}"),
            ([0.5], "^prediction"),
            (7, "^prediction"),
            ("\ud800", "^prediction is not valid text"),
        ):
            with pytest.raises(InputError, match=said):
                engine.add("It", prediction=prediction)  # pyright: ignore[reportArgumentType]
        assert not engine.waiting
    with Engine(speculator()) as bare, pytest.raises(InputError, match="^prediction is text, but"):
        bare.add([1], prediction="It was")


def test_a_row_that_runs_is_not_read_again_for_a_prediction_without_a_drafter() -> None:
    spec, engine = predicting("none")
    target: TableModel = spec.target  # pyright: ignore
    started: list[int] = []
    start = target.start

    def counted(prompts, sources=None):
        started.append(len(prompts))
        start(prompts, sources)

    target.start = counted
    with engine:
        engine.add([1], gamma=0, max_new_tokens=20)
        engine.step()
        engine.add([2], gamma=2, max_new_tokens=20, prediction=[4, 5])
        drained(engine)
    assert started == [1, 1]
