"""Pieces of prompts in passes of their own beside rows that decode, in fixed shapes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pairs
import tiny
from foretoken.models import graphs
from foretoken.models.graph_pass import GraphPass
from foretoken.models.graph_prompts import count_prompt_positions, cut_piece, group_pieces
from foretoken.models.graphs import GraphModel
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import CheckedSequences
from tiny_families import FAMILIES
from work import record_pass_work


def llama() -> Any:
    """It has room for several passes of one prompt."""
    network: Any = tiny.llama(pairs.V, 2048)
    return network.double().to(pairs.DEVICE)


class MixedSequences(CheckedSequences):
    """Blocks of given sizes, of which the last few logits are compared with the stock model's."""

    def run(self, *sizes: int, need: list[int] | None = None) -> None:
        blocks = [self.draw_tokens(n) for n in sizes]
        need = [min(3, n) for n in sizes] if need is None else need
        logits = self.runner.score(blocks, need)
        assert logits.shape[:2] == (len(blocks), max(need))
        self.seqs = [seq + block for seq, block in zip(self.seqs, blocks, strict=True)]
        for b, n in enumerate(need):
            assert not logits[b, n:].any()
            if n:
                self.compare(logits[b, :n], self.compute_reference(b, n))

    def back(self, *counts: int) -> None:
        self.seqs = [t[: len(t) - n] for t, n in zip(self.seqs, counts, strict=True)]
        self.runner.set_lengths(list(map(len, self.seqs)))


def test_passes_of_few_shapes_run_all() -> None:
    def group(counts: dict[int, int], end: int = 1024) -> list[tuple[int, list[int]]]:
        passes = group_pieces([cut_piece(b, 0, n, 0) for b, n in counts.items()], end)
        return [(width, [piece.row for piece in pieces]) for width, pieces in passes]

    counts = {0: 512, 2: 70, 3: 1, 4: 100, 5: 128, 6: 64, 7: 500, 9: 300, 10: 600}
    assert group(counts) == [(64, [3, 6]), (128, [2, 4]), (128, [5]), (512, [0, 7, 9, 10])]
    many = dict.fromkeys(range(20), 512)
    assert [len(rows) for _, rows in group(many)] == [8, 8, 4]
    assert [len(rows) for _, rows in group(many, 1 << 14)] == [4] * 5
    assert [len(rows) for _, rows in group({0: 9, 1: 9}, 1 << 20)] == [1, 1]
    assert [count_prompt_positions(n) for n in (1, 65, 512, 513, 1100)] == [
        *(64, 128, 512, 576, 1152)
    ]


@pytest.mark.daily("Llama", "Gemma 2", "GPT-2", "T5", "BART")
@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_batches_equal_alone(name: str) -> None:
    """Pieces of prompts beside draft tokens and rows that rest, in rows that join, move, are there
    twice, go back and leave."""
    pairs.must_record(name)
    model = pairs.random(name, 0)
    rows = MixedSequences(model, random.Random(3), GraphModel(model))
    rows.start([9, 0])
    rows.run(3, 40)
    rows.start([70, 2, 0])
    rows.run(1, 2, 5, 64, 34)
    rows.back(0, 2, 4, 30, 20)
    rows.run(5, 0, 1, 50, 36, need=[5, 0, 1, 0, 1])
    rows.permute([4, 2, 0, 3, 0])
    rows.run(1, 1, 60, 0, 2)
    rows.leave([0, 2])
    rows.run(0, 40, 35)
    rows.back(0, 80, 1)
    rows.run(2, 34, 1, need=[1, 34, 1])
    rows.run(1, 1, 1)
    assert rows.max_delta / rows.spread < (1e-5 if name in pairs.SINGLE else 1e-6)


def test_pieces_of_any_length() -> None:
    """Those of more tokens than a pass takes, as they join and beside others; the cache grows."""
    model = llama()
    rows = MixedSequences(model, random.Random(4), GraphModel(model))
    rows.start([600, 3, 1100])
    rows.run(4, 520, 1)
    rows.run(1, 700, 33, need=[1, 300, 2])
    rows.back(0, 250, 2)
    rows.run(130, 1, 3)
    rows.start([500] * 5)
    rows.run(*[1] * 8)
    assert rows.max_delta / rows.spread < 1e-6


def test_hidden_states_are_those_of_the_torch_backend() -> None:
    """At the taps and at the needed positions, of all passes of a step."""
    network = llama()
    dice = random.Random(5)
    both = graphs, torch_model = GraphModel(network), CausalModel(network)
    for model in both:
        model.tap((1, 2))
        model.expose_hidden_states(lambda tokens: 0)

    def draw(*sizes: int) -> list[list[int]]:
        return [[dice.randrange(pairs.V) for _ in range(n)] for n in sizes]

    def check(blocks: list[list[int]], need: list[int]) -> None:
        for model in both:
            model.score(blocks, need)
        assert torch.allclose(graphs.hidden, torch_model.hidden, 0, 1e-9)
        for ours, theirs in zip(*(model.take_hidden_states() for model in both), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.first == theirs.first
                assert torch.allclose(ours.states, theirs.states, 0, 1e-9)

    for sizes in ((80, 3), (600, 0)):
        prompts = draw(*sizes)
        for model in both:
            model.start(prompts)
        check(draw(*[1] * len(graphs.lengths)), [1] * len(graphs.lengths))
    check(draw(2, 100, 0, 550), [2, 1, 0, 3])
    for model in both:
        model.permute([3, 0, 1])
        model.set_lengths([n - 40 * (b == 0) for b, n in enumerate(model.lengths)])
    check(draw(70, 5, 70), [1, 5, 0])


def count_run_positions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list of the shapes of all passes from now on."""
    shapes: list[tuple[int, ...]] = []
    run = GraphPass.__call__

    def watched(self: GraphPass, *given: Any) -> Any:
        shapes.append(tuple(self.inputs[0].shape))
        return run(self, *given)

    monkeypatch.setattr(GraphPass, "__call__", watched)
    return shapes


def test_a_prompt_costs_its_own_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that decode are not padded to its pieces, nor do they take part as it joins."""
    model = GraphModel(llama())
    shapes = count_run_positions(monkeypatch)
    model.start([[5, 6], [7], []])
    assert shapes == [(2, 64)]
    shapes.clear()
    model.score([[8], [8, 9, 4], [9] * 100], [1, 3, 0])
    assert shapes == [(4, 3), (1, 128)]
    assert model.padding == 4 * 3 + 128 - 104
    shapes.clear()
    model.start([[5] * 530])
    assert shapes == [(1, 512), (1, 64)]
    shapes.clear()
    model.score([[], [], [3] * 64, [4] * 50], [0, 0, 0, 1])
    assert shapes == [(2, 64)] and model.padding == 128 - 114
    assert model.count_padded_positions(3, 3) == 12
    assert model.count_padded_positions(3, 100) == 3 * 128


def test_few_passes_serve_all_prompts() -> None:
    """Whatever their lengths and slots: their number of rows, width and end name a pass."""
    dice, model = random.Random(6), GraphModel(llama())
    model.start([[5] * 900] * 8)
    for _ in range(30):
        model.set_lengths([min(n, dice.randrange(300)) for n in model.lengths])
        sizes = [dice.choice((0, 1, 4, dice.randrange(34, 300))) for _ in model.lengths]
        model.score([[7] * n for n in sizes], [int(n > 0) for n in sizes])
        model.permute(dice.sample(range(8), 8))
        model.start([[5] * dice.randrange(300)])
        model.leave([8])
    assert {rows for rows, *_ in model.prompt_passes} <= {1, 2, 4, 8}
    assert {width for _, width, *_ in model.prompt_passes} <= {64, 128, 256, 512}
    assert len(model.prompt_passes) <= 4 * 4 * 4  # and ends from 128 to 1024
    assert {width for _, width, *_ in model.passes} <= {1, 5}


def test_prompts_are_recorded_when_their_shape_recurs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that comes once does not pay for a recording, passes over draft tokens do."""
    recorded: list[tuple[int, ...]] = []

    def record(self: GraphPass) -> SimpleNamespace:
        recorded.append(tuple(self.inputs[0].shape))
        self.outputs = self.run()
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(GraphPass, "_record", record)
    monkeypatch.setattr(graphs, "make_memory_pool", lambda device: object())
    model = GraphModel(llama())
    model.start([[5] * 100])
    model.score([[5]], [1])
    assert recorded == [(1, 1)]
    model.leave([0])
    model.start([[6] * 90])
    model.leave([0])
    assert recorded == [(1, 1), (1, 128)]
    model.start([[7] * 300])
    assert recorded == [(1, 1), (1, 128)]


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "T5"])
def test_other_prompts_do_the_same_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording holds all there is to do at any lengths and in any slots."""
    seen = record_pass_work(monkeypatch)
    model = pairs.target(name)
    rows = MixedSequences(model, random.Random(7), GraphModel(model))
    rows.start([66, 73, 69])
    for sizes in ((40, 1, 50), (54, 2, 34), (34, 35, 1), (1, 54, 51), (50, 0, 50)):
        rows.run(*sizes, need=[min(n, 1) for n in sizes])
        rows.back(*sizes)
        rows.permute([2, 0, 1])
    runner: Any = rows.runner
    works = [seen[id(each)] for each in runner.prompt_passes.values() if id(each) in seen]
    assert max(map(len, works)) > 1
    assert all(work == each[0] for each in works for work in each)


def test_a_first_pass_over_some_slots_leaves_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass makes the arrays, of which those of other sequences must be defined, too."""

    def make_nan(x: torch.Tensor, *shape: int, **given: Any) -> torch.Tensor:
        return x.new_full(shape, torch.nan, **given)

    monkeypatch.setattr(torch.Tensor, "new_empty", make_nan)
    model = GraphModel(llama())
    model.start([[], [], []])
    model.score([[], [], [7] * 40], [0, 0, 1])
    assert model.score([[5], [6], [8]], [1, 1, 1]).isfinite().all()
