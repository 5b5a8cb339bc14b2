"""The container's file, as far as it can be checked without a container runtime: its paths, what
they let through, its Python, and the names that it installs and runs."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[3]
LINES = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
STEPS = [tuple(line.split(None, 1)) for line in LINES if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def arguments(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def test_the_steps_are_known_and_begin_with_an_image_of_our_python() -> None:
    known = "FROM COPY RUN USER ENV VOLUME EXPOSE STOPSIGNAL ENTRYPOINT".split()
    assert STEPS[0][0] == "FROM" and {name for name, _ in STEPS} <= set(known)
    version = re.fullmatch(r"python:(3\.\d+)-slim", STEPS[0][1])
    assert version and version[1] in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize("step", arguments("COPY"))
def test_what_is_copied_is_there_and_not_ignored(step: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"  # so that weights, results and virtual environments stay out
    for source in step.split()[:-1]:
        assert (ROOT / source).exists()
        assert any(fnmatch(source, line.removeprefix("!")) for line in ignored if line[0] == "!")


def test_what_is_installed_and_run_is_the_projects() -> None:
    (run,), (entry,) = arguments("RUN"), arguments("ENTRYPOINT")
    extras = re.search(r'"/src\[(.+)\]"', run)
    assert extras and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert json.loads(entry)[:2] == ["foretoken", "serve"] and "foretoken" in PROJECT["scripts"]
    assert arguments("USER") and "useradd" in run  # it does not run as root
