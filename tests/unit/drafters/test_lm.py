"""LMDrafter over table models: what the draft model sees, and that q is what was drawn from."""

from __future__ import annotations

import pytest
import torch

from foretoken.costing.gamma import Fixed
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import Batch
from foretoken.errors import InputError, NumericsError
from foretoken.request import Request, Row
from foretoken.sampling.distributions import SamplingParams, probabilities
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import RowKey
from foretoken.sampling.verifier import Sampled
from foretoken.sampling.verify import speculative
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
        super().__init__([RowKey(3, b) for b in range(rows)], [7] * rows, [params] * rows)
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


def test_q_is_the_distribution_that_the_tokens_were_drawn_from():
    drafter = started(Careful(Q, V), [[0], [1, 2, 3]])
    spy = Spy(2, SAMPLED)
    draft = drafter.propose([3, 3], spy)
    assert draft.lengths.tolist() == [3, 3]
    assert draft.calls == 3
    for i, (drawn_from, ids) in enumerate(spy.drawn):
        assert torch.equal(draft.q[:, i], drawn_from)
        assert torch.equal(draft.tokens[:, i], ids)
    for b, prompt in enumerate([[0], [1, 2, 3]]):
        for i in range(3):
            text = prompt + draft.tokens[b, :i].tolist()
            assert torch.equal(draft.q[b, i], standardized(Q, text))


@pytest.mark.parametrize("kept", [[3], "guess", "guesses", "all"])
def test_after_a_commit_it_guesses_from_the_text_that_was_kept(kept):
    drafter = started(Careful(Q, V), [[0]])
    x = drafter.propose([2], Spy(1, SAMPLED)).tokens[0].tolist()
    kept = {"guess": [x[0], 4], "guesses": x, "all": [*x, 4]}.get(str(kept), kept)
    drafter.commit([kept])
    draft = drafter.propose([1], Spy(1, SAMPLED))
    assert torch.equal(draft.q[0, 0], standardized(Q, [0, *kept]))


def test_greedy_draft_tokens_are_certain():
    drafter = started(Careful(Q, V), [[0]])
    draft = drafter.propose([2], Spy(1, SamplingParams()))
    best = int(Q((0,)).argmax())
    assert draft.q is None
    assert draft.tokens.tolist() == [[best, int(Q((0, best)).argmax())]]


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams()], ids=["sampled", "greedy"])
def test_a_larger_vocabulary_is_cut_to_the_targets(params):
    def beyond(text):
        return [0.05] * V + [0.75]  # the likeliest token is none of the target's

    drafter = started(Careful(beyond, V + 1), [[0]])
    spy = Spy(1, params)
    draft = drafter.propose([2], spy)
    assert int(draft.tokens.max()) < V
    if draft.q is not None:
        assert draft.q.shape == (1, 2, V)
        torch.testing.assert_close(draft.q.sum(-1), torch.ones(1, 2).double())


def test_a_distribution_with_nothing_in_the_targets_vocabulary_is_named():
    drafter = started(TableModel(lambda text: [0.0] * V + [1.0], V + 1), [[0]])
    target, row = TableModel(P, V), Row.of(Request([0], 9, RowKey(0, 0), params=SAMPLED))
    target.start([[]])
    with pytest.raises(
        NumericsError, match="the draft's logits hold nothing but -inf at position 1"
    ):
        step([row], target, drafter, Sampled(speculative), [2])
    assert row.tokens == [0]


def test_a_smaller_vocabulary_never_guesses_the_rest():
    small = random_model(4, V - 2)
    drafter = started(Careful(small, V - 2), [[0]])
    draft = drafter.propose([1], Spy(1, SAMPLED))
    assert torch.equal(draft.q[0, 0], standardized(small, [0]))
    assert draft.q[0, 0, V - 2 :].tolist() == [0, 0]


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
    row = Row.of(Request([0, 1], limit, RowKey(0, 0), params=SAMPLED))
    for _ in running(Batch(TableModel(P, V), drafter), [row], Sampled(speculative), Fixed(3)):
        pass
    assert len(row.new_tokens) == limit
    length = 2
    for record in row.records:
        assert record.drafted == max(0, min(record.gamma, 4 - length + 1))
        length += len(record.kept)


def test_a_prompt_past_its_context_is_never_read():
    drafter = started(Careful(Q, V, context=3), [[0, 1, 2, 3], [0]])
    draft = drafter.propose([2, 2], Spy(2, SAMPLED))
    assert draft.lengths.tolist() == [0, 2]


def test_a_decoder_reads_the_source_as_the_head_of_its_prompt():
    drafter = started(Careful(Q, V), [[0]], sources=[[3, 4]])
    draft = drafter.propose([1], Spy(1, SAMPLED))
    assert torch.equal(draft.q[0, 0], standardized(Q, [3, 4, 0]))


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
    with pytest.raises(InputError, match=r" is no model; give .*\.target$") as error:
        LMDrafter(model)
    assert "\n" not in str(error.value)
