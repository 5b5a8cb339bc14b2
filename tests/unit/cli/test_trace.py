"""`foretoken trace` end to end on small models: text, table, page, JSON."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

import foretoken
from console import Run, mistake
from tiny import byte_level, folder, llama, t5

PROMPT = "It was <b>the day"


@pytest.fixture
def run(console: Run) -> Run:
    return console


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target` and `draft`, and `t5` without a tokenizer."""
    base = tmp_path_factory.mktemp("trace")
    folder(base / "target", llama(320, eos_token_id=None), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "t5", t5(64))
    return base


@pytest.fixture
def pair(base: Path) -> tuple[object, ...]:
    flags = ("--target", base / "target", "--draft", base / "draft", "--gamma", 3)
    return (*flags, "--temperature", 1, "--max-new-tokens", 12)


@pytest.fixture(scope="module")
def done(base: Path) -> foretoken.Completion:
    spec = foretoken.load(base / "target", base / "draft")
    return spec.generate(PROMPT, gamma=3, temperature=1.0, max_new_tokens=12)[0]


def test_every_step_is_a_line_and_a_row(run, pair, done):
    shown = run("trace", PROMPT, *pair, "--table").out
    lines = shown.split("accepted draft token")[0].split("\n")[:-1][-len(done.steps) :]
    assert [int(line[:4]) for line in lines] == list(range(1, len(done.steps) + 1))
    rows = [line.split() for line in shown.split("verify ms")[1].splitlines()[2:] if line.strip()]
    *steps, total = [row for row in rows if len(row) == 7]
    counts = [
        [number, s.drafted, s.accepted, len(s.kept)] for number, s in enumerate(done.steps, 1)
    ]
    assert [[int(cell) for cell in row[:4]] for row in steps] == counts
    assert total[:4] == [
        "all",
        *(str(sum(column)) for column in list(zip(*counts, strict=True))[1:]),
    ]
    assert "verify ms" not in run("trace", PROMPT, *pair).out


def test_the_files(run, pair, done, tmp_path):
    page, picture, trace = (tmp_path / name for name in ("t.html", "t.svg", "t.json"))
    result = run("trace", PROMPT, *pair, "--html", page, "--svg", picture, "--chrome", trace)
    assert result.code == 0 and result.err.split()[-3:] == [str(page), str(picture), str(trace)]
    assert picture.read_text().startswith("<?xml") and "gamma 3" in picture.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == "target" for event in events) == len(done.steps)
    text = page.read_text()
    assert "gamma 3" in text
    assert text.count("<li>") == len(done.steps) and text.count("<svg") == 1
    shown = re.search(r'<p class="text"><b>(.*?)</b>(.*?)</p>', text, re.S)
    assert shown and unescape(shown[1]) == PROMPT and unescape(shown[2]) == done.text
    assert "<b>the" not in text
    assert not re.search(r'<(script|link|img|iframe)|@import|url\(["\']?http', text)
    assert f"{len(done.steps)}</th><td>{done.steps[-1].drafted}<" in text


def test_json_has_steps(run, pair, done):
    document = json.loads(run("trace", PROMPT, *pair, "--json").out)
    (completion,) = document["completions"]
    assert completion["tokens"] == done.tokens and completion["gamma"] == 3
    assert [step["accepted"] for step in completion["steps"]] == [s.accepted for s in done.steps]


def test_an_encoder_decoder_of_ids(run, base, tmp_path):
    page = tmp_path / "t.html"
    args = ("--target", base / "t5", "--draft", base / "t5", "--max-new-tokens", 4, "--gamma", 1)
    result = run("trace", "5,6,7", *args, "--html", page)
    assert result.code == 0 and "5,6,7" in result.out
    assert "<b>5,6,7</b>\n" in page.read_text() and "draft encoder" in page.read_text()
    assert ", by the encoders 0." in page.read_text()


def test_mistakes(run, pair, tmp_path):
    missing = tmp_path / "no" / "t.html"
    says = f"there is no folder {missing.parent}; make it or give another --html"
    mistake(run("trace", PROMPT, *pair, "--html", missing), says)
    mistake(run("trace", PROMPT, *pair, "--html", tmp_path), "is a folder; give another --html")
    same = ("--svg", tmp_path / "t", "--chrome", tmp_path / "t")
    mistake(run("trace", PROMPT, *pair, *same), "two of --svg and --chrome name one file")
    mistake(run("trace", "", *pair), "empty")
    mistake(run("trace", PROMPT, *pair, "--table", "--json"), "--json has all that --table prints")
    assert not list(tmp_path.iterdir())


def test_a_picture_needs_matplotlib(run, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("foretoken.cli.option.find_spec", lambda name: None)
    says = "--html draws; give it matplotlib: pip install 'foretoken[plot]'"
    mistake(run("trace", PROMPT, *pair, "--html", tmp_path / "t.html"), says)
