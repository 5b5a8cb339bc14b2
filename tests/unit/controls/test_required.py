"""Wishes that this model, or this tokenizer, cannot honour are refused before anything runs."""

from __future__ import annotations

import pytest

from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.generation_config import Ends
from foretoken.models.table import TableModel
from foretoken.speculator import Speculator
from oracle import random_model
from tiny import byte_level

V = 5


def spec(encoder_decoder: bool = False) -> Speculator:
    target = TableModel(random_model(1, V), V, encoder_decoder=encoder_decoder)
    return Speculator(target, NoDrafter(), ends=Ends(decoder_start=0))


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
    with pytest.raises(InputError, match=f"^{name} is {V + 1}, but there are {V} tokens"):
        spec().generate([1], **{name: V + 1})


def test_prompt_logprobs_of_an_encoders_prompt():
    with pytest.raises(RefusedError, match="^prompt_logprobs: an encoder reads the prompt"):
        spec(encoder_decoder=True).generate([1], prompt_logprobs=0)


@pytest.mark.parametrize(
    ("name", "value"), [("stop_strings", "end"), ("structured", {"regex": "a*"})]
)
def test_what_needs_a_tokenizer(name, value):
    with pytest.raises(InputError, match=f"^{name} needs a tokenizer; load the model with one"):
        spec().generate([1], **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.5), ("logprobs", 1), ("include_stop_string", False), ("stopping", [])],
)
def test_what_a_beam_search_does_not_take(name, value):
    with pytest.raises(RefusedError, match=f"^beam_search does not take {name}; leave it out"):
        spec().beam_search([1], **{name: value})


def test_stop_strings_of_the_model_in_a_beam_search():
    target, tokenizer = TableModel(random_model(1, V), V), byte_level()
    with_stops = Speculator(target, NoDrafter(), tokenizer, controls={"stop_strings": ["x"]})
    with pytest.raises(
        RefusedError, match=r"sets stop_strings=\['x'\], which beam_search does not"
    ):
        with_stops.beam_search([[1]])
