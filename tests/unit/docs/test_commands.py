"""The commands of README and docs, page by page and in order, as a reader would type them: with a
tiny pair where he has his own, in a folder where each finds what those before it have made."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import ROOT
from tiny import TEXT, byte_level, folder, llama

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STARTS = ("foretoken ", "python -m reproduction ", "python ", "make ", "mkdir ", "printf ", "echo ")
SKIPPED = {  # a pattern, and why what it matches is not run here
    r"^make ": "it makes .venv, and its recipes are these commands, the tests and the site",
    r"^foretoken serve|--base-url|--url ": "a server runs until it is stopped: tests/e2e",
    r"smollm2": "93 MB from PyPI: make chat",
    r"^foretoken transcribe ": "a model that hears: tests/e2e/test_transcribe.py",
    r"--ray ": "several processes: tests/e2e",
    r"benchmarks/\w+\.py|benchmarks/peers|DIR/target": "hours, and peers from the network",
    r"NOVELS": "the text is no part of the repository",
    r"standins digits": "minutes, and scikit-learn is an extra: test_digits.py trains small ones",
    r"^python -m reproduction report": "half an hour: test_report.py has a recipe of a tiny pair",
}
# In the ordinary tests; all others by `make prove`
QUICK = {"README.md": r"m\.json"}
CHAT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def blocks(page: str) -> Iterator[list[str]]:
    """The lines of fenced and indented blocks."""
    for fence, fenced, indented in re.findall(
        r"^```(\w*)\n(.*?)^```|(?<=\n\n)((?:^    [^\n]*\n)+)", page, re.S | re.M
    ):
        if fence in ("", "sh"):
            yield fenced.splitlines() or [line[4:] for line in indented.splitlines()]


def commands(page: str) -> list[str]:
    """What is typed: behind "$ " in blocks that show what is printed too."""
    found: list[str] = []
    for lines in blocks(page):
        shown = any(line.startswith("$ ") for line in lines)
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).split("\n")
        typed = [line.removeprefix("$ ") for line in joined if line.startswith("$ ") or not shown]
        found += [re.sub(r"\s{2,}#.*", "", line) for line in typed if line.startswith(STARTS)]
    return found


EVERY = {page.name: commands(page.read_text()) for page in PAGES}


def skipped(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in SKIPPED)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for the words in capitals."""
    base = tmp_path_factory.mktemp("given")
    tokenizer = byte_level()
    tokenizer.chat_template = CHAT
    folder(base / "target", llama(320, context=512, eos_token_id=None), tokenizer)
    draft = llama(320, context=512, seed=1, num_hidden_layers=1, eos_token_id=None)
    folder(base / "draft", draft, tokenizer)
    (base / "prompts").write_text("It was the\nOnce upon\nThe day\nWhen he\n")
    (base / "text").mkdir()
    (base / "text" / "a.txt").write_text(TEXT * 200)
    pairs = "".join(f"the {n} day\tday {n}\n" for n in range(400))
    (base / "pairs.tsv").write_text(pairs)
    sources = "".join(f'{{"source": "the {n} day"}}\n' for n in range(40))
    (base / "prompts.jsonl").write_text(sources)
    target, draft = f"{base}/target", f"{base}/draft"
    text = f"{base}/text"
    return {
        # at their own number of steps these take hours; the tutorial's have a smaller one
        r"(train (?:lm|seq2seq|distill|heads|eagle|dspark) (?!.*--steps).*)": r"\1 --steps 4",
        r"--requests \d+": "--requests 50",  # of thousands, a minute each
        r"--out DIR\b": "--out made",
        r"\b(DIR2|DRAFT)\b|(?<= )D(?= )": draft,
        r"\b(DIR|TARGET)\b|(?<= )T(?= )": target,
        r"(?<= )FILE\b": f"{base}/prompts",
        r"\b(TEXT|FOLDER_OF_TEXT)\b": text,
        r"(?<= )pairs\.tsv": f"{base}/pairs.tsv",
        r"(?<=--data )prompts\.jsonl": f"{base}/prompts.jsonl",
        r"(?<=certify) \.\.\.": f" --target {target} --draft {draft}",
        r" \.\.\.$": " Once",
    }


def run(name: str, given: dict[str, str], at: Path, only: str = "") -> None:
    """The page's commands that match `only`, in a folder of their own; each must succeed."""
    (at / "bin").mkdir()
    for command in ("foretoken", "python -m reproduction"):
        script = f'#!/bin/sh\nexec "{sys.executable}" -m {command.replace("-", "_")} "$@"\n'
        (at / "bin" / command).write_text(script)
        (at / "bin" / command).chmod(0o755)
    (at / "bin" / "python").symlink_to(sys.executable)
    (at / "in.jsonl").write_text('{"prompt": "It was"}\n')
    for each in ("benchmarks", "recipes"):
        (at / each).symlink_to(ROOT / each)
    environment = os.environ | {
        "PATH": f"{at / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    ran = 0
    for command in EVERY[name]:
        if skipped(command) or not re.search(only, command):
            continue
        typed = command
        for pattern, words in given.items():
            typed = re.sub(pattern, words, typed)
        process = subprocess.run(
            ["bash", "-c", typed], cwd=at, env=environment, input="Hello\n", text=True,
            capture_output=True,
        )  # fmt: skip
        assert not process.returncode, f"{command}\n{process.stdout}\n{process.stderr}"[-3000:]
        ran += 1
    assert ran


@pytest.mark.parametrize("name", QUICK)
def test_what_is_quick_runs_as_it_stands(name: str, given: dict[str, str], tmp_path: Path) -> None:
    run(name, given, tmp_path, QUICK[name])


@pytest.mark.prove
@pytest.mark.parametrize(
    "name", [name for name, each in EVERY.items() if not all(map(skipped, each))]
)
def test_every_page_runs_as_it_stands(name: str, given: dict[str, str], tmp_path: Path) -> None:
    run(name, given, tmp_path)


def test_no_page_is_longer_than_a_reader_s_patience() -> None:
    assert [page.name for page in PAGES if len(page.read_text().splitlines()) > 300] == []


def test_nothing_is_passed_over() -> None:
    """Commands are found where the pages have them, and every reason has its commands."""
    every = [command for each in EVERY.values() for command in each]
    assert len(every) > 80
    assert all(any(re.search(pattern, each) for each in every) for pattern in SKIPPED)
