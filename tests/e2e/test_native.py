"""Every family as the native decoder runs it, through `load` and `generate`: greedy texts are
transformers' own, sampled ones follow from their draws, and logits are those of full forwards.

It computes in float32: where a text differs from transformers', each of its tokens must win in full
forwards up to float noise, as the self-check measures it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken import Completion, Speculator
from foretoken.models.stock.selfcheck import TOLERANCE, deviation
from foretoken.sampling.keys import RowKey, exponentials
from pairs import PROMPTS, V, an_end, relative, scores, speculator, stock, target
from tiny_families import FAMILIES

pytestmark = pytest.mark.native

LIMIT = 24
SEEDS = [(5, 0), (5, 1), (8, 2)]
SOON = {"Mistral", "T5"}  # one of each form: the rest takes a minute
NAMES = [name if name in SOON else pytest.param(name, marks=pytest.mark.prove) for name in FAMILIES]


@cache
def pair(name: str, runtime: str = "native") -> Speculator:
    """Target and draft on that runtime; the middle row ends well before the others."""
    model = target(name)
    return speculator(model, relative(model), an_end(model, PROMPTS[1], LIMIT), runtime)


def distributions(model: PreTrainedModel, prompt: list[int], new: list[int]) -> Tensor:
    """Logits before every new token, `[len(new), V]`: one forward, no cache."""
    settings, encoder_decoder = model.generation_config, model.config.is_encoder_decoder
    head, source = (
        ([settings.decoder_start_token_id], prompt) if encoder_decoder else (prompt, None)
    )
    logits = scores(model, [*head, *new[:-1]], source)[len(head) - 1 :].double()
    if settings.forced_eos_token_id is not None and len(new) == LIMIT:
        logits[-1] = -torch.inf
        logits[-1, settings.forced_eos_token_id] = 0
    return logits


def noise(model: PreTrainedModel, prompt: list[int], seed: tuple[int, int]) -> Tensor:
    """Coupled mode's Gumbel noise at the places of new tokens, `[LIMIT, V]`."""
    first = 1 if model.config.is_encoder_decoder else len(prompt)
    exponentials_of = [exponentials(RowKey(*seed), first + i, V) for i in range(LIMIT)]
    return -torch.from_numpy(np.stack(exponentials_of)).log()


def assert_chosen(found: Completion, model: PreTrainedModel, prompt: list[int], added: Tensor):
    """Every token has, up to float noise, the largest logit once `added [LIMIT, V]` is added; the
    text ends where it must."""
    new = torch.tensor(found.tokens)[:, None]
    logits = distributions(model, prompt, found.tokens)
    sums = logits + added[: len(new)]
    missing = sums.amax(-1) - sums.gather(1, new)[:, 0]
    finite = logits[logits.isfinite()]
    assert missing.max() <= 2 * TOLERANCE * (finite.max() - finite.min())
    stopped = found.finish_reason == "stop"
    assert stopped or len(new) == LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts(name: str) -> None:
    """A ragged batch whose rows leave at different times, with draft tokens and without, and
    alone."""
    model, spec = target(name), pair(name)
    eos = an_end(model, PROMPTS[1], LIMIT)
    assert spec.target.runtime == spec.drafter.runtime == "native"
    for gamma in 3, 0:
        together = spec.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
        (alone,) = spec.generate(PROMPTS[2], max_new_tokens=LIMIT, gamma=gamma)
        for prompt, text in zip([*PROMPTS, PROMPTS[2]], [*together, alone], strict=True):
            assert eos not in text.tokens[:-1]
            assert (text.tokens[-1] == eos) == (text.finish_reason == "stop")
            if text.tokens != stock(model, prompt, LIMIT, eos):
                assert_chosen(text, model, prompt, torch.zeros(LIMIT, 1))
        assert len({len(text.steps) for text in together}) > 1  # not all left together
        if gamma:
            drafted = sum(text.stats.drafted for text in together)
            assert 0 < sum(text.stats.accepted for text in together) < drafted


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_sampled_texts_follow_from_their_draws(name: str) -> None:
    """At temperature 1 with shared noise a text follows from its key and the target's distributions
    alone; under the other rules it is that of the torch runtime, unless a draw falls within the
    float noise of a boundary: in one row once in thousands, in two of three less than once in
    1e6."""
    model, how = target(name), {"temperature": 1.0, "seed": SEEDS, "max_new_tokens": LIMIT}
    for gamma in 3, 0:
        texts = pair(name).generate(PROMPTS, gamma=gamma, rule="coupled", **how)
        for prompt, seed, text in zip(PROMPTS, SEEDS, texts, strict=True):
            assert_chosen(text, model, prompt, noise(model, prompt, seed))
    for rule in "speculative", "block":
        ours, theirs = (
            [text.tokens for text in pair(name, place).generate(PROMPTS, gamma=3, rule=rule, **how)]
            for place in ("native", "transformers")
        )
        assert sum(one != other for one, other in zip(ours, theirs, strict=True)) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_logits_through_joins_rollbacks_and_leaves(name: str) -> None:
    """Of the very model that made texts, against full forwards of its source."""
    spec = pair(name)
    spec.generate(PROMPTS, max_new_tokens=LIMIT, gamma=3)
    assert deviation(target(name), spec.target) < TOLERANCE
    spec.target.permute([])
