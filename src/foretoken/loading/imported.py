"""Drafters of users by an import path: "MODULE:ARGUMENT" names a module with a function
`drafter(argument, target)`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

from foretoken.drafters.base import Drafter, require_drafter, require_vocabulary
from foretoken.errors import InputError, shown
from foretoken.loading.target import LoadedTarget

MAKER = "drafter"  # the function of a module that makes its drafter


def is_import_path(draft: str) -> bool:
    """Tell whether this is spelled MODULE:ARGUMENT."""
    module, colon, _ = draft.partition(":")
    return bool(colon) and all(part.isidentifier() for part in module.split("."))


def import_drafter(draft: str) -> Callable[[LoadedTarget], Drafter] | None:
    """Import the module of MODULE:ARGUMENT, from the current folder too, and return what makes the
    drafter of a target; None where there is no such module. Raises InputError for a module without
    the function `drafter`, and whatever the module itself raises."""
    name, _, argument = draft.partition(":")
    module = _imported(name)
    if module is None:
        return None
    make = getattr(module, MAKER, None)
    if not callable(make):
        raise InputError(
            f"draft is {draft!r:.100}, but the module {name} has no function {MAKER}; give it "
            f"{MAKER}(argument, target), which returns a Drafter"
        )
    return partial(_made, draft, make, argument)


def _imported(name: str) -> ModuleType | None:
    """The module; None where it, or the package that it is in, cannot be found."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # a package that the module needs


def _made(
    draft: str, make: Callable[[str, LoadedTarget], object], argument: str, target: LoadedTarget
) -> Drafter:
    """The drafter that the module's function returns. Raises InputError for what is none, and for
    one of another vocabulary."""
    made = make(argument, target)
    if isinstance(made, type) or not hasattr(made, "propose"):
        raise InputError(
            f"draft is {draft!r:.100}, but its function {MAKER} returned {shown(made)}; return a "
            "Drafter"
        )
    drafter = require_drafter(made)
    require_vocabulary(drafter, target.vocab_size, "the target")
    return drafter
