"""Options that several commands share, with one help text each: single ones, and those of loading
in groups, which `cli.command` takes apart. And checks before models load."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foretoken.errors import InputError
from foretoken.loading import hub

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


def _loading(text: str, *flags: str) -> Any:
    """An option under "Loading" in `--help`."""
    return Option(*flags, help=text, rich_help_panel="Loading")


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
    """The target of a command that takes it by its place or by --target; InputError for two."""
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
DraftRevision = Annotated[str | None, _loading("The draft's commit, tag or branch on the hub.")]
Json = Annotated[bool, Option("--json", help="One JSON document.")]
Examples = Annotated[
    Path,
    Option(
        help="Text (a .txt or .txt.gz file, or a folder of them) for a decoder; one source a "
        'line for an encoder-decoder; or .jsonl of {"source": ..., "target": ...} or .tsv for both.'
    ),
]


@dataclass(frozen=True)
class Origin:
    """Which version of a model is read, and whether its own code may run."""

    revision: Annotated[str | None, _loading("The target's commit, tag or branch on the hub.")] = (
        None
    )
    trust_remote_code: Annotated[
        bool,
        _loading(
            "Run code that comes with a model; without this it is not run.", "--trust-remote-code"
        ),
    ] = False


@dataclass(frozen=True)
class TargetReading(Origin):
    """How a target is read, wherever it runs."""

    tokenizer: Annotated[
        str | None, _loading("Folder or hub id of the target's tokenizer, if not its own.")
    ] = None
    ignore_generation_config: Annotated[
        bool,
        _loading(
            "Ignore entries of the generation config that are refused.",
            "--ignore-generation-config",
        ),
    ] = False

    @property
    def arguments(self) -> dict[str, Any]:
        """These as keyword arguments of `foretoken.load`."""
        keywords = asdict(self)
        ignored = keywords.pop("ignore_generation_config")
        return keywords | {"generation_config": "ignore" if ignored else None}


@dataclass(frozen=True)
class Placing:
    """Where a model runs, and in which precision."""

    dtype: Annotated[
        str,
        _loading(
            "float32, bfloat16, float16, float64, auto; int8, int4: rounded weights, another model."
        ),
    ] = "float32"
    device: Annotated[str, _loading("cpu, cuda, ...")] = "cpu"
    runtime: Annotated[
        str, _loading("auto (the fastest that is exact), openvino, graphs, transformers.")
    ] = "auto"


@dataclass(frozen=True)
class Loading(TargetReading, Placing):
    """All options of a target that generates."""

    kv_dtype: Annotated[
        str | None, _loading("int8: keys and values in eight bits, which is another model.")
    ] = None

    def load(self, target: str | None, draft: str | None) -> Speculator:
        """`foretoken.load` with these options."""
        from foretoken.loading.load import load  # late: torch takes seconds to import

        return load(target, draft, **self.arguments)


@dataclass(frozen=True)
class PairLoading(Loading):
    """The same for a target with a draft."""

    draft_dtype: Annotated[
        str | None,
        _loading("The draft's; left out: the target's, or int8 or int4 where that is faster."),
    ] = None
    draft_revision: DraftRevision = None
    exact_shapes: Annotated[
        bool,
        _loading("The same text to the bit with and without guesses; slower.", "--exact-shapes"),
    ] = False

    def require(self, target: str | None) -> None:
        """InputError for unknown values and for a target in neither a folder nor the hub: before
        torch is imported, which takes seconds."""
        from foretoken.options import require_place  # late: NumPy, which `--help` does without

        require_place(self.runtime, self.dtype, self.draft_dtype, kv_dtype=self.kv_dtype)
        if target is not None:
            hub.way(hub.path(target), self.revision)


def require_folder(out: Path, flag: str = "--out") -> None:
    """InputError for a file in a missing folder: before the work, which may take hours."""
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}; make it or give another {flag}")


def require_file(out: Path, flag: str = "--out") -> None:
    """As above, and InputError for a folder in the file's place."""
    require_folder(out, flag)
    if out.is_dir():
        raise InputError(f"{out} is a folder; give another {flag}, for a file")
