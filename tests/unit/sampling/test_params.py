"""What a row may wish: values of every kind are taken and kept alike, all else is refused in a
line."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.errors import InputError, RefusedError, format_value
from foretoken.sampling.distributions import probabilities
from foretoken.sampling.params import (
    FOREIGN_NAMES,
    SAMPLING_FIELDS,
    Controls,
    SamplingParams,
    Structured,
    gather_params,
    suggest_name,
)

HUGE = 10**400  # an integer that no float comes near
SCHEMA = '{"type": "object"}'


@pytest.mark.parametrize("kind", [Fraction, np.float16, np.float32, np.float64, float])
@pytest.mark.parametrize("count", [np.int8, np.int64, int])
def test_fractions_and_numbers_of_numpy_are_numbers(kind, count):
    """torch divides by no Fraction, and JSON holds nothing of NumPy's."""
    params = SamplingParams(kind(0.5), count(3), kind(0.75), kind(0.125))
    assert params == SamplingParams(0.5, 3, 0.75, 0.125)
    assert json.dumps(asdict(params)) == json.dumps(asdict(SamplingParams(0.5, 3, 0.75, 0.125)))
    logits = torch.randn(2, 9, generator=torch.manual_seed(0))
    assert torch.equal(
        probabilities(logits, params), probabilities(logits, SamplingParams(0.5, 3, 0.75, 0.125))
    )


def test_top_k_may_be_larger_than_any_vocabulary():
    logits = torch.randn(2, 9, generator=torch.manual_seed(0))
    assert torch.equal(
        probabilities(logits, SamplingParams(1.0, HUGE)), probabilities(logits, SamplingParams(1.0))
    )


FIELD_NAMES = {field.name for field in fields(SamplingParams)}
VALID: list[tuple[str, Any, Any]] = [
    ("typical_p", Fraction(1, 2), 0.5),
    ("eta_cutoff", np.float32(0.5), 0.5),
    ("max_new_tokens", np.int64(3), 3),
    ("repetition_penalty", 2, 2.0),
    ("frequency_penalty", np.float64(0.5), 0.5),
    ("bad_words_ids", [[1, 2], (3,)], ((1, 2), (3,))),
    ("bad_words_ids", torch.tensor([[1, 2]]), ((1, 2),)),
    ("bad_words_ids", [], ()),
    ("sequence_bias", {(1, 2): 1, (3,): -math.inf}, (((1, 2), 1.0), ((3,), -math.inf))),
    ("sequence_bias", [[[1, 2], 0.5]], (((1, 2), 0.5),)),
    ("sequence_bias", {1: 0.5}, (((1,), 0.5),)),
    ("logit_bias", {3: 1, "4": 2.5}, (((3,), 1.0), ((4,), 2.5))),
    ("logit_bias", {np.int64(3): np.float32(1)}, (((3,), 1.0),)),
    ("suppress_tokens", np.array([1, 2]), (1, 2)),
    ("suppress_tokens", range(1, 3), (1, 2)),
    ("begin_suppress_tokens", {5}, (5,)),
    ("forced_bos_token_id", np.int64(5), 5),
    ("forced_eos_token_id", [5], 5),
    ("exponential_decay_length_penalty", [3, 2], (3, 2.0)),
    ("remove_invalid_values", True, True),
    ("stop_strings", "end", ("end",)),
    ("stop_strings", ["b", "a", "b"], ("b", "a")),
    ("stop_token_ids", [7], (7,)),
    ("logprobs", 0, 0),
    ("processors", abs, (abs,)),
    ("stopping", [abs, max], (abs, max)),
    ("structured", {"regex": "a+"}, Structured("regex", "a+")),
    ("structured", {"choice": ["x", "y"]}, Structured("choice", '["x", "y"]')),
    ("structured", {"json_schema": {"type": "object"}}, Structured("json_schema", SCHEMA)),
    ("structured", {"json_schema": SCHEMA}, Structured("json_schema", SCHEMA)),
]


@pytest.mark.parametrize(("name", "given", "kept"), VALID, ids=lambda value: format_value(value))
def test_what_is_taken_and_how_it_is_kept(name, given, kept):
    """Equal, hashable and as good as its own fields: a list is as good as its tuple."""
    params = SamplingParams(**{name: given})
    value = getattr(params, name)
    assert value == kept and type(value) is type(kept)
    assert params == SamplingParams(**{name: kept}) and hash(params) == hash(replace(params))
    assert replace(params, temperature=0.5) == SamplingParams(0.5, **{name: kept})
    assert SamplingParams(**{n: getattr(params, n) for n in FIELD_NAMES}) == params
    assert f"{name}=" in repr(params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; give 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": HUGE}, "temperature is inf; give 0"),
        ({"temperature": Decimal(1)}, r"temperature is Decimal\('1'\); give a number"),
        ({"temperature": torch.tensor(1.0)}, r"temperature is tensor\(1.\); give a number"),
        ({"temperature": True}, "temperature is True; give a number"),
        ({"temperature": np.bool_(True)}, "temperature is np.True_; give a number"),
        ({"top_k": -1}, "top_k is -1; give 0"),
        ({"top_k": -(10**5000)}, "top_k is a int too large to show; give 0"),
        ({"top_k": np.float64(2)}, r"top_k is np.float64\(2.0\); give a whole number"),
        ({"top_p": 0.0}, r"top_p is 0.0; give a number in \(0, 1\]"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"typical_p": 0.0}, r"typical_p is 0.0; give a number in \(0, 1\]"),
        ({"epsilon_cutoff": 1}, r"epsilon_cutoff is 1.0; give a number in \[0, 1\)"),
        ({"eta_cutoff": -0.1}, "eta_cutoff is -0.1; give a number in"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give 1 or more"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; give a number above 0 "),
        ({"repetition_penalty": 1e-320}, "repetition_penalty is 1e-320; give a number above 0"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan; give a finite number"),
        ({"bad_words_ids": "ab"}, "bad_words_ids is 'ab'; give a list of lists of ids"),
        ({"bad_words_ids": [1, 2]}, "bad_words_ids is 1; give"),
        ({"bad_words_ids": [[]]}, "bad_words_ids holds an empty sequence; give one or more"),
        ({"bad_words_ids": [[-1]]}, "bad_words_ids holds -1; give token ids, each 0 or more"),
        ({"sequence_bias": {(): 1.0}}, "sequence_bias holds an empty sequence"),
        ({"sequence_bias": {(1,): math.inf}}, r"sequence_bias adds inf to \[1\]; give a finite"),
        ({"sequence_bias": {(1,): None}}, r"sequence_bias adds None to \[1\]; give a finite"),
        ({"sequence_bias": [1]}, "sequence_bias holds 1; give a mapping from ids to numbers"),
        ({"sequence_bias": 5}, "sequence_bias is 5; give a mapping from ids to numbers"),
        ({"logit_bias": {(1, 2): 1.0}}, r"logit_bias holds \[1, 2\]; give single ids, or use seq"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias holds 'x'; give a mapping from ids"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias holds '9{56}...; give a mapping from ids"),
        (
            {"logit_bias": {-(10**5000): 1.0}},
            "logit_bias holds a int too large to show; give to",
        ),
        ({"logit_bias": None}, "logit_bias is None; give a mapping"),
        ({"suppress_tokens": [1.5]}, "suppress_tokens holds 1.5; give token ids, each 0"),
        ({"forced_bos_token_id": [1, 2]}, r"forced_bos_token_id is \[1, 2\]; give one id"),
        ({"exponential_decay_length_penalty": 3}, "exponential_decay_length_penalty is 3; give"),
        ({"exponential_decay_length_penalty": (1, 0)}, r"exponential_decay_length_penalty is \(1,"),
        ({"exponential_decay_length_penalty": (-1, 2)}, r"exponential_decay_length_penalty is \(-"),
        ({"remove_invalid_values": 1}, "remove_invalid_values is 1; give True or False"),
        ({"stop_strings": [""]}, "stop_strings holds ''; give strings that are not empty"),
        ({"stop_strings": [3]}, "stop_strings holds 3; give strings that are not empty"),
        ({"logprobs": -1}, r"logprobs is -1; give 0 \(only each token's own logprob"),
        ({"logprobs_of": "top"}, "logprobs_of is 'top'; give one of raw, drawn"),
        ({"processors": 3}, "processors holds 3; give functions or callables, not classes"),
        (
            {"processors": [int]},
            "processors holds <class 'int'>; give functions or callables, not classes",
        ),
        ({"structured": {"yaml": "x"}}, "structured is {'yaml': 'x'}; give a dict with one key of"),
        ({"structured": {"regex": "a", "lark": "b"}}, "structured is {'regex': 'a', 'lark': 'b'}"),
        ({"structured": {"regex": " "}}, "structured's regex is ' '; give a non-empty string"),
        (
            {"structured": {"json_schema": {"a": {1, 2}}}},
            "structured's json_schema is not valid JSON",
        ),
        ({"structured": {"choice": []}}, "structured's choice is empty; give"),
    ],
)
def test_values_that_are_refused(changes, message):
    with pytest.raises(InputError, match=f"^{message}") as error:
        SamplingParams(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 is above max_new_tokens=8"),
        (
            {"num_return_sequences": 2},
            "num_return_sequences=2 at temperature 0 gives equal outputs",
        ),
        ({"include_stop_string": True}, "include_stop_string has no effect; give stop"),
        (
            {"structured": {"regex": "a"}, "ignore_eos": True},
            "structured output ends with an EOS token, which",
        ),
        ({"logprobs_of": "drawn"}, "logprobs_of='drawn' has no effect without logprobs; give both"),
    ],
)
def test_options_that_contradict_one_another(changes, message):
    with pytest.raises(RefusedError, match=f"^{message}"):
        SamplingParams(**changes)


def test_every_field_is_checked_and_can_be_a_keyword():
    assert {*Controls.__annotations__} == {*SAMPLING_FIELDS} == FIELD_NAMES


def test_what_repr_shows():
    assert repr(SamplingParams()) == "SamplingParams(temperature=0.0)"
    shown = repr(SamplingParams(0.5, logit_bias={3: 1}, stop_strings="x"))
    assert (
        shown == "SamplingParams(temperature=0.5, logit_bias=(((3,), 1.0),), stop_strings=('x',))"
    )


def test_the_ids_it_names():
    assert SamplingParams().list_ids() == {}
    params = SamplingParams(
        bad_words_ids=[[1, 2], [3]], logit_bias={4: 1}, forced_eos_token_id=0, stop_token_ids=[5]
    )
    assert params.list_ids() == {
        "bad_words_ids": [1, 2, 3],
        "logit_bias": [4],
        "stop_token_ids": [5],
        "forced_eos_token_id": [0],
    }


def test_gathered():
    one, two = SamplingParams(0.5), SamplingParams(0.7)
    assert gather_params(None, {}, 2) == [SamplingParams()] * 2
    assert gather_params(None, {"temperature": 0.5}, 2) == [one, one]
    assert gather_params(one, {}, 3) == [one] * 3
    assert gather_params([one, two], {}, 2) == [one, two] == gather_params((one, two), {}, 2)


@pytest.mark.parametrize(
    ("params", "controls", "message"),
    [
        (
            None,
            {"repetition_penaltyy": 1},
            "repetition_penaltyy is not an option of generate; did you mean repetition_penalty?",
        ),
        (
            None,
            {"max_tokens": 1},
            "max_tokens is not an option of generate; did you mean max_new_tok",
        ),
        (None, {"stop": ["x"]}, "stop is not an option of generate; did you mean stop_strings?"),
        (None, {"n": 2}, "n is not an option of generate; did you mean num_return_sequences?"),
        (None, {"xyzzy": 1}, "xyzzy is not an option of generate; give one of temperature, top_k"),
        (SamplingParams(), {"top_k": 1}, "params and top_k are both given; leave out params"),
        ([SamplingParams()], {}, "params has 1 entries for 2 prompts; give one entry"),
        ([SamplingParams()] * 3, {}, "params has 3 entries for 2 prompts; give one entry"),
        ([], {}, "params has 0 entries for 2 prompts"),
        ([SamplingParams(), None], {}, r"params is \[SamplingParams.*; give a foretoken.Samp"),
        ({"temperature": 1}, {}, "params is {'temperature': 1}; give a foretoken.SamplingParams"),
        (0.5, {}, "params is 0.5; give a foretoken.SamplingParams, or a list"),
    ],
)
def test_what_is_no_params_for_two_prompts(params, controls, message):
    with pytest.raises(InputError, match=f"^{message}"):
        gather_params(params, controls, 2)


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_what_others_call_it(name: str) -> None:
    """No name of ours, and it stands for one."""
    assert name not in SAMPLING_FIELDS and FOREIGN_NAMES[name] in SAMPLING_FIELDS
    assert suggest_name(name, SAMPLING_FIELDS) == FOREIGN_NAMES[name]
