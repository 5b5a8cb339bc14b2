"""/set: values as the options read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.cli.sampling_options import OneAnswer
from foretoken.cli.session import changed
from foretoken.errors import InputError

FIRST = OneAnswer(temperature=0.5)


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("top_p", "0.9", {"top_p": 0.9}),
        ("top-k", "5", {"top_k": 5}),
        ("--min-p", "1e-2", {"min_p": 0.01}),
        ("typical_p", "0.2", {"typical_p": 0.2}),
        ("min_new_tokens", "2", {"min_new_tokens": 2}),
        ("ignore_eos", "on", {"ignore_eos": True}),
        ("ignore-eos", "off", {}),
        ("stop", "the end", {"stop_strings": ["the end"]}),
        ("stop_strings", '["\\n", "b"]', {"stop_strings": ["\n", "b"]}),
        ("logit_bias", '{"5": -2.5}', {"logit_bias": {"5": -2.5}}),
        ("exponential-decay", "30,1.05", {"exponential_decay_length_penalty": [30, 1.05]}),
        ("regex", "a b+", {"structured": {"regex": "a b+"}}),
        ("choice", '["yes", "no"]', {"structured": {"choice": ["yes", "no"]}}),
    ],
)
def test_values_are_read_as_the_option_s(name, value, given):
    assert changed(FIRST, FIRST, name, value).given == {"temperature": 0.5, **given}


def test_files_are_named(tmp_path):
    (tmp_path / "s.json").write_text("{}")
    sampling = changed(FIRST, FIRST, "json_schema", str(tmp_path / "s.json"))
    assert sampling.json_schema == Path(tmp_path / "s.json")
    assert sampling.given["structured"] == {"json_schema": {}}


def test_nothing_is_what_was_there_at_first():
    sampling = changed(changed(FIRST, FIRST, "temperature", "1"), FIRST, "top_k", "3")
    assert sampling.given == {"temperature": 1.0, "top_k": 3}
    again = changed(changed(sampling, FIRST, "temperature", ""), FIRST, "top_k", "")
    assert again == FIRST


def test_an_answer_s_limit_is_its_own():
    """64 is not what an answer has when it is left out."""
    sampling = changed(OneAnswer(), OneAnswer(), "max_new_tokens", "64")
    assert sampling.given == {"max_new_tokens": 64} and OneAnswer().given == {}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temprature", "1", "'temprature' cannot be set; did you mean temperature?"),
        ("zzzzz", "1", "'zzzzz' cannot be set; give one of temperature, top_k"),
        ("num_return_sequences", "2", "cannot be set"),
        ("temperature", "hot", "temperature is 'hot'; give a number"),
        ("top_k", "1.5", "top_k is '1.5'; give a whole number"),
        ("ignore_eos", "perhaps", "ignore_eos is 'perhaps'; give on or off"),
        ("stop", "[1]", "stop_strings is '[1]'; give a list of texts"),
        ("stop", "[", "stop_strings is '[', which is no JSON"),
    ],
)
def test_mistakes(name, value, says):
    with pytest.raises(InputError) as error:
        changed(FIRST, FIRST, name, value)
    assert says in str(error.value) and "\n" not in str(error.value)
