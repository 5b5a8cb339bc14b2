"""`foretoken measure`: how far a draft agrees with its target, and what everything costs here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from typer import Option

from foretoken.cli import option, sheet
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command
from foretoken.cli.page import page
from foretoken.cli.quiet import quiet
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.measurement.result import Measurement


@command
def measure(
    context: typer.Context,
    loading: option.PairLoading,
    prompts: option.Prompts,
    target: option.Target = None,
    draft: Annotated[
        str | None, Option(help="Folder, hub id, heads:FILE, ngram:FILE, lookup, copy or uniform.")
    ] = None,
    gamma: option.Gamma = 4,
    temperature: option.Temperature = 0.0,
    top_k: option.TopK = 0,
    top_p: option.TopP = 1.0,
    min_p: option.MinP = 0.0,
    max_new_tokens: option.MaxNewTokens = 64,
    limit: option.Limit = None,
    seed: option.Seed = 0,
    out: Annotated[
        Path | None, Option(help="JSON file to write, for foretoken plan; resumed after a kill.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Measure a pair: alpha, acceptance by position, c, v(n), overhead, memory, speed-up."""
    texts = read(prompts, limit)
    if out is not None:
        option.require_folder(out)
    found = run(texts, context.params, loading, out)
    if as_json:
        print(json.dumps(document(found), allow_nan=False))
    else:
        sheet.show(found, page())
        if out is not None:
            print(f"{out}: plan with `foretoken plan {out}`")


def read(file: Path, limit: int | None) -> list[prompt_files.Line]:
    """The first `limit` prompts of a file."""
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; give the number of prompts to use, 1 or more")
    return prompt_files.read(None, file)[:limit]


def run(
    lines: list[prompt_files.Line],
    asked: dict[str, Any],
    loading: option.PairLoading,
    out: Path | None,
) -> Measurement:
    """Load the pair and measure it, with a bar on standard error; what is wrong fails first.

    `asked` has what a command was given, by the names of lab.measurement.Options and more.
    """
    from foretoken.lab import limits
    from foretoken.options import keys_of, require_place
    from foretoken.sampling.params import SamplingParams

    SamplingParams(*(asked[name] for name in ("temperature", "top_k", "top_p", "min_p")))
    limits.require(asked["gamma"], asked["max_new_tokens"], len(lines), asked["draft"])
    keys_of(asked["seed"], 1)
    require_place(loading.runtime, loading.dtype, loading.draft_dtype)
    option.require_model(asked["target"], loading)
    from foretoken.lab.machine import describe  # late: torch takes seconds to import
    from foretoken.lab.measurement.measure import digest, measure
    from foretoken.lab.measurement.part import Part
    from foretoken.lab.measurement.result import Options

    quiet()
    given = {field.name: asked[field.name] for field in fields(Options) if field.name in asked}
    given |= {"prompts": str(asked["prompts"])}
    options = Options(**given, prompts_sha256=digest([line.prompt for line in lines]))
    spec = loading.load(options.target, options.draft)
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
    from foretoken.lab.measurement.prediction import formula, predictions

    derived = {
        "d_lk": 1 - found.alpha.value,
        "c": found.c,
        "c_hat": found.c_hat,
        "v": found.v,
        "bandwidth_bytes_per_second": found.bandwidth,
        "floor_seconds": found.floor_seconds,
        "measured_over_formula": found.speedup.value / formula(found),
        "predictions": [asdict(one) for one in predictions(found)],
    }
    return {**asdict(found), "derived": derived}


def _bar(numbers: Sequence[int]) -> Iterable[int]:
    return track(numbers, "measuring", console=Console(stderr=True))
