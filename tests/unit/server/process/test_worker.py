"""The engine's end of the pipe, in this process: what it says to every message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any

import pytest
import torch

from foretoken import Engine, Speculator
from foretoken.controls import grammar
from foretoken.costing.costs import Costs
from foretoken.drafters.base import Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.generation_config import EndTokens
from foretoken.inputs import InputProcessor
from foretoken.server.process import preparation, sandbox, worker
from foretoken.server.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    GenerateRequest,
    ModelInfo,
    Refusal,
    Reply,
    StepOutput,
    StepOutputs,
    Stop,
)
from foretoken.server.process.replies import ReplyPreparer
from foretoken.server.process.sandbox import MediaSandbox
from foretoken.server.process.startup import measure_step_costs
from foretoken.server.process.worker import Worker
from oracle import random_model
from table import TableModel
from tiny import byte_level, legacy, metaspace

V = 320
MEDIA = MediaSandbox(10**6, 60)
DISTRIBUTION = random_model(1, V)


class Broken(TableModel):
    """Raises where a text holds id 9: what no row is to blame for."""

    def score(self, blocks: Any, need: list[int]) -> torch.Tensor:
        if any(9 in block for block in blocks):
            raise OSError("the disk is gone")
        return super().score(blocks, need)


def replies(spec: Speculator) -> ReplyPreparer:
    return ReplyPreparer(spec.tokenizer, None, "auto")


@pytest.fixture
def pipe() -> Iterator[Connection]:
    with working(LMDrafter(TableModel(random_model(2, V), V), V)) as pipe:
        yield pipe


@contextmanager
def working(drafter: Drafter) -> Iterator[Connection]:
    ours, theirs = Pipe()
    spec = Speculator(Broken(DISTRIBUTION, V, context=200), drafter, byte_level(), EndTokens())
    engine = Engine(spec, 2, max_waiting=1)
    thread = Thread(target=Worker(theirs, spec, engine, replies(spec), MEDIA).run, daemon=True)
    thread.start()
    assert isinstance(hear(ours), ModelInfo)
    yield ours
    ours.send(Stop())
    thread.join(10)
    assert not thread.is_alive()


def hear(pipe: Connection) -> Any:
    assert pipe.poll(300), "nothing is said"
    return pipe.recv()


def parts(pipe: Connection, id: int) -> list[StepOutput]:
    """Of one text, to its end."""
    heard: list[StepOutput] = []
    while not (heard and heard[-1].done):
        message = hear(pipe)
        assert isinstance(message, StepOutputs), message
        heard += [part for part in message.parts if part.id == id]
    return heard


SAMPLING = {"gamma": 2, "temperature": 1.0, "max_new_tokens": 12}
# Of a request, beside its controls
OWN = {"gamma", "seed", "rule", "prediction", "default_new_tokens", "begun"}


def add(id: int, prompt: Any, options: dict[str, Any]) -> Add:
    own = {name: options[name] for name in OWN & options.keys()}
    controls: Any = {name: value for name, value in options.items() if name not in OWN}
    return Add(id, GenerateRequest(prompt, controls, **own))


def test_what_is_refused(pipe: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the server's clients can send: tests/unit/server/bad_requests.json. Too many ids
    are counted, not looked at."""
    for prompt, options, kind, said in (
        ("It", {"tempature": 1}, "input", "did you mean temperature?"),
        ([1] * 190, {"max_new_tokens": 20}, "length", "max_tokens is 20"),
        ([{"role": "user", "content": "a"}], {}, "input", "no chat template"),
        ("It", {"prediction": "ab " * 150}, "length", "the context length is 200"),
        ("It", {"prediction": "a" * 90_000}, "length", "90000 characters"),
        ("It", {"prediction": "\ud800"}, "input", "prediction"),
        ([1] * 201, SAMPLING, "length", "201 tokens, but the context length is 200"),
    ):
        if len(prompt) > 200:
            monkeypatch.setattr(InputProcessor, "encode_prompt", None)
        pipe.send(add(0, prompt, options))
        refusal = hear(pipe)
        assert isinstance(refusal, Refusal) and refusal.kind == kind and said in refusal.message


def test_no_text_waits_for_the_costs_of_greedy_or_sampled_steps() -> None:
    spec = Speculator(TableModel(DISTRIBUTION, V), LMDrafter(TableModel(DISTRIBUTION, V), V))
    measure_step_costs(spec, 2)
    assert set(spec.costing.measured) == {
        (kind, rows) for kind in ("greedy", "sampled") for rows in (1, 2)
    }
    plain = Speculator(TableModel(DISTRIBUTION, V), NoDrafter())  # for predictions
    measure_step_costs(plain, 1)
    assert set(plain.costing.measured) == {("greedy", 1), ("sampled", 1)}


def test_speculation_is_told_of_the_sampling_that_was_measured_last() -> None:
    """Costs go on with their last slope: (4 + 1) tokens in (3 c + v(4)) + 1 plain passes."""
    asked = Ask(0, "speculation", {"alpha": 1.0, "made": {3: 5, 0: 5}})
    spec = Speculator(TableModel(DISTRIBUTION, V), LMDrafter(TableModel(DISTRIBUTION, V), V))
    ours, theirs = Pipe()
    told = partial(Worker(theirs, spec, Engine(spec), replies(spec), MEDIA)._answer, asked)
    told()
    assert ours.recv().value == {"c": None, "v": None, "predicted_speedup": None}
    for kind, c in (("sampled", 0.5), ("greedy", 0.1)):
        costs = Costs(((1, c),), ((1, 1.0), (2, 1.1)), ((1, 0.0),))
        spec.costing.measured[kind, 1] = costs
        told()
        answer = ours.recv().value
        assert answer["c"] == c and answer["v"] == [(1, 1.0), (2, 1.1)]
        assert answer["predicted_speedup"] == pytest.approx(5 / (3 * c + 1.3 + 1))


def test_without_a_limit_a_text_may_fill_the_context(pipe: Connection) -> None:
    for id, most, written in ((0, None, 195), (1, 7, 7)):
        more = {} if most is None else {"default_new_tokens": most}
        pipe.send(add(id, [1] * 5, {"gamma": 2, "ignore_eos": True, "suppress_tokens": [9]} | more))
        assert hear(pipe) == Accepted(id, 5)
        assert sum(len(part.tokens) for part in parts(pipe, id)) == written


def test_a_full_queue_and_an_aborted_text(pipe: Connection) -> None:
    endless = {"gamma": 0, "ignore_eos": True, "suppress_tokens": [9]}
    for id in range(4):
        pipe.send(add(id, [1], endless))
    said = [message for message in (hear(pipe) for _ in range(200)) if isinstance(message, Refusal)]
    assert [(each.id, each.kind) for each in said] == [(3, "busy")]
    for id in range(3):
        pipe.send(Abort(id))
    while (heard := hear(pipe)).running or heard.waiting:
        pass


def test_a_step_that_fails_ends_its_requests_and_no_more(pipe: Connection) -> None:
    pipe.send(add(0, [1, 1, 9], {"gamma": 0}))
    assert hear(pipe) == Accepted(0, 3)
    failed = hear(pipe)
    assert failed.parts == [Refusal(0, "failed", "the disk is gone")]
    assert failed.running == 0  # gauges follow, though no step does
    pipe.send(add(1, [1], {"gamma": 0, "max_new_tokens": 2, "suppress_tokens": [9]}))
    assert hear(pipe) == Accepted(1, 1)
    assert parts(pipe, 1)[-1].done is not None


SLOW = {"structured": {"json_schema": {"type": "integer", "multipleOf": 99999989}}}


@pytest.mark.prove
def test_a_grammar_that_takes_long_holds_up_nobody(
    pipe: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its request's end, which comes before it is added."""
    monkeypatch.setattr(sandbox, "TIMEOUT_SECONDS", 3.0)
    for id in (0, 1):
        pipe.send(add(id, [1], SAMPLING | SLOW))
    pipe.send(Abort(1))
    pipe.send(add(2, [1], SAMPLING | {"suppress_tokens": [9]}))
    heard = [hear(pipe)]
    while not (isinstance(heard[-1], StepOutputs) and any(part.done for part in heard[-1].parts)):
        heard.append(hear(pipe))
    assert Accepted(2, 1) in heard and not any(isinstance(each, Refusal) for each in heard)
    while not (isinstance(said := hear(pipe), Refusal) and said.id == 0):
        pass
    assert "takes more than 3 s" in said.message and said.kind == "input"


PLAIN = {"template": None, "chat_template_kwargs": None, "texts": False}


def held_up(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[..., bool]
) -> tuple[Event, Event]:
    """Calls of a function wait, when this holds of their arguments: the first event is set by
    them, the second lets them go on."""
    tried, go, own = Event(), Event(), getattr(owner, name)

    def late(*args: Any, **more: Any) -> Any:
        if when(*args):
            tried.set()
            assert go.wait(30)
        return own(*args, **more)

    monkeypatch.setattr(owner, name, late)
    return tried, go


@pytest.mark.daily("a question")
@pytest.mark.parametrize("what", ["a long text", "a question", "a short text"])
def test_prompts_are_prepared_where_nobody_waits(
    pipe: Connection, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Texts run on, others are begun and ended, while a prompt is tokenized."""
    slow: Any = lambda inputs, text, *_: text.startswith("slow")  # noqa: E731
    tried, go = held_up(monkeypatch, InputProcessor, "_tokenize", slow)
    monkeypatch.setattr(worker, "LONG_PROMPT_SIZE", 100)
    long = "slow" * (1 if what == "a short text" else 30)
    endless = SAMPLING | {"suppress_tokens": [9], "max_new_tokens": 150, "ignore_eos": True}
    pipe.send(add(0, [1], endless))
    assert hear(pipe) == Accepted(0, 1)
    if what == "a question":
        pipe.send(Ask(1, "tokenize", {"prompt": long, **PLAIN}))
    else:
        pipe.send(add(1, long, SAMPLING | {"suppress_tokens": [9]}))
    assert tried.wait(30)
    assert parts(pipe, 0)[-1].done is not None
    if what != "a short text":  # these are prepared in the order of their arrival
        pipe.send(add(2, [1], endless))
        assert hear(pipe) == Accepted(2, 1)
    pipe.send(Abort(2))
    while hear(pipe).running:
        pass
    go.set()
    while not isinstance(said := hear(pipe), Accepted | Reply):
        pass
    assert said.id == 1


def test_an_aborted_request_is_not_prepared(
    pipe: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    record: Any = lambda inputs, text, *_: prepared.append(text) or True  # noqa: E731
    tried, go = held_up(monkeypatch, InputProcessor, "_tokenize", record)
    for id, text in enumerate("abc"):
        pipe.send(add(id, text, SAMPLING | {"suppress_tokens": [9]}))
    assert tried.wait(30)
    pipe.send(Abort(1))
    assert isinstance(hear(pipe), StepOutputs)
    go.set()
    while not (isinstance(said := hear(pipe), Accepted) and said.id == 2):
        pass
    assert prepared == ["a", "c"]


def test_a_text_is_refused_by_its_length_where_no_tokens_can_be_few_enough() -> None:
    tokenizer = byte_level()
    longest = max(map(len, tokenizer.get_vocab()))
    assert preparation.compute_max_token_characters(tokenizer) == longest
    assert len(tokenizer("a" * 50).input_ids) * longest >= 50
    for other in (metaspace(), legacy(), None):
        assert preparation.compute_max_token_characters(other) == preparation.MAX_TOKEN_CHARACTERS


def test_a_text_that_is_left_while_it_is_added_is_not_written(
    pipe: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, go = held_up(monkeypatch, grammar, "to_llguidance", lambda _: True)
    pipe.send(add(0, [1], SAMPLING | {"structured": {"regex": "[a-z]{99}"}, "stop_token_ids": [0]}))
    assert tried.wait(30)
    pipe.send(Abort(0))
    assert isinstance(hear(pipe), StepOutputs)
    go.set()
    pipe.send(add(1, [1], SAMPLING | {"structured": {"regex": "[a-z]{2}"}, "stop_token_ids": [0]}))
    assert hear(pipe) == Accepted(1, 1)
    assert parts(pipe, 1)[-1].done is not None
