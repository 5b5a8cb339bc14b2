"""Forwards of fixed shapes: their cache, the guard against operations that no graph can have."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pairs
from foretoken.errors import RefusedError
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.runtimes.place import place
from foretoken.models.graph_pass import GraphPass, RecordingGuard
from foretoken.models.graphs import GraphModel, rehearse, round_up_width
from foretoken.models.row_slots import round_up_to_power_of_two
from foretoken.models.stock import attention
from foretoken.models.stock.cache import RaggedCache, RaggedLayer
from foretoken.models.stock.fixed_cache import FixedCache, FixedDecoderCache, round_up_slots
from foretoken.models.stock.selfcheck import (
    CheckedBackend,
    CheckedSequences,
    check,
    measure_deviation,
)
from pairs import PROMPTS
from tiny_families import FAMILIES, build
from work import Work

CPU = torch.device("cpu")


def test_buckets() -> None:
    assert [round_up_to_power_of_two(n) for n in (0, 1, 2, 3, 4, 5)] == [0, 1, 2, 4, 4, 8]
    assert [round_up_slots(n) for n in (0, 1, 64, 65, 129)] == [0, 64, 64, 128, 256]
    assert [round_up_width(n) for n in (1, 2, 3, 4, 5, 6, 9, 10, 17)] == [
        1,
        2,
        3,
        5,
        5,
        9,
        9,
        17,
        17,
    ]


def filled(lengths: list[int]) -> RaggedCache:
    """One layer, one head, width 1: the values of row b are b + 1."""
    cache = RaggedCache([RaggedLayer()], len(lengths), CPU)
    cache.prepare(max(lengths))
    block = torch.arange(1.0, len(lengths) + 1).view(-1, 1, 1, 1).expand(-1, -1, max(lengths), 1)
    cache.update(block, block, 0)
    cache.advance(lengths)
    return cache


def test_rows_join_and_change_places_within_the_same_tensors() -> None:
    cache = FixedCache([RaggedLayer()], CPU)
    cache.join(filled([3, 70]))
    assert cache.shape == (2, 128) and cache.lengths == [3, 70]
    (layer,) = cache.list_parts()
    keys = layer.arrays[0]
    cache.select([1])
    cache.join(filled([2]))
    assert cache.shape == (2, 128) and layer.arrays[0] is keys
    assert cache.lengths == [70, 2] and cache.slots == [1, 0]
    assert keys[1, 0, :70].eq(2).all() and keys[0, 0, :2].eq(1).all()
    cache.select([1, 0, 1])
    assert cache.shape == (4, 128) and cache.lengths == [2, 70, 2]
    assert layer.arrays[0][cache.slots, 0, 0, 0].tolist() == [1, 2, 1]


def test_the_guard_lets_fixed_shapes_through_and_names_others() -> None:
    x = torch.arange(4.0)
    with RecordingGuard("Mine"):
        chosen = x[torch.tensor([0, 2])]
    assert chosen.tolist() == [0, 2]
    moves = (lambda: x.to("meta"), lambda: torch.empty(4, device="meta").copy_(x))
    for depends in (lambda: x[x > 1], lambda: x.nonzero(), lambda: float(x.sum()), *moves):
        with pytest.raises(RefusedError, match="Mine cannot be run in fixed shapes"):
            with RecordingGuard("Mine"):
                depends()


@pytest.mark.daily("Llama", "Gemma 2", "GPT-2", "T5", "BART")
@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_equals_alone(name: str) -> None:
    """Joins, rollbacks, growth, repeated rows and leaves; float32 casts within families allowed."""
    pairs.must_record(name)
    model = pairs.random(name, 0)
    assert measure_deviation(model, GraphModel(model)) < (1e-5 if name in pairs.SINGLE else 1e-6)


def only_on_the_host(self: GraphModel, lengths: list[int]) -> None:
    self.cache.lengths = list(lengths)


def forgets(self: FixedCache, rows: list[int]) -> None:
    self.lengths, self.long = [self.lengths[b] for b in rows], [False] * len(rows)
    self.shown.select(rows)
    self.slots = list(range(len(rows)))


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "lengths are not taken back": (GraphModel, "set_lengths", only_on_the_host),
    "slots are not hidden": (
        FixedCache, "get_query_offset", lambda self, layer_idx=0: self.offset + 3,
    ),
    "rows stay where others were": (FixedCache, "select", forgets),
}  # fmt: skip


def sends_once(self: FixedDecoderCache, lengths: list[int]) -> None:
    if len(self.source_lengths) != self.rows:
        self.source_lengths = torch.tensor([*lengths, *[1] * (self.rows - len(lengths))])


PLANTED_IN_SOURCES: dict[str, tuple[Any, str, Any]] = {
    "sources change places": (FixedDecoderCache, "_send_source_lengths", sends_once),
    "padding of sources is seen": (
        FixedDecoderCache, "_send_source_lengths",
        lambda self, lengths: setattr(self, "source_lengths", torch.full((self.rows,), 64)),
    ),
    "a bias from the longest sequence": (attention, "shift_bias", lambda cache, bias: bias),
}  # fmt: skip


@pytest.mark.parametrize("bug", [*PLANTED, *PLANTED_IN_SOURCES])
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*(PLANTED | PLANTED_IN_SOURCES)[bug])
    model = build("Llama" if bug in PLANTED else "T5")
    with pytest.raises(RefusedError, match="not exact over fixed shapes"):
        check(model, CheckedBackend("fixed shapes", GraphModel))


CAUSAL = ["Llama", "Mistral", "Gemma 2", "GPT-2", "OPT", "Mixtral"]


@pytest.mark.daily("Llama", "Gemma 2", "GPT-2", "T5")
@pytest.mark.parametrize("name", [*CAUSAL, "T5", "BART", "Marian"])
def test_no_number_changes_the_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recording holds must be all there is to do at any lengths and for any ids."""
    pairs.must_record(name)
    seen: dict[tuple[int, ...], list[Any]] = {}
    run = GraphPass.__call__

    def watched(self: GraphPass, *inputs: Any) -> Any:
        if self.guard is not None:  # under the guard, and buffers are made
            return run(self, *inputs)
        self.fill(*inputs)
        with Work() as work:
            logits = self.run()
        seen.setdefault((*self.inputs[0].shape, id(self)), []).append(work.done)
        return logits

    monkeypatch.setattr(GraphPass, "__call__", watched)
    model = pairs.target(name)
    rows = CheckedSequences(model, random.Random(2), GraphModel(model))
    rows.start([4, 21, 9])
    for width in (3, 1, 5, 5, 1, 4, 3, 1, 5, 1):
        rows.score(width)
    assert max(map(len, seen.values())) > 1
    for works in seen.values():
        assert all(work == works[0] for work in works)
    assert rows.max_delta < 1e-5 * rows.spread


def test_few_passes_serve_all() -> None:
    """Rows leave, texts end and new ones begin: nothing that was made is made again."""
    model = pairs.target("Llama")
    pair = pairs.speculator(model, pairs.relative(model), runtime="graphs")
    pair.generate(PROMPTS, max_new_tokens=30, gamma=4)
    passes = dict(pair.target.passes)
    assert 0 < len(passes) <= 3 * 4  # rows of 4, 2 and 1, widths of 1, 2, 3 and 5
    pair.generate(PROMPTS, max_new_tokens=30, gamma=4)
    assert all(pair.target.passes[key] is one for key, one in passes.items())
    assert {width for _, width, *_ in pair.target.passes} <= {1, 2, 3, 5}


def test_what_a_shape_holds_beside_the_blocks_is_padding() -> None:
    model = GraphModel(pairs.target("Llama"))
    model.start([[5], [6], [7]])
    model.score([[5, 6, 7, 8], [6], [7]], [1, 1, 1])
    assert model.padding == 4 * 5 - 6
    model.score([[8], [8], [8]], [1, 1, 1])
    assert model.padding == 4 - 3


def test_growth_makes_all_anew() -> None:
    """Recorded passes write to where the cache was."""
    model = GraphModel(pairs.target("Llama"))
    model.start([[5, 6]])
    model.score([[7]], [1])
    (before,) = model.passes.values()
    model.start([[5] * 70])
    model.score([[7], [8]], [1, 1])
    assert before not in model.passes.values()
    assert set(model.passes) == {(2, 1, 128, 0)}


def test_sources_have_a_capacity_of_their_own() -> None:
    """Growth makes passes anew; sources that leave make room for passes over fewer positions, in
    the same tensors."""
    model = GraphModel(pairs.target("T5"))
    model.start([[5, 6]], [[7] * 9])
    model.score([[7]], [1])
    keys = model.cache.cross.layers[0].arrays[0]
    model.start([[5]], [[7] * 64])
    model.score([[7], [8]], [1, 1])
    assert set(model.passes) == {(2, 1, 64, 64)} and keys.shape[2] == 64
    model.start([[5]], [[8] * 65])
    model.score([[7], [8], [9]], [1, 1, 1])
    assert set(model.passes) == {(4, 1, 64, 128)}
    kept, keys = dict(model.passes), model.cache.cross.layers[0].arrays[0]
    model.leave([2])
    model.score([[7], [8]], [1, 1])
    assert set(model.passes) == {*kept, (2, 1, 64, 64)}
    assert model.cache.cross.layers[0].arrays[0] is keys and keys.shape[2] == 128


def test_what_looks_at_its_numbers_is_refused_by_name() -> None:
    """Dynamic frequencies ask for the longest position, and the host waits for the answer."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **shape))
    with pytest.raises(RefusedError, match="LlamaForCausalLM cannot be run in fixed shapes"):
        place(ModelFacts(model), Placement(runtime="graphs"))
    assert place(ModelFacts(model), Placement()).model.runtime == "transformers"


def test_compiled_encoder_decoders_and_int8_are_refused() -> None:
    with pytest.raises(RefusedError, match="encoder-decoders are not compiled"):
        place(ModelFacts(build("T5")), Placement(runtime="compiled"))
    with pytest.raises(RefusedError, match="only on the native decoder, not on graphs"):
        place(ModelFacts(build("Llama")), Placement(runtime="graphs", dtype="int8"))


def test_a_rehearsal_says_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: GraphPass, *inputs: Any) -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    model = rehearse(GraphModel(build("Llama")))
    assert model.cache.lengths == []
    monkeypatch.setattr(GraphPass, "__call__", fails)
    with pytest.raises(RefusedError, match="recorded as a CUDA graph: RuntimeError$") as error:
        rehearse(GraphModel(build("Llama")))
    assert "operation not permitted" in str(error.value.__cause__)


def test_where_it_is_chosen() -> None:
    placed = place(ModelFacts(build("Llama")), Placement(runtime="graphs"))
    assert placed.model.runtime == "graphs" and placed.reason == "it passed the self-check"
