"""What is exported, and what another system makes of it. Knows no system and no models."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path, PurePath
from typing import Literal

from foretoken.errors import InputError, RefusedError

Kind = Literal["plain", "model", "lookup"]  # of a draft that other systems may have

# Drafts that are of this package only, by the word before their colon
OURS = {
    "self": "is a copy of the target that drafts over the target's own keys and values",
    "heads": "reads heads that were trained here",
    "ngram": "is a table with a law of its own, which must take part in the verification",
    "copy": "copies an encoder-decoder's source",
    "uniform": "guesses at random, to compare with",
}


@dataclass(frozen=True, slots=True)
class ExportSetting:
    """A plan in the terms of this package: models as folders or hub ids, guesses per target call,
    and the temperature that requests will have."""

    target: str
    draft: str  # "none" for plain decoding
    gamma: int
    temperature: float = 0.0
    revision: str | None = None
    draft_revision: str | None = None
    encoder_decoder: bool = False
    measured: str = ""  # flags of the measurement beside the above

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise InputError(f"gamma is {self.gamma}; give 0 or more")
        if not 0 <= self.temperature < inf:
            raise InputError(f"temperature is {self.temperature:g}; give 0 or more, and finite")
        for name in ("target", "draft"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty; give a folder or a hub id")

    @property
    def kind(self) -> Kind:
        """RefusedError for a draft that is of this package only."""
        if self.draft == "none" or not self.gamma:
            return "plain"
        word = self.draft.partition(":")[0]
        if word in OURS:
            raise RefusedError(
                f"draft {self.draft} {OURS[word]}: no other system has it; give the folder of a "
                "model, lookup or none"
            )
        return "lookup" if self.draft == "lookup" else "model"


@dataclass(frozen=True, slots=True)
class Fact:
    """What a system does, and where that can be seen; of drafts of one kind, or of all."""

    text: str
    source: str
    kind: Kind | None = None

    def concerns(self, setting: ExportSetting) -> bool:
        return self.kind in (None, setting.kind)


@dataclass(frozen=True, slots=True)
class System:
    """One that decodes speculatively; all that is said is of this version."""

    name: str
    version: str
    flags: str  # where its options are documented
    law: tuple[Fact, ...]  # what its verification does to the target's law
    lacks: tuple[Fact, ...]  # what of a plan it does otherwise, or not at all
    steps: Callable[[ExportSetting], list[str]]  # shell commands, or lines of Python
    converts: bool = False  # whether it reads files of its own kind only


@dataclass(frozen=True, slots=True)
class Export:
    """A plan for a system."""

    system: System
    steps: list[str]
    law: list[Fact]
    lacks: list[Fact]


def require(system: System, setting: ExportSetting) -> None:
    """RefusedError for a target or draft that the system does not have."""
    if setting.encoder_decoder:
        raise RefusedError(
            f"{setting.target} is an encoder-decoder, and {system.name} {system.version} has no "
            "speculation for one; export a decoder"
        )
    _ = setting.kind  # refuses what is of this package only
    revision = setting.revision or setting.draft_revision
    if system.converts and revision is not None:
        raise RefusedError(
            f"revision {revision} of a model on the hub: {system.name} reads converted files; "
            "give the folder of that revision"
        )


def with_tokenizer(setting: ExportSetting) -> tuple[list[str], ExportSetting]:
    """A shell command that copies a draft without a tokenizer into the working folder, with the
    target's, and the setting with that copy: other systems' converters want one in each folder."""
    draft = Path(setting.draft)
    if setting.kind != "model" or not draft.is_dir() or [*draft.glob("*tokenizer*")]:
        return [], setting
    folder = converted(setting, setting.draft, "-with-tokenizer")
    command = shlex.join(["mkdir", "-p", folder])
    files = f"{shlex.quote(setting.draft)}/* {shlex.quote(setting.target)}/*tokenizer*"
    return [f"{command} && cp {files} {shlex.quote(folder)}"], replace(setting, draft=folder)


def converted(setting: ExportSetting, model: str, ending: str) -> str:
    """A name in the working folder for what is made of a model: the last two parts of its path; of
    a draft that would have the target's name, one more."""
    names = [
        "-".join([part for part in PurePath(path).parts if part.strip("./")][-2:])
        for path in (model, setting.target)
    ]
    twin = model != setting.target and names[0] == names[1]
    return f"{names[0]}{'-draft' if twin else ''}{ending}"


def export(system: System, setting: ExportSetting) -> Export:
    """RefusedError as `require`."""
    require(system, setting)
    return Export(
        system,
        system.steps(setting),
        [fact for fact in system.law if fact.concerns(setting)] if setting.kind != "plain" else [],
        [*_measured(setting), *(fact for fact in system.lacks if fact.concerns(setting))],
    )


def _measured(setting: ExportSetting) -> list[Fact]:
    if not setting.measured:
        return []
    text = f"the plan was measured with {setting.measured}, which the above does not ask for"
    return [Fact(text, "the measurement")]
