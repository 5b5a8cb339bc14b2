"""The explicit cache on OpenVINO gives transformers' own logits, row by row, whatever rows did."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from foretoken import Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.generation_config import Ends
from foretoken.models.openvino.explicit import BUCKET, ExplicitModel, Slots
from foretoken.models.openvino.export_explicit import export_explicit
from foretoken.models.openvino.tracing import core
from foretoken.models.stock.model import Seq2SeqModel
from foretoken.models.stock.selfcheck import CheckedRows, deviation, stir
from pairs import PROMPTS, BrokenOff, assert_greedy, relative, target
from tiny_families import FAMILIES, T5, build

pytestmark = pytest.mark.cpu_only

ENCODER_DECODERS = [
    name for name, (_, kind, _) in FAMILIES.items() if kind.startswith(("T5", "MT5"))
]
ENCODER_DECODERS += ["BART", "Marian"]
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


def compiled(model: PreTrainedModel) -> tuple[Any, ...]:
    exported = export_explicit(model)
    graphs = {
        name: core().compile_model(graph, "CPU", EXACT) for name, graph in exported.graphs.items()
    }
    return graphs["decoder"], exported.facts, graphs.get("cross"), graphs.get("encoder")


@cache
def family(name: str) -> tuple[PreTrainedModel, tuple[Any, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = copy.deepcopy(target(name)).float() if name == "T5" else build(name)
        if name != "T5":
            stir(model)
    return model, compiled(model)


def conversation(name: str, seed: int) -> CheckedRows:
    model, graphs = family(name)
    return CheckedRows(model, random.Random(seed), ExplicitModel(*graphs))


@pytest.fixture
def t5() -> ExplicitModel:
    return ExplicitModel(*family("T5")[1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.prove] * (name not in ("T5", "BART", "Gemma 2")))
        for name in (*ENCODER_DECODERS, "Gemma 2")
    ],
)
def test_ragged_rows_are_each_row_alone(name: str) -> None:
    """Joins, blocks of different lengths, rollbacks, permutation and leaving, past a bucket."""
    model, graphs = family(name)
    assert deviation(model, ExplicitModel(*graphs)) < 1e-5


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_repeated_rows_go_their_own_ways(name: str) -> None:
    rows = conversation(name, 3)
    rows.start([4, 0, 9])
    rows.score(6)
    rows.permute([2, 2, 0, 2, 1])
    for width in (5, 1, 4):
        rows.score(width)
    rows.leave([0, 4])
    rows.score(3)
    assert len(rows.texts) == 3 and rows.worst / rows.spread < 1e-5


def test_rows_that_stay_are_not_copied(t5: ExplicitModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row joins in a gap, or behind the others; the last ones close what gaps are left."""
    put: list[int] = []
    write = Slots.put
    monkeypatch.setattr(
        Slots, "put", lambda self, place, row: put.append(place) or write(self, place, row)
    )
    t5.start([[1, 2, 3], [4], [5], [6, 7]], [[8]] * 4)
    assert t5.caches
    pair = t5.caches[0].arrays
    t5.start([[9]], [[3, 4]])
    t5.score([[1]] * 5, [1] * 5)
    assert put == [4, 4]  # its own tokens and its source
    t5.start([[9]], [[3, 4]])
    t5.leave([1, 3])
    t5.permute([3, 2, 1, 0])
    t5.start([[9]], [[3, 4]])
    t5.score([[1]] * 5, [1] * 5)
    assert put[2:] == [5, 5, 1, 1, 3, 3] and t5.caches[0].arrays is pair


@pytest.mark.parametrize("joins", [False, True])
def test_what_a_broken_text_left_harms_no_other(joins: bool) -> None:
    """NaN survives a mask. The place goes to a row that joins, or to the last one."""
    rows = conversation("T5", 4)
    rows.start([30, 9, 5])
    rows.score(4)
    held: Any = rows.runner
    for x in (*held.caches[0].arrays, *held.caches[1].arrays):
        x[:, held.caches[0].places[0]] = float("nan")
    rows.leave([0])
    if joins:
        rows.start([2])
    for _ in range(3):
        rows.score(6)
    assert len(rows.texts) == 2 + joins and rows.worst / rows.spread < 1e-5


def test_slots_that_no_row_needs_any_more_are_given_up() -> None:
    """A pass reads them all."""
    rows = conversation("T5", 7)
    rows.start([5 * BUCKET, 3, 8])
    rows.score(2)
    rows.leave([0])
    for width in (0, 5, BUCKET, 3):
        rows.score(width)
    held: Any = rows.runner
    assert held.caches[0].capacity <= 2 * BUCKET and rows.worst / rows.spread < 1e-5
    rows.runner.set_lengths([0, 0])
    rows.texts = [[], []]
    rows.score(3)
    assert held.caches[0].capacity == BUCKET and rows.worst / rows.spread < 1e-5


def test_arrays_stay_within_what_memory_says(t5: ExplicitModel) -> None:
    """While rows join, grow, and all but one leave: of rows that are there, and slots."""

    def taken() -> int:
        assert len(t5.caches) == 2
        arrays = [*t5.caches[0].arrays, *t5.caches[1].arrays]
        return sum(x[:, : len(t5.lengths)].nbytes for x in arrays)

    t5.start([[1] * 100, [2] * 3], [[3] * 5, [4] * 90])
    assert 0 < taken() <= t5.memory([100, 3], [5, 90])
    for i in range(1, 6):
        t5.score([[5] * 20, [6]], [1, 1])
        assert taken() <= t5.memory([100 + 20 * i, 3 + i], [5, 90])
    t5.leave([0])
    t5.score([[7]], [1])
    assert taken() <= t5.memory([9], [90]) < t5.memory([100, 3], [5, 90])


def test_sources_longer_and_shorter_than_those_present() -> None:
    rows = conversation("T5", 5)
    for sources in ([40, 3], [1], [90, 7]):
        texts, read = [rows.draw(5) for _ in sources], [rows.draw(n) for n in sources]
        rows.runner.start(texts, read)
        rows.texts, rows.sources = rows.texts + texts, rows.sources + read
        rows.score(4)
    rows.leave([0, 3])
    rows.score(4)
    assert list(map(len, rows.sources)) == [3, 1, 7] and rows.worst / rows.spread < 1e-5
    runner: Any = rows.runner
    assert runner.caches[1].capacity == 7  # the slots of a long source go with it


def test_its_encoder_runs_when_rows_join_and_never_again(t5: ExplicitModel) -> None:
    assert t5.encoder_seconds == 0
    t5.start([[0]], [[5, 6, 7]])
    spent = t5.encoder_seconds
    t5.score([[3]], [1])
    assert t5.encoder_seconds == spent > 0
    t5.start([[0]], [[8]])
    assert t5.encoder_seconds > spent


def test_a_row_grows_past_many_buckets() -> None:
    """T5's distances end in one bucket for all that is far; a long row needs them right."""
    rows = conversation("mT5", 6)
    rows.start([3 * BUCKET, 2])
    for _ in range(20):
        rows.score(12)
    assert max(map(len, rows.texts)) > 3 * BUCKET and rows.worst / rows.spread < 1e-5


def test_rows_that_all_left_leave_nothing_behind(t5: ExplicitModel) -> None:
    t5.start([[1, 2], [3]], [[4], [5, 6]])
    t5.leave([0, 1])
    assert t5.lengths == [] and t5.score([], []).shape == (0, 0, 64)
    t5.start([[1, 2]], [[4]])
    fresh = ExplicitModel(*family("T5")[1])
    fresh.start([[1, 2]], [[4]])
    assert torch.equal(t5.score([[3]], [1]), fresh.score([[3]], [1]))


def test_logits_outlive_the_next_pass(t5: ExplicitModel) -> None:
    t5.start([[1, 2]], [[4]])
    first = t5.score([[3]], [1])
    clone = first.clone()
    t5.score([[9]], [1])
    assert torch.equal(first, clone)


def test_a_block_that_nobody_needs_counts_as_one_that_somebody_does(t5: ExplicitModel) -> None:
    other = ExplicitModel(*family("T5")[1])
    for runner in (t5, other):
        runner.start([[1], [2, 5]], [[4], [8, 8]])
    assert t5.score([[3, 7], []], [0, 0]).shape == (2, 0, 64)
    other.score([[3, 7], []], [2, 0])
    assert t5.lengths == other.lengths == [3, 2]
    assert torch.allclose(t5.score([[6], [6]], [1, 1]), other.score([[6], [6]], [1, 1]))


def test_blocks_are_padded_to_the_longest(t5: ExplicitModel) -> None:
    t5.start([[1], [2, 5]], [[4], [8, 8]])
    t5.score([[3, 7, 9], [6]], [1, 1])
    assert t5.padding == 2


def test_a_pass_reads_the_cache_where_it_stands(t5: ExplicitModel) -> None:
    """Nothing is handed over again unless it grew."""
    t5.start([[1]], [[4]])
    t5.score([[2]], [1])
    bound = {name: pair for name, (pair, _) in t5.decoder.bound.items()}
    t5.score([[3]], [1])
    t5.set_lengths([1])
    t5.score([[3, 5]], [2])
    assert all(t5.decoder.bound[name][0] is pair for name, pair in bound.items())
    t5.score([[3] * BUCKET], [1])
    assert (
        t5.decoder.bound[""][0] is bound[""]
    )  # written and grown behind the pass, read by the next
    t5.score([[3]], [1])
    assert t5.decoder.bound[""][0] is not bound[""]
    assert t5.decoder.bound["cross_"][0] is bound["cross_"]


@pytest.mark.parametrize("late", [False, True])
def test_nothing_stale_is_read_behind_a_pass_that_was_broken_off(
    t5: ExplicitModel, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while inputs change; the pass is then made again."""
    t5.start([[1, 2], [3]], [[4], [5, 6]])
    expected = t5.score([[3, 7, 8], [9]], [2, 1])
    for n in range(1, 11):
        t5.leave([0, 1])
        t5.start([[1, 2], [3]], [[4], [5, 6]])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(t5.decoder, "request", BrokenOff(t5.decoder.request, n, late=late))
            t5.permute([1, 0, 1])
            t5.score([[9], [9, 9, 9], [9]], [1, 2, 0])
        t5.permute([1, 0])
        assert torch.equal(t5.score([[3, 7, 8], [9]], [2, 1]), expected)


def test_the_models_errors_are_one_line_each(t5: ExplicitModel) -> None:
    with pytest.raises(InputError, match="one non-empty source"):
        t5.start([[1]])
    with pytest.raises(InputError, match="one non-empty source"):
        t5.start([[1]], [[]])
    t5.start([[1, 2]], [[4]])
    with pytest.raises(InputError, match="can only go back"):
        t5.set_lengths([3])
    with pytest.raises(InputError, match="2 blocks for 1 rows"):
        t5.score([[1], [2]], [1, 1])
    bart = ExplicitModel(*family("BART")[1])
    with pytest.raises(InputError, match="the encoder takes 128"):
        bart.start([[1]], [[4] * 129])
    bart.start([[2] * 126], [[4]])
    with pytest.raises(InputError, match="would hold 129 tokens, the model 128"):
        bart.score([[1, 2, 3]], [1])
    assert bart.lengths == [126] and bart.score([[1, 2]], [2]).isfinite().all()


def test_the_exported_model_stays_as_it_was() -> None:
    """Here a decoder that is not as deep as its encoder."""
    model = T5ForConditionalGeneration(T5Config(**T5 | {"num_decoder_layers": 1})).train()
    stock = model.config._attn_implementation
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    graphs = compiled(model)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == stock
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert deviation(model, ExplicitModel(*graphs)) < 1e-5


def test_what_cannot_go_back_row_by_row_is_refused() -> None:
    model = build("Llama")
    model._is_stateful = True
    with pytest.raises(RefusedError, match="keeps states beside"):
        export_explicit(model)


def test_greedy_text_is_transformers_own() -> None:
    """Under the whole loop, several rows at once, with a draft that is right at times."""
    stock, runner = target("T5"), ExplicitModel(*family("T5")[1])
    draft = LMDrafter(Seq2SeqModel(relative(stock)), 64)
    for gamma, drafter in ((0, NoDrafter()), (4, draft)):
        spec = Speculator(runner, drafter, ends=Ends(decoder_start=0))
        completions = spec.generate(PROMPTS, gamma=gamma, max_new_tokens=24)
        for completion, prompt in zip(completions, PROMPTS, strict=True):
            assert_greedy(completion, stock, prompt, 24)
    assert 0 < completion.stats.accepted < completion.stats.drafted
    assert completion.stats.runtime == "openvino"
