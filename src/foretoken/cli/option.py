"""Options that several commands share, each with its one help text, and a check of `--out`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from foretoken import hub
from foretoken.errors import InputError

Target = Annotated[str | None, Option(help="Folder or hub id; left out: the pair that ships.")]
Draft = Annotated[
    str | None,
    Option(help="Folder, hub id, heads:FILE, ngram:FILE, lookup, copy, uniform or none."),
]
PROMPTS = 'One prompt a line, or .jsonl: {"prompt": text or ids, "id": any}.'
Prompts = Annotated[Path, Option(help=PROMPTS)]
Limit = Annotated[int | None, Option(help="Prompts of the file to use; left out: all.")]
Gamma = Annotated[int, Option(help="Guesses per target call while measuring.")]
Temperature = Annotated[float, Option(help="0 is greedy.")]
TopK = Annotated[int, Option(help="0 is off.")]
TopP = Annotated[float, Option(help="1 is off.")]
MinP = Annotated[float, Option(help="0 is off.")]
MaxNewTokens = Annotated[int, Option(help="New tokens of a prompt at most.")]
Seed = Annotated[int, Option()]
Dtype = Annotated[
    str,
    Option(help="float32, bfloat16, float16, float64, auto; int8: rounded weights, another model."),
]
DraftDtype = Annotated[
    str | None, Option(help="The draft's, if not the target's; it never changes the output's law.")
]
Device = Annotated[str, Option(help="cpu, cuda, ...")]
Runtime = Annotated[
    str, Option(help="auto (the fastest that is exact), openvino, graphs, transformers.")
]
Json = Annotated[bool, Option("--json", help="One JSON document.")]
Examples = Annotated[
    Path,
    Option(
        help="Text (a .txt or .txt.gz file, or a folder of them) for a decoder; a source a "
        'line for an encoder-decoder; or a .jsonl of {"source": ..., "target": ...} for both.'
    ),
]


def require_model(target: str | None) -> None:
    """InputError where neither a folder nor the hub has it: said before torch is imported, which
    takes seconds."""
    if target is not None:
        hub.way(hub.path(target), None)


def require_folder(out: Path) -> None:
    """InputError where a file cannot be: said before the work, which may take hours."""
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}; make it or give another --out")


def require_file(out: Path) -> None:
    """As above, and InputError where a folder is in the file's place."""
    require_folder(out)
    if out.is_dir():
        raise InputError(f"{out} is a folder; give another --out, for a file")
