"""Source code that a model runs and no installed library holds: a user's own classes, or those that
a model's folder brings."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from torch import nn

KNOWN_PACKAGES = {
    "foretoken",
    "torch",
    "transformers",
}  # also where they are installed from a checkout
INSTALL_FOLDERS = {"site-packages", "dist-packages"}


def third_party_sources(model: nn.Module) -> list[str]:
    """The sources of all parts of the model that come from no library, with what they import from
    outside the libraries' folders. Raises where a part has no source."""
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
    """Tell whether a module is installed, Python's own, this package's, or not loaded."""
    package = name.split(".")[0]
    if not name or package in KNOWN_PACKAGES or package in sys.stdlib_module_names:
        return True
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return module is None
    return bool(INSTALL_FOLDERS & set(Path(file).parts))
