"""The prompts of a recipe, with references where there are: from lines, TSV or JSONL, also gzipped.

Knows files, no models.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, one_line, shown
from foretoken.storage import files
from foretoken_lab.recipes.recipe import Prompts


@dataclass(frozen=True, slots=True)
class RecipePrompt:
    """A prompt, and what a good text would be; None where the file does not say."""

    prompt: str | list[int]
    reference: str | None = None


def read(prompts: Prompts) -> list[RecipePrompt]:
    """At least two, in the file's order. InputError names the file, the line and the remedy."""
    path = Path(prompts.file)
    lines = [(number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    tasks: list[RecipePrompt] = []
    for number, line in lines:
        place = f"{path}, line {number}"
        if kind == "jsonl":
            task = _from_json(place, line, prompts)
        elif kind == "tsv":
            task = _from_tsv(place, line, prompts)
        else:
            task = RecipePrompt(prompts.prefix + line)
        if prompts.longest is None or len(task.prompt) <= prompts.longest:
            tasks.append(task)
        if len(tasks) == prompts.limit:
            break
    bare = [task for task in tasks if task.reference is None]
    if kind == "tsv" and 0 < len(bare) < len(tasks):
        raise InputError(
            f"{path}: {len(bare)} of {len(tasks)} prompts have no reference, the first "
            f"{shown(bare[0].prompt)}; give all of them one, or none"
        )
    if len(tasks) < 2:
        fitting = "" if prompts.longest is None else f" of {prompts.longest} characters at most"
        raise InputError(f"{path} holds {len(tasks)} prompts{fitting}; give 2 or more, one a line")
    return tasks


def _lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        return content.decode("utf-8-sig").splitlines()
    except FileNotFoundError:
        raise InputError(f"there is no {path}; give prompts.file, one prompt a line") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}") from None


def _from_tsv(place: str, line: str, prompts: Prompts) -> RecipePrompt:
    prompt, *references = line.split("\t")
    if not prompt.strip():
        raise InputError(f"{place}: the prompt is empty; give prompt<TAB>reference")
    if len(references) > 1:
        raise InputError(f"{place}: {len(references) + 1} columns; give prompt<TAB>reference")
    return RecipePrompt(prompts.prefix + prompt, *references)


def _from_json(place: str, line: str, prompts: Prompts) -> RecipePrompt:
    try:
        document = files.parse_json(line)
    except ValueError as error:
        raise InputError(f"{place}: {one_line(error)}; give JSON, an object a line") from None
    if not isinstance(document, dict) or prompts.prompt not in document:
        keys = f", which has {shown(list(document))}" if isinstance(document, dict) else ""
        raise InputError(f"{place} has no {prompts.prompt!r}{keys}; name it in prompts.prompt")
    prompt, reference = _first(document[prompts.prompt]), document.get(prompts.reference)
    if isinstance(prompt, str) and prompt.strip():
        prompt = prompts.prefix + prompt
    elif not (isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt)):
        raise InputError(f"{place}: the prompt is {shown(prompt)}; give text or ids")
    reference = _first(reference)
    return RecipePrompt(prompt, reference if isinstance(reference, str) else None)


def _first(value: Any) -> Any:
    """Return the first of several turns or references."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else value
