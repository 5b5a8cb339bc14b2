"""Requests and rows from what a call asks for; bad prompts are refused in test_speculator."""

from __future__ import annotations

import pytest

from foretoken.errors import InputError
from foretoken.generation_config import EndTokens
from foretoken.inputs import InputProcessor
from foretoken.sampling.params import SamplingParams
from oracle import random_model
from table import TableModel
from tiny import byte_level

V = 320
ENDS = EndTokens(eos=frozenset({5}), forced_bos=6, forced_eos=7)


def intake(tokenizer=None, ends: EndTokens = ENDS, **controls) -> InputProcessor:
    return InputProcessor(TableModel(random_model(1, V), V, context=20), tokenizer, ends, controls)


def test_a_request_knows_its_ends_places_and_limit() -> None:
    (request,) = intake().make_requests([[1, 2, 3]], SamplingParams(max_new_tokens=9), [4])
    assert (request.prompt, request.limit, request.source) == ([1, 2, 3], 9, None)
    assert request.eos == {5} and request.forced == {-2: 6, 8: 7}
    assert tuple(request.key) == (4, 0)
    (short,) = intake().make_requests([[1] * 15], SamplingParams(), 0)
    assert short.limit == 5 and short.forced[4] == 7  # the context's last place


def test_more_ends_or_none_of_the_models() -> None:
    sampling = SamplingParams(stop_token_ids=[8], ignore_eos=True)
    (request,) = intake().make_requests([[1]], sampling, 0)
    assert request.eos == {8}


def test_the_models_own_where_the_caller_left_it_open() -> None:
    own = intake(repetition_penalty=1.5, no_repeat_ngram_size=2)
    (request,) = own.make_requests([[1]], SamplingParams(no_repeat_ngram_size=0), 0)
    assert request.params.repetition_penalty == 1.5 and request.params.no_repeat_ngram_size == 0


def test_a_stop_string_that_is_a_special_token() -> None:
    """It has no text to be found in, so its id ends the text."""
    (special,) = byte_level().all_special_tokens[:1]
    (request,) = intake(byte_level()).make_requests(["It"], SamplingParams(stop_strings=special), 0)
    assert byte_level().convert_tokens_to_ids(special) in request.eos


def test_a_special_token_as_a_stop_string_may_stand_within_the_least_new_tokens() -> None:
    """It is written and ends nothing there, as any stop string, and unlike the model's own end."""
    special = byte_level().all_special_tokens[0]
    sampling = SamplingParams(stop_strings=special, min_new_tokens=2)
    for ends, least in ((EndTokens(), [0, 5, 0]), (EndTokens(frozenset({0})), [0])):
        reader = InputProcessor(TableModel(lambda _: [1.0], V), byte_level(), ends, {})
        (row,) = reader.make_sequences(reader.make_requests(["It"], sampling, 0))
        assert row.commit([0, 5, 0, 7]) == least and row.stop_reason == 0
        names = [] if row.controls is None else [name for name, _ in row.controls.controls]
        assert names == (["min_new_tokens"] if ends.eos else [])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"suppress_tokens": [V]}, f"suppress_tokens names the id {V}; ids must be in"),
        ({"structured": {"regex": "("}}, "structured's regex cannot be followed"),
    ],
)
def test_of_several_prompts_the_one_that_fails_is_named(sampling, message):
    """Before a row is made, for which a model may have to run."""
    fine, bad = SamplingParams(), SamplingParams(**sampling)
    with pytest.raises(InputError, match=f"^prompt 1: {message}"):
        intake(byte_level()).make_requests(["a", "b"], [fine, bad], 0)
    with pytest.raises(InputError, match=f"^{message}"):
        intake(byte_level()).make_requests(["b"], [bad], 0)


def test_a_prompt_is_read_once_for_all_its_texts(monkeypatch):
    given, read = intake(byte_level()), []
    monkeypatch.setattr(
        InputProcessor, "encode_prompt", lambda self, prompt, i=0: read.append(prompt) or [1]
    )
    sampling = SamplingParams(1.0, num_return_sequences=3)
    requests = given.make_requests(["a", "b"], sampling, 4)
    assert read == ["a", "b"]
    assert [tuple(request.key) for request in requests] == [(4, row) for row in range(6)]


def test_a_prediction_has_no_special_tokens_and_is_of_the_decoders_ids() -> None:
    reader = intake(byte_level())
    text = byte_level()("It was", add_special_tokens=False).input_ids
    assert reader.tokenize_prediction("It was") == tuple(text) == reader.tokenize_prediction(text)
    assert reader.tokenize_prediction("") == reader.tokenize_prediction([]) == ()
    for bad, said in (([V], "0..319"), ([-1], "prediction"), (3, "prediction")):
        with pytest.raises(InputError, match=said):
            reader.tokenize_prediction(bad)
    with pytest.raises(InputError, match="prediction is text, but there is no tokenizer"):
        intake().tokenize_prediction("It was")
