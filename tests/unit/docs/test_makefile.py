"""What `make` installs: little to run, the rest to develop, and what is little is enough."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# All modules but those that draw, or need Ray
IMPORT_ALL = """
import importlib, pkgutil
import foretoken, llguidance
for each in pkgutil.walk_packages(foretoken.__path__, "foretoken."):
    if not each.name.startswith(("foretoken.cluster.", "foretoken.cli.remote")):  # extras
        if not each.name.endswith(("__main__", ".kernels")):  # a library for ctypes
            importlib.import_module(each.name)
"""


def recipe(target: str) -> str:
    """What `make` would run for this target in a clean clone."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", target]
    given = {"MAKEFLAGS", "MAKEOVERRIDES", "TORCH_INDEX"}  # to the `make` that runs the tests
    environment = {name: value for name, value in os.environ.items() if name not in given}
    return subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=True
    ).stdout


def extras(target: str) -> list[str]:
    """The extras of each installation of the project, in order."""
    return re.findall(r'--editable "\.\[(.+)\]"', recipe(target))


@pytest.mark.daily("demo")
@pytest.mark.parametrize("target", ["demo", "chat", "serve"])
def test_a_user_gets_what_these_commands_need(target: str) -> None:
    assert extras(target) == ["gguf,serve"]
    assert re.match(r'echo "Installing [^"]+:"\necho "0\.\d GB to download', recipe(target))
    assert "--quiet" not in recipe(target)  # minutes without a sign of life


@pytest.mark.daily("test")
@pytest.mark.parametrize(
    "target", ["test", "reproduction-test", "quick", "prove", "check", "report", "docs"]
)
def test_a_developer_gets_the_rest_on_top(target: str) -> None:
    assert extras(target) == ["gguf,serve", "dev"]
    assert "-W ignore -m compileall" in recipe(target)  # a warning would fail the test that imports


def needed(requirements: list[str]) -> set[str]:
    """The names of all distributions that these requirements bring, as they are installed here."""
    waiting, found = [Requirement(each) for each in requirements], set[tuple[str, str]]()
    while waiting:
        one = waiting.pop()
        for extra in ("", *one.extras):
            if (key := (canonicalize_name(one.name), extra)) in found:
                continue
            found.add(key)
            for each in map(Requirement, metadata.requires(one.name) or []):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    waiting.append(each)
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the packages that `make demo` installs, and to no others."""
    site = tmp_path_factory.mktemp("site")
    groups = [PROJECT["optional-dependencies"][extra] for extra in extras("demo")[0].split(",")]
    here = (Requirement(each) for each in sum(groups, PROJECT["dependencies"]))
    names = needed([str(each) for each in here if not each.marker or each.marker.evaluate()])
    assert {"torch", "gguf", "uvicorn"} <= names and not {"ray", "pytest", "matplotlib"} & names
    for name in names | {"foretoken"}:  # of that, its version
        distribution = metadata.distribution(name)
        for top in {Path(each).parts[0] for each in distribution.files or []} - {"..", "bin"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return site


def run(installed: Path, *command: object) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{installed}"}
    process = subprocess.run(  # -S: without this environment's own packages
        [sys.executable, "-S", *map(str, command)], env=environment, text=True, capture_output=True
    )
    assert not process.returncode, process.stderr[-2000:]
    return process.stdout


def test_it_is_enough_to_import(installed: Path) -> None:
    run(installed, "-c", IMPORT_ALL)


def test_the_readme_installs_the_same_with_pip() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    ((index, told),) = re.findall(
        r"^    pip install --index-url (\S+) torch .*\n    pip install '\.\[(.+)\]'", page, re.M
    )
    assert told == extras("demo")[0] and f"--extra-index-url {index} torch" in recipe("demo")
