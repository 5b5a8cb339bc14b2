"""Gemma 4's assistants on the native decoder beside the same assistants on torch."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch

import assistants
import pairs
from assistants import WIDTH, WINDOW
from foretoken import Engine, Speculator
from foretoken.certificate.planted_bugs import OffByOneModel
from foretoken.drafters.none import NoDrafter
from foretoken.engine.engine import Event
from foretoken.errors import InputError
from foretoken.models.stock.assistant import StockAssistant

pytestmark = pytest.mark.native
V = 24
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 15, 16, 17, 40]


def text(length: int) -> list[int]:
    return random.Random(length).choices(range(V), k=length)


@cache
def target(*, sharing: bool = True, seed: int = 0) -> Any:
    net = assistants.target(V, sharing=sharing, seed=seed, inputs=16)
    return copy.deepcopy(net).float()


def test_a_sequence_that_joins_again_drafts_at_once() -> None:
    """The pages of its whole text are there, from the sequence that was the same before."""
    model, drafter = assistants.on_native(target(), assistants.network(V))
    spec, drafted = Speculator(model, drafter), list[list[list[int]]]()
    with Engine(spec, prefix_cache=True) as engine:
        for preempted in (False, True):
            for length in (17, 40):
                engine.add(text(length), max_new_tokens=30, gamma=3, temperature=1.0, seed=1)
            events: list[Event] = []
            while engine.running or engine.waiting:
                events += engine.step()
                if preempted and engine.stats().preempted < 4 and engine.running == 2:
                    spec.core.preempt()
            done = [event.completion for event in events if event.completion is not None]
            assert engine.stats().preempted == 4 * preempted
            drafted.append(sorted([step.drafted for step in each.steps] for each in done))
    assert drafted[0] == drafted[1] and min(sum(each) for each in drafted[0]) > 20


@pytest.mark.daily
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_steps_are_those_on_torch(ordered: bool, sharing: bool) -> None:
    """Of rows around the window and the ends of pages, together and alone."""
    net = target(sharing=sharing)
    network = copy.deepcopy(assistants.network(V, ordered=ordered)).float()
    model, drafter = assistants.on_native(net, network)
    stock, rows = assistants.running(net), [*range(len(LENGTHS))]
    for each in (model, stock):
        each.start([text(n) for n in LENGTHS])
    theirs, embed = StockAssistant(network, stock), net.get_input_embeddings()
    for some in (rows, [3], [5, 1], [7]):
        ids = [torch.tensor(text(9 + b)[:3]) for b in some]
        states = expected = torch.randn(len(some), WIDTH)
        drafter.network.begin(some)
        theirs.begin(some)
        for token in torch.stack(ids).unbind(1):
            assert torch.allclose(drafter.embedding(token), embed(token), atol=1e-6)
            logits, states = drafter.network.step(drafter.embedding(token), states)
            wanted, expected = theirs.step(embed(token), expected)
            possible = wanted > -torch.inf
            assert torch.equal(logits > -torch.inf, possible)
            assert torch.allclose(logits[possible], wanted[possible], atol=1e-4)
            assert torch.allclose(states, expected, atol=1e-4)
    assert model.lengths == LENGTHS


@pytest.mark.daily("int8")
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_texts_are_the_target_s(dtype: str) -> None:
    """In a batch whose rows end and begin at different times, with cached prefixes and an abort."""
    net, network = target(seed=4), assistants.network(V, ordered=True, seed=2)
    model, drafter = assistants.on_native(net, network, dtype)
    words, prompts = random.Random(1), [text(n) for n in (1, 2, WINDOW + 1, 30)]
    prompts += [[*prompts[3], 5], [*prompts[3], 7, *words.choices(range(V), k=20)]]
    plain = Speculator(target=model, drafter=NoDrafter()).generate(prompts, max_new_tokens=40)
    found: dict[int, Any] = {}
    with Engine(Speculator(target=model, drafter=drafter), 4, prefix_cache=True) as engine:
        lost = engine.add(text(9), max_new_tokens=40, gamma=2)
        keys = [engine.add(prompt, max_new_tokens=40, gamma=3) for prompt in prompts]
        for step in range(300):
            if step == 3:
                engine.abort(lost)
            for event in engine.step():
                if event.completion is not None:
                    found[event.id] = event.completion
    for key, expected in zip(keys, plain, strict=True):
        assert found[key].tokens == expected.tokens
    stats = [found[key].stats for key in keys]
    accepted, drafted = (sum(getattr(x, name) for x in stats) for name in ("accepted", "drafted"))
    assert (dtype == "int4" or accepted > 0) and accepted < drafted


def test_greedy_texts_of_another_precision_are_transformers_own() -> None:
    net = target()
    model, drafter = assistants.on_native(net, assistants.network(V))
    prompts = [text(n) for n in (1, 2, WINDOW + 1, 30)]
    for prompt, completion in zip(
        prompts,
        Speculator(target=model, drafter=drafter).generate(prompts, max_new_tokens=40, gamma=3),
        strict=True,
    ):
        pairs.assert_greedy(completion, net, prompt, 40)


def test_an_assistant_stays_with_its_target() -> None:
    model, drafter = assistants.on_native(target(), assistants.network(V))
    assert drafter.with_target(OffByOneModel(model)).network is drafter.network
    other, _ = assistants.on_native(target(), assistants.network(V))
    with pytest.raises(InputError, match="keys and values of the target .*; give that target"):
        drafter.with_target(other)
