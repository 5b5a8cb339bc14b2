"""Options to fields of `SamplingParams`: only those that were given, read and checked."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from foretoken.cli.command import command
from foretoken.cli.option import SamplingOptions, Structure
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import WRITABLE, SamplingParams

SAID = [
    (["--temperature", "0.5"], {"temperature": 0.5}),
    (["--top-k", "5"], {"top_k": 5}),
    (["--top-p", "0.9"], {"top_p": 0.9}),
    (["--min-p", "0.1"], {"min_p": 0.1}),
    (["--typical-p", "0.2"], {"typical_p": 0.2}),
    (["--epsilon-cutoff", "0.01"], {"epsilon_cutoff": 0.01}),
    (["--eta-cutoff", "0.01"], {"eta_cutoff": 0.01}),
    (["--max-new-tokens", "9"], {"max_new_tokens": 9}),
    (["--min-new-tokens", "2"], {"min_new_tokens": 2}),
    (["--repetition-penalty", "1.2"], {"repetition_penalty": 1.2}),
    (["--encoder-repetition-penalty", "1.2"], {"encoder_repetition_penalty": 1.2}),
    (["--presence-penalty", "-0.5"], {"presence_penalty": -0.5}),
    (["--frequency-penalty", "0.5"], {"frequency_penalty": 0.5}),
    (["--no-repeat-ngram-size", "0"], {"no_repeat_ngram_size": 0}),
    (["--encoder-no-repeat-ngram-size", "3"], {"encoder_no_repeat_ngram_size": 3}),
    (["--bad-words-ids", "[[5], [6, 7]]"], {"bad_words_ids": [[5], [6, 7]]}),
    (["--sequence-bias", "[[[6, 7], -2.5]]"], {"sequence_bias": [[[6, 7], -2.5]]}),
    (["--logit-bias", '{"5": -2.5}'], {"logit_bias": {"5": -2.5}}),
    (["--suppress-tokens", "1, 2"], {"suppress_tokens": [1, 2]}),
    (["--allowed-token-ids", "1, 2"], {"allowed_token_ids": [1, 2]}),
    (["--begin-suppress-tokens", ""], {"begin_suppress_tokens": []}),
    (["--forced-bos-token-id", "0"], {"forced_bos_token_id": 0}),
    (["--forced-eos-token-id", "3"], {"forced_eos_token_id": 3}),
    (
        ["--exponential-decay", "30,1.05"],
        {"exponential_decay_length_penalty": [30, 1.05]},
    ),
    (["--remove-invalid-values"], {"remove_invalid_values": True}),
    (["--stop", r"a\n", "--stop", "b"], {"stop_strings": [r"a\n", "b"]}),
    (
        ["--stop-token-ids", "4", "--include-stop-string"],
        {"stop_token_ids": [4], "include_stop_string": True},
    ),
    (["--ignore-eos"], {"ignore_eos": True}),
    (
        ["--num-return-sequences", "2", "--temperature", "1"],
        {"num_return_sequences": 2, "temperature": 1.0},
    ),
    (["--logprobs", "0", "--logprobs-of", "drawn"], {"logprobs": 0, "logprobs_of": "drawn"}),
    (["--prompt-logprobs", "2"], {"prompt_logprobs": 2}),
    (["--deterministic"], {"deterministic": True}),
    (["--regex", "a+"], {"structured": {"regex": "a+"}}),
    (["--choice", "a", "--choice", "b"], {"structured": {"choice": ["a", "b"]}}),
]


@command
def shown(sampling: SamplingOptions) -> None:
    print(json.dumps(sampling.given))


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    program = typer.Typer()
    program.command()(shown)
    return program


@pytest.mark.parametrize(("options", "given"), SAID)
def test_what_is_given_is_read(app, options, given):
    """As a line of JSON has it, and as `SamplingParams` takes it."""
    result = CliRunner().invoke(app, options)
    assert json.loads(result.stdout) == given
    assert SamplingParams(**given) != SamplingParams()


def test_nothing_given_is_nothing(app):
    assert CliRunner().invoke(app, []).stdout == "{}\n"
    assert CliRunner().invoke(app, ["--temperature", "0"]).stdout == "{}\n"
    assert SamplingOptions(**{f.name: f.default for f in fields(SamplingOptions)}).given == {}


def test_every_field_has_an_option():
    """But code; what is left out is as `SamplingParams` has it."""
    options = {f.name: f.default for f in fields(SamplingOptions)}
    structures = {f.name for f in fields(Structure)}
    assert options.keys() - structures == {*WRITABLE} - {"structured"}
    defaults = inspect.signature(SamplingParams).parameters
    for name in options.keys() - structures:
        assert options[name] == defaults[name].default or not options[name]
    assert {name for given in SAID for name in given[1]} == {*WRITABLE}


def test_files_become_what_must_match(tmp_path):
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    (tmp_path / "g.lark").write_text("start: /a/")
    schema = SamplingOptions(json_schema=tmp_path / "s.json").given
    assert schema == {"structured": {"json_schema": {"type": "integer"}}}
    assert SamplingOptions(grammar=tmp_path / "g.lark").given == {
        "structured": {"lark": "start: /a/"}
    }
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(InputError, match=r"s\.json is '\{', which is no JSON: "):
        SamplingOptions(json_schema=tmp_path / "s.json").given  # noqa: B018
    with pytest.raises(InputError, match="no such file"):
        SamplingOptions(grammar=tmp_path / "no").given  # noqa: B018


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"top_p": 0.0}, "top_p is 0.0; give a number in (0, 1], 1 being off"),
        ({"bad_words_ids": "[[5"}, "bad_words_ids is '[[5', which is no JSON: "),
        ({"logit_bias": '{"5": NaN}'}, "logit_bias is '{\"5\": NaN}', which is no JSON: "),
        ({"logit_bias": "[" * 10**5}, "logit_bias is '[[["),
        ({"logit_bias": '{"x": 1}'}, "logit_bias holds 'x'; give a mapping from ids to numbers"),
        ({"suppress_tokens": "1,x"}, "suppress_tokens is '1,x'; give numbers with commas"),
        ({"suppress_tokens": "-1"}, "suppress_tokens holds -1; give ids, 0 or more"),
        (
            {"exponential_decay_length_penalty": "5"},
            "exponential_decay_length_penalty is [5]; ",
        ),
        ({"stop_strings": [""]}, "stop_strings holds ''; give strings that are not empty"),
        ({"logprobs": -1}, "logprobs is -1; give 0"),
        ({"logprobs_of": "x"}, "logprobs_of is 'x'; give one of raw, drawn"),
        ({"regex": " "}, "structured's regex is ' '; give its text"),
        ({"choice": ["a", ""]}, "structured's choice holds ''"),
        ({"regex": "a", "choice": ["b"]}, "a text cannot follow --regex and --choice at once"),
    ],
)
def test_mistakes_are_told_of_the_options_alone(sampling, says):
    with pytest.raises(ForetokenError) as error:
        SamplingOptions(**sampling).given  # noqa: B018
    assert str(error.value).startswith(says) and "\n" not in str(error.value)
