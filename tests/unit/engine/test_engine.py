"""Requests in, events out: what `generate` gives, whatever comes and goes beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from threading import Thread
from typing import Any

import pytest

from foretoken import Engine, Event, InputError, RefusedError, SamplingParams, Speculator
from foretoken.costing.costs import Costs
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import ForetokenError
from foretoken.generation_config import Ends
from foretoken.models.base import Capabilities
from foretoken.records import Begun, StepRecord
from oracle import random_model
from table import TableModel
from tiny import byte_level

pytestmark = pytest.mark.daily

V = 320
P, Q = (random_model(seed, V) for seed in (1, 2))
SAMPLING = SamplingParams(1.0, max_new_tokens=12)


def speculator(tokenizer: bool = False, target=P) -> Speculator:
    spelling = byte_level() if tokenizer else None
    return Speculator(TableModel(target, V), LMDrafter(TableModel(Q, V), V), spelling, Ends())


def drained(engine: Engine, most: int = 500) -> list[Event]:
    events: list[Event] = []
    for _ in range(most):
        if not engine.running and not engine.waiting:
            return events
        events += engine.step()
    raise AssertionError("the engine never ends")


def test_events_concatenate_to_what_generate_returns() -> None:
    spec = speculator(tokenizer=True)
    options = {"gamma": 3, "temperature": 0.9, "max_new_tokens": 20, "logprobs": 1}
    (expected,) = spec.generate("It was", seed=5, stop_strings="e", **options)
    with Engine(spec) as engine:
        id = engine.add("It was", seed=5, stop_strings="e", **options)
        events = drained(engine)
    assert {event.id for event in events} == {id}
    assert "".join(event.text or "" for event in events) == expected.text
    assert [token for event in events for token in event.tokens] == expected.tokens
    assert [each for event in events for each in event.logprobs or ()] == expected.logprobs
    *others, last = events
    assert all(event.finish_reason is None and event.completion is None for event in others)
    assert last.completion is not None and last.finish_reason == expected.finish_reason
    assert last.completion.tokens == expected.tokens and last.completion.text == expected.text
    kept = [[token for step in event.steps for token in step.kept] for event in events]
    assert kept == [event.tokens for event in events]
    assert [step for event in events for step in event.steps] == last.completion.steps


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
            id = engine.add(prompt, seed=5, begun=Begun(steps), **sampling)
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
        with pytest.raises(InputError, match="begun ends the text already"):
            engine.add([1, 2], SAMPLING, gamma=1, begun=Begun(completion.steps))


STEP = StepRecord(0, (), 0, (1,), (), 0, 0.0, 0.0, 0.0, 1)


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        (5, "begun is 5; give a foretoken.records.Begun"),
        ([], r"begun is \[\]; give"),
        (Begun(5), "begun's steps are 5; give the steps of a completion"),
        (Begun([5]), r"begun's steps are \[5\]; give"),
        (Begun([replace(STEP, kept=(10**6,))]), "begun holds the id 1000000; ids must be in"),
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


@pytest.mark.parametrize("max_rows", [1, 3, 16])
def test_more_requests_than_rows(max_rows: int) -> None:
    spec = speculator()
    expected = [spec.generate([1, i], SAMPLING, gamma=i % 4, seed=i)[0].tokens for i in range(9)]
    with Engine(spec, max_rows) as engine:
        ids = [engine.add([1, i], SAMPLING, gamma=i % 4, seed=i) for i in range(9)]
        assert engine.waiting == 9 and not engine.running
        events = engine.step()
        assert engine.running == min(9, max_rows)
        events += drained(engine)
        stats = engine.stats()
    completions = {event.id: event.completion for event in events if event.completion}
    assert [completions[id].tokens for id in ids] == expected
    assert (stats.finished, stats.tokens, stats.running, stats.waiting) == (9, 108, 0, 0)
    assert stats.steps >= 12 // 5


def test_an_aborted_request_is_gone_and_others_go_on() -> None:
    spec = speculator()
    (expected,) = spec.generate([2], SAMPLING, gamma=2, seed=1)
    with Engine(spec, 1) as engine:
        running, waiting, other = (engine.add([i], SAMPLING, gamma=2, seed=1) for i in (3, 4, 2))
        engine.step()
        engine.abort(waiting)
        engine.abort(running)
        events = drained(engine)
        assert {event.id for event in events} == {other}
        assert engine.stats().aborted == 2 and engine.stats().finished == 1
        for gone in (running, other, 99, "x"):
            with pytest.raises(InputError, match=f"^request {gone!r} is unknown or finished"):
                engine.abort(gone)  # pyright: ignore[reportArgumentType]
    assert events[-1].completion is not None
    assert events[-1].completion.tokens == expected.tokens


def test_generate_and_stream_beside_an_engine() -> None:
    spec = speculator()
    expected = [spec.generate([i], SAMPLING, gamma=2)[0].tokens for i in range(3)]
    with Engine(spec) as engine:
        engine.add([0], SAMPLING, gamma=2)
        first = engine.step()
        assert spec.generate([1], SAMPLING, gamma=2)[0].tokens == expected[1]
        pieces = spec.stream([2], SAMPLING, gamma=2)
        assert [token for piece in pieces for token in piece.tokens] == expected[2]  # pyright: ignore
        events = [*first, *engine.step(), *drained(engine)]
    assert [token for event in events for token in event.tokens] == expected[0]


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
    other = Speculator(spec.target, LMDrafter(TableModel(Q, V), V), ends=Ends())
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


def test_a_request_that_fails_says_so_and_others_go_on() -> None:
    def poisoned(text):
        return [float("nan")] * V if len(text) > 3 and text[0] == 9 else P(text)

    spec = speculator(target=poisoned)
    with Engine(spec) as engine:
        bad = engine.add([9], SAMPLING, gamma=1)
        dead = engine.add([1], gamma=1, suppress_tokens=range(V))
        good = engine.add([2], SAMPLING, gamma=1)
        completions = {event.id: event for event in drained(engine) if event.finish_reason}
    assert [completions[id].finish_reason for id in (bad, dead, good)] == [
        "error",
        "error",
        "length",
    ]
    assert "logits hold NaN" in str(completions[bad].completion.error)  # pyright: ignore
    assert "suppress_tokens leaves no token" in str(completions[dead].completion.error)  # pyright: ignore


def test_an_invalid_draft_fails_what_runs_and_no_more() -> None:
    spec = speculator()
    with Engine(spec) as engine:
        engine.add([1], SAMPLING, gamma=2)
        engine.step()  # which drafts nothing
        propose = spec.drafter.propose
        spec.drafter.propose = lambda gamma, draw: propose([g + 1 for g in gamma], draw)
        (event,) = engine.step()
        assert event.finish_reason == "error" and event.completion is not None
        assert "the drafter proposed" in (event.completion.error or "")
        spec.drafter.propose = propose
        engine.add([1], SAMPLING, gamma=2)
        assert drained(engine)[-1].finish_reason == "length"


def test_what_is_refused() -> None:
    spec = speculator()
    with Engine(spec, 1, max_waiting=1) as engine:
        with pytest.raises(InputError, match="^these models have an engine; close it first"):
            Engine(spec)
        engine.add([1], SAMPLING)
        engine.add([1], SAMPLING)
        with pytest.raises(InputError, match="^1 requests wait already; take steps first"):
            engine.add([1], SAMPLING)
        engine.abort(0)
        with pytest.raises(InputError, match="^a request has one text of one prompt, not 2"):
            engine.add([1], SamplingParams(1.0, num_return_sequences=2))
        with pytest.raises(InputError, match="not 2; add each by itself"):
            engine.add([[1], [2]], SAMPLING)
        with pytest.raises(InputError, match="^temprature is no option of add; did you mean"):
            engine.add([1], temprature=1.0)  # pyright: ignore[reportCallIssue]
    for call in (engine.step, lambda: engine.add([1], SAMPLING)):
        with pytest.raises(InputError, match="^the engine is closed; make another one"):
            call()
    engine.close()
    with pytest.raises(InputError, match="^spec is 'gpt2'; give a Speculator"):
        Engine("gpt2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="^max_rows is 0; give a whole number from 1"):
        Engine(spec, 0)


def test_requests_come_from_any_thread() -> None:
    spec = speculator()
    expected = [spec.generate([i], SAMPLING, gamma=2, seed=i)[0].tokens for i in range(8)]
    with Engine(spec, 4) as engine:
        ids: dict[int, int] = {}

        def work(i: int) -> None:
            ids[engine.add([i], SAMPLING, gamma=2, seed=i)] = i

        threads = [Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        events = [event for _ in range(20) for event in engine.step()]
        for thread in threads:
            thread.join()
        events += drained(engine)
    done = {ids[event.id]: event.completion for event in events if event.completion}
    assert [done[i].tokens for i in range(8)] == expected


def test_max_length_counts_the_prompt() -> None:
    spec = speculator()
    with Engine(spec, max_length=8) as engine:
        engine.add([1, 2, 3], SAMPLING)
        (last,) = (event for event in drained(engine) if event.completion)
        assert last.completion and len(last.completion.tokens) == 5
        with pytest.raises(InputError, match="has 8 tokens, max_length=8 leaves room for no new"):
            engine.add([1] * 8, SAMPLING)
        assert not engine.waiting


class Sized(TableModel):
    """A token is a byte."""

    capabilities = Capabilities(memory=True)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        return sum(lengths)


def test_memory_is_stated_up_front() -> None:
    spec = Speculator(Sized(P, V), LMDrafter(Sized(Q, V), V), None, Ends())
    expected = [c.tokens for c in spec.generate([[1, i] for i in range(5)], SAMPLING, gamma=2)]
    with Engine(spec, kv_memory=64) as engine:
        ids = [engine.add([1, i], SAMPLING, gamma=2, seed=(0, i)) for i in range(5)]
        with pytest.raises(InputError, match="prompt of 30 tokens and up to 12 new ones take 84"):
            engine.add([1] * 30, SAMPLING)
        texts = {e.id: e.completion.tokens for e in drained(engine) if e.completion}
        assert [texts[id] for id in ids] == expected
        assert engine.stats().finished == 5
    spec.generate([1] * 30, SAMPLING, gamma=0)  # the budget was the engine's
    with pytest.raises(RefusedError, match="TableModel does not say what its rows take"):
        Engine(speculator(), kv_memory=10**9)
    with Engine(spec, kv_memory=64), pytest.raises(InputError, match="have an engine"):
        Engine(spec)


def test_max_length_moves_a_forced_last_token() -> None:
    options = {"gamma": 2, "max_new_tokens": 9, "forced_eos_token_id": 7}
    with Engine(speculator(), max_length=5) as engine:
        engine.add([1, 2, 3], **options)
        (end,) = [event.completion for event in drained(engine) if event.completion]
    assert len(end.tokens) == 2 and end.tokens[-1] == 7


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


@pytest.mark.parametrize("call", ["step", "close"])
def test_a_processor_that_calls_its_engine_fails_alone(call: str) -> None:
    spec = speculator()
    expected = spec.generate([2], SAMPLING, gamma=2)[0].tokens
    with Engine(spec) as engine:

        def inner(ids, scores):
            getattr(engine, call)()
            return scores

        bad = engine.add([1], max_new_tokens=5, gamma=2, processors=[inner])
        good = engine.add([2], SAMPLING, gamma=2)
        ends = {event.id: event for event in drained_of(engine, 2)}
    assert ends[bad].finish_reason == "error"
    assert ends[good].completion is not None and ends[good].completion.tokens == expected


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
    spec = Speculator(TableModel(P, V), KINDS[drafter](), byte_level(), Ends())
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
    assert [step.kept for step in empty.steps] == [step.kept for step in without.steps]
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
    kept = [[step.kept for step in each.steps] for each in (own, *done)]
    assert kept[0] == kept[1] == kept[3] == kept[4]
    assert kept[2] == kept[5] and (kept[2] == kept[1]) == (temperature > 0)
    if not temperature:
        assert again.stats.target_calls < first.stats.target_calls / 2


def test_a_prediction_is_followed_by_a_row_that_waits_again() -> None:
    spec, engine = predicting("lm")
    plain = spec.generate([[1, i] for i in range(3)], gamma=0, max_new_tokens=LENGTH)
    with engine:
        ids = [
            engine.add([1, i], gamma=3, max_new_tokens=LENGTH, prediction=own.tokens)
            for i, own in enumerate(plain)
        ]
        events = [event for _ in range(3) for event in engine.step()]
        engine._core.preempt()
        events += drained(engine)
        assert engine.stats().preempted >= 1
    completions = {event.id: event.completion for event in events if event.completion}
    for id, own in zip(ids, plain, strict=True):
        assert (
            completions[id].tokens == own.tokens
            and completions[id].stats.target_calls == 1 + LENGTH // 4  # the first drafts nothing
        )
        assert completions[id].stats.accepted == completions[id].stats.drafted


def test_predictions_as_text_and_such_as_are_none() -> None:
    _, engine = predicting("none")
    with engine:
        ids = byte_level()("It was").input_ids
        begins = {"logit_bias": {ids[0]: 100.0}}  # nothing is drafted for the first token
        id = engine.add("It", gamma=3, max_new_tokens=8, prediction="It was", **begins)
        completions = {event.id: event.completion for event in drained(engine) if event.completion}
        first = next(step for step in completions[id].steps if step.predicted)
        assert list(first.guesses) == ids[1:4]
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
