"""Logprobs are those of a full forward in float64, and cost nothing where nobody asks."""

from __future__ import annotations

import pytest
import torch

from foretoken import SamplingParams, Speculator, step
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.engine import batch
from foretoken.engine.batch import PROMPT_LOGPROBS_CHUNK_TOKENS
from foretoken.generation_config import EndTokens
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.sampling.acceptance_rules import EXACT_RULES
from foretoken.sampling.distributions import probabilities
from pairs import scores
from tiny import llama, t5

V = 64
TARGET, DRAFT = llama(V, seed=0).double(), llama(V, seed=1, num_hidden_layers=1).double()
PROMPTS = [[5, 17, 33], [60], [3, 58, 20, 3, 58]]
MOST = 4


def spec(drafter=None) -> Speculator:
    return Speculator(CausalModel(TARGET), drafter or LMDrafter(CausalModel(DRAFT)))


def full(prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits before each of the tokens, `[n, V]`, by one forward."""
    return scores(TARGET, [*prompt, *tokens])[len(prompt) - 1 : -1]


def assert_told(told, log_p: torch.Tensor, tokens: list[int], count: int) -> None:
    """`log_p [n, V]`: logarithms of the distributions."""
    assert [one.token for one in told] == tokens
    for one, row in zip(told, log_p, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-9)
        assert len(one.top) == count
        best = row.sort(descending=True, stable=True)
        for (token, logprob), i, value in zip(one.top, best.indices, best.values, strict=False):
            assert logprob == pytest.approx(float(value), abs=1e-9)
            assert token == int(i) or float(row[token]) == pytest.approx(float(value), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [0, MOST])
def test_raw(count, temperature):
    """The model's own, whatever the controls."""
    params = SamplingParams(
        temperature, top_k=9, max_new_tokens=12, repetition_penalty=1.3, logprobs=count
    )
    for drafter, gamma in (None, 0), (None, 1), (None, 4), (LookupDrafter(), 4):
        texts = spec(drafter).generate(PROMPTS, params, gamma=gamma)
        for prompt, completion in zip(PROMPTS, texts, strict=True):
            log_p = full(prompt, completion.tokens).log_softmax(-1)
            assert_told(completion.logprobs, log_p, completion.tokens, count)


@pytest.mark.parametrize("rule", [*EXACT_RULES, "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drawn(temperature, rule):
    """The distribution that a token was drawn from: a certain one at temperature 0."""
    params = SamplingParams(
        temperature,
        top_k=9,
        max_new_tokens=12,
        logit_bias={3: 2.0},
        logprobs=MOST,
        logprobs_of="drawn",
    )
    for gamma, other in (0, params), (1, SamplingParams(0.9)), (4, SamplingParams(0.0)):
        texts = spec().generate(PROMPTS, [params, other, params], gamma=gamma, rule=rule)
        for prompt, one in zip(PROMPTS[::2], texts[::2], strict=True):
            logits = full(prompt, one.tokens)
            logits[:, 3] += 2.0
            assert one.logprobs is not None and all(x.logprob > -torch.inf for x in one.logprobs)
            assert_told(one.logprobs, probabilities(logits, params).log(), one.tokens, MOST)


def test_an_end_has_its_logprob_too():
    (whole,) = spec().generate([PROMPTS[0]], gamma=3, max_new_tokens=12)
    (completion,) = spec().generate(
        [PROMPTS[0]], gamma=3, max_new_tokens=12, logprobs=0, stop_token_ids=[whole.tokens[6]]
    )
    assert completion.finish_reason == "stop" and completion.tokens[-1] == whole.tokens[6]
    log_p = full(PROMPTS[0], completion.tokens).log_softmax(-1)
    assert_told(completion.logprobs, log_p, completion.tokens, 0)


@pytest.mark.parametrize("count", [0, MOST])
def test_of_the_prompt(count):
    """All but the first token's, in passes of a few positions; other rows are read as ever."""
    long = [(7 * i) % V for i in range(2 * PROMPT_LOGPROBS_CHUNK_TOKENS + 5)]
    prompts = [long, PROMPTS[0], [60], PROMPTS[2]]
    params = SamplingParams(0.0, max_new_tokens=5, prompt_logprobs=count)
    plain = SamplingParams(0.0, max_new_tokens=5)
    completions = spec().generate(prompts, [params, plain, params, params], gamma=2)
    expected = spec().generate(prompts, plain, gamma=2)
    assert [one.tokens for one in completions] == [one.tokens for one in expected]
    assert completions[1].prompt_logprobs is None and completions[2].prompt_logprobs == []
    for i in (0, 3):
        log_p = scores(TARGET, prompts[i])[:-1].log_softmax(-1)
        assert_told(completions[i].prompt_logprobs, log_p, prompts[i][1:], count)


def test_of_an_encoder_decoder():
    network = t5(V, seed=2).double()
    pair = Speculator(Seq2SeqModel(network), LookupDrafter(), ends=EndTokens(decoder_start=1))
    for prompt, completion in zip(
        PROMPTS, pair.generate(PROMPTS, gamma=3, max_new_tokens=9, logprobs=MOST), strict=True
    ):
        log_p = scores(network, [1, *completion.tokens], prompt)[:-1].log_softmax(-1)
        assert_told(completion.logprobs, log_p, completion.tokens, MOST)


def test_a_stream_tells_them_with_its_tokens():
    pair = spec()
    pieces = list(pair.stream(PROMPTS[0], gamma=3, max_new_tokens=12, logprobs=2))
    (whole,) = pair.generate([PROMPTS[0]], gamma=3, max_new_tokens=12, logprobs=2)
    assert [one for piece in pieces for one in piece.logprobs or []] == whole.logprobs
    assert all(len(piece.tokens) == len(piece.logprobs or []) for piece in pieces)


def test_none_are_computed_where_none_are_asked_for(monkeypatch):
    """And in a batch of several only those of the row that asks."""
    prefixes: list[list[int]] = []

    def spy(logits, tokens, count):
        prefixes.append(tokens)
        return [None for _ in tokens]

    monkeypatch.setattr(step, "logprobs", spy)
    monkeypatch.setattr(batch, "logprobs", spy)
    pair = spec()
    plain = SamplingParams(0.8, max_new_tokens=9, repetition_penalty=1.2)
    completions = pair.generate(PROMPTS, plain, gamma=2)
    assert not prefixes and all(one.logprobs is None for one in completions)
    params = SamplingParams(0.8, max_new_tokens=9, repetition_penalty=1.2, logprobs=1)
    completions = pair.generate(PROMPTS, [plain, params, plain], gamma=2)
    assert [token for tokens in prefixes for token in tokens] == completions[1].tokens
