"""`foretoken measure`: how far drafts agree with a target, what everything costs here, and which
draft and gamma are predicted to be fastest."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from foretoken.cli import option, prompts, sheet
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar, page
from foretoken.errors import InputError
from foretoken.loading.options import smaller

if TYPE_CHECKING:
    from foretoken.lab.measurement.measure import Prompt
    from foretoken.lab.measurement.plan import Plan
    from foretoken.lab.measurement.result import Measurement, MeasureOptions
    from foretoken.speculator import Speculator


@command
def measure(
    context: typer.Context,
    loading: option.PairLoading,
    files: Annotated[
        list[Path] | None,
        Argument(help="Compare files that --out wrote, all of one target; measure nothing."),
    ] = None,
    prompt_file: Annotated[
        Path | None, Option("--prompts", help=f"Prompts to measure on. {option.PROMPTS}")
    ] = None,
    target: option.Target = None,
    draft: Annotated[
        list[str] | None,
        Option(
            help="Folder, hub id, heads:FILE, ngram:FILE, lookup, copy or uniform. Repeat it to "
            "compare drafts. Default: the one that ships with the target.",
            show_default=False,
        ),
    ] = None,
    own: Annotated[
        bool,
        Option("--self", help="Also measure lookup and copies of the target: no second model."),
    ] = False,
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
        Option(help="Also measure a batch of this many requests, for foretoken-lab simulate."),
    ] = None,
    beside: Annotated[
        int, Option(help="Run this many other engines meanwhile, as replicas on one machine do.")
    ] = 0,
    out: Annotated[
        Path | None,
        Option(help="Save the measurement of one draft as JSON. The same command resumes it."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Measure drafts with a target, and pick the draft and gamma that are fastest here.

    One draft: alpha, acceptance by position, c, v(n), overhead, memory and speed-up. Several
    drafts, or files: a comparison. Both end with the command to use, or with "do not speculate".
    """
    if files:
        _require_alone(context)
        return _report(saved(files), as_json=as_json)
    if prompt_file is None:
        raise InputError("give files of foretoken measure --out, or --prompts to measure on")
    lines = prompts.first(prompt_file, limit)
    copies = [f"self:{kind}" for kind in smaller(loading.dtype)]
    drafts = [*(draft or []), *([*copies, "lookup"] if own else [])] or [None]
    if len(drafts) > 1 and (out is not None or rows is not None):
        flag = "--out" if out is not None else "--rows"
        raise InputError(f"{flag} is for one draft; measure each by itself and compare the files")
    if out is not None:
        option.require_folder(out)
    parameters = {**context.params, "prompts": prompt_file}
    measured = [
        (each or "", run(lines, {**parameters, "draft": each}, loading, out)) for each in drafts
    ]
    if len(measured) > 1:
        return _report(measured, as_json=as_json)
    measurement = measured[0][1]
    if as_json:
        print(json.dumps(_document(measurement), allow_nan=False))
        return
    sheet.show(measurement, page())
    sheet.advise(_plan(measured), page())
    if out is not None:
        print(f"{out}: compare with `foretoken measure {out} OTHER`")


def _require_alone(context: typer.Context) -> None:
    """Raise InputError for options of measuring that the user gave beside files."""
    for parameter in context.command.params:
        if parameter.name in ("files", "as_json") or parameter.name is None:
            continue
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"{parameter.opts[0]} is for measuring; give files of measurements or options to "
                "measure with, not both"
            )


def saved(files: list[Path]) -> list[tuple[str, Measurement]]:
    """Read measurements, each with its file's name. InputError for a file that holds none."""
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no {file}; make it with foretoken measure --out")
    from foretoken.lab.measurement.result import load  # late: torch takes seconds to import

    return [(str(file), load(file)) for file in files]


def run(
    lines: list[prompts.Line],
    parameters: dict[str, Any],
    loading: option.PairLoading,
    out: Path | None,
) -> Measurement:
    """Load a pair and measure it, with a bar on standard error.

    parameters: the command's, among them the fields of MeasureOptions. Mistakes are told before
    models load.
    """
    _require(parameters, len(lines))
    loading.require(parameters["target"])
    from foretoken.lab.measurement.measure import digest, measure  # late: torch takes seconds
    from foretoken.lab.measurement.result import MeasureOptions

    quiet()
    values = {f.name: parameters[f.name] for f in fields(MeasureOptions) if f.name in parameters}
    values["prompts"] = str(parameters["prompts"])
    options = MeasureOptions(**values, prompts_sha256=digest([line.prompt for line in lines]))
    spec = loading.load(options.target, options.draft)
    texts = [prompts.for_model(line, spec) for line in lines]
    rows, beside = parameters["rows"], parameters["beside"]
    if out is not None:
        return _resumed(spec, texts, options, rows, beside, out)
    track = partial(bar, text="measuring")
    return measure(spec, texts, options, rows=rows, beside=beside, track=track)


def _require(parameters: dict[str, Any], count: int) -> None:
    """Raise InputError for values with which nothing can be measured."""
    from foretoken.lab import limits
    from foretoken.options import keys_of
    from foretoken.sampling.params import SamplingParams

    SamplingParams(*(parameters[name] for name in ("temperature", "top_k", "top_p", "min_p")))
    limits.require(parameters["gamma"], parameters["max_new_tokens"], count, parameters["draft"])
    keys_of(parameters["seed"], [1])
    rows, beside = parameters["rows"], parameters["beside"]
    if rows is not None and rows < 1:
        raise InputError(f"rows is {rows}; give the requests that run at a time, 1 or more")
    if beside and rows is None:
        raise InputError("--beside is for a batch; give --rows too, or leave it out")
    if not 0 <= beside <= 64:
        raise InputError(f"beside is {beside}; give the other engines on the machine, 0 to 64")


def _resumed(
    spec: Speculator,
    texts: list[Prompt],
    options: MeasureOptions,
    rows: int | None,
    beside: int,
    out: Path,
) -> Measurement:
    """Measure the prompts that an earlier run did not, and save the result."""
    from foretoken.lab.machine import describe
    from foretoken.lab.measurement.measure import measure
    from foretoken.lab.measurement.result import PartialMeasurement

    part = PartialMeasurement(out, options, describe(spec.target.device))
    if part.done:
        print(f"{len(part.done)} of {len(texts)} prompts are done already", file=sys.stderr)
    how = {"done": part.done, "keep": part.add, "track": partial(bar, text="measuring")}
    try:
        measurement = measure(spec, texts, options, rows=rows, beside=beside, **how)
    except KeyboardInterrupt:
        print("interrupted; the same command picks up", part.path, file=sys.stderr)
        raise typer.Exit(130) from None
    measurement.save(out)
    part.remove()
    return measurement


def _report(measurements: list[tuple[str, Measurement]], *, as_json: bool) -> None:
    """Print a comparison."""
    plan = _plan(measurements)
    if as_json:
        print(json.dumps(_plan_document(plan), allow_nan=False))
    else:
        sheet.compare(plan, page())


def _plan(measurements: list[tuple[str, Measurement]]) -> Plan:
    from foretoken.lab.measurement.plan import plan  # late: torch takes seconds to import

    return plan(measurements)


def _document(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement and the numbers that follow from it."""
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


def _plan_document(plan: Plan) -> dict[str, Any]:
    return {
        "speculate": plan.gamma > 0,
        "draft": plan.first.draft if plan.gamma else None,
        "gamma": plan.gamma,
        "command": plan.command,
        "vllm_speculative_config": plan.vllm,
        "candidates": [
            {
                "draft": candidate.draft,
                "alpha": asdict(candidate.measurement.alpha),
                "c": candidate.measurement.c,
                "others": candidate.measurement.others,
                **asdict(candidate.best),
            }
            for candidate in plan.candidates
        ],
    }
