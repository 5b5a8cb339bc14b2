"""A user's own processors and criteria, and what controls need of a model."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation import logits_process, stopping_criteria

from foretoken.controls.custom import REFUSED_CLASSES, require_supported, wrap_processors
from foretoken.controls.penalties import TokenHistory
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import ControlError, InputError, RefusedError
from foretoken.generation_config import EndTokens
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel

pytestmark = pytest.mark.daily

V = 5
PROMPTS = [[1], [2, 3], [4, 0, 4]]


def pair(drafter=None) -> Speculator:
    p, q = (TableModel(random_model(seed, V), V) for seed in (1, 2))
    return Speculator(p, LMDrafter(q, V) if drafter is None else drafter)


def test_it_is_given_the_rows_own_ids_and_scores():
    calls = []

    def look(ids, scores):
        calls.append((ids.tolist(), tuple(scores.shape), scores.dtype))
        return scores

    (own,) = wrap_processors([look], 0)
    history = TokenHistory([3, 1])
    history.push(4)
    own(torch.zeros(V, dtype=torch.float64), history)
    assert calls == [([[3, 1, 4]], (1, V), torch.float64)]


def test_what_it_does_to_its_ids_is_forgotten():
    def spoil(ids, scores):
        ids.fill_(-9)
        return scores

    (own,) = wrap_processors([spoil], 0)
    history = TokenHistory([3, 1])
    own(torch.zeros(V), history)
    assert history.tokens == [3, 1] and history.to_tensor(torch.device("cpu")).tolist() == [3, 1]
    spec, plain = pair(), pair()
    for gamma in 0, 3:
        assert [c.tokens for c in spec.generate(PROMPTS, gamma=gamma, processors=spoil)] == [
            c.tokens for c in plain.generate(PROMPTS, gamma=gamma)
        ]


class Breaks:
    """One that fails as told, for texts that begin with 1."""

    def __init__(self, how) -> None:
        self.how = how

    def __call__(self, ids, scores):
        return self.how(scores) if ids[0, 0] == 1 else scores


def broken(scores):
    raise KeyError("no such\nthing")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (broken, r"processor Breaks raised KeyError: 'no such\\nthing'"),
        (
            lambda scores: scores[0],
            r"processor Breaks returned \(5,\); it must return a tensor of shape \(1, 5\)",
        ),
        (
            lambda scores: scores[:, :3],
            r"processor Breaks returned \(1, 3\); it must return a tensor of shape \(1, 5\)",
        ),
        (
            lambda scores: None,
            r"processor Breaks returned NoneType; it must return a tensor of shape \(1, 5\)",
        ),
        (lambda scores: scores.tolist(), "processor Breaks returned list"),
        (lambda scores: scores * torch.nan, "processor Breaks returns a score of NaN or infinity"),
        (lambda scores: scores - torch.inf, "processor Breaks allows no token after"),
    ],
)
@pytest.mark.parametrize("gamma", [0, 3])
def test_one_that_fails_ends_its_row_and_no_other(gamma, how, message):
    spec = pair()
    options = {"gamma": gamma, "max_new_tokens": 12}
    completions = spec.generate(PROMPTS, processors=Breaks(how), **options)
    plain = pair().generate(PROMPTS, **options)
    assert completions[0].finish_reason == "error" and completions[0].tokens == []
    assert [one.tokens for one in completions[1:]] == [one.tokens for one in plain[1:]]
    assert {one.finish_reason for one in completions[1:]} == {"length"}
    with pytest.raises(ControlError, match=f"^row 0: {message}"):
        spec.generate(PROMPTS[:1], processors=Breaks(how), **options)


@pytest.mark.parametrize("drafter", [None, LookupDrafter()])
def test_a_prefix_constraint_counts_the_rows_of_the_call(drafter):
    """transformers' own class would see each row as number 0 here."""
    allowed = [[0, 1], [2, 3], [4, 1]]
    calls: set[tuple[int, tuple[int, ...]]] = set()

    def by_row(row, ids):
        calls.add((row, tuple(ids.tolist())))
        return allowed[row]

    constraint = PrefixConstrainedLogitsProcessor(by_row, num_beams=1)
    for gamma in 0, 2:
        for given in (constraint, [constraint], LogitsProcessorList([constraint])):
            completions = pair(drafter).generate(PROMPTS, gamma=gamma, processors=given)
            for row, one in enumerate(completions):
                assert {*one.tokens} <= {*allowed[row]}
    assert {(row, tuple(prompt)) for row, prompt in enumerate(PROMPTS)} <= calls
    assert all(list(ids[: len(PROMPTS[row])]) == PROMPTS[row] for row, ids in calls)


@pytest.mark.parametrize("name", REFUSED_CLASSES)
def test_what_no_single_row_can_honour_is_refused(name):
    """Each of them is a class of transformers."""
    kind = getattr(logits_process, name, None) or getattr(stopping_criteria, name)
    instance = object.__new__(kind)
    with pytest.raises(RefusedError, match=f"^{name} .*; leave out {name}"):
        require_supported([instance])
    with pytest.raises(RefusedError, match=f"^{name} "):
        require_supported([LogitsProcessorList([instance])])
    option = "stopping" if name == "ConfidenceCriteria" else "processors"
    with pytest.raises(RefusedError, match=f"^{name} "):
        pair().generate([1], gamma=0, **{option: [instance]})


@pytest.mark.parametrize("gamma", [0, 3])
def test_ctrl_c_in_a_criterion_leaves_text_tokens_and_reports_alike(gamma):
    def impatient(ids, scores):
        if ids.shape[1] == 6:
            raise KeyboardInterrupt
        return False

    options = {"gamma": gamma, "max_new_tokens": 9, "logprobs": 0}
    (whole,) = pair().generate([1], **options)
    (part,) = pair().generate([1], stopping=impatient, **options)
    assert part.finish_reason == "interrupted" and 0 < len(part.tokens) < 5
    assert part.tokens == whole.tokens[: len(part.tokens)]
    assert [*chain.from_iterable(step.new_tokens for step in part.steps)] == part.tokens
    assert part.logprobs == whole.logprobs[: len(part.tokens)]


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_a_criterion_ends_a_text_inside_a_block(gamma):
    criteria = StoppingCriteriaList([MaxLengthCriteria(5)])
    completions = pair().generate(PROMPTS, gamma=gamma, stopping=criteria)
    plain = pair().generate(PROMPTS, gamma=gamma)
    for prompt, one, whole in zip(PROMPTS, completions, plain, strict=True):
        assert one.tokens == whole.tokens[: 5 - len(prompt)]
        assert (one.finish_reason, one.stop_reason) == ("stop", "MaxLengthCriteria")
    completions = pair().generate(
        PROMPTS, gamma=gamma, stopping=lambda ids, scores: ids.shape[1] > 4
    )
    assert [len(one.tokens) for one in completions] == [4, 3, 2]


def test_a_criterion_that_raises_ends_its_row_and_no_other():
    def wants_short(ids, scores):
        assert ids[0, 0] != 2, "not\nthis"
        return False

    completions = pair().generate(PROMPTS, gamma=2, max_new_tokens=5, stopping=wants_short)
    assert [one.finish_reason for one in completions] == ["length", "error", "length"]
    assert completions[1].error is not None
    assert completions[1].error.startswith("stopping function raised AssertionError: not this")


def spec(encoder_decoder: bool = False) -> Speculator:
    target = TableModel(random_model(1, V), V, encoder_decoder=encoder_decoder)
    return Speculator(target, NoDrafter(), ends=EndTokens(decoder_start=0))


@pytest.mark.parametrize(
    ("name", "within", "beyond"),
    [
        ("bad_words_ids", [[4, 1]], [[1], [0, V]]),
        ("sequence_bias", {(4,): 1.0}, {(1,): 1.0, (V, 1): 2.0}),
        ("logit_bias", {"4": 1.0}, {V: 1.0}),
        ("suppress_tokens", [4], [1, V]),
        ("begin_suppress_tokens", [4], [V]),
        ("stop_token_ids", [4], [V]),
        ("forced_bos_token_id", 4, V),
        ("forced_eos_token_id", 4, V),
    ],
)
def test_ids_beyond_the_vocabulary(name, within, beyond):
    assert spec().generate([1], max_new_tokens=3, **{name: within})
    with pytest.raises(InputError, match=rf"^{name} names the id {V}; ids must be in 0\.\.{V - 1}"):
        spec().generate([1], max_new_tokens=3, **{name: beyond})


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens(name):
    (completion,) = spec().generate([1, 2], max_new_tokens=3, **{name: V})
    likelihoods = completion.logprobs if name == "logprobs" else completion.prompt_logprobs
    assert likelihoods and all(len(one.top) == V for one in likelihoods)
    with pytest.raises(InputError, match=f"^{name} is {V + 1}, but the model has {V} tokens"):
        spec().generate([1], **{name: V + 1})


def test_prompt_logprobs_of_an_encoders_prompt():
    with pytest.raises(RefusedError, match="^prompt_logprobs does not work with"):
        spec(encoder_decoder=True).generate([1], prompt_logprobs=0)


@pytest.mark.parametrize(
    ("name", "value"), [("stop_strings", "end"), ("structured", {"regex": "a*"})]
)
def test_what_needs_a_tokenizer(name, value):
    with pytest.raises(InputError, match=f"^{name} needs a tokenizer; load the model with"):
        spec().generate([1], **{name: value})
