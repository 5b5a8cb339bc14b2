"""`foretoken measure`: how far a draft agrees with its target, and what everything costs here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from foretoken.cli import option, sheet
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar, page
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
    rows: Annotated[
        int | None,
        Option(help="Measure a batch of so many requests too, for foretoken-lab simulate."),
    ] = None,
    beside: Annotated[
        int, Option(help="Other such engines at work meanwhile: replicas that share the machine.")
    ] = 0,
    out: Annotated[
        Path | None, Option(help="JSON file to write, for foretoken plan; resumed after a kill.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Measure a pair: alpha, acceptance by position, c, v(n), overhead, memory, speed-up."""
    lines = read(prompts, limit)
    if out is not None:
        option.require_folder(out)
    measurement = run(lines, context.params, loading, out)
    if as_json:
        print(json.dumps(_document(measurement), allow_nan=False))
    else:
        sheet.show(measurement, page())
        if out is not None:
            print(f"{out}: plan with `foretoken plan {out}`")


def read(file: Path, limit: int | None) -> list[prompt_files.Line]:
    """The first `limit` prompts of a file."""
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; give the number of prompts to use, 1 or more")
    return prompt_files.read(None, file)[:limit]


def run(
    lines: list[prompt_files.Line],
    parameters: dict[str, Any],
    loading: option.PairLoading,
    out: Path | None,
) -> Measurement:
    """Load the pair and measure it, with a bar on standard error; mistakes are told first.

    `parameters`: the command's, among them the fields of lab.measurement.result.Options.
    """
    from foretoken.lab import limits
    from foretoken.options import keys_of
    from foretoken.sampling.params import SamplingParams

    SamplingParams(*(parameters[name] for name in ("temperature", "top_k", "top_p", "min_p")))
    limits.require(
        parameters["gamma"], parameters["max_new_tokens"], len(lines), parameters["draft"]
    )
    keys_of(parameters["seed"], [1])
    if (rows := parameters.get("rows")) is not None and rows < 1:
        raise InputError(f"rows is {rows}; give the requests that run at a time, 1 or more")
    if (beside := parameters.get("beside", 0)) and rows is None:
        raise InputError("--beside is for a batch; give --rows too, or leave it out")
    if not 0 <= beside <= 64:
        raise InputError(f"beside is {beside}; give the other engines on the machine, 0 to 64")
    loading.require(parameters["target"])
    from foretoken.lab.machine import describe  # late: torch takes seconds to import
    from foretoken.lab.measurement.measure import digest, measure
    from foretoken.lab.measurement.result import MeasureOptions, PartialMeasurement

    quiet()
    values = {f.name: parameters[f.name] for f in fields(MeasureOptions) if f.name in parameters}
    values["prompts"] = str(parameters["prompts"])
    options = MeasureOptions(**values, prompts_sha256=digest([line.prompt for line in lines]))
    spec = loading.load(options.target, options.draft)
    texts = [prompt_files.for_model(line, spec) for line in lines]
    track = partial(bar, text="measuring")
    if out is None:
        return measure(spec, texts, options, rows=rows, beside=beside, track=track)
    part = PartialMeasurement(out, options, describe(spec.target.device))
    if part.done:
        print(f"{len(part.done)} of {len(texts)} prompts are done already", file=sys.stderr)
    try:
        measurement = measure(
            spec,
            texts,
            options,
            rows=rows,
            beside=beside,
            done=part.done,
            keep=part.add,
            track=track,
        )
    except KeyboardInterrupt:
        print("interrupted; the same command picks up", part.path, file=sys.stderr)
        raise typer.Exit(130) from None
    measurement.save(out)
    part.remove()
    return measurement


def _document(measurement: Measurement) -> dict[str, Any]:
    """What `--json` prints: the measurement and what follows from it."""
    from foretoken.lab.measurement.plan import formula, predictions

    derived = {
        "d_lk": 1 - measurement.alpha.value,
        "c": measurement.c,
        "c_hat": measurement.c_hat,
        "v": measurement.v,
        "bandwidth_bytes_per_second": measurement.bandwidth,
        "floor_seconds": measurement.floor_seconds,
        "measured_over_formula": measurement.speedup.value / formula(measurement),
        "predictions": [asdict(prediction) for prediction in predictions(measurement)],
    }
    return {**asdict(measurement), "derived": derived}
