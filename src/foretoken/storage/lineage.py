"""What a result kept on disk depends on besides its input: the source code that made it, with all
that this code imports, and the versions of the libraries below.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# A whole import statement; parsing the files instead would take ten times as long at every start
IMPORT = re.compile(
    r"^[ ]*(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([\w., ]+))", re.MULTILINE
)
LIBRARIES = ("foretoken", "torch", "transformers", "openvino")


@cache
def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed ones among `packages`; without any, of LIBRARIES."""
    installed: dict[str, str] = {}
    for name in packages or LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


@cache
def lineage(*modules: str) -> str:
    """A digest of the source of these modules and of all modules of this package that they import,
    directly or not, within functions too. The package's own `__init__.py`, which only re-exports
    names, does not count."""
    sources: dict[Path, str] = {}
    pending = {file for module in modules for file in files_of(module)}
    while pending:
        file = pending.pop()
        sources[file] = file.read_text()
        imported = {part for name in imports(sources[file]) for part in files_of(name)}
        pending |= imported - sources.keys()
    parts = [f"{file.relative_to(PACKAGE)}\n{sources[file]}" for file in sorted(sources)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def imports(source: str) -> set[str]:
    """Full names of the modules a file imports; of `from a import b` both, as b may be one."""
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
    base = PACKAGE.joinpath(*path)
    return [file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
