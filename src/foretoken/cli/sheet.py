"""Tables of `foretoken measure`: one measurement, and a comparison of several with the advice that
follows. Every figure is the measurement's or its prediction's."""

from __future__ import annotations

import json
import shlex
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foretoken.cli.render import labelled, milliseconds, prose, table
from foretoken.costing.contention import remark

if TYPE_CHECKING:
    from foretoken.lab.estimate import Estimate, Spread
    from foretoken.lab.measurement.footprint import Footprint
    from foretoken.lab.measurement.plan import Candidate, GammaPrediction, Plan
    from foretoken.lab.measurement.result import Measurement

LABEL = 28  # letters of the column of labels
LEGEND = [
    ("c", "time of a draft token over that of a target pass"),
    ("v", "time of a target pass over gamma + 1 tokens over that of one over 1"),
    ("tokens", "a target call"),
]


def show(measurement: Measurement, console: Console) -> None:
    """Print a measurement."""
    from foretoken.lab.measurement.plan import predictions

    predicted = predictions(measurement)
    _head(measurement, console)
    console.print()
    labelled(console, [*_agreement(measurement, predicted), *_costs(measurement)], LABEL)
    console.print()
    prose(console, "acceptance by position")
    console.print(_positions(measurement, predicted))
    console.print()
    prose(
        console,
        f"a target pass over n tokens behind {measurement.context:.0f} others, and what "
        "gamma = n - 1 would give",
    )
    console.print(_gammas(measurement, predicted))
    console.print()
    _verdict(measurement, console)
    if warning := remark(measurement.others):
        prose(console, warning, bold=warning)
    console.print()


def compare(plan: Plan, console: Console) -> None:
    """Print a row for each measurement, the fastest first, and the advice."""
    first = plan.first.measurement
    console.print(_candidates(plan))
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
    advise(plan, console)
    for candidate in plan.candidates:
        if warning := remark(candidate.measurement.others):
            prose(console, f"{candidate.draft}: {warning}", bold=warning)


def advise(plan: Plan, console: Console) -> None:
    """Print the draft and gamma to use, the command that does, and vLLM's option for it."""
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
    for line in _broken(shlex.split(plan.command), console.width):
        console.print(line, soft_wrap=True, markup=False)
    console.print()
    config = "none" if plan.vllm is None else json.dumps(plan.vllm)
    if not plan.gamma:
        config += ", decode plainly"
    elif not plan.vllm:
        config += ", vLLM has no such draft"
    prose(console, f"vLLM --speculative-config: {config}")


def _head(measurement: Measurement, console: Console) -> None:
    """Print which models were measured, and how."""
    options, machine = measurement.options, measurement.machine
    how = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    how += "".join(
        f", {name.replace('_', '-')} {getattr(options, name):g}"
        for name, neutral in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        if getattr(options, name) != neutral
    )
    models = [_model("target", measurement.target), _model("draft", measurement.draft)]
    labelled(console, models, 8)
    prose(
        console,
        f"{len(measurement.prompts)} prompts, {measurement.tokens:.0f} new tokens each, {how}, "
        f"gamma {options.gamma}; {machine.cpu}, cores: {machine.cores}",
    )
    prose(console, "intervals are 95 %, Student t over prompts unless named")


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
    lines: list[tuple[str, str]] = []
    if m.draft_seconds is not None:
        draft_token, target_pass = _time(m.draft_seconds), _time(m.plain_pass)
        times = f"a draft token {draft_token}, a target pass {target_pass} "
        times += "(in the runs; medians, quartiles)"
        lines.append(("c", f"{m.c:.4f}: {times}"))
    if m.c_hat is not None:
        lines.append(("c_hat", f"{m.c_hat:.4f} of the operations a token"))
    other = f"plain {_time(m.plain_overhead)}, gamma {m.options.gamma} {_time(m.loop_overhead)}"
    lines += [("other work of a step", other), _step(m)]
    if m.floor_seconds is not None and m.target.pass_bytes is not None:
        lines.append(
            (
                "floor of a pass",
                f"{m.floor_seconds * 1e3:.3f} ms for {_bytes(m.target.pass_bytes)} of "
                f"weights at {m.bandwidth / 1e9:.1f} GB/s; measured "
                f"{m.passes[0].median / m.floor_seconds:.2f}x",
            )
        )
    return [*lines, ("memory", f"process peak {_bytes(m.peak_bytes)}")]


def _step(m: Measurement) -> tuple[str, str]:
    """Split the time of a full step; beside a draft, a pass can be slower than alone."""
    gamma = m.options.gamma
    label = f"a step at gamma {gamma}"
    full = [s for prompt in m.prompts for s in prompt.loop.steps if s.drafted == gamma]
    if not full:
        return label, "none made so many draft tokens"
    draft = median(step.draft_seconds for step in full) * 1e3
    score = median(step.score_seconds for step in full) * 1e3
    return (
        label,
        f"draft {draft:.3f} ms, target pass {score:.3f} ms, alone "
        f"{m.passes[gamma].median * 1e3:.3f}, other {m.loop_overhead.median * 1e3:.3f} ms",
    )


def _positions(m: Measurement, predicted: list[GammaPrediction]) -> Table:
    """Make a table of acceptance by position."""
    view = table(
        "position", "reached", "judged", "accepted", "rate", "95 % (Wilson)", "all so far", left=0
    )
    for i, position in enumerate(m.positions, 1):
        tokens = [one.tokens_per_call for one in predicted[i - 1 : i + 1]]
        so_far = tokens[1] - tokens[0] if len(tokens) == 2 else 0.0
        rate = position.rate
        cells = ("", "") if rate is None else (f"{rate.value:.3f}", _interval(rate))
        counts = (i, position.asked, position.judged, position.kept)
        view.add_row(*map(str, counts), *cells, f"{so_far:.3f}")
    return view


def _gammas(m: Measurement, predicted: list[GammaPrediction]) -> Table:
    """Make a table with a row for each number of tokens in a pass, n = gamma + 1."""
    fastest = max(predicted, key=lambda row: row.speedup.value)
    view = table("n", "ms", "quartiles", "v(n)", "gamma", "tokens", "speed-up", "", left=0)
    for row, seconds, v in zip(predicted, m.passes, m.v, strict=True):
        marks = ["run"] * (row.gamma == m.options.gamma)
        marks += ["best"] * (row is fastest)
        view.add_row(
            str(row.gamma + 1),
            milliseconds(seconds.median),
            f"{milliseconds(seconds.q1)}-{milliseconds(seconds.q3)}",
            f"{v:.2f}",
            str(row.gamma),
            f"{row.tokens_per_call:.2f}",
            f"{row.speedup.value:.2f} ± {row.speedup.error:.2f}",
            ", ".join(marks),
            style="bold" if marks else None,
        )
    return view


def _candidates(plan: Plan) -> Table:
    """Make a table with a row for each draft."""
    view = table("draft", "alpha", "c", "gamma", "v", "tokens", "speed-up")
    names = _short([candidate.draft for candidate in plan.candidates])
    for candidate, name in zip(plan.candidates, names, strict=True):
        style = "bold" if candidate is plan.first and plan.gamma else None
        view.add_row(escape(name), *_row(candidate), style=style)
    return view


def _row(candidate: Candidate) -> tuple[str, ...]:
    m, best = candidate.measurement, candidate.best
    return (
        f"{m.alpha.value:.3f} ± {m.alpha.error:.3f}",
        "" if m.c is None else f"{m.c:.4f}",
        str(best.gamma),
        f"{m.v[best.gamma]:.2f}",
        f"{best.tokens_per_call:.2f}",
        f"{best.speedup.value:.2f}x ± {best.speedup.error:.2f}",
    )


def _short(names: list[str]) -> list[str]:
    """Return the shortest ends of paths that tell them apart."""
    parts = [name.split("/") for name in names]
    for count in range(1, max(map(len, parts))):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(set(names)):
            return ends
    return names


def _broken(arguments: list[str], width: int) -> list[str]:
    """Spell a shell command in lines of at most that width."""
    lines = [""]
    for argument in map(shlex.quote, arguments):
        if lines[-1] and len(lines[-1]) + len(argument) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"    {argument}")
        else:
            lines[-1] += f" {argument}" if lines[-1] else argument
    return lines


def _verdict(m: Measurement, console: Console) -> None:
    from foretoken.lab.measurement.plan import formula

    gamma, measured, expected = m.options.gamma, m.speedup, formula(m)
    gain = f"{measured.value:.2f}x"
    prose(
        console,
        f"gamma {gamma} measured: {gain} plain decoding {_interval(measured)}, "
        f"{measured.value / expected:.2f} of the {expected:.2f}x that follows from "
        f"acceptance and costs; other gammas are predicted in this proportion, and draft tokens "
        f"beyond {gamma} are taken as accepted with alpha",
        bold=gain,
    )


def _model(role: str, footprint: Footprint) -> tuple[str, str]:
    parts = [f"{footprint.name}: {footprint.runtime}"]
    if footprint.parameters is not None:
        parts.append(f"{footprint.parameters / 1e6:.3g}M parameters in {footprint.dtype}")
    if footprint.weight_bytes:
        parts.append(f"{_bytes(footprint.weight_bytes)} of weights")
    if footprint.cache_bytes:
        parts.append(f"cache {_bytes(footprint.cache_bytes)} a token")
    return role, ", ".join(parts)


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} {_interval(estimate)}"


def _interval(estimate: Estimate) -> str:
    return f"({estimate.low:.3f} to {estimate.high:.3f})"


def _time(spread: Spread) -> str:
    return f"{spread.median * 1e3:.3f} ms ({spread.q1 * 1e3:.3f} to {spread.q3 * 1e3:.3f})"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
