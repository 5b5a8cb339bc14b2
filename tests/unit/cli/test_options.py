"""Options that commands share: declared once, read, checked, and handed to where they are used."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from console import mistake
from foretoken.cli import option
from foretoken.cli.command import command
from foretoken.cli.option import (
    ClusterOptions,
    SamplingOptions,
    StructuredOutputOptions,
    require_extra,
)
from foretoken.errors import InputError
from foretoken.loading import adapters, hub
from foretoken.loading import load as loading
from foretoken.loading.options import LOAD_OPTIONS
from foretoken.measurement import machine, races
from foretoken.sampling.checks import Choice, as_flag
from foretoken.sampling.params import TEXT_OPTIONS, SamplingParams
from tiny import TEXT, byte_level, folder, llama

# Of sampling: only those that are given

SAID: list[tuple[str, dict[str, Any]]] = [
    ("--temperature 0.5", {"temperature": 0.5}),
    ("--top-k 5", {"top_k": 5}),
    ("--top-p 0.9", {"top_p": 0.9}),
    ("--min-p 0.1", {"min_p": 0.1}),
    ("--typical-p 0.2", {"typical_p": 0.2}),
    ("--epsilon-cutoff 0.01", {"epsilon_cutoff": 0.01}),
    ("--eta-cutoff 0.01", {"eta_cutoff": 0.01}),
    ("--max-new-tokens 9", {"max_new_tokens": 9}),
    ("--min-new-tokens 2", {"min_new_tokens": 2}),
    ("--repetition-penalty 1.2", {"repetition_penalty": 1.2}),
    ("--encoder-repetition-penalty 1.2", {"encoder_repetition_penalty": 1.2}),
    ("--presence-penalty -0.5", {"presence_penalty": -0.5}),
    ("--frequency-penalty 0.5", {"frequency_penalty": 0.5}),
    ("--no-repeat-ngram-size 0", {"no_repeat_ngram_size": 0}),
    ("--encoder-no-repeat-ngram-size 3", {"encoder_no_repeat_ngram_size": 3}),
    ("--bad-words-ids '[[5], [6, 7]]'", {"bad_words_ids": [[5], [6, 7]]}),
    ("--sequence-bias '[[[6, 7], -2.5]]'", {"sequence_bias": [[[6, 7], -2.5]]}),
    ("--logit-bias '{\"5\": -2.5}'", {"logit_bias": {"5": -2.5}}),
    ("--suppress-tokens '1, 2'", {"suppress_tokens": [1, 2]}),
    ("--allowed-token-ids '1, 2'", {"allowed_token_ids": [1, 2]}),
    ("--begin-suppress-tokens ''", {"begin_suppress_tokens": []}),
    ("--forced-bos-token-id 0", {"forced_bos_token_id": 0}),
    ("--forced-eos-token-id 3", {"forced_eos_token_id": 3}),
    ("--exponential-decay 30,1.05", {"exponential_decay_length_penalty": [30, 1.05]}),
    ("--remove-invalid-values", {"remove_invalid_values": True}),
    ("--stop 'a\\n' --stop b", {"stop_strings": ["a\\n", "b"]}),
    (
        "--stop-token-ids 4 --include-stop-string",
        {"stop_token_ids": [4], "include_stop_string": True},
    ),
    ("--ignore-eos", {"ignore_eos": True}),
    ("--num-return-sequences 2 --temperature 1", {"num_return_sequences": 2, "temperature": 1.0}),
    ("--logprobs 0 --logprobs-of drawn", {"logprobs": 0, "logprobs_of": "drawn"}),
    ("--prompt-logprobs 2", {"prompt_logprobs": 2}),
    ("--deterministic", {"deterministic": True}),
    ("--regex a+", {"structured": {"regex": "a+"}}),
    ("--choice a --choice b", {"structured": {"choice": ["a", "b"]}}),
]


@command
def shown(sampling: SamplingOptions) -> None:
    print(json.dumps(sampling.chosen_values))


def given(function: Any, arguments: str) -> str:
    """What a function of options prints."""
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, shlex.split(arguments)).stdout


@pytest.mark.parametrize(("arguments", "values"), SAID)
def test_what_is_given_is_read(arguments, values):
    """As a line of JSON has it, and as `SamplingParams` takes it."""
    assert json.loads(given(shown, arguments)) == values
    assert SamplingParams(**values) != SamplingParams()


def test_every_field_has_an_option():
    """But code; what is left out is as `SamplingParams` has it."""
    options = {f.name: f.default for f in fields(SamplingOptions)}
    structures = {f.name for f in fields(StructuredOutputOptions)}
    assert options.keys() - structures == {*TEXT_OPTIONS} - {"structured"}
    defaults = inspect.signature(SamplingParams).parameters
    for name in options.keys() - structures:
        assert options[name] == defaults[name].default or not options[name]
    assert {name for _, values in SAID for name in values} == {*TEXT_OPTIONS}
    assert given(shown, "") == given(shown, "--temperature 0") == "{}\n"


def test_files_become_what_must_match(tmp_path):
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    (tmp_path / "g.lark").write_text("start: /a/")
    schema = SamplingOptions(json_schema=tmp_path / "s.json").chosen_values
    assert schema == {"structured": {"json_schema": {"type": "integer"}}}
    lark = SamplingOptions(grammar=tmp_path / "g.lark").chosen_values
    assert lark == {"structured": {"lark": "start: /a/"}}
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(InputError, match=r"s\.json is '\{', which is "):
        SamplingOptions(json_schema=tmp_path / "s.json").chosen_values  # noqa: B018


# Groups of options as Typer takes them


@dataclass(frozen=True)
class First:
    a: Annotated[int, typer.Option(help="The a.")] = 1


@dataclass(frozen=True)
class Second(First):
    b: Annotated[str | None, typer.Option("--bee")] = None


@command
def called(context: typer.Context, two: Second, own: str = "x") -> None:
    """One
    line.

    Another
    paragraph.
    """
    print(two, own, sorted(context.params))


def test_groups_are_single_options_and_groups_again():
    names = "['a', 'b', 'own']"
    assert given(called, "--a 3 --bee y --own z") == f"Second(a=3, b='y') z {names}\n"
    assert given(called, "") == f"Second(a=1, b=None) x {names}\n"
    assert "The a." in given(called, "--help")
    assert called.__doc__ == "One line.\n\nAnother paragraph."


def test_what_is_missing_is_named_with_what_installs_it() -> None:
    with pytest.raises(InputError, match=r"needs no_such_package, .* 'foretoken\[serve,ray\]'"):
        with require_extra("serve,ray"):
            import no_such_package  # pyright: ignore  # noqa: F401
    with pytest.raises(ModuleNotFoundError), require_extra("ray"):
        import foretoken.no_such_module  # pyright: ignore  # noqa: F401


def test_ray_is_used_where_it_is_asked_for() -> None:
    assert (
        not ClusterOptions().used
        and ClusterOptions(replicas=1).used
        and ClusterOptions(ray="auto").used
    )
    assert (
        ClusterOptions(replicas=2).address == "local"
        and ClusterOptions(ray="auto").address == "auto"
    )


def test_a_word_alone_is_the_prompt_unless_it_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "a.gguf"
    file.touch()
    for model in (str(tmp_path), str(file)):
        assert option.split_arguments([model], None) == (model, None)
        assert option.split_arguments([model], "other") == ("other", model)
    for word in ("It was", "", str(tmp_path / "missing"), "a" * 5000, "a\0b"):
        assert option.split_arguments([word], None) == (None, word)
    assert option.split_arguments([str(tmp_path), "It was"], None) == (str(tmp_path), "It was")
    assert option.split_arguments(None, None) == (None, None)


# Of loading: every command that loads a model has all of them that it can honour

READING = {"--revision", "--trust-remote-code", "--tokenizer", "--ignore-generation-config"}
PLACING = {"--dtype", "--device", "--runtime"}
PAIR = READING | PLACING | {"--draft-dtype", "--draft-revision"}
QUICK = ("--repeats", 1, "--gamma", 2, "--max-new-tokens", 6)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        *[((name,), PAIR) for name in ("generate", "chat", "bench", "certify")],
        (("train", "eagle"), READING | PLACING),
        (("train", "distill"), READING | {"--draft-revision"}),
        (("doctor",), PLACING | {"--revision", "--trust-remote-code"}),
    ],
)
def test_commands_take_what_they_can_honour(run, words, options):
    assert {*re.findall(r"--[a-z][a-z-]+", run(*words, "--help").out)} & PAIR == options


def test_all_of_them_reach_load(run, monkeypatch, tmp_path):
    """Each by its name, and those not given as `load` has them."""
    seen: dict[str, object] = {}
    parameters = inspect.signature(loading.load).parameters.values()

    def load(check, target, draft, **given):
        seen.update(given, target=target, draft=draft)
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_checked", load)
    monkeypatch.setattr(hub, "resolve_options", lambda *_: {})  # a folder has no revision
    monkeypatch.setattr(adapters, "find_adapter", lambda _: None)  # nor is "main" an adapter
    options = {name: each for name, each in LOAD_OPTIONS.items() if each.panel}
    (tmp_path / "config.json").write_text("{}")
    for name, each in options.items():
        flag = each.flag or f"--{name.replace('_', '-')}"
        switch = each.check is as_flag or name == "generation_config"
        value = True if switch else each.check.values[-1] if type(each.check) is Choice else "main"
        seen.clear()
        run("generate", "a", "--target", tmp_path, flag, *(() if switch else (value,)))
        assert seen.pop("target") == str(tmp_path)
        assert seen[name] == ("ignore" if name == "generation_config" else value)
        assert seen.keys() == options.keys() | {"draft"}
    seen.clear()
    run("generate", "text")
    said = {"target", "draft", *options}
    defaults = {one.name: one.default for one in parameters if one.name in said}
    assert seen == defaults | {"target": "novels"}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\n")
    for words in (
        ("generate", "--prompt-file", prompts),
        ("generate", "--prompt-file", prompts, "--output", tmp_path / "out.jsonl"),
        ("bench", "--prompts", prompts, "--batch", "1,8"),
        ("certify", "--draft", "lookup", "--prompts", prompts),
    ):
        seen.clear()
        run(*words)
        assert seen == defaults | {"target": "novels", "draft": seen["draft"]}


@pytest.mark.parametrize("command", ["bench", "distill"])
def test_what_a_model_needs_is_in_the_command_that_is_printed(
    run, base, tmp_path, monkeypatch, command
):
    """A setting that is refused, and a tokenizer elsewhere."""
    monkeypatch.setattr(machine, "BANDWIDTH_READ_BYTES", 2**20)
    monkeypatch.setattr(races, "REST_SECONDS", 0.0)
    target = llama(320, eos_token_id=None)
    target.generation_config.guidance_scale = 1.5
    (tmp_path / "a.txt").write_text(TEXT * 20, encoding="utf-8")
    byte_level().save_pretrained(tmp_path / "words")
    model = ("--target", folder(tmp_path / "target", target), "--tokenizer", tmp_path / "words")
    steps = ("--length", 6, "--steps", 1, "--batch", 1, "--shape", "num_hidden_layers=1")
    asked = {
        "bench": ("bench", "--prompts", base / "prompts.txt", "--draft", base / "draft", *QUICK),
        "distill": ("train", "distill", "--data", tmp_path / "a.txt", *steps, "--held-out", 1,
                    "--out", tmp_path / "d"),
    }[command]  # fmt: skip
    refused = run(*asked, *model)
    mistake(refused, "guidance_scale=1.5")
    assert "--ignore-generation-config" in refused.err
    result = run(*asked, *model, "--ignore-generation-config")
    assert result.code == 0, result.err
    again = f"--tokenizer {tmp_path / 'words'} --ignore-generation-config"
    assert again in " ".join(result.out.split())


def test_what_the_model_suggests_is_said_once(run, base, tmp_path):
    model = llama(320, eos_token_id=None)
    config = model.generation_config
    config.do_sample, config.temperature, config.top_p = True, 0.6, 0.9
    target = folder(tmp_path / "m", model, byte_level())
    args = ("generate", "It was", "--target", target, "--draft", "lookup", "--max-new-tokens", 6)
    remedy = "--temperature 0.6 --top-p 0.9"
    assert run(*args).err.endswith(f"{remedy}\n") and run(*args).err.count("\n") == 1
    assert run(*args, "--json", "--compare").err == run(*args).err
    assert run(*args, *remedy.split()).err == ""
    assert run(*args, "--ignore-generation-config").err == ""
