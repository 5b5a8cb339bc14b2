"""Layers that torch compiles: the same logits, few forms, and what happens where it cannot."""

from __future__ import annotations

import copy
import logging
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo

import pairs
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.runtimes import graphs
from foretoken.loading.runtimes.place import place
from foretoken.models.graphs import GraphModel, rehearse
from foretoken.models.stock import compiled
from foretoken.models.stock.compiled import LayerCache
from foretoken.models.stock.selfcheck import measure_deviation

PLAIN = "aot_eager"  # traced as for any other, and run by torch: without a compiler, in a second


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILE_BACKEND", PLAIN)
    torch._dynamo.reset()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "GPT-2", "Mixtral"])
def test_ragged_equals_alone(name: str) -> None:
    pairs.must_record(name)
    model = pairs.random(name, 0)
    runner = GraphModel(model, compiled=True)
    assert measure_deviation(model, runner) < (1e-5 if name in pairs.SINGLE else 1e-6)
    assert runner.layers is not None and not runner.layers.refusal


@pytest.mark.prove  # torch compiles for seconds
def test_all_layers_share_few_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whether there is one row and one token; not by the layer, nor by lengths and slots."""
    forms: list[Any] = []

    def counted(graph: Any, example: Any) -> Any:
        forms.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "COMPILE_BACKEND", counted)
    model = copy.deepcopy(pairs.target("Llama"))
    ids = torch.tensor(pairs.PROMPTS[:1])
    model(ids, output_hidden_states=True)  # which leaves hooks in it
    pair = pairs.speculator(model, "lookup", runtime="compiled")
    assert pair.target.runtime == "compiled"
    pair.generate(pairs.PROMPTS, max_new_tokens=30, gamma=4)
    pair.generate([[5] * 90], max_new_tokens=8, gamma=8)
    assert 0 < len(forms) <= 4


@pytest.mark.prove
@pytest.mark.filterwarnings("default")  # of torch, about its own code
@pytest.mark.skipif(
    pairs.DEVICE == "cpu" and shutil.which("g++") is None, reason="there is no compiler"
)
def test_greedy_texts_of_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILE_BACKEND", "inductor")
    model = pairs.target("Llama")
    pair = pairs.speculator(model, pairs.relative(model), runtime="compiled")
    assert pair.target.runtime == pair.drafter.runtime == "compiled"
    for text, prompt in zip(
        pair.generate(pairs.PROMPTS, max_new_tokens=24, gamma=3), pairs.PROMPTS, strict=True
    ):
        pairs.assert_greedy(text, model, prompt, 24)


def refused(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """A rehearsal says that layers run as they are, and they do."""
    model = pairs.random("Llama", 0)
    with caplog.at_level(logging.WARNING, "foretoken"):
        runner = rehearse(GraphModel(model, compiled=True))
    assert runner.runtime == "graphs"
    assert f"decoder layers run uncompiled: {reason}" in caplog.text
    assert measure_deviation(model, runner) < 1e-6


def test_where_torch_cannot_compile(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: Any, example: Any) -> Any:
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr(compiled, "COMPILE_BACKEND", fails)
    refused(caplog, "RuntimeError: there is no compiler")


@pytest.mark.prove
def test_where_it_computes_something_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(self: LayerCache, keys: torch.Tensor, values: torch.Tensor, *args: Any) -> Any:
        k, v = (x[:, :, : self.end] for x in self.arrays)
        return torch.zeros_like(k), torch.ones_like(v)

    monkeypatch.setattr(LayerCache, "update", forgets)
    refused(caplog, "logits differ by")


def test_it_is_chosen_by_name_or_for_long_runs() -> None:
    facts = ModelFacts(pairs.random("Llama", 0))
    assert place(facts, Placement()).model.runtime != "compiled"
    for named in (False, True):
        model, _ = graphs.build(facts, Placement(runtime="graphs", named=named))
        assert model.runtime == "graphs"
        model.prepare()
        assert model.runtime == ("graphs" if named else "compiled")
    assert place(facts, Placement(runtime="graphs")).model.may_compile is False
    model, _ = graphs.build(ModelFacts(pairs.random("T5", 0)), Placement(runtime="graphs"))
    model.prepare()
    assert model.may_compile and model.runtime == "graphs"


def test_a_speculator_prepares_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(GraphModel, "prepare", lambda model: prepared.append(model))
    spec = pairs.speculator(pairs.random("Llama", 0), pairs.random("Llama", 1), runtime="graphs")
    assert spec.prepared() is spec
    assert prepared == [spec.target, spec.drafter.model]
