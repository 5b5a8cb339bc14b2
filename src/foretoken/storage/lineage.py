"""What a result that is kept on disk depends on beside its input: the source of what made it, with
all that this imports, and the versions of the libraries below.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# A whole statement; parsing the files would take ten times as long, of every start
IMPORT = re.compile(
    r"^[ ]*(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([\w., ]+))", re.MULTILINE
)


LIBRARIES = ("foretoken", "torch", "transformers", "openvino")


@cache
def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed; without names, of what results depend on."""
    known: dict[str, str] = {}
    for name in packages or LIBRARIES:
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


@cache
def lineage(*modules: str) -> str:
    """A digest of the source of these modules and of all modules of the package that they import,
    directly or not, within functions too. Modules of others are passed over, and so is the face of
    the package, which only says where names are."""
    known: dict[Path, str] = {}
    fresh = {file for module in modules for file in files_of(module)}
    while fresh:
        file = fresh.pop()
        known[file] = file.read_text()
        fresh |= {part for name in imports(known[file]) for part in files_of(name)} - known.keys()
    parts = [f"{file.relative_to(PACKAGE)}\n{known[file]}" for file in sorted(known)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def imports(source: str) -> set[str]:
    """Full names of what a file imports; of `from a import b` both, as b may be a module."""
    names: set[str] = set()
    for module, inner, plain in IMPORT.findall(source):
        names |= {name.split()[0] for name in plain.split(",") if name.strip()}
        if module:
            parts = [part.split("#")[0] for part in inner.strip("()").split("\n")]
            inner_names = [name.split()[0] for name in ",".join(parts).split(",") if name.strip()]
            names |= {module, *(f"{module}.{name}" for name in inner_names)}
    return names


def files_of(module: str) -> list[Path]:
    """The files of a module of this package; none for others."""
    package, *path = module.split(".")
    if package != PACKAGE.name or not path:
        return []
    place = PACKAGE.joinpath(*path)
    return [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
