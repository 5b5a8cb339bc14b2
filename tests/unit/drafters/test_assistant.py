"""The drafter of Gemma 4's assistants: which rows draft, from which distributions, and that the
target does not notice."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import assistants
import pairs
import tiny
from assistants import WINDOW
from foretoken.errors import InputError
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.model import CausalModel
from foretoken.sampling.distributions import SamplingParams, probabilities
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.speculator import Speculator

V = 12
SAMPLED, GREEDY = SamplingParams(temperature=0.7, top_p=0.9), SamplingParams()
PROMPTS = [[5, 7], [3, 9, 1, 1, 8, 2, 4, 10], [6, 2, 2, 11]]


def draw(rows: int, params: SamplingParams = SAMPLED) -> Draw:
    return Draw([SequenceKey(5, b) for b in range(rows)], [9] * rows, [params] * rows)


def started(prompts: list[list[int]], *, ordered: bool = True, read: int = 1) -> tuple[Any, Any]:
    """Target and drafter with these rows, whose last `read` tokens are not read."""
    model = assistants.running(assistants.target(V))
    model.expose_hidden_states(lambda text: 0)
    drafter = assistants.drafter(model, assistants.network(V, ordered=ordered))
    model.start([prompt[:-read] for prompt in prompts])
    drafter.start([*range(len(prompts))], prompts, None)
    return model, drafter


@pytest.mark.parametrize("ordered", [False, True])
def test_draft_tokens_come_with_the_distributions_that_they_were_drawn_from(ordered: bool) -> None:
    _, drafter = started(PROMPTS, ordered=ordered)
    draft = drafter.propose([3, 1, 2], draw(3))
    assert draft.lengths.tolist() == [3, 1, 2] and draft.calls == 3
    assert draft.q is not None and draft.q.shape == (3, 3, V)
    dice = draw(3)
    for i in range(3):
        assert torch.equal(draft.tokens[:, i], dice(draft.q[:, i], i))
    for b, (prompt, count) in enumerate(zip(PROMPTS, [3, 1, 2], strict=True)):
        logits = logits_of(prompt, draft.tokens[b, :count].tolist(), ordered=ordered)
        assert torch.allclose(draft.q[b, :count], probabilities(logits, SAMPLED), atol=1e-5)
        if ordered:  # tokens of two centroids of four, as each row's own state has them
            assert bool(((draft.q[b, :count] > 0).sum(1) <= V // 2).all())


def logits_of(prompt: list[int], tokens: list[int], *, ordered: bool) -> torch.Tensor:
    """Logits before each of these draft tokens, of a row that is alone."""
    model, drafter = started([prompt], ordered=ordered)
    state, embed = drafter.seqs[0].state[None], model.model.get_input_embeddings()
    drafter.network.begin([0])
    logits: list[torch.Tensor] = []
    for token in [prompt[-1], *tokens[:-1]]:
        made, state = drafter.network.step(embed(torch.tensor([token])), state)
        logits.append(made[0])
    return torch.stack(logits)


def test_a_row_that_is_still_being_read_or_holds_one_token_proposes_nothing() -> None:
    model, drafter = started([PROMPTS[1], [3, 4, 5], [6, 6, 6, 7]], read=2)
    assert drafter.propose([2, 2, 2], draw(3)).lengths.tolist() == [0, 0, 0]
    model.score([[4], [4, 5], [6]], [0, 1, 0])  # row 1 is read to its end, and gains a token
    drafter.commit([[], [9], []])
    assert drafter.propose([2, 2, 2], draw(3)).lengths.tolist() == [2, 2, 2]
    _, short = started([[4], [5, 6]])
    assert short.propose([2, 2], draw(2)).lengths.tolist() == [0, 2]
    assert short.propose([2, 0], draw(2)).tokens.shape == (2, 0)


def test_another_target_has_the_same_taps() -> None:
    _, drafter = started(PROMPTS)
    other = assistants.running(assistants.target(V, seed=5))
    assert other.capabilities.shared_kv
    assert drafter.with_target(other).network.target is other
    with pytest.raises(InputError, match="does not expose .*; give a target that does"):
        other = CausalModel(tiny.llama(V))
        other.tap((0, FINAL_TAP))
        drafter.with_target(other)


@pytest.mark.daily("True")
@pytest.mark.parametrize("sharing", [False, True])
def test_greedy_texts_are_the_target_s(sharing: bool) -> None:
    """In a batch whose rows end and begin at different times, all far beyond the window."""
    net = assistants.target(V, sharing=sharing)
    model = assistants.running(net)
    pair = Speculator(
        target=model, drafter=assistants.drafter(model, assistants.network(V, ordered=True))
    )
    words = random.Random(1)
    prompts = [words.choices(range(V), k=k) for k in (1, 2, WINDOW + 1, 30)]
    found = pair.generate(prompts, max_new_tokens=40, gamma=3)
    for prompt, completion in zip(prompts, found, strict=True):
        pairs.assert_greedy(completion, net, prompt, 40)
    drafted = sum(completion.stats.drafted for completion in found)
    assert 0 < sum(completion.stats.accepted for completion in found) < drafted
