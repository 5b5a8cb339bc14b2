"""What a target's files alone decide is refused before any weights are loaded or converted."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import foretoken
from console import Run, mistake
from foretoken.errors import InputError
from foretoken.loading import load as loading
from foretoken.server.process.startup import describe_missing
from tiny import byte_level, folder, llama


@pytest.fixture(autouse=True)
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(*args: object) -> None:
        raise AssertionError("weights are loaded")

    for name in ("place", "draft_of"):
        monkeypatch.setattr(loading, name, place)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    folder(base / "bare", llama(320))
    folder(base / "text", llama(320), byte_level())
    folder(base / "weightless", llama(320), byte_level())
    (base / "weightless" / "model.safetensors").unlink()
    (base / "empty").mkdir()
    (base / "shell").mkdir()
    shutil.copy(base / "text" / "model.safetensors", base / "shell")
    (base / "notes.txt").write_text("Buy milk.\n")
    (base / "model").write_bytes(b"GGUF....")
    (base / "prompts.txt").write_text("It was\nOn the day\n")
    (base / "chat.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n"
    )
    return base


TOKENIZER = "has no tokenizer"
COMMANDS = [
    ("generate", "{base}/bare", "It was"),
    ("generate", "--target", "{base}/bare", "--prompt-file", "{base}/prompts.txt"),
    ("bench", "--target", "{base}/bare", "--prompts", "{base}/prompts.txt"),
    ("certify", "--target", "{base}/bare"),
    ("chat", "{base}/bare", "-q", "Hi"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_text_without_a_tokenizer(models: Path, console: Run, command: tuple[str, ...]) -> None:
    mistake(console(*(each.format(base=models) for each in command)), TOKENIZER)


def test_a_file_of_texts_without_a_tokenizer(models: Path, tmp_path: Path, console: Run) -> None:
    out = tmp_path / "out.jsonl"
    given = ["--prompt-file", models / "prompts.txt", "--output", out]
    result = console("generate", "--target", models / "bare", *given)
    assert result.code == 2 and TOKENIZER in result.err.splitlines()[-1] and not out.exists()


@pytest.mark.parametrize(
    "command",
    [
        ("chat", "{base}/text", "-q", "Hi"),
        ("generate", "--target", "{base}/text", "--chat", "Hi"),
        ("generate", "--target", "{base}/text", "--prompt-file", "{base}/chat.jsonl"),
    ],
)
def test_messages_without_a_chat_template(
    models: Path, console: Run, command: tuple[str, ...]
) -> None:
    mistake(console(*(each.format(base=models) for each in command)), "--chat-template FILE")


PLACES = {
    "empty": "is an empty folder; a model's folder holds config.json, a tokenizer and weights",
    "shell": "holds no config.json; a model's folder holds config.json, a tokenizer and weights",
    "weightless": "holds no weights; a model's folder holds config.json, a tokenizer and weights",
    "notes.txt": "is a file that holds no model; give a model's folder, a GGUF file or a hub id",
    "model": "is a GGUF file, but not named so; rename it to model.gguf",
    "text/model.safetensors": "is a part of a model; give the folder that holds it: ",
    "text/config.json": "is a part of a model; give the folder that holds it: ",
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_model(models: Path, console: Run, place: str) -> None:
    mistake(console("generate", "--target", models / place, "Hi"), f"{place} {PLACES[place]}")
    for target in (models / place, str(models / place)):
        with pytest.raises(InputError) as told:
            foretoken.load(target, "lookup")
        assert f"{place} {PLACES[place]}" in str(told.value)


def test_a_file_in_the_working_folder(
    models: Path, console: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name could be a hub id."""
    monkeypatch.chdir(models)
    mistake(console("generate", "--target", "notes.txt", "Hi"), PLACES["notes.txt"])


def test_load_warns_of_a_missing_tokenizer(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "foretoken"), pytest.raises(AssertionError):
        foretoken.load(models / "bare", "lookup")
    (told,) = caplog.messages
    assert told.startswith("bare holds no tokenizer, so prompts must be token ids; give tokenizer=")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "foretoken"), pytest.raises(AssertionError):
        foretoken.load(models / "text", "lookup")
    assert not caplog.messages


def test_a_server_says_which_requests_it_will_refuse() -> None:
    bare, plain = (SimpleNamespace(name="m", tokenizer=each) for each in (None, byte_level()))
    assert "--tokenizer" in describe_missing(bare)
    assert "m has no chat template" in describe_missing(plain)
