"""Finds the source code of a model that is not from the installed libraries: a user's own classes,
or remote code in a model's folder."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from torch import nn

# Listed here because an editable install is not in INSTALL_FOLDERS
KNOWN_PACKAGES = {"foretoken", "torch", "transformers"}
INSTALL_FOLDERS = {"site-packages", "dist-packages"}


def find_third_party_sources(model: nn.Module) -> list[str]:
    """Return the source code of all classes of the model's modules that are not from an installed
    library, and of all non-library modules that these classes' modules import. Raises OSError or
    TypeError if a class has no source file."""
    kinds = {base for part in model.modules() for base in type(part).__mro__}
    files = {inspect.getfile(kind) for kind in kinds if not _is_library(kind.__module__)}
    fresh = {kind.__module__ for kind in kinds if not _is_library(kind.__module__)}
    visited: set[str] = set()
    while fresh:
        name = fresh.pop()
        visited.add(name)
        module = sys.modules.get(name)
        files |= {own} if (own := getattr(module, "__file__", None)) else set()
        values = list(vars(module).values()) if module else []
        names = {
            getattr(v, "__name__" if inspect.ismodule(v) else "__module__", "") for v in values
        }
        fresh |= {
            part for part in names - visited if isinstance(part, str) and not _is_library(part)
        }
    return [Path(file).read_text() for file in sorted(files)]


def _is_library(name: str) -> bool:
    """Return whether a module is from an installed package, the standard library or this package;
    True also for a module that is not loaded."""
    package = name.split(".")[0]
    if not name or package in KNOWN_PACKAGES or package in sys.stdlib_module_names:
        return True
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return module is None
    return bool(INSTALL_FOLDERS & set(Path(file).parts))
