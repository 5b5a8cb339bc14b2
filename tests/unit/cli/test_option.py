"""The options of loading: every command that loads a model has all of them that it can honour."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from console import Run, mistake
from foretoken.cli import option
from foretoken.loading import adapters, hub
from foretoken.loading import load as loading
from foretoken.loading.options import OPTIONS
from foretoken.measurement import bench, machine
from foretoken.sampling.checks import Choice, as_flag
from tiny import TEXT, byte_level, folder, llama

READING = {"--revision", "--trust-remote-code", "--tokenizer", "--ignore-generation-config"}
PLACING = {"--dtype", "--device", "--runtime"}
OF_PAIRS = {"--draft-dtype", "--draft-revision"}
SHORT = ("--max-new-tokens", 6)
FEW = ("--repeats", 1, "--gamma", 2)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    monkeypatch.setattr(bench, "REST_SECONDS", 0.0)
    return console


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose settings are refused, with its tokenizer elsewhere; a draft, prompts, text."""
    base = tmp_path_factory.mktemp("loading")
    target = llama(320, eos_token_id=None)
    target.generation_config.guidance_scale = 1.5
    folder(base / "target", target)
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    byte_level().save_pretrained(base / "words")
    (base / "prompts.txt").write_text("It was\nThe day was\n")
    (base / "a.txt").write_text(TEXT * 20, encoding="utf-8")
    return base


def options(run: Run, *command: str) -> set[str]:
    """Those of loading that a command shows."""
    shown = set(re.findall(r"--[a-z][a-z-]+", run(*command, "--help").out))
    return shown & (READING | PLACING | OF_PAIRS)


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "certify"])
def test_commands_with_a_pair_take_all(run, command):
    assert options(run, command) == READING | PLACING | OF_PAIRS


def test_other_commands_take_what_they_can_honour(run):
    assert options(run, "train", "eagle") == READING | PLACING
    assert options(run, "train", "distill") == READING | {"--draft-revision"}
    assert options(run, "doctor") == PLACING | {"--revision", "--trust-remote-code"}


@pytest.fixture
def commands(base: Path, tmp_path: Path) -> dict[str, tuple[object, ...]]:
    """Each short, with a target that is refused."""
    file = ("--prompts", base / "prompts.txt")
    pair = ("--target", base / "target", "--draft", base / "draft", "--runtime", "transformers")
    text = ("--target", base / "target", "--data", base / "a.txt")
    steps = (*text, "--length", 6, "--steps", 1, "--batch", 1)
    fresh = ("--shape", "num_hidden_layers=1", "--held-out", 1)
    return {
        "generate": ("generate", "It was", *pair, *SHORT),
        "bench": ("bench", *pair, *file, *SHORT, *FEW),
        "distill": ("train", "distill", *steps, *fresh, "--out", tmp_path / "d"),
    }


NAMES = ("generate", "bench", "distill")


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_refused_with_a_remedy_that_the_command_has(run, base, commands, name):
    words = ("--tokenizer", base / "words")
    refused = run(*commands[name], *words)
    mistake(refused, "guidance_scale=1.5")
    assert "--ignore-generation-config" in refused.err
    result = run(*commands[name], *words, "--ignore-generation-config")
    assert result.code == 0, result.err
    again = f"--tokenizer {base / 'words'} --ignore-generation-config"
    if name == "bench":  # what was measured so is generated so
        assert again in " ".join(result.out.split())
    elif name == "distill":
        assert again in result.out


def test_all_of_them_reach_load(run, monkeypatch, tmp_path):
    """Each by its name, and those not given as `load` has them."""
    seen: dict[str, object] = {}
    parameters = inspect.signature(loading.load).parameters.values()

    def load(check, target, draft, **given):
        seen.update(given, target=target, draft=draft)
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_checked", load)
    monkeypatch.setattr(hub, "way", lambda *_: {})  # a folder has no revision
    monkeypatch.setattr(adapters, "folder", lambda _: None)  # nor is "main" an adapter
    options = {name: each for name, each in OPTIONS.items() if each.panel}
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


# How the model's own generation config would sample


@pytest.fixture
def sampling(tmp_path: Path) -> tuple[object, ...]:
    model = llama(320, eos_token_id=None)
    config = model.generation_config
    config.do_sample, config.temperature, config.top_p = True, 0.6, 0.9
    target = folder(tmp_path / "m", model, byte_level())
    return ("--target", target, "--draft", "lookup", *SHORT)


SAYS = (
    "the model's generation config suggests temperature=0.6, top_p=0.9, which is followed only "
    "where it is asked for: --temperature 0.6 --top-p 0.9\n"
)


def test_what_the_model_suggests_is_said_once(run, base, sampling):
    result = run("generate", "It was", *sampling)
    assert result.code == 0 and result.err == SAYS and "suggests" not in result.out
    assert run("chat", "--raw", "-q", "It was", *sampling) == result
    document = run("generate", "It was", *sampling, "--json", "--compare")
    assert document.err == SAYS and json.loads(document.out)["completions"]
    measured = run("bench", "--prompts", base / "prompts.txt", *sampling, *FEW)
    assert measured.err.count(SAYS) == 1


def test_what_is_asked_for_is_not_missed(run, sampling):
    arguments = ("--temperature", 0.6, "--top-p", 0.9)
    assert run("generate", "It was", *sampling, *arguments).err == ""
    assert run("generate", "It was", *sampling, "--ignore-generation-config").err == ""


def test_a_word_alone_is_the_prompt_unless_it_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "a.gguf"
    file.touch()
    for model in (str(tmp_path), str(file)):
        assert option.target_and_prompt([model], None) == (model, None)
        assert option.target_and_prompt([model], "other") == ("other", model)
    for word in ("It was", "", str(tmp_path / "missing"), "a" * 5000, "a\0b"):
        assert option.target_and_prompt([word], None) == (None, word)
    assert option.target_and_prompt([str(tmp_path), "It was"], None) == (str(tmp_path), "It was")
    assert option.target_and_prompt(None, None) == (None, None)
