"""Drafts over hidden states in fixed shapes. Their law is tested beside that on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foretoken
import tiny
from foretoken import Engine, Speculator
from foretoken.errors import InputError, RefusedError
from foretoken.models.base import TokenChoice
from foretoken.models.graph_pairs import GraphPairModel
from foretoken.models.graph_pass import GraphPass
from foretoken.models.graphs import rehearse
from foretoken.models.stock.pairs import StockPairModel
from pairdrafts import eagle_file, on_graphs

V, TAPS = 64, (1, 2, 3)
KEPT = [3, 4, 9, *range(12, 40, 2), *range(41, 64)]
TARGET = tiny.llama(V, context=256, num_hidden_layers=4).double()
PROMPTS = [[5, 17, 33], [60, 12, 7, 9, 44, 31, 2, 18, 50, 41, 23, 6], [3, 58]]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9},
)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["all tokens", "some tokens"])
def test_a_draft_in_one_recording_is_that_of_a_pass_for_each_token(kept: list[int] | None) -> None:
    """The same tokens, and distributions to rounding, in rows of their own numbers of tokens."""
    drafter: Any = on_graphs(TARGET, eagle_file(V, TAPS, kept, layers=2).read(TARGET))
    table, made, overlaps = drafter._table, [], []
    for at_once in (True, False):
        drafter._table = table if at_once else None
        for options in OPTIONS:
            with Engine(Speculator(drafter.target, drafter)) as engine:
                for n, prompt in enumerate(PROMPTS):
                    engine.add(prompt, max_new_tokens=20, gamma=n % 4, seed=n, **options)
                ended = [e.completion for _ in range(40) for e in engine.step() if e.completion]
            steps = [step for text in ended for step in text.steps]
            facts = [(s.draft_tokens, s.accepted, s.new_tokens, s.draft_calls) for s in steps]
            made.append(([text.tokens for text in ended], facts))
            overlaps.append(torch.tensor([x for s in steps for x in s.overlaps]))
        chains = len(drafter.decoder.chains)
    assert made[:3] == made[3:] and sum(fact[1] for _, facts in made for fact in facts) > 10
    for one, other in zip(overlaps[:3], overlaps[3:], strict=True):
        assert torch.allclose(one, other, 0, 1e-6)
    assert 0 < chains == len(drafter.decoder.chains)  # and no pass of one token made another


def test_long_blocks_beside_others() -> None:
    """Each pass gets its own part of the pairs."""
    target = tiny.llama(V, context=1024, num_hidden_layers=4).double()
    network = eagle_file(V, TAPS, layers=2).read(target).network.double()
    both = graphs, torch_model = GraphPairModel(network), StockPairModel(network)
    random = torch.Generator().manual_seed(0)
    for model in both:
        model.start([[]] * 3)
    for counts in ([3, 0, 70], [40, 2, 1], [1, 100, 600]):
        shape = sum(counts), graphs.width
        new = torch.randn(shape, generator=random, dtype=torch.float64)
        need = [min(n, 2) for n in counts]
        for model in both:
            model.set_next_pairs(new, counts)
        logits, expected = (model.score([[0] * n for n in counts], need) for model in both)
        assert torch.allclose(logits, expected, 0, 1e-9)
        assert torch.allclose(graphs.hidden, torch_model.hidden, 0, 1e-9)
        for model in both:
            model.permute([2, 0, 1])


def test_a_prompt_does_not_widen_the_chain_of_others() -> None:
    drafter: Any = on_graphs(TARGET, eagle_file(V, TAPS).read(TARGET))
    decoder, table = drafter.decoder, drafter._table
    other = StockPairModel(decoder.model)
    random = torch.Generator().manual_seed(0)
    counts = [3, 90, 1]
    states = torch.randn(sum(counts), 3 * 32, generator=random, dtype=torch.float64)
    tokens = torch.randint(V, (sum(counts),), generator=random).tolist()
    for model in (decoder, other):
        model.start([[]] * 3)
    decoder.set_draft_pairs(tokens, states, table)
    made = decoder.chain([[0] * n for n in counts], [2, 1, 3], TokenChoice(V), table)
    assert decoder.lengths == [4, 90, 3]
    assert {shape.width for shape, *_ in decoder.chains} == {3}
    embedded = torch.cat([table[tokens], other.project_states(states)], -1)
    other.set_next_pairs(embedded, counts)
    logits = other.score([[0] * n for n in counts], [1] * 3)[:, 0]
    assert torch.equal(made.tokens[:, 0], logits.argmax(-1))
    assert torch.allclose(made.tops[:, 0], logits.amax(-1), 0, 1e-9)


def test_what_does_not_fit_changes_nothing() -> None:
    drafter: Any = on_graphs(TARGET, eagle_file(V, TAPS).read(TARGET))
    decoder = drafter.decoder
    decoder.start([[]])
    decoder.set_draft_pairs([5], torch.zeros(1, 3 * 32).double(), drafter._table)
    limit = decoder.context
    with pytest.raises(InputError, match=f"context length is {limit}"):
        decoder.chain([[5]], [limit + 1], TokenChoice(V), drafter._table)
    assert decoder.lengths == [0]


def test_it_is_loaded_beside_a_target_on_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on torch if it cannot be recorded."""
    target = tiny.llama(320, context=128, num_hidden_layers=6)
    draft = eagle_file(320, TAPS).save(tmp_path / "draft")
    spec = foretoken.load(target, draft, runtime="graphs")
    decoder = spec.drafter.holds[0]
    assert isinstance(decoder, GraphPairModel) and spec.target.runtime == "graphs"
    assert decoder.lengths == []
    drafted = spec.generate(PROMPTS, max_new_tokens=16, gamma=3)
    plain = spec.generate(PROMPTS, max_new_tokens=16, gamma=0)
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert decoder.chains and sum(text.stats.drafted for text in drafted) > 0

    def fails(self: GraphPass, *inputs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    network = eagle_file(320, TAPS).read(target).network
    monkeypatch.setattr(GraphPass, "__call__", fails)
    with pytest.raises(RefusedError, match="cannot be recorded as a CUDA graph: RuntimeError$"):
        rehearse(GraphPairModel(network))
