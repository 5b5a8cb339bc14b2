"""All draft tokens of a step in one recording: they are those of a forward pass for each."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pairs
from foretoken.drafters.base import Draft
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import InputError
from foretoken.models.base import TokenChoice
from foretoken.models.graph_chain import round_up_gamma
from foretoken.models.graphs import GraphModel, rehearse
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from work import record_pass_work

GREEDY = SamplingParams(temperature=0.0)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(temperature=0.9, top_k=5),
    "top-p": SamplingParams(temperature=1.2, top_p=0.8),
    "min-p": SamplingParams(temperature=1.5, min_p=0.05),
    "all": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
}


def drafter(network: Any, *, chains: bool, V: int = pairs.V) -> LMDrafter:
    model = GraphModel(network)
    model.capabilities = replace(model.capabilities, chain=chains)
    return LMDrafter(model, V)


class Course:
    """Two drafters of one network, of which one chains: in each step their drafts must be equal."""

    def __init__(self, network: Any, params: SamplingParams, V: int = pairs.V) -> None:
        self.chained, self.stepwise = (drafter(network, chains=x, V=V) for x in (True, False))
        self.dice, self.V = random.Random(0), V
        self.params: SamplingParams | list[SamplingParams] = params
        self.texts: list[list[int]] = []
        self.keys: list[SequenceKey] = []
        self.num_joined = 0

    def join(self, *sizes: int) -> None:
        prompts = [[self.dice.randrange(pairs.V) for _ in range(n)] for n in sizes]
        for each in (self.chained, self.stepwise):
            rows = range(len(self.texts), len(self.texts) + len(prompts))
            each.start([*rows], [list(prompt) for prompt in prompts], None)
        self.texts += prompts
        self.keys += [SequenceKey(1, self.num_joined + i) for i in range(len(prompts))]
        self.num_joined += len(prompts)

    def leave(self, *rows: int) -> None:
        for each in (self.chained, self.stepwise):
            each.leave([*rows])
        stay = [b for b in range(len(self.texts)) if b not in rows]
        self.texts, self.keys = [self.texts[b] for b in stay], [self.keys[b] for b in stay]

    def step(self, *gamma: int) -> Draft:
        params = self.params if isinstance(self.params, list) else [self.params] * len(gamma)
        draws = [Draw(self.keys, [*map(len, self.texts)], params) for _ in range(2)]
        both = zip((self.chained, self.stepwise), draws, strict=True)
        one, other = (each.propose([*gamma], draw) for each, draw in both)
        self.compare(one, other)
        if any(gamma):
            pairs_of_masses = zip(draws[0].masses, draws[1].masses, strict=True)
            assert all(torch.allclose(a, b, 0, 1e-12) for a, b in pairs_of_masses)
        new = []
        for x, n in zip(one.tokens.tolist(), one.lengths.tolist(), strict=True):
            accepted = self.dice.randint(0, n)
            new.append([*x[:accepted], self.dice.randrange(pairs.V)])
        for each in (self.chained, self.stepwise):
            each.commit(copy.deepcopy(new))
        self.texts = [[*text, *x] for text, x in zip(self.texts, new, strict=True)]
        return one

    def compare(self, one: Draft, other: Draft) -> None:
        assert one.lengths.tolist() == other.lengths.tolist() and one.calls == other.calls
        assert one.tokens.shape == other.tokens.shape
        assert (one.q is None) == (other.q is None)
        for b, n in enumerate(one.lengths.tolist()):
            assert torch.equal(one.tokens[b, :n], other.tokens[b, :n])
            if one.q is not None and other.q is not None:
                assert one.q.shape == (*one.tokens.shape, self.V) and one.q.isfinite().all()
                assert torch.allclose(one.q[b, :n], other.q[b, :n], 0, 1e-12)
        model = self.chained.model
        assert model.lengths == self.stepwise.model.lengths


@pytest.mark.daily
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 2", "Mistral"])
def test_a_chain_is_the_draft_of_a_pass_for_each_token(name: str, params: str) -> None:
    """The same tokens, and distributions to rounding, in rows of their own budgets that join,
    lose draft tokens, wait and leave."""
    course = Course(pairs.target(name), PARAMS[params])
    course.join(3, 9)
    course.step(4, 4)
    course.step(1, 5)
    course.join(1, 20, 2)
    course.step(2, 0, 3, 7, 1)
    for _ in range(3):
        course.step(0, 2, 0, 0, 2)  # three rows wait, and lack more tokens than a chain appends
    course.step(3, 3, 3, 3, 3)
    course.leave(0, 3)
    for gamma in ([4, 2, 0], [9, 1, 3], [0, 0, 0], [2, 2, 2]):
        course.step(*gamma)


def test_rows_of_different_params_draft_in_one_recording() -> None:
    course = Course(pairs.target("Llama"), GREEDY)
    course.join(*range(2, 2 + len(PARAMS)))
    course.params = [*PARAMS.values()]
    for gamma in ([3] * 7, [4, 0, 1, 2, 5, 3, 4], [2] * 7):
        course.step(*gamma)
    chained: Any = course.chained.model
    assert len(chained.chains) == len({3, 6, 2})
    course.params[2] = SamplingParams(temperature=1.0, typical_p=0.9)
    course.step(*[1] * 7)
    assert len(chained.chains) == 3


def test_a_target_of_more_tokens() -> None:
    course = Course(pairs.target("Llama"), PARAMS["all"], pairs.V + 6)
    course.join(3, 9)
    draft = course.step(4, 2)
    assert draft.q is not None and not draft.q[..., pairs.V :].any()
    course.step(3, 3)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_where_the_context_ends(name: str) -> None:
    """A row that has no room gets no draft tokens, and passes of others reach beyond its end."""
    model = pairs.target(name)
    limit = GraphModel(model).context
    assert limit is not None
    course = Course(model, PARAMS["sampled"])
    course.join(limit - 3, 4, limit)
    assert course.step(6, 6, 6).lengths.tolist() == [4, 6, 1]
    while len(course.texts[0]) <= limit:
        course.step(2, 2, 2)
    assert course.step(6, 6, 6).lengths.tolist() == [0, 6, 0]
    chained: Any = course.chained.model
    with pytest.raises(InputError, match=f"context length is {limit}"):
        chained.chain([[3, 4]] * 3, [limit] * 3, TokenChoice(pairs.V))


def test_other_numbers_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording holds all there is to do at any lengths, budgets, temperature, top-k, ..."""
    seen = record_pass_work(monkeypatch)
    course = Course(pairs.target("Llama"), PARAMS["all"])
    course.join(5, 9, 2)
    for params in ("all", "top-k", "top-p", "all", "top-p", "top-k"):
        course.params = PARAMS[params]
        course.step(4, 2, 0)
        course.step(3, 4, 4)
    model: Any = course.chained.model
    (chain,) = map(id, model.chains.values())
    assert len(seen[chain]) > 8
    assert all(work == seen[chain][0] for work in seen[chain])


def test_few_chains_serve_all() -> None:
    """For any params that need the same work, and budgets that are rounded up."""
    assert [round_up_gamma(n) for n in (1, 2, 3, 4, 5, 7, 9, 16, 40)] == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 40)
    ]
    course = Course(pairs.target("Llama"), PARAMS["greedy"])
    course.join(5, 9)
    model: Any = course.chained.model
    for params in PARAMS.values():
        course.params = params
        course.step(5, 2)
        course.step(3, 6)
    assert len(model.chains) <= 3 * 2  # argmax, sampled, and sampled by rank; before and after 64
    assert {shape.num_tokens for shape, *_ in model.chains} == {6}
    before = [each.run for each in model.chains.values()]
    course.join(200)
    course.step(3, 3, 3)
    assert all(each.run not in before for each in model.chains.values())  # the cache has grown


def sick(id: int) -> Any:
    """A network to which one token is NaN."""
    network = copy.deepcopy(pairs.target("Llama"))
    head, embeddings = network.get_output_embeddings(), network.get_input_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    embeddings.weight.data[id] = torch.nan
    return network


def test_invalid_logits_are_seen_and_stay_in_their_row() -> None:
    model = GraphModel(sick(63))
    model.start([[5, 7], [8]])
    numbers = torch.full((2, 2), 0.5, dtype=torch.float64)
    choice = TokenChoice(pairs.V, filters=[(0.8, 0, 0.9, 0.0)] * 2, numbers=numbers)
    made = model.chain([[63], [3]], [2, 2], choice)
    assert made.tops[0].isnan().all() and made.tops[1].isfinite().all()
    assert made.q is not None and made.q.isfinite().all() and (made.masses - 1).abs().max() < 1e-9


def test_a_draft_token_that_is_not_appended_leaves_no_trace() -> None:
    """The last draft token of a row is not run, though passes of other rows follow."""
    clean = GraphModel(pairs.target("Llama"))
    clean.start([[5, 7], [8]])
    blocks = [[9], [3]]
    tokens = clean.chain(blocks, [1, 3], TokenChoice(pairs.V)).tokens.tolist()
    assert tokens[0][0] not in tokens[1]
    model = GraphModel(sick(tokens[0][0]))
    model.start([[5, 7], [8]])
    assert model.chain(blocks, [1, 3], TokenChoice(pairs.V)).tokens[1].tolist() == tokens[1]
    assert model.score([[4], [4]], [1, 1]).isfinite().all()


def test_a_rehearsal_leaves_no_chain() -> None:
    """A target would never use it."""
    model = rehearse(GraphModel(pairs.target("Llama")))
    assert model.passes and not model.chains and model.lengths == []
