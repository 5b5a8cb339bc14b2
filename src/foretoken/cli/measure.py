"""`foretoken measure`: how far drafts agree with a target, what everything costs here, and which
draft and gamma are predicted to be fastest."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from foretoken.cli import option, prompts
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar, labelled, milliseconds, page, prose, table
from foretoken.costing.contention import remark
from foretoken.errors import InputError, SameModelError

if TYPE_CHECKING:
    from foretoken.measurement.estimate import Estimate, Spread
    from foretoken.measurement.plan import GammaPrediction, Plan
    from foretoken.measurement.result import Footprint, Measurement, Position

LABEL = 28  # letters of the column of labels
LEGEND = [
    ("c", "time of a draft token over that of a target pass"),
    ("v", "time of a target pass over gamma + 1 tokens over that of one over 1"),
    ("tokens", "a target call"),
]
log = logging.getLogger(__name__)


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
            help="Folder, hub id, self:int4, self:int8, self:LAYERS, mtp, lookup, copy, uniform or "
            "MODULE:ARGUMENT. Repeat it to compare drafts. Default: the one that ships "
            "with the target.",
            show_default=False,
        ),
    ] = None,
    own: Annotated[
        bool,
        Option(
            "--self",
            help="Also measure what needs no second model: the target's own copies and look-up.",
        ),
    ] = False,
    gamma: option.Gamma = 4,
    temperature: option.Temperature = 0.0,
    top_k: option.TopK = 0,
    top_p: option.TopP = 1.0,
    min_p: option.MinP = 0.0,
    max_new_tokens: option.MaxNewTokens = 64,
    limit: option.Limit = None,
    seed: option.Seed = 0,
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
        sources = {each: context.get_parameter_source(each) for each in context.params}
        given = {
            name for name, source in sources.items() if source and source.name == "COMMANDLINE"
        }
        if given - {"files", "as_json"}:
            raise InputError("give files of measurements, or options to measure with, not both")
        return _report(saved(files), as_json=as_json)
    if prompt_file is None:
        raise InputError("give files of foretoken measure --out, or --prompts to measure on")
    lines, target = prompts.first(prompt_file, limit), option.chosen(target)
    drafts = [*(draft or []), *(_own_drafts(target, loading) if own else [])] or [None]
    if len(drafts) > 1 and out is not None:
        raise InputError("--out is for one draft; measure each by itself and compare the files")
    if out is not None:
        option.require_folder(out)
    parameters = {**context.params, "prompts": prompt_file, "target": target}
    measured: list[tuple[str, Measurement]] = []
    for i, each in enumerate(drafts, 1):
        text = f"measuring {each}, {i} of {len(drafts)}" if len(drafts) > 1 else "measuring"
        try:
            measured.append((each or "", run(lines, parameters | {"draft": each}, loading, text)))
        except SameModelError as error:
            if each in (draft or []):
                raise
            log.warning("left out: %s", error)
    if len(measured) > 1:
        return _report(measured, as_json=as_json)
    measurement = measured[0][1]
    if as_json:
        print(json.dumps(_document(measurement), allow_nan=False))
        return
    show(measurement, page())
    _advise(_plan(measured), page())
    if out is not None:
        print(f"{out}: compare with `foretoken measure {out} OTHER`")


def saved(files: list[Path]) -> list[tuple[str, Measurement]]:
    """Read measurements, each with its file's name. InputError for a file that holds none."""
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no {file}; make it with foretoken measure --out")
    from foretoken.measurement.result import load  # late: torch takes seconds to import

    return [(str(file), load(file)) for file in files]


def _own_drafts(target: str, loading: option.PairLoading) -> list[str]:
    """Return the drafts that a target has without a second model."""
    loading.require(target)
    from foretoken.loading.draft import kinds
    from foretoken.loading.runtimes import Placement
    from foretoken.loading.sources import source
    from foretoken.loading.target import ModelFacts

    read = source(target, loading.revision, loading.trust_remote_code)
    facts = ModelFacts(read, Placement(loading.dtype, runtime=loading.runtime))
    # some of its layers alone would need states of their own
    return [*kinds(loading.dtype, 0 if facts.has_states else facts.layers), "lookup"]


def run(
    lines: list[prompts.Line],
    parameters: dict[str, Any],
    loading: option.PairLoading,
    text: str,
) -> Measurement:
    """Load a pair and measure it, with a bar of this text on standard error.

    parameters: the command's, among them the fields of MeasureOptions, and `out`, where it is saved
    unless that is None. Mistakes are told before models load.
    """
    _require(parameters, len(lines))
    loading.require(parameters["target"])
    from foretoken.measurement.machine import describe  # late: torch takes seconds
    from foretoken.measurement.measure import digest, measure
    from foretoken.measurement.result import MeasureOptions, PartialMeasurement

    quiet()
    values = {f.name: parameters[f.name] for f in fields(MeasureOptions) if f.name in parameters}
    values["prompts"] = str(parameters["prompts"])
    options = MeasureOptions(**values, prompts_sha256=digest([line.prompt for line in lines]))
    texts: list[str | list[int]] = []
    spec = loading.load(
        options.target,
        options.draft,
        1,
        lambda known: texts.extend(prompts.for_model(line, known) for line in lines),
    ).prepared()
    measuring = partial(measure, spec, texts, options, track=partial(bar, text=text))
    if (out := parameters["out"]) is None:
        return measuring()
    part = PartialMeasurement(out, options, describe(spec.target.device))
    if part.done:
        print(f"{len(part.done)} of {len(texts)} prompts are done already", file=sys.stderr)
    try:
        measurement = measuring(done=part.done, keep=part.add)
    except KeyboardInterrupt:
        print("interrupted; the same command picks up", part.path, file=sys.stderr)
        raise typer.Exit(130) from None
    measurement.save(out)
    part.remove()
    return measurement


def _require(parameters: dict[str, Any], count: int) -> None:
    """Raise InputError for values with which nothing can be measured."""
    from foretoken.options import keys_of
    from foretoken.sampling.params import SamplingParams

    SamplingParams(*(parameters[name] for name in ("temperature", "top_k", "top_p", "min_p")))
    keys_of(parameters["seed"], [1])
    for name, least, why in (
        ("gamma", 1, " to measure a draft"),
        ("max_new_tokens", 2, ""),
    ):
        value = parameters[name]
        if value is not None and value < least:
            raise InputError(f"{name} is {value}; give {least} or more{why}")
    if count < 2:
        raise InputError(f"{count} prompt; give 2 or more, intervals are over prompts")
    if parameters["draft"] == "none":
        raise InputError("draft is none; give one that guesses")


def _report(measurements: list[tuple[str, Measurement]], *, as_json: bool) -> None:
    """Print a comparison."""
    plan = _plan(measurements)
    if as_json:
        print(json.dumps(_plan_document(plan), allow_nan=False))
    else:
        _compare(plan, page())


def _plan(measurements: list[tuple[str, Measurement]]) -> Plan:
    from foretoken.measurement.plan import plan  # late: torch takes seconds to import

    return plan(measurements)


def _document(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement and the numbers that follow from it."""
    from foretoken.measurement.plan import formula, predictions

    derived = {
        "d_lk": 1 - measurement.alpha.value,
        "c": measurement.c,
        "c_hat": measurement.c_hat,
        "v": measurement.v,
        "accepted": [rate and asdict(rate) for rate in map(_rate, measurement.positions)],
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


def show(measurement: Measurement, console: Console) -> None:
    """Print a measurement."""
    from foretoken.measurement.plan import formula, predictions

    predicted, gamma = predictions(measurement), measurement.options.gamma
    _head(measurement, console)
    console.print()
    labelled(console, [*_agreement(measurement, predicted), *_costs(measurement)], LABEL)
    console.print()
    prose(
        console,
        "acceptance of the last of gamma draft tokens, where it was judged, with its interval "
        f"(Wilson), a target pass over gamma + 1 tokens behind {measurement.context:.0f} others, "
        "and what follows",
    )
    console.print(_gammas(measurement, predicted))
    console.print()
    gain, expected = measurement.speedup, formula(measurement)
    prose(
        console,
        f"gamma {gamma} measured: {gain.value:.2f}x plain decoding {_interval(gain)}, "
        f"{gain.value / expected:.2f} of the {expected:.2f}x that follows from acceptance and "
        "costs; other gammas are predicted in this proportion, and draft tokens beyond "
        f"{gamma} are taken as accepted with alpha",
        bold=f"{gain.value:.2f}x",
    )
    if warning := remark(measurement.others):
        prose(console, warning, bold=warning)
    console.print()


def _head(measurement: Measurement, console: Console) -> None:
    """Print which models were measured, and how."""
    options, machine = measurement.options, measurement.machine
    how = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    for name, neutral in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
        if getattr(options, name) != neutral:
            how += f", {name.replace('_', '-')} {getattr(options, name):g}"
    models = ("target", measurement.target), ("draft", measurement.draft)
    labelled(console, [(role, _model(model)) for role, model in models], 8)
    prose(
        console,
        f"{len(measurement.prompts)} prompts, {measurement.tokens:.0f} new tokens each, {how}, "
        f"gamma {options.gamma}; {machine.cpu}, cores: {machine.cores}",
    )
    prose(console, "intervals are 95 %, Student t over prompts unless named")


def _model(model: Footprint) -> str:
    count = model.parameters
    size = f", {count / 1e6:.3g}M parameters in {model.dtype}" if count else ""
    return f"{model.name}: {model.runtime}{size}"


def _agreement(m: Measurement, predicted: list[GammaPrediction]) -> list[tuple[str, str]]:
    from foretoken.theory import expected_tokens

    gamma = m.options.gamma
    places = sum(len(prompt.overlaps) for prompt in m.prompts)
    judged = sum(position.judged for position in m.positions)
    loop = "no draft token was judged"
    if m.alpha_in_loop is not None:
        loop = f"{_estimate(m.alpha_in_loop)}, mean over {judged} draft tokens judged"
    silent = f"; no draft token, so 0, at {m.silent:.0%}" if m.silent else ""
    tokens, equation = predicted[gamma].tokens_per_call, expected_tokens(m.alpha.value, gamma)
    return [
        (
            "alpha on the target's text",
            f"{_estimate(m.alpha)}, mean of sum min(p, q) over {places} tokens{silent}; D_LK "
            f"{1 - m.alpha.value:.3f}",
        ),
        ("alpha in the loop", loop),
        (
            "tokens a target call",
            f"{_estimate(m.tokens_per_call)}; {tokens:.2f} expected from acceptance by position, "
            f"{equation:.2f} from alpha (equation 1)",
        ),
    ]


def _costs(m: Measurement) -> list[tuple[str, str]]:
    other = f"plain {_time(m.plain_overhead)}, gamma {m.options.gamma} {_time(m.loop_overhead)}"
    lines = [("other work of a step", other)]
    if m.c_hat is not None:
        lines.insert(0, ("c_hat", f"{m.c_hat:.4f} of the operations a token"))
    if m.draft_seconds is not None:
        times = f"a draft token {_time(m.draft_seconds)}, a target pass {_time(m.plain_pass)}"
        lines.insert(0, ("c", f"{m.c:.4f}: {times} (in the runs; medians, quartiles)"))
    return [*lines, *_memory(m)]


def _memory(m: Measurement) -> list[tuple[str, str]]:
    """Return lines on bytes: those held, those moved, and the time that moving them takes."""
    models = ("target", m.target, "a pass"), ("draft", m.draft, "a draft token")
    weights = [
        f"{role} {_bytes(model.weight_bytes)}, of which {what} reads {_bytes(model.pass_bytes)}"
        for role, model, what in models
        if model.weight_bytes and model.pass_bytes
    ]
    lines = [("weights", "; ".join(weights))] if weights else []
    if m.bandwidth and m.floor_seconds:
        floor = f"{m.floor_seconds * 1e3:.3f} ms at {m.bandwidth / 1e9:.1f} GB/s of bandwidth"
        over = f"{m.passes[0].median / m.floor_seconds:.2f}x"
        lines.append(("floor of a target pass", f"{floor}; measured {over}"))
    held = [] if m.peak_bytes is None else [f"process peak {_bytes(m.peak_bytes)}"]
    held += [
        f"{_bytes(model.cache_bytes)} a token in the {role}'s cache"
        for role, model, _ in models
        if model.cache_bytes
    ]
    return [*lines, ("memory", "; ".join(held))] if held else lines


def _gammas(m: Measurement, predicted: list[GammaPrediction]) -> Table:
    """Make a table with a row for each gamma."""
    fastest = max(predicted, key=lambda row: row.speedup.value)
    heads = ("gamma", "accepted", "95 %", "ms", "quartiles", "v", "tokens", "speed-up", "")
    view = table(*heads, left=0, gap=0)
    rates = [_rate(position) for position in m.positions]
    for row, seconds, v in zip(predicted, m.passes, m.v, strict=True):
        rate = rates[row.gamma - 1] if 0 < row.gamma <= len(rates) else None
        marks = ["run"] * (row.gamma == m.options.gamma) + ["best"] * (row is fastest)
        view.add_row(
            str(row.gamma),
            *(
                ("", "")
                if rate is None
                else (f"{rate.value:.3f}", f"{rate.low:.2f}-{rate.high:.2f}")
            ),
            milliseconds(seconds.median),
            f"{milliseconds(seconds.q1)}-{milliseconds(seconds.q3)}",
            f"{v:.2f}",
            f"{row.tokens_per_call:.2f}",
            f"{row.speedup.value:.2f} ± {row.speedup.error:.2f}",
            ", ".join(marks),
            style="bold" if marks else None,
        )
    return view


def _rate(position: Position) -> Estimate | None:
    """Return how often a draft token was accepted where it was judged."""
    from foretoken.measurement.estimate import wilson

    return wilson(position.kept, position.judged)


def _compare(plan: Plan, console: Console) -> None:
    """Print a row for each measurement, the fastest first, and the advice."""
    first = plan.first.measurement
    view = table("draft", "alpha", "c", "gamma", "v", "tokens", "speed-up")
    for candidate in plan.candidates:
        m, best = candidate.measurement, candidate.best
        view.add_row(
            escape(candidate.draft),
            f"{m.alpha.value:.3f} ± {m.alpha.error:.3f}",
            "" if m.c is None else f"{m.c:.4f}",
            str(best.gamma),
            f"{m.v[best.gamma]:.2f}",
            f"{best.tokens_per_call:.2f}",
            f"{best.speedup.value:.2f}x ± {best.speedup.error:.2f}",
            style="bold" if candidate is plan.first and plan.gamma else None,
        )
    console.print(view)
    console.print()
    labelled(console, LEGEND, 10)
    prose(
        console,
        f"speed-up over plain decoding of {first.target.name} for texts of {first.tokens:.0f} new "
        "tokens, as measured with one gamma; for others in proportion to what follows from the "
        "acceptance and costs. Draft tokens beyond the gamma that was measured are taken as "
        "accepted with alpha; ± is 95 %",
    )
    console.print()
    _advise(plan, console)
    for candidate in plan.candidates:
        if warning := remark(candidate.measurement.others):
            prose(console, f"{candidate.draft}: {warning}", bold=warning)


def _advise(plan: Plan, console: Console) -> None:
    """Print the draft and gamma to use, and the command that does."""
    best = plan.first.best
    gain = f"{best.speedup.value:.2f}x ± {best.speedup.error:.2f}"
    if plan.gamma:
        advice, reason = f"speculate with {plan.first.draft}, gamma {best.gamma}", gain
        if best.speedup.low <= 1:
            reason += "; the interval holds 1, so measure on more prompts"
    else:
        advice = "do not speculate"
        reason = f"the best draft is predicted to give {gain}, at gamma {best.gamma}"
    prose(console, f"{advice}: {reason}", bold="speculate" if plan.gamma else advice)
    console.print()
    console.print(plan.command, soft_wrap=True, markup=False)


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} {_interval(estimate)}"


def _interval(estimate: Estimate) -> str:
    return f"({estimate.low:.3f} to {estimate.high:.3f})"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"


def _time(spread: Spread) -> str:
    return f"{spread.median * 1e3:.3f} ms ({spread.q1 * 1e3:.3f} to {spread.q3 * 1e3:.3f})"
