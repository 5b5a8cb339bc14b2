"""All controls of a row together: their order, what is pushed and popped, and which one failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import SamplingParams
from foretoken.controls.chain import Chain, build_chain
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import ControlError
from foretoken.generation_config import EndTokens
from foretoken.request import Request
from foretoken.sampling.keys import SequenceKey
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel

pytestmark = pytest.mark.daily

V = 5
EVERYTHING: dict[str, Any] = {
    "sequence_bias": {(1, 2): 1.0},
    "logit_bias": {3: 0.5},
    "encoder_repetition_penalty": 1.2,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 4,
    "bad_words_ids": [[1, 1]],
    "min_new_tokens": 2,
    "forced_eos_token_id": 0,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.1),
    "suppress_tokens": [4],
    "begin_suppress_tokens": [3],
    "processors": [lambda ids, scores: scores - ids[0, -1]],
}


def request(prompt: list[int], eos: frozenset[int] = frozenset(), **sampling) -> Request:
    params = SamplingParams(**sampling)
    return Request(prompt, 50, SequenceKey(0, 0), eos, forced={49: 0}, params=params)


def made(prompt: list[int], eos: frozenset[int] = frozenset(), **sampling) -> Chain:
    controls = build_chain(request(prompt, eos, **sampling), V)
    assert controls is not None
    return controls


class Alternating:
    """A grammar of 1 and 2 by turns."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def push(self, token: int) -> None:
        self.tokens.append(token)

    def pop(self) -> None:
        self.tokens.pop()

    def __call__(self, scores):
        (token,) = self.find_forced_tokens()[:1]
        score = float(scores[token])
        scores.fill_(-torch.inf)[token] = score
        return scores

    def find_forced_tokens(self) -> list[int]:
        return [1 + (len(self.tokens) + i) % 2 for i in range(3)]


OFF = {"repetition_penalty": 1.0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0}
OFF |= {"encoder_no_repeat_ngram_size": 0, "bad_words_ids": [], "min_new_tokens": 0}
OFF |= {"sequence_bias": {}, "logit_bias": {}, "suppress_tokens": [], "begin_suppress_tokens": []}
OFF |= {"remove_invalid_values": False, "processors": [], "presence_penalty": 0}


@pytest.mark.parametrize("name", OFF)
def test_what_is_off_costs_nothing(name):
    plain = Request([1], 50, SequenceKey(0, 0), params=SamplingParams(**{name: OFF[name]}))
    assert build_chain(plain, V) is None


def test_what_could_do_nothing_costs_nothing():
    """Without ends there are none to suppress, and an end is no bad word."""
    for eos, sampling in [
        (frozenset(), {"min_new_tokens": 3}),
        (frozenset({V, -1}), {"min_new_tokens": 3}),
        (frozenset({2}), {"bad_words_ids": [[2]]}),
    ]:
        plain = Request([1], 50, SequenceKey(0, 0), eos, params=SamplingParams(**sampling))
        assert build_chain(plain, V) is None


def test_the_order_is_that_of_transformers():
    """As its `_get_logits_processor` has it; what it lacks stands beside its kin."""
    names = [name for name, _ in made([1, 2], frozenset({0}), **EVERYTHING).controls]
    assert names == [
        "sequence_bias",
        "logit_bias",
        "encoder_repetition_penalty",
        "repetition_penalty",
        "presence_penalty and frequency_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "min_new_tokens",
        "forced_bos_token_id and forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "processor function",
    ]


def outcome(controls: Chain, logits: torch.Tensor, ahead: list[int]) -> list[float] | str:
    try:
        return controls.shape(logits, ahead).tolist()
    except ControlError as error:
        return str(error)


TOKENS = st.lists(st.integers(0, V - 1), max_size=6)


@settings(max_examples=60)
@given(TOKENS, st.lists(st.tuples(st.booleans(), TOKENS), max_size=12))
def test_a_position_is_shaped_by_its_own_text_whatever_was_asked_before(prompt, walk):
    """True: these are committed; else only looked at."""
    prompt, eos = [1, *prompt], frozenset({0})
    mine, text = made(prompt, eos, **EVERYTHING), list(prompt)
    logits = torch.linspace(-1, 2, V, dtype=torch.float64)
    for commits, tokens in walk:
        fresh = made(prompt, eos, **EVERYTHING)
        fresh.commit([*text[len(prompt) :], *tokens])
        assert outcome(mine, logits, tokens) == outcome(fresh, logits, [])
        if commits:
            mine.commit(tokens)
            text += tokens
    assert torch.equal(logits, torch.linspace(-1, 2, V, dtype=torch.float64))


def test_a_matcher_follows_the_text_and_says_what_it_forces():
    row = Request([3], 50, SequenceKey(0, 0))
    mine = build_chain(row, V, matcher=Alternating())
    assert mine is not None and made([1], repetition_penalty=2).find_forced_tokens([1]) == []
    zero = torch.zeros(V)
    assert mine.shape(zero, []).isfinite().nonzero().tolist() == [[1]]
    assert mine.shape(zero, [1]).isfinite().nonzero().tolist() == [[2]]
    assert mine.find_forced_tokens([1]) == [2, 1, 2] and mine.find_forced_tokens([]) == [1, 2, 1]
    mine.commit([1, 2, 1])
    assert mine.shape(zero, []).isfinite().nonzero().tolist() == [[2]]


@pytest.mark.parametrize(
    ("sampling", "blamed"),
    [
        ({"suppress_tokens": range(V)}, "suppress_tokens allows no token after 3 tokens"),
        (
            {"bad_words_ids": [[0], [1]], "suppress_tokens": [2, 3, 4]},
            "suppress_tokens allows no token after 3 tokens",
        ),
        ({"logit_bias": dict.fromkeys(range(V), -torch.inf)}, "logit_bias allows no token"),
        (
            {"processors": lambda ids, scores: scores * torch.nan, "repetition_penalty": 1.1},
            "processor function returns a score of NaN or infinity after 3 tokens",
        ),
        (
            {"processors": lambda ids, scores: scores + torch.inf},
            "processor function returns a score of NaN or infinity",
        ),
    ],
)
def test_who_leaves_nothing_is_named(sampling, blamed):
    mine = made([1, 2], **sampling)
    with pytest.raises(ControlError, match=f"^{blamed}"):
        mine.shape(torch.zeros(V), [0])
    mine.commit([3])  # and it can go on


def test_scores_beyond_what_a_temperature_leaves_finite_keep_their_distribution():
    """Also those that are all of float32's least number, as transformers leaves what is banned."""
    logits = torch.tensor([1e38, 1e38 - 1e33, -1e38, -torch.inf, 0.0], dtype=torch.float64)
    mine = made([1], processors=lambda ids, scores: scores)
    assert torch.equal(mine.shape(logits, []), logits - 1e38)
    least = torch.full((V,), torch.finfo(torch.float32).min)
    assert torch.equal(mine.shape(least, []), torch.zeros(V))


def test_begin_is_behind_a_forced_second_token():
    for prompt, forced, first in (([1], 3, 1), ([1], None, 0), ([1, 2], 3, 0)):
        params = SamplingParams(begin_suppress_tokens=[4], forced_bos_token_id=forced)
        mine = build_chain(Request(prompt, 50, SequenceKey(0, 0), params=params), V)
        assert mine is not None
        banned = [not mine.shape(torch.zeros(V), [0] * n)[4].isfinite() for n in range(3)]
        assert banned == [n == first for n in range(3)]


def pair() -> Speculator:
    p, q = (TableModel(random_model(seed, V), V) for seed in (1, 2))
    return Speculator(p, LMDrafter(q, V), ends=EndTokens())


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_that_fails_leaves_its_others_alone(gamma, temperature):
    """It has what it was until then, no more, and says what failed."""
    stops = SamplingParams(temperature, no_repeat_ngram_size=1, max_new_tokens=9)
    never = SamplingParams(temperature, suppress_tokens=range(V), logprobs=2, logprobs_of="drawn")
    fine = SamplingParams(temperature, repetition_penalty=1.5, max_new_tokens=9)
    spec, seeds = pair(), [(0, 0), (0, 1), (0, 2), (0, 3)]
    prompts = [[1], [2, 3], [1, 4], [2, 2]]
    completions = spec.generate(prompts, [fine, stops, never, fine], gamma=gamma, seed=seeds)
    for i in (0, 3):
        (alone,) = spec.generate([prompts[i]], fine, gamma=gamma, seed=[seeds[i]])
        assert completions[i].tokens == alone.tokens and completions[i].error is None
        assert completions[i].finish_reason == "length"
    assert sorted([*completions[1].tokens, 2, 3]) == list(range(V))
    assert completions[1].finish_reason == completions[2].finish_reason == "error"
    assert completions[1].error == "no_repeat_ngram_size allows no token after 5 tokens"
    assert completions[2].error == "suppress_tokens allows no token after 2 tokens"
    assert completions[2].tokens == [] and completions[2].logprobs == []


def test_where_all_rows_fail_the_first_error_is_raised():
    with pytest.raises(ControlError, match="^row 0: suppress_tokens allows no token after 1 "):
        pair().generate([[1], [2, 3]], gamma=2, suppress_tokens=range(V))
    with pytest.raises(ControlError, match="^row 0: suppress_tokens allows no token after 1 "):
        list(pair().stream([1], gamma=2, suppress_tokens=range(V)))
