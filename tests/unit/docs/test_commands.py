"""The commands of README and docs, page by page and in order, as a reader would type them: with a
tiny pair where he has his own, in a folder where each finds what those before it have made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import commands, run, skipped, stand_ins
from scripts import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SKIPPED = {  # a pattern, and why what it matches is not run here
    r"^make ": "it makes .venv, and its recipes are these commands, the tests and the site",
    r"^foretoken serve|--base-url|--url ": "a server runs until it is stopped: tests/e2e",
    r"benchmarks/gpu/": "a GPU",
    r"smollm2": "93 MB from PyPI: make chat",
    r"^foretoken transcribe ": "a model that hears: tests/e2e/test_transcribe.py",
    r"--ray ": "several processes: tests/e2e",
    r"benchmarks/\w+\.py|benchmarks/peers|DIR/target": "hours, and peers from the network",
    r"^python prepare.py|qualitative.jsonl": "a data set from the network: unit/cli/test_bench.py",
    r"^foretoken export vllm bench": "the best draft may be ours alone: unit/cli/test_export.py",
}
EVERY = {page.name: commands(page.read_text()) for page in PAGES}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return stand_ins(tmp_path_factory.mktemp("given"))


@pytest.mark.prove
@pytest.mark.parametrize(
    "name", [n for n, each in EVERY.items() if not all(skipped(e, SKIPPED) for e in each)]
)
def test_every_page_runs_as_it_stands(name: str, given: dict[str, str], tmp_path: Path) -> None:
    run([each for each in EVERY[name] if not skipped(each, SKIPPED)], given, tmp_path)


def test_no_page_is_longer_than_a_reader_s_patience() -> None:
    assert [page.name for page in PAGES if len(page.read_text().splitlines()) > 300] == []


def test_nothing_is_passed_over() -> None:
    """Commands are found where the pages have them, and every reason has its commands."""
    every = [command for each in EVERY.values() for command in each]
    assert len(every) > 50
    assert all(any(re.search(pattern, each) for each in every) for pattern in SKIPPED)
