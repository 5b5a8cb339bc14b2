"""A recipe: the models, texts and numbers that experiments run with. A TOML file, checked; and the
prompts that it names, with references where there are: from lines, TSV or JSONL, also gzipped.

Paths in it are relative to the file. Knows no models and imports no torch, so that mistakes are
told at once.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from math import isqrt
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from foretoken.errors import InputError, describe_mismatch, format_value, to_one_line
from foretoken.models.store import compute_digest
from foretoken.storage import files

Name = Literal[
    "acceptance",
    "walltime",
    "bigram",
    "lenience",
    "trace",
    "timeline",
    "quality",
    "beyond",
    "drafts",
    "observations",
    "pixels",
]
PaperDraft = Literal["Unigram", "Bigram", "T5-small", "T5-base", "T5-large", "GPT-like 6M"]
Temperature = Annotated[float, Field(ge=0, le=10)]
Gamma = Annotated[int, Field(ge=1, le=64)]
Lenience = Annotated[float, Field(gt=0, le=1)]
SHIPPED = Path(
    str(resources.files("foretoken") / "assets")
)  # the pair of a recipe that names no target
LINE = r"^[^\x00-\x1f\x7f\x85\u2028\u2029]*$"  # text without a break: it stands in tables
# Limits under --quick: new tokens of a text, tokens for alpha, timed prompts, gammas, prompts
QUICK_LENGTH, QUICK_TOKENS, QUICK_TIMED, QUICK_GAMMAS, QUICK_PROMPTS = 48, 700, 3, 2, 24


class RecipeForm(BaseModel):
    """A table of the file: other keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RecipeDraft(RecipeForm):
    """A draft. Neither `draft` nor `order`: the draft that `foretoken.load` picks itself."""

    label: Annotated[str, Field(min_length=1, max_length=60, pattern=LINE)]
    draft: Annotated[str, Field(min_length=1)] | None = None  # as foretoken.load takes it
    order: Annotated[int, Field(ge=1, le=8)] | None = None  # a table fitted to the target's texts
    paper: PaperDraft | None = None  # whose figures of the paper stand beside it
    c: Annotated[float, Field(ge=0, le=100)] | None = None  # the paper's own
    distilled_from: str | None = None  # the label of what it was before it was taught

    @model_validator(mode="after")
    def one_kind(self) -> RecipeDraft:
        if self.draft is not None and self.order is not None:
            raise ValueError(f"{self.label} has a draft and an order; give one of them")
        return self

    @property
    def is_model(self) -> bool:
        """A model of its own, as far as its name tells."""
        name = self.draft or ""
        drafters = ("lookup", "copy", "uniform", "none", "self")
        return self.order is None and ":" not in name and name not in drafters


class Prompts(RecipeForm):
    """A file of prompts: lines; TSV of prompt and reference; or JSONL with these keys."""

    file: Annotated[str, Field(min_length=1)]
    prompt: str = "prompt"
    reference: str = "reference"
    prefix: str = ""  # put before every prompt
    chat: bool = False  # each is a user's message, in the target's chat template
    longest: Annotated[int, Field(ge=1)] | None = None  # characters; a longer one is left out
    limit: Annotated[int, Field(ge=2)] | None = None  # the first so many


class Recipe(RecipeForm):
    """The experiments of one target. All numbers are those of the full report."""

    name: Annotated[str, Field(pattern=r"^[\w-]{1,40}$")]
    title: Annotated[str, Field(pattern=LINE)]
    target: str | None = None  # folder or hub id; left out: the pair that ships
    drafts: Annotated[list[RecipeDraft], Field(min_length=1)]  # the smallest model first
    # "image": a text is a square image of max_new_tokens pixels, row by row
    task: Literal["text", "translation", "summarization", "code", "image"] = "text"
    paper: Literal["GPT-like", "EnDe", "CNNDM"] | None = None  # the paper's task beside it
    prompts: Prompts
    temperatures: Annotated[list[Temperature], Field(min_length=1)] = [0, 1]
    gammas: Annotated[list[Gamma], Field(min_length=1)] = [1, 2, 3, 5]
    lenience: Annotated[list[Lenience], Field(min_length=1)] = [1.0, 0.5, 0.3, 0.1]
    max_new_tokens: Annotated[int, Field(ge=4, le=100_000)] = 128
    # of the target's own, that alpha is a mean over
    tokens: Annotated[int, Field(ge=100, le=10**8)] = 10_000
    timed: Annotated[int, Field(ge=2)] = 8  # prompts that are timed
    repeats: Annotated[int, Field(ge=1, le=100)] = 3
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    # of classifier-free guidance, away from texts behind the ids `negative`
    guidance: Annotated[float, Field(ge=-100, le=100)] | None = None
    negative: Annotated[list[int], Field(min_length=1)] | None = None
    dtype: str = "float32"
    # those that do not apply are left out
    experiments: Annotated[list[Name], Field(min_length=1)] = list(get_args(Name))
    beyond_models: Annotated[int, Field(ge=1)] | None = None  # `beyond` runs with the first so many

    @model_validator(mode="after")
    def agrees(self) -> Recipe:
        labels = [draft.label for draft in self.drafts]
        for name in ("labels", "temperatures", "gammas", "lenience", "experiments"):
            values = labels if name == "labels" else getattr(self, name)
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"{name} has {value} twice; give each once")
        if self.task == "image" and isqrt(self.max_new_tokens) ** 2 != self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}, which is no square of pixels; give one"
            )
        if self.drafts[0].draft == "none":
            raise ValueError(
                f"the first draft, {labels[0]}, is none, which guesses nothing, and a report is "
                "about the first; put another before it"
            )
        for draft in self.drafts:
            if draft.distilled_from is not None and draft.distilled_from not in labels:
                raise ValueError(
                    f"{draft.label} is distilled_from {format_value(draft.distilled_from)}; "
                    "give the "
                    "label of another draft"
                )
        return self

    def draft(self, label: str) -> RecipeDraft:
        """The draft of that label."""
        return next(draft for draft in self.drafts if draft.label == label)

    def quick(self) -> Recipe:
        """The same in minutes: shorter texts, and fewer."""
        limit = min(self.prompts.limit or QUICK_PROMPTS, QUICK_PROMPTS)
        longest = self.max_new_tokens if self.task == "image" else QUICK_LENGTH
        return self.model_copy(
            update={
                "max_new_tokens": min(self.max_new_tokens, longest),
                "tokens": min(self.tokens, QUICK_TOKENS),
                "timed": min(self.timed, QUICK_TIMED),
                "gammas": self.gammas[:QUICK_GAMMAS],
                "repeats": 1,
                "beyond_models": 1,
                "prompts": self.prompts.model_copy(update={"limit": limit}),
            }
        )

    @property
    def digest(self) -> str:
        """A digest of all that its measurements depend on but machine and package: prompts
        included, and what the files in its models' folders hold, wherever they lie. InputError
        where the prompts or these files cannot be read."""
        unmeasured = {"title": True, "experiments": True}
        fields = _renamed(self, _without_folder, _without_folder).model_dump(
            exclude={**unmeasured, "drafts": {"__all__": {"distilled_from"}}}
        )
        try:
            text = Path(self.prompts.file).read_bytes()
        except OSError as error:
            raise InputError(
                f"the prompts of {self.name} cannot be read: {to_one_line(error)}; "
                "give prompts.file, one a line, a .tsv or a .jsonl"
            ) from None
        pair = [self.target] if self.target else [str(SHIPPED / "target"), str(SHIPPED / "draft")]
        names = [*pair, *(draft.draft for draft in self.drafts if draft.draft)]
        head = json.dumps([fields, [_files(name) for name in names]], sort_keys=True)
        return hashlib.sha256(head.encode() + b"\n" + text).hexdigest()[:16]


def read(path: Path) -> Recipe:
    """The recipe in a file, its paths made absolute. InputError names what is wrong in it."""
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise InputError(
            f"there is no {path}; give a recipe: there are some in reproduction/recipes/"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # no TOML, or no text
        raise InputError(f"{path} cannot be read as a recipe: {to_one_line(error)}") from None
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{path}: {_mistake(error)}") from None
    folder = path.resolve().parent
    return _renamed(recipe, lambda name: placed(name, folder), lambda file: str(folder / file))


def shown_from(recipe: Recipe, folder: Path) -> Recipe:
    """The same to be shown: its files below `folder` by their place there."""

    def name(absolute: str) -> str:
        kind, colon, file = absolute.rpartition(":")
        place = Path(file)
        near = place.is_absolute() and place.is_relative_to(folder)
        return f"{kind}{colon}{place.relative_to(folder).as_posix()}" if near else absolute

    return _renamed(recipe, name, name)


def _renamed(recipe: Recipe, model: Callable[[str], str], file: Callable[[str], str]) -> Recipe:
    """With other names of its models and of its prompts' file."""
    prompts = recipe.prompts.model_copy(update={"file": file(recipe.prompts.file)})
    drafts = [
        draft.model_copy(update={"draft": draft.draft and model(draft.draft)})
        for draft in recipe.drafts
    ]
    target = recipe.target and model(recipe.target)
    return recipe.model_copy(update={"prompts": prompts, "drafts": drafts, "target": target})


def _without_folder(name: str) -> str:
    """A model's or file's name without its folder where that is of this machine."""
    kind, colon, file = name.rpartition(":")
    return f"{kind}{colon}{Path(file).name}" if Path(file).is_absolute() else name


def placed(name: str, folder: Path) -> str:
    """Return a model's or drafter's name with its path relative to `folder`, FILE of `MODULE:FILE`,
    made absolute. Hub ids and names of drafters stay; a name that begins with a
    dot is a path even if nothing is there."""
    kind, colon, file = name.rpartition(":")
    try:
        place = Path(os.path.normpath(folder / file))  # a link keeps its own name
        path = file.startswith((".", "/")) or (file and place.exists())
        return f"{kind}{colon}{place}" if path else name
    except OSError:  # a name that is too long
        return name


def _mistake(error: ValidationError) -> str:
    """One mistake: key, value, remedy; a key that there is none of before what is missing."""
    errors = error.errors()
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        tables: dict[Any, type[RecipeForm]] = {"drafts": RecipeDraft, "prompts": Prompts}
        *place, name = first["loc"]
        table = tables[place[0]] if place else Recipe
        near = get_close_matches(str(name), table.model_fields, 1, 0.5)
        remedy = (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(table.model_fields)}"
        )
        return f"{key} is no key of a recipe; {remedy}"
    if first["type"] == "missing":
        return f"{key} is missing; give it"
    value = "" if first["type"] == "value_error" else f"{key} is {format_value(first['input'])}: "
    return value + describe_mismatch(first)


def _files(name: str) -> str:
    """A digest of the files in a model's folder, by their contents: a clone of it has the same."""
    path = Path(name.rpartition(":")[2])
    try:
        parts = list(path.iterdir()) if path.is_dir() else [path]
        return compute_digest([part for part in parts if part.is_file()])
    except (OSError, UnicodeEncodeError) as error:  # names, too: too long, or no text
        reason = to_one_line(error)
        raise InputError(
            f"{format_value(name)} cannot be read: {reason}; look at its files"
        ) from None


@dataclass(frozen=True, slots=True)
class RecipePrompt:
    """A prompt, and what a good text would be; None where the file does not say."""

    prompt: str | list[int]
    reference: str | None = None


def read_prompts(prompts: Prompts) -> list[RecipePrompt]:
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
            f"{format_value(bare[0].prompt)}; give all of them one, or none"
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
        raise InputError(f"{path} cannot be read: {to_one_line(error)}") from None


def _from_tsv(place: str, line: str, prompts: Prompts) -> RecipePrompt:
    prompt, *references = line.split("\t")
    if not prompt.strip() or len(references) > 1:
        raise InputError(
            f"{place}: {len(references) + 1} columns, the first {format_value(prompt)}; give "
            "prompt<TAB>reference"
        )
    return RecipePrompt(prompts.prefix + prompt, *references)


def _from_json(place: str, line: str, prompts: Prompts) -> RecipePrompt:
    try:
        document = files.parse_json(line)
        prompt, reference = document[prompts.prompt], document.get(prompts.reference)
    except (ValueError, TypeError, LookupError) as error:
        raise InputError(
            f"{place} has no {prompts.prompt!r} ({to_one_line(error)}); give JSON, an object a "
            "line, "
            "and name its key in prompts.prompt"
        ) from None
    prompt, reference = _first(prompt), _first(reference)
    if isinstance(prompt, str) and prompt.strip():
        prompt = prompts.prefix + prompt
    elif not (isinstance(prompt, list) and prompt and all(isinstance(i, int) for i in prompt)):
        raise InputError(f"{place}: the prompt is {format_value(prompt)}; give text or ids")
    return RecipePrompt(prompt, reference if isinstance(reference, str) else None)


def _first(value: Any) -> Any:
    """Return the first of several turns or references."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else value
