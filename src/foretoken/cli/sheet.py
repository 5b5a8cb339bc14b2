"""A measurement for reading: what `foretoken measure` prints on a terminal.

Only words and tables; every figure is the measurement's own or its prediction's.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from foretoken.cli.page import labelled, milliseconds, prose

if TYPE_CHECKING:
    from foretoken.lab.estimate import Estimate, Spread
    from foretoken.lab.measurement.footprint import Footprint
    from foretoken.lab.measurement.prediction import Prediction
    from foretoken.lab.measurement.result import Measurement

LABEL = 28  # letters of the column of labels


def show(found: Measurement, console: Console) -> None:
    """For reading."""
    from foretoken.lab.measurement.prediction import predictions

    o, table = found.options, predictions(found)
    law = f"temperature {o.temperature:g}" if o.temperature else "greedy"
    law += "".join(
        f", {name.replace('_', '-')} {getattr(o, name):g}"
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        if getattr(o, name) != off
    )
    labelled(console, [_weight("target", found.target), _weight("draft", found.draft)], 8)
    prose(
        console,
        f"{len(found.prompts)} prompts, {found.tokens:.0f} new tokens each, {law}, gamma "
        f"{o.gamma}; {found.machine.cpu}, cores: {found.machine.cores}",
    )
    prose(console, "intervals are 95 %, Student t over prompts unless named")
    console.print()
    labelled(console, [*_agreement(found, table), *_costs(found)], LABEL)
    console.print()
    prose(console, "acceptance by position")
    console.print(_positions(found, table))
    console.print()
    prose(
        console,
        f"a target pass over n tokens behind {found.context:.0f} others, and what gamma = n - 1 "
        "would give",
    )
    console.print(_gammas(found, table))
    console.print()
    _verdict(found, console)


def _agreement(found: Measurement, table: list[Prediction]) -> list[tuple[str, str]]:
    from foretoken.theory import expected_tokens

    gamma = found.options.gamma
    places = sum(len(one.overlaps) for one in found.prompts)
    judged = sum(position.judged for position in found.positions)
    loop = "no guess was judged"
    if found.alpha_in_loop is not None:
        loop = f"{_interval(found.alpha_in_loop)}, mean over {judged} guesses judged"
    silent = f"; no guess, so 0, at {found.silent:.0%}" if found.silent else ""
    kept, equation = table[gamma].tokens_per_call, expected_tokens(found.alpha.value, gamma)
    return [
        (
            "alpha on the target's text",
            f"{_interval(found.alpha)}, mean of sum min(p, q) over {places} tokens{silent}; D_LK "
            f"{1 - found.alpha.value:.3f}",
        ),
        ("alpha in the loop", loop),
        (
            "tokens a target call",
            f"{_interval(found.tokens_per_call)}; {kept:.2f} expected from the guesses kept, "
            f"{equation:.2f} from alpha (equation 1)",
        ),
    ]


def _costs(found: Measurement) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    guess = found.draft_seconds
    if guess is not None:
        lines.append(
            (
                "c",
                f"{found.c:.4f}: a guess {_time(guess)}, a target pass {_time(found.plain_pass)} "
                "(in the runs; medians, quartiles)",
            )
        )
    if found.c_hat is not None:
        lines.append(("c_hat", f"{found.c_hat:.4f} of the operations a token"))
    plain, loop = found.plain_overhead, found.loop_overhead
    other = f"plain {_time(plain)}, gamma {found.options.gamma} {_time(loop)}"
    lines += [("other work of a step", other), _step(found)]
    if found.floor_seconds is not None and found.target.pass_bytes is not None:
        lines.append(
            (
                "floor of a pass",
                f"{found.floor_seconds * 1e3:.3f} ms for {_bytes(found.target.pass_bytes)} of "
                f"weights at {found.bandwidth / 1e9:.1f} GB/s; measured "
                f"{found.passes[0].median / found.floor_seconds:.2f}x",
            )
        )
    return [*lines, ("memory", f"process peak {_bytes(found.peak_bytes)}")]


def _step(found: Measurement) -> tuple[str, str]:
    """Where the time of a full step went; beside drafts a pass can be slower than alone."""
    gamma = found.options.gamma
    label = f"a step at gamma {gamma}"
    full = [s for one in found.prompts for s in one.loop.steps if s.drafted == gamma]
    if not full:
        return label, "none made so many guesses"
    draft = median(step.draft_seconds for step in full) * 1e3
    score = median(step.score_seconds for step in full) * 1e3
    return (
        label,
        f"draft {draft:.3f} ms, target pass {score:.3f} ms, alone "
        f"{found.passes[gamma].median * 1e3:.3f}, other {found.loop_overhead.median * 1e3:.3f} ms",
    )


def _positions(found: Measurement, table: list[Prediction]) -> Table:
    """Whether guess i was kept."""
    view = Table()
    for heading in ("guess", "reached", "judged", "kept", "rate", "95 % (Wilson)", "all so far"):
        view.add_column(heading, justify="right")
    for i, one in enumerate(found.positions, 1):
        so_far = table[i].tokens_per_call - table[i - 1].tokens_per_call if i < len(table) else 0.0
        rate = ("", "") if one.rate is None else (f"{one.rate.value:.3f}", _ends(one.rate))
        counts = (str(i), str(one.asked), str(one.judged), str(one.kept))
        view.add_row(*counts, *rate, f"{so_far:.3f}")
    return view


def _gammas(found: Measurement, table: list[Prediction]) -> Table:
    """A row per number of tokens in a pass: n = gamma + 1."""
    fastest = max(table, key=lambda one: one.speedup.value)
    view = Table()
    for heading in ("n", "ms", "quartiles", "v(n)", "gamma", "tokens", "speed-up", ""):
        view.add_column(heading, justify="right")
    for one, spent, v in zip(table, found.passes, found.v, strict=True):
        marks = ["run"] * (one.gamma == found.options.gamma)
        marks += ["best"] * (one is fastest)
        view.add_row(
            str(one.gamma + 1),
            milliseconds(spent.median),
            f"{milliseconds(spent.q1)}-{milliseconds(spent.q3)}",
            f"{v:.2f}",
            str(one.gamma),
            f"{one.tokens_per_call:.2f}",
            f"{one.speedup.value:.2f} ± {one.speedup.error:.2f}",
            ", ".join(marks),
            style="bold" if marks else None,
        )
    return view


def _verdict(found: Measurement, console: Console) -> None:
    from foretoken.lab.measurement.prediction import formula

    gamma, measured, expected = found.options.gamma, found.speedup, formula(found)
    gain = f"{measured.value:.2f}x"
    prose(
        console,
        f"gamma {gamma} measured: {gain} plain decoding {_ends(measured)}, "
        f"{measured.value / expected:.2f} of the {expected:.2f}x that follows from the guesses "
        f"kept and the costs; other gammas are predicted in this proportion, and beyond guess "
        f"{gamma} every guess is taken as kept with alpha",
        bold=gain,
    )


def _weight(role: str, one: Footprint) -> tuple[str, str]:
    parts = [f"{one.name}: {one.runtime}"]
    if one.parameters is not None:
        parts.append(f"{one.parameters / 1e6:.3g}M parameters in {one.dtype}")
    if one.weight_bytes:
        parts.append(f"{_bytes(one.weight_bytes)} of weights")
    if one.cache_bytes:
        parts.append(f"cache {_bytes(one.cache_bytes)} a token")
    return role, ", ".join(parts)


def _interval(one: Estimate) -> str:
    return f"{one.value:.3f} {_ends(one)}"


def _ends(one: Estimate) -> str:
    return f"({one.low:.3f} to {one.high:.3f})"


def _time(one: Spread) -> str:
    return f"{one.median * 1e3:.3f} ms ({one.q1 * 1e3:.3f} to {one.q3 * 1e3:.3f})"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
