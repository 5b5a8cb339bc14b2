"""Rows of one batch, each with options of its own, are each what they are alone.

In float64 a batch rounds otherwise than a row alone by some 1e-15: a number between 0 and 1 falls
into such a gap less than once in 1e10 runs of this file.
"""

from __future__ import annotations

import pytest

from foretoken import SamplingParams, Speculator
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.models.stock.model import CausalModel
from foretoken.sampling.verify import RULES
from tiny import llama

V, LIMIT = 64, 20


def causal(seed: int, layers: int = 2) -> CausalModel:
    return CausalModel(llama(V, seed=seed, num_hidden_layers=layers).double())


def allow_half(ids, scores):
    """A user's processor: behind an even id only the lower half."""
    if ids[0, -1] % 2 == 0:
        scores[:, V // 2 :] = -float("inf")
    return scores


PROMPTS = [[5, 17, 33], [60], [3, 58, 20, 3, 58], [9, 9, 9, 9], [41, 2], [7, 8, 7, 8, 7, 8, 7]]
SAMPLING = [
    SamplingParams(0.0, max_new_tokens=LIMIT, repetition_penalty=1.4, no_repeat_ngram_size=2),
    SamplingParams(1.0, max_new_tokens=LIMIT),
    SamplingParams(0.7, 20, 0.9, max_new_tokens=11, bad_words_ids=[[4], [8, 7]], logprobs=2),
    SamplingParams(1.3, max_new_tokens=LIMIT, frequency_penalty=0.8, eta_cutoff=0.01),
    SamplingParams(0.0, max_new_tokens=LIMIT, stop_token_ids=[11, 12, 13, 14, 15]),
    SamplingParams(0.9, typical_p=0.8, max_new_tokens=LIMIT, processors=[allow_half]),
]
SEEDS = [(5, 0), (5, 1), (5, 2), (8, 0), (9, 0), (7, 3)]


DRAFTERS = {
    "lm": lambda: LMDrafter(causal(1, 1)),
    "lookup": LookupDrafter,
    "uniform": lambda: UniformDrafter(V),
    "cascade": lambda: CascadeDrafter(causal(1), LMDrafter(causal(2, 1)), 2),
    "lookup-then-lm": lambda: MixtureDrafter([(LookupDrafter(), 2), (LMDrafter(causal(1)), None)]),
    "lm-then-uniform": lambda: MixtureDrafter(
        [(LMDrafter(causal(1)), 1), (UniformDrafter(V), None)]
    ),
}


def spec(kind: str) -> Speculator:
    return Speculator(causal(0), DRAFTERS[kind]())


@pytest.mark.daily
@pytest.mark.parametrize("rule", [*RULES, "coupled"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_six_rows(kind, rule):
    options, pair = {"gamma": 3, "rule": rule}, spec(kind)
    together = pair.generate(PROMPTS, SAMPLING, seed=SEEDS, **options)
    for prompt, params, seed, completion in zip(PROMPTS, SAMPLING, SEEDS, together, strict=True):
        (alone,) = pair.generate([prompt], params, seed=[seed], **options)
        assert completion.tokens == alone.tokens
        assert completion.finish_reason == alone.finish_reason
        assert [step.kept for step in completion.steps] == [step.kept for step in alone.steps]
        assert (completion.logprobs is None) == (params.logprobs is None)
    assert sum(completion.stats.drafted for completion in together) > 0


def test_a_coupled_text_follows_from_the_seed_alone_with_controls_too():
    """Whatever guesses, however many, and whoever shares the batch."""
    first = spec("lm").generate(PROMPTS, SAMPLING, seed=SEEDS, gamma=0, rule="coupled")
    for kind in "lm", "uniform", "cascade":
        pair = spec(kind)
        for gamma in 1, 4:
            again = pair.generate(PROMPTS, SAMPLING, seed=SEEDS, gamma=gamma, rule="coupled")
            assert [one.tokens for one in again] == [one.tokens for one in first]


@pytest.mark.daily("cascade")
@pytest.mark.parametrize("kind", ["lm", "lookup", "cascade"])
def test_greedy_rows_are_those_of_plain_decoding(kind):
    """Beside rows that are sampled, and without any draft token."""
    pair = spec(kind)
    greedy = [i for i, params in enumerate(SAMPLING) if params.greedy]
    for gamma in 1, 4:
        completions = pair.generate(PROMPTS, SAMPLING, seed=SEEDS, gamma=gamma)
        for i in greedy:
            (plain,) = pair.generate([PROMPTS[i]], SAMPLING[i], gamma=0)
            assert completions[i].tokens == plain.tokens
