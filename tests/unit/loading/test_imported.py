"""A drafter of a user by an import path: `MODULE:ARGUMENT`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import httpx2
import pytest

import foretoken
from console import Run
from foretoken.errors import InputError
from foretoken.server.process.client import spawn
from loads import refused
from scripts import ROOT
from served import serving
from tiny import byte_level, folder, llama

MODULE = """
import torch
from foretoken import Drafter, UniformDrafter
from foretoken.drafters.base import pack

class Again(Drafter):
    "Drafts the token that the target found most probable when it made the last one."

    def __init__(self, target):
        self.vocab_size, self.model_of = target.vocab_size, target.model
        self.output, self.guesses = target.network.get_output_embeddings(), []

    def start(self, rows, prompts, sources):
        self.guesses += [None for _ in prompts]

    def propose(self, gamma, draw):
        return pack([[] if x is None else [x][:g] for x, g in zip(self.guesses, gamma)])

    @torch.inference_mode()
    def commit(self, tokens):
        best = self.output(self.model_of.hidden).argmax(-1)
        for b, kept in enumerate(tokens):
            self.guesses[b] = int(best[b, len(kept) - 1]) if kept else self.guesses[b]

    def leave(self, rows):
        self.guesses = [x for b, x in enumerate(self.guesses) if b not in rows]

def drafter(argument, target):
    if argument == "nothing":
        return 5
    if argument == "half":
        return type("Half", (), {"propose": lambda self, gamma, draw: None})()
    if argument == "narrow":
        return UniformDrafter(7)
    if argument == "again":
        return Again(target)
    assert target.tokenizer.decode(target.tokenizer("It was").input_ids) == "It was"
    assert target.structure.config.vocab_size == target.vocab_size
    return UniformDrafter(target.vocab_size)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a target, a package that has a module of drafters, and others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder(tmp_path / "target", llama(320), byte_level())
    (tmp_path / "mydrafts").mkdir()
    (tmp_path / "mydrafts" / "ours.py").write_text(MODULE)
    (tmp_path / "silentdraft.py").write_text("drafter = 5\n")
    (tmp_path / "needydraft.py").write_text("import no_such_package\n")
    return tmp_path


@pytest.mark.parametrize("argument", ["", "again", "a:b/c"])
def test_it_drafts_and_the_texts_are_the_targets(here: Path, argument: str) -> None:
    spec = foretoken.load("target", f"mydrafts.ours:{argument}")
    assert spec.draft_name == f"mydrafts.ours:{argument}"
    (made,) = spec.generate("It was", max_new_tokens=12, gamma=3)
    (plain,) = spec.generate("It was", max_new_tokens=12, gamma=0)
    assert made.tokens == plain.tokens and made.stats.drafted


def test_mistakes_are_one_line(here: Path) -> None:
    for draft, says in (
        (
            "mydrafts.theirs:a",
            "there is no module mydrafts.theirs; give a module that can be imported",
        ),
        ("nowhere:a", "there is no module nowhere"),
        ("silentdraft:a", "the module silentdraft has no function drafter; define drafter"),
        ("mydrafts.ours:nothing", "function drafter returned 5; return a Drafter"),
        ("mydrafts.ours:half", "Half lacks start and commit and leave"),
        (
            "mydrafts.ours:narrow",
            "UniformDrafter has a vocabulary of 7 tokens, but the target has 320",
        ),
    ):
        refused(InputError, says, "target", draft)
    says = "draft_dtype is 'int8', but mydrafts.ours:a is not loaded from a model"
    refused(InputError, says, "target", "mydrafts.ours:a", draft_dtype="int8")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):  # what a module raises itself
        foretoken.load("target", "needydraft:a")


def test_the_documented_example(here: Path, console: Run) -> None:
    """The module in docs/drafts.md, with the command there."""
    page = (ROOT / "docs" / "drafts.md").read_text()
    (module,) = re.findall(r"```python\n((?:(?!```).)*\ndef drafter\(.*?)```", page, re.S)
    (here / "repeat.py").write_text(module)
    (command,) = re.findall(r"`foretoken (generate [^`]*repeat:2[^`]*)`", page)
    words = [*shlex.split(command), "--max-new-tokens", 8, "--gamma", 2]
    result = console(*words)
    plain = console(*[word if word != "repeat:2" else "none" for word in words[:-2]])
    assert result.code == 0 and result.out == plain.out


@pytest.mark.prove
def test_proof_an_engine_in_a_process_of_its_own_takes_it(here: Path) -> None:
    with serving("target", "mydrafts.ours:a", begin=spawn) as (url, _):
        body = {"model": "tiny", "prompt": "It was", "max_tokens": 8, "temperature": 0}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 8
