"""Options that several commands share, with one help text each: single ones, and those of loading
in groups, which `cli.command` takes apart. And checks before models load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foretoken.cli.sampling_options import group
from foretoken.errors import InputError
from foretoken.loading import hub
from foretoken.loading.options import OPTIONS, LoadOptions

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


Target = Annotated[str | None, Option(help="Folder or hub id; left out: the pair that ships.")]
Draft = Annotated[
    str | None,
    Option(
        help="Folder, hub id, self, self:int8, self:LAYERS, lookup, heads:FILE, ngram:FILE, copy, "
        "uniform or none; left out: the shipped one; for a target of yours self or lookup, by "
        "measured costs."
    ),
]


def target(positional: str | None, named: str | None) -> str | None:
    """Return the target of a command that takes it by its place or by --target; InputError for
    two."""
    if positional is not None and named is not None and positional != named:
        raise InputError(f"the target is {positional!r} and --target {named!r}; give one of them")
    return positional if named is None else named


PROMPTS = 'One prompt a line, or .jsonl: {"prompt": text or ids, "id": any}.'
Prompts = Annotated[Path, Option(help=PROMPTS)]
Limit = Annotated[int | None, Option(help="Prompts of the file to use; left out: all.")]
Gamma = Annotated[int, Option(help="Guesses per target call while measuring.")]
Guesses = Annotated[
    int | None, Option(help="Guesses per target call; 0: plain; left out: chosen every step.")
]
Rule = Annotated[
    str,
    Option(
        help="block, speculative; coupled: a seed gives one text, whatever guesses; "
        "to compare: match, rejection."
    ),
]
Lenience = Annotated[
    float, Option(help="1 is exact; below, guesses pass more easily: another law.")
]
Temperature = Annotated[float, Option(help="0 is greedy.")]
TopK = Annotated[int, Option(help="0 is off.")]
TopP = Annotated[float, Option(help="1 is off.")]
MinP = Annotated[float, Option(help="0 is off.")]
MaxNewTokens = Annotated[int, Option(help="New tokens of a prompt at most.")]
Seed = Annotated[int, Option()]
DraftRevision = Annotated[
    str | None, Option(help=OPTIONS["draft_revision"].help, rich_help_panel="Loading")
]
Json = Annotated[bool, Option("--json", help="One JSON document.")]
Examples = Annotated[
    Path,
    Option(
        help="Text (a .txt or .txt.gz file, or a folder of them) for a decoder; one source a "
        'line for an encoder-decoder; or .jsonl of {"source": ..., "target": ...} or .tsv for both.'
    ),
]


def _group(name: str) -> Any:
    """Make a dataclass of the options of `foretoken.load` in a group."""
    declarations = {n: each for n, each in OPTIONS.items() if each.group == name}
    declarations.pop("generation_config", None)  # a flag of its own
    return group(name, declarations, LoadOptions())


@dataclass(frozen=True)
class Origin(_group("origin")):
    """Options of reading a model: its version, and whether its own code may run."""


@dataclass(frozen=True)
class TargetReading(_group("reading"), Origin):
    """Options of reading a target, wherever it runs."""

    ignore_generation_config: Annotated[
        bool,
        Option(
            "--ignore-generation-config",
            help=OPTIONS["generation_config"].help,
            rich_help_panel="Loading",
        ),
    ] = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Return these as keyword arguments of `foretoken.load`."""
        keywords = asdict(self)
        ignored = keywords.pop("ignore_generation_config")
        return keywords | {"generation_config": "ignore" if ignored else None}


@dataclass(frozen=True)
class Placing(_group("placing")):
    """Options of where a model runs, and in which precision."""


@dataclass(frozen=True)
class Loading(_group("target"), TargetReading, Placing):
    """All options of a target that generates."""

    def load(self, target: str | None, draft: str | None) -> Speculator:
        """Call `foretoken.load` with these options."""
        from foretoken.loading.load import load  # late: torch takes seconds to import

        return load(target, draft, **self.arguments)


@dataclass(frozen=True)
class PairLoading(_group("pair"), Loading):
    """The same for a target with a draft."""

    def require(self, target: str | None) -> None:
        """Raise InputError or RefusedError for invalid options and for a target in neither a folder
        nor the hub: before torch is imported, which takes seconds."""
        LoadOptions(**self.arguments)
        if target is not None:
            hub.way(hub.path(target), self.revision)


def require_folder(out: Path, flag: str = "--out") -> None:
    """InputError for a file in a missing folder: before the work, which may take hours."""
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}; make it or give another {flag}")


def require_file(out: Path, flag: str = "--out") -> None:
    """Do the same, and raise InputError for a folder in the file's place."""
    require_folder(out, flag)
    if out.is_dir():
        raise InputError(f"{out} is a folder; give another {flag}, for a file")
