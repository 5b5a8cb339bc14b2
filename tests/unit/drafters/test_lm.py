"""LMDrafter over table models: what the draft model sees, and that q is what was drawn from."""

from __future__ import annotations

import pytest
import torch

from foretoken.costing.gamma import FixedGamma
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import Batch
from foretoken.errors import InputError, NumericsError
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import speculative
from foretoken.sampling.distributions import SamplingParams, probabilities
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import SampledVerifier
from foretoken.speculator import Speculator
from foretoken.step import step
from oracle import random_model
from running import running
from table import TableModel

V = 5
P, Q = random_model(1, V), random_model(2, V)
SAMPLED = SamplingParams(temperature=0.8, top_k=3)


class Careful(TableModel):
    """Checks what it is asked: no text longer than its context, no id past its vocabulary."""

    def score(self, blocks, need):
        assert any(need)
        logits = super().score(blocks, need)
        for text, block, count in zip(self._texts, blocks, need, strict=True):
            assert bool(block) == bool(count)
            assert self.context is None or len(text) <= self.context
            assert not text or max(text) < self.vocab_size
        return logits


class Spy(Draw):
    """Remembers the distributions that tokens were drawn from."""

    def __init__(self, rows: int, params: SamplingParams) -> None:
        super().__init__([SequenceKey(3, b) for b in range(rows)], [7] * rows, [params] * rows)
        self.drawn: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, distribution: torch.Tensor, i: int) -> torch.Tensor:
        ids = super().__call__(distribution, i)
        self.drawn.append((distribution, ids))
        return ids


def started(model: TableModel, prompts, sources=None, vocab_size: int = V) -> LMDrafter:
    drafter = LMDrafter(model, vocab_size)
    drafter.start(list(range(len(prompts))), prompts, sources)
    return drafter


def standardized(model, text, params=SAMPLED, width: int = V) -> torch.Tensor:
    q = probabilities(torch.tensor(model(tuple(text))).log(), params)
    return torch.nn.functional.pad(q, (0, width - len(q)))


def test_a_distribution_with_nothing_in_the_targets_vocabulary_is_named():
    drafter = started(TableModel(lambda text: [0.0] * V + [1.0], V + 1), [[0]])
    target, row = (
        TableModel(P, V),
        SequenceState.from_request(Request([0], 9, SequenceKey(0, 0), params=SAMPLED)),
    )
    target.start([[]])
    with pytest.raises(
        NumericsError, match="the draft's logits hold nothing but -inf at position 1"
    ):
        step([row], target, drafter, SampledVerifier(speculative), [2])
    assert row.tokens == [0]


@pytest.mark.parametrize("prompt", [[0], [0, V - 1, 1]], ids=["in the text", "in the prompt"])
def test_an_id_that_the_draft_does_not_know_silences_its_row(prompt):
    small = random_model(4, V - 2)
    drafter = started(Careful(small, V - 2), [prompt, [1]])
    drafter.propose([1, 1], Spy(2, SAMPLED))
    drafter.commit([[V - 1], [2]])
    draft = drafter.propose([2, 2], Spy(2, SAMPLED))
    assert draft.lengths.tolist() == [0, 2]
    assert torch.equal(draft.q[1, 0], standardized(small, [1, 2]))


@pytest.mark.parametrize("limit", [3, 9])
def test_it_falls_silent_where_its_context_ends(limit):
    """A context of 4: the last draft token is made from a text of 4 tokens, and never one from
    5."""
    drafter = LMDrafter(Careful(Q, V, context=4), V)
    row = SequenceState.from_request(Request([0, 1], limit, SequenceKey(0, 0), params=SAMPLED))
    for _ in running(
        Batch(TableModel(P, V), drafter), [row], SampledVerifier(speculative), FixedGamma(3)
    ):
        pass
    assert len(row.new_tokens) == limit
    length = 2
    for record in row.records:
        assert record.drafted == max(0, min(record.gamma, 4 - length + 1))
        length += len(record.new_tokens)


def test_an_encoder_decoder_reads_the_source_once():
    drafter = started(Careful(Q, V, encoder_decoder=True, context=2), [[0]], sources=[[3, 4]])
    draft = drafter.propose([2], Spy(1, SAMPLED))
    assert draft.lengths.tolist() == [2]  # the source takes none of the decoder's context
    assert torch.equal(draft.q[0, 0], standardized(Q, [3, 4, 0]))


@pytest.mark.parametrize("params", [{"temperature": 1.0}, 0.7, "greedy"])
def test_params_are_sampling_params(params):
    with pytest.raises(InputError, match="^params is .*; give a foretoken.SamplingParams"):
        LMDrafter(TableModel(Q, V), params=params)


@pytest.mark.parametrize("model", [Speculator(TableModel(Q, V), NoDrafter()), "./draft", None])
def test_what_is_no_model(model):
    with pytest.raises(InputError, match=r" is not a model; give .*\.target$") as error:
        LMDrafter(model)
    assert "\n" not in str(error.value)
