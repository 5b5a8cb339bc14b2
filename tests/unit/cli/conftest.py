"""The console script with standard input, and small models that all commands share."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import foretoken
from console import TEMPLATE, Result, Run
from tiny import TEXT, byte_level, folder, llama, t5


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    """Call the console script. stdin: text that is piped in, None for a terminal."""

    def call(*args: object, stdin: str | bytes | None = None) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        piped = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        piped.isatty = lambda: stdin is None
        monkeypatch.setattr(sys, "stdin", piped)
        return console(*args)

    return call


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target` and `draft`, without a chat template, `bare` without a tokenizer, and `t5`;
    a template, prompts and a folder of text."""
    base = tmp_path_factory.mktemp("models")
    folder(base / "target", llama(320, eos_token_id=None), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "bare", llama(64))
    folder(base / "t5", t5(320), byte_level())
    (base / "chat.jinja").write_text(TEMPLATE)
    (base / "prompts.txt").write_text("It was\nThe day\n")
    (base / "text").mkdir()
    (base / "text" / "book.txt").write_text(TEXT * 20, encoding="utf-8")
    return base


@pytest.fixture
def pair(base: Path) -> tuple[object, ...]:
    return ("--target", base / "target", "--draft", base / "draft", "--gamma", 2)


@pytest.fixture(scope="session")
def spec(base: Path) -> foretoken.Speculator:
    return foretoken.load(base / "target", base / "draft")
