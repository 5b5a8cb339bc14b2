"""What pages of documentation say and what there is: commands to type, and names of code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts import ROOT
from tiny import TEXT, byte_level, folder, llama

STARTS = ("foretoken ", "python ", "make ", "mkdir ", "printf ", "echo ")
CHAT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "reproduction")
FILES = [path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
OTHERS = {"foretoken.service", "prepare.py"}  # systemd's, and SPEED-Bench's


# --- commands ---


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


def skipped(command: str, reasons: dict[str, str]) -> bool:
    """Whether one of these patterns, each with its reason, is in a command."""
    return any(re.search(pattern, command) for pattern in reasons)


def stand_ins(base: Path) -> dict[str, str]:
    """What stands for the words in capitals: a tiny pair, texts and prompts, written to `base`."""
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
        # at their own number of steps these take hours, unless the page has a smaller one
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


def run(typed: list[str], given: dict[str, str], at: Path) -> None:
    """Run commands in a folder, one after another; each must succeed."""
    (at / "bin").mkdir()
    for name, words in {"foretoken": "-m foretoken", "python": ""}.items():
        (at / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (at / "bin" / name).chmod(0o755)
    (at / "in.jsonl").write_text('{"prompt": "It was"}\n')
    for each in ("benchmarks", "examples", "reproduction"):
        (at / each).symlink_to(ROOT / each)
    environment = os.environ | {
        "PATH": f"{at / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    for command in typed:
        line = command
        for pattern, words in given.items():
            line = re.sub(pattern, words, line)
        process = subprocess.run(
            ["bash", "-c", line], cwd=at, env=environment, input="Hello\n", text=True,
            capture_output=True,
        )  # fmt: skip
        assert not process.returncode, f"{command}\n{process.stdout}\n{process.stderr}"[-3000:]


# --- names of code ---


def exists(dotted: str) -> bool:
    """Whether this is a module, or a name within one."""
    first, *rest = dotted.split(".")
    found: Any = import_module(first)
    for name in rest:
        if not hasattr(found, name) and hasattr(found, "__path__"):
            try:
                import_module(f"{found.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        if not hasattr(found, name) and name not in getattr(found, "__annotations__", {}):
            return False
        found = getattr(found, name, None)
    return True


def dead(page: str, package: str = "foretoken") -> list[str]:
    """Return what a page names and nothing has: files of Python, and names from a package on. A
    word in capitals in a file's name stands for any."""
    files = [name for name in re.findall(r"[\w/-]+\.py\b", page) if not re.search("[A-Z]{4}", name)]
    names = {*re.findall(rf"(?<![\w/]){package}(?:\.[A-Za-z_]\w*)+", page)} - OTHERS
    ours = [name for name in files if Path(name).name not in OTHERS]
    lost = [name for name in ours if not any(Path("/", f).match(name) for f in FILES)]
    return [*lost, *sorted(name for name in names if not exists(name))]
