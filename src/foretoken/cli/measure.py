"""`foretoken measure`: how far a draft agrees with its target, and what everything costs here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from typer import Option

from foretoken.cli import prompts as prompt_files
from foretoken.cli import sheet
from foretoken.cli.quiet import quiet
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.measurement import Measurement

Target = Annotated[
    str | None, Option(help="Folder or hub id; left out: the pair that ships.", show_default=False)
]
Gamma = Annotated[int, Option(help="Guesses per target call while measuring.")]
Temperature = Annotated[float, Option(help="0 is greedy.")]
TopK = Annotated[int, Option(help="0 is off.")]
TopP = Annotated[float, Option(help="1 is off.")]
MinP = Annotated[float, Option(help="0 is off.")]
MaxNewTokens = Annotated[int, Option(help="New tokens of a prompt at most.")]
Limit = Annotated[int | None, Option(help="Prompts of the file to use; left out: all.")]
Seed = Annotated[int, Option()]
Dtype = Annotated[str, Option(help="float32, bfloat16, int8, float16, float64, auto.")]
DraftDtype = Annotated[str | None, Option(help="The draft's, if not the target's.")]
Device = Annotated[str, Option(help="cpu, cuda, ...")]
Runtime = Annotated[str, Option(help="auto, or a runtime that doctor lists.")]
Json = Annotated[bool, Option("--json", help="One JSON document.")]


def measure(
    prompts: Annotated[
        Path, Option(help='One prompt a line, or .jsonl: {"prompt": text or ids, "id": any}.')
    ],
    target: Target = None,
    draft: Annotated[
        str | None, Option(help="Folder, hub id, heads:FILE, ngram:FILE, lookup, copy or uniform.")
    ] = None,
    gamma: Gamma = 4,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    max_new_tokens: MaxNewTokens = 64,
    limit: Limit = None,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    draft_dtype: DraftDtype = None,
    device: Device = "cpu",
    runtime: Runtime = "auto",
    out: Annotated[
        Path | None, Option(help="JSON file to write, for foretoken plan; resumed after a kill.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a pair: alpha, acceptance by position, c, v(n), overhead, memory, speed-up."""
    texts = read(prompts, limit)
    options = {
        "target": target,
        "draft": draft,
        "prompts": str(prompts),
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "gamma": gamma,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "dtype": dtype,
        "draft_dtype": draft_dtype,
        "device": device,
        "runtime": runtime,
    }
    if out is not None and not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}; make it or give another --out")
    found = run(texts, options, out)
    if as_json:
        print(json.dumps(document(found), allow_nan=False))
    else:
        sheet.show(found, Console(highlight=False))
        if out is not None:
            print(f"{out}: plan with `foretoken plan {out}`")


def read(file: Path, limit: int | None) -> list[prompt_files.Line]:
    """The first `limit` prompts of a file."""
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; give the number of prompts to use, 1 or more")
    return prompt_files.read(None, file)[:limit]


def run(lines: list[prompt_files.Line], asked: dict[str, Any], out: Path | None) -> Measurement:
    """Load the pair and measure it, with a bar on standard error; what is wrong fails first."""
    from foretoken.lab.machine import describe  # late: torch takes seconds to import
    from foretoken.lab.measure import digest, measure, require
    from foretoken.lab.measurement import Options
    from foretoken.lab.part import Part
    from foretoken.loading import load

    quiet()
    options = Options(**asked, prompts_sha256=digest([line.prompt for line in lines]))
    require(options, len(lines))
    spec = load(
        options.target,
        options.draft,
        dtype=options.dtype,
        draft_dtype=options.draft_dtype,
        device=options.device,
        runtime=options.runtime,
    )
    texts = [(line if spec.tokenizer else prompt_files.as_ids(line)).prompt for line in lines]
    if out is None:
        return measure(spec, texts, options, track=_bar)
    part = Part(out, options, describe(spec.target.device))
    if part.found:
        print(f"{len(part.found)} of {len(texts)} prompts are done already", file=sys.stderr)
    try:
        found = measure(spec, texts, options, found=part.found, keep=part.add, track=_bar)
    except KeyboardInterrupt:
        print("interrupted; the same command picks up", part.path, file=sys.stderr)
        raise typer.Exit(130) from None
    found.save(out)
    part.remove()
    return found


def document(found: Measurement) -> dict[str, Any]:
    """What `--json` prints: what was measured and what follows from it."""
    from foretoken.lab.prediction import predictions

    derived = {
        "d_lk": 1 - found.alpha.value,
        "c": found.c,
        "c_hat": found.c_hat,
        "v": found.v,
        "bandwidth_bytes_per_second": found.bandwidth,
        "floor_seconds": found.floor_seconds,
        "predictions": [asdict(one) for one in predictions(found)],
    }
    return {**asdict(found), "derived": derived}


def _bar(numbers: Sequence[int]) -> Iterable[int]:
    return track(numbers, "measuring", console=Console(stderr=True))
