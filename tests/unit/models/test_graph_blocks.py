"""Drafts by blocks in fixed shapes, against those on torch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from blocks import (
    CONFIDENT,
    DFLASH2,
    DOMINO,
    DSPARK,
    LAYERS,
    ZLAB,
    draft,
    graph_pair,
    ready,
    speculators,
)
from foretoken import SamplingParams, Speculator
from foretoken.errors import RefusedError
from foretoken.models.graph_blocks import GraphBlockModel
from foretoken.models.graph_pass import GraphPass
from foretoken.models.stock.dflash import StockBlockModel
from work import record_pass_work

pytestmark = pytest.mark.daily

V, H = 40, 32
TARGET = tiny.llama(V, context=2048, seed=5).double()
WINDOW = {"sliding_window": 3, "use_sliding_window": True}
MIXED = {**LAYERS, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "DFlash": ZLAB,
    "DFlash2": DFLASH2,
    "Domino": DOMINO,
    "DSpark": CONFIDENT,
    "JetSpec": {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal": True}},
    "windows of both ways": {**ZLAB, **MIXED},
    "windows from the anchor": speculators(transformer_layer_config=MIXED),
    "causal windows": speculators(transformer_layer_config=MIXED, sliding_window_non_causal=False),
}


class Both:
    """The same sequences in fixed shapes and on torch, whose results must be equal."""

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        self.graphs = GraphBlockModel(ready(config, TARGET))
        self.torch_model = draft(config, TARGET)
        self.dice = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)

    @property
    def models(self) -> tuple[GraphBlockModel, StockBlockModel]:
        return self.graphs, self.torch_model

    def append(self, *counts: int) -> list[int]:
        width = self.graphs.network.fc.in_features
        states = [
            torch.randn(n, width, generator=self.numbers, dtype=torch.float64) for n in counts
        ]
        passes = [model.append_context(states) for model in self.models]
        assert self.graphs.lengths == self.torch_model.lengths
        return passes

    def predict(self, *counts: int) -> None:
        """And what the heads make of the results, token after token."""
        anchors = [self.dice.randrange(V) for _ in counts]
        results = [model.predict_block(anchors, list(counts)) for model in self.models]
        before = torch.tensor(anchors)
        memories: list[Tensor | None] = [None, None]
        for i in range(max(counts)):
            rows = [b for b, n in enumerate(counts) if n > i]
            made: list[tuple[Tensor, Tensor | None]] = []
            for k, (model, (states, logits)) in enumerate(zip(self.models, results, strict=True)):
                assert states.shape[:2] == logits.shape[:2] == (len(counts), max(counts))
                out, chance, memories[k] = model.condition_on_previous(
                    states[:, i], logits[:, i], before, memories[k]
                )
                made += [(states[:, i], logits[:, i]), (out, chance)]
            for one, other in zip(made[:2], made[2:], strict=True):
                for x, y in zip(one, other, strict=True):
                    assert (x is None) == (y is None)
                    assert x is None or y is None or torch.allclose(x[rows], y[rows], 0, 1e-9)
            before = made[3][0].argmax(-1)

    def start(self, rows: int) -> None:
        for model in self.models:
            model.start(rows)

    def permute(self, *rows: int) -> None:
        for model in self.models:
            model.permute(list(rows))

    def leave(self, *rows: int) -> None:
        for model in self.models:
            model.leave(list(rows))


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_those_of_the_torch_backend(name: str) -> None:
    """In sequences of different lengths that join, move, are there twice, and leave. Draft tokens
    that are rejected leave nothing in a context."""
    both = Both(CONFIGS[name])
    both.start(3)
    both.append(7, 1, 30)
    both.predict(4, 1, 2)
    both.append(2, 1, 0)
    both.predict(4, 0, 3)
    both.start(2)
    both.append(0, 5, 1, 60, 0)
    both.predict(1, 4, 4, 2, 3)
    both.permute(4, 2, 0, 2)
    both.append(1, 2, 3, 4)
    both.predict(4, 4, 4, 4)
    both.leave(0, 2)
    both.predict(3, 2)
    both.append(40, 1)
    both.predict(1, 1)
    both.leave(0, 1)
    both.start(1)
    both.predict(2)
    both.append(3)
    both.predict(4)


def test_long_prompts_are_appended_in_pieces() -> None:
    both = Both(DFLASH2)
    both.start(3)
    assert both.append(600, 3, 1100) == [3 + 2 + 1, 3]
    both.predict(4, 4, 1)
    assert both.append(1, 700, 0) == [2 + 1, 2]
    both.predict(4, 4, 4)
    assert set(both.graphs.append_passes) <= {1 << k for k in range(10)}


def test_few_passes_serve_all() -> None:
    both = Both(ZLAB)
    both.start(8)
    both.append(*[200] * 8)
    for _ in range(30):
        both.append(*(both.dice.randrange(6) for _ in range(8)))
        both.predict(*(both.dice.randrange(5) for _ in range(7)), 1)
        both.permute(*both.dice.sample(range(8), 8))
        both.leave(7)
        both.start(1)
    graphs = both.graphs
    assert {rows for rows, *_ in graphs.block_passes} == {8}
    assert {width for _, width, _ in graphs.block_passes} <= {2, 3, 5}
    assert {end for *_, end in graphs.block_passes} <= {64, 128, 256, 512}
    assert len(graphs.append_passes) <= 10


def test_other_numbers_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording holds all there is to do at any lengths, sizes and ids."""
    seen = record_pass_work(monkeypatch)
    both = Both(CONFIGS["windows from the anchor"])
    both.start(3)
    both.append(66, 73, 69)
    for counts in ((4, 3, 3), (0, 4, 1), (1, 1, 4), (4, 4, 4)):
        both.append(*counts)
        both.predict(*counts)
        both.permute(2, 0, 1)
    assert max(map(len, seen.values())) > 2
    assert all(work == works[0] for works in seen.values() for work in works)


def test_growth_makes_all_anew() -> None:
    """Recorded passes write to where the cache was."""
    both = Both(ZLAB)
    both.start(1)
    both.append(3)
    both.predict(4)
    before = {*both.graphs.append_passes.values(), *both.graphs.block_passes.values()}
    both.append(70)
    both.predict(4)
    assert before.isdisjoint(
        {*both.graphs.append_passes.values(), *both.graphs.block_passes.values()}
    )
    assert set(both.graphs.append_passes) == {128} and set(both.graphs.block_passes) == {
        (1, 5, 128)
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_output_is_that_of_plain_decoding(name: str) -> None:
    target, drafter = graph_pair(CONFIGS[name], TARGET)
    prompts = [[5, 17, 33], [6, 12, 7, 9, 4, 31, 2, 18, 5, 1, 23, 6], [3, 8]]
    spec, params = Speculator(target, drafter), SamplingParams(max_new_tokens=24)
    drafted, plain = (spec.generate(prompts, params, gamma=gamma) for gamma in (4, 0))
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert sum(text.stats.drafted for text in drafted) > 0


def test_a_network_that_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: one that looks at its numbers, and one whose recording fails."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(RefusedError, match="BlockNetwork cannot be run in fixed shapes"):
        GraphBlockModel(ready({**ZLAB, "rope_parameters": rope}, TARGET)).rehearse()
    model = GraphBlockModel(ready(DSPARK, TARGET)).rehearse()
    assert model.lengths == [] and model.append_passes and model.block_passes

    def fails(self: GraphPass, *inputs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphPass, "__call__", fails)
    with pytest.raises(RefusedError, match="cannot be recorded as a CUDA graph: RuntimeError$"):
        GraphBlockModel(ready(DSPARK, TARGET)).rehearse()


def test_what_a_tensor_held_before_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """New arrays are filled only in used slots, and masked values are multiplied by 0."""

    def make_nan(x: Tensor, *shape: int, **given: Any) -> Tensor:
        return x.new_full(shape, torch.nan, **given)

    monkeypatch.setattr(torch.Tensor, "new_empty", make_nan)
    both = Both(DSPARK)
    both.start(3)
    both.append(0, 2, 70)
    both.predict(3, 1, 4)
    both.leave(0, 2)
    both.start(2)
    both.append(1, 0, 200)
    both.predict(4, 4, 4)
