"""What `foretoken measure` prints on a terminal: every figure is the measurement's or its
prediction's."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from foretoken.cli.render import labelled, milliseconds, prose
from foretoken.costing.contention import remark

if TYPE_CHECKING:
    from foretoken.lab.estimate import Estimate, Spread
    from foretoken.lab.measurement.footprint import Footprint
    from foretoken.lab.measurement.plan import GammaPrediction
    from foretoken.lab.measurement.result import Measurement

LABEL = 28  # letters of the column of labels


def show(measurement: Measurement, console: Console) -> None:
    """All of it."""
    from foretoken.lab.measurement.plan import predictions

    options, machine = measurement.options, measurement.machine
    table = predictions(measurement)
    law = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    law += "".join(
        f", {name.replace('_', '-')} {getattr(options, name):g}"
        for name, neutral in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        if getattr(options, name) != neutral
    )
    models = [_model("target", measurement.target), _model("draft", measurement.draft)]
    labelled(console, models, 8)
    prose(
        console,
        f"{len(measurement.prompts)} prompts, {measurement.tokens:.0f} new tokens each, {law}, "
        f"gamma {options.gamma}; {machine.cpu}, cores: {machine.cores}",
    )
    prose(console, "intervals are 95 %, Student t over prompts unless named")
    console.print()
    labelled(console, [*_agreement(measurement, table), *_costs(measurement)], LABEL)
    console.print()
    prose(console, "acceptance by position")
    console.print(_positions(measurement, table))
    console.print()
    prose(
        console,
        f"a target pass over n tokens behind {measurement.context:.0f} others, and what "
        "gamma = n - 1 would give",
    )
    console.print(_gammas(measurement, table))
    console.print()
    _verdict(measurement, console)
    if warning := remark(measurement.others):
        prose(console, warning, bold=warning)


def _agreement(m: Measurement, table: list[GammaPrediction]) -> list[tuple[str, str]]:
    from foretoken.theory import expected_tokens

    gamma = m.options.gamma
    places = sum(len(prompt.overlaps) for prompt in m.prompts)
    judged = sum(position.judged for position in m.positions)
    loop = "no guess was judged"
    if m.alpha_in_loop is not None:
        loop = f"{_estimate(m.alpha_in_loop)}, mean over {judged} guesses judged"
    silent = f"; no guess, so 0, at {m.silent:.0%}" if m.silent else ""
    tokens, equation = table[gamma].tokens_per_call, expected_tokens(m.alpha.value, gamma)
    return [
        (
            "alpha on the target's text",
            f"{_estimate(m.alpha)}, mean of sum min(p, q) over {places} tokens{silent}; D_LK "
            f"{1 - m.alpha.value:.3f}",
        ),
        ("alpha in the loop", loop),
        (
            "tokens a target call",
            f"{_estimate(m.tokens_per_call)}; {tokens:.2f} expected from the guesses kept, "
            f"{equation:.2f} from alpha (equation 1)",
        ),
    ]


def _costs(m: Measurement) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    if m.draft_seconds is not None:
        guess, target_pass = _time(m.draft_seconds), _time(m.plain_pass)
        times = f"a guess {guess}, a target pass {target_pass} (in the runs; medians, quartiles)"
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
    """Where the time of a full step went; next to a draft a pass can be slower than alone."""
    gamma = m.options.gamma
    label = f"a step at gamma {gamma}"
    full = [s for prompt in m.prompts for s in prompt.loop.steps if s.drafted == gamma]
    if not full:
        return label, "none made so many guesses"
    draft = median(step.draft_seconds for step in full) * 1e3
    score = median(step.score_seconds for step in full) * 1e3
    return (
        label,
        f"draft {draft:.3f} ms, target pass {score:.3f} ms, alone "
        f"{m.passes[gamma].median * 1e3:.3f}, other {m.loop_overhead.median * 1e3:.3f} ms",
    )


def _positions(m: Measurement, table: list[GammaPrediction]) -> Table:
    """How often guess i was kept."""
    view = _table("guess", "reached", "judged", "kept", "rate", "95 % (Wilson)", "all so far")
    for i, position in enumerate(m.positions, 1):
        so_far = table[i].tokens_per_call - table[i - 1].tokens_per_call if i < len(table) else 0.0
        rate = position.rate
        cells = ("", "") if rate is None else (f"{rate.value:.3f}", _interval(rate))
        counts = (i, position.asked, position.judged, position.kept)
        view.add_row(*map(str, counts), *cells, f"{so_far:.3f}")
    return view


def _gammas(m: Measurement, table: list[GammaPrediction]) -> Table:
    """A row per number of tokens in a pass: n = gamma + 1."""
    fastest = max(table, key=lambda row: row.speedup.value)
    view = _table("n", "ms", "quartiles", "v(n)", "gamma", "tokens", "speed-up", "")
    for row, seconds, v in zip(table, m.passes, m.v, strict=True):
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


def _table(*headings: str) -> Table:
    view = Table()
    for heading in headings:
        view.add_column(heading, justify="right")
    return view


def _verdict(m: Measurement, console: Console) -> None:
    from foretoken.lab.measurement.plan import formula

    gamma, measured, expected = m.options.gamma, m.speedup, formula(m)
    gain = f"{measured.value:.2f}x"
    prose(
        console,
        f"gamma {gamma} measured: {gain} plain decoding {_interval(measured)}, "
        f"{measured.value / expected:.2f} of the {expected:.2f}x that follows from the guesses "
        f"kept and the costs; other gammas are predicted in this proportion, and beyond guess "
        f"{gamma} every guess is taken as kept with alpha",
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
