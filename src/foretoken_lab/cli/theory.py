"""`foretoken-lab theory`: the paper's section 3 for one alpha and c, as a table over gamma.

Without models or clocks: `foretoken.theory` computes what is printed. The optimum is also searched
beyond the table, so that a short table does not hide it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from foretoken.cli import option
from foretoken.errors import InputError


@dataclass(frozen=True, slots=True)
class GammaRow:
    """The gains of one gamma."""

    gamma: int
    expected_tokens: float
    walltime_factor: float
    operations_factor: float


@dataclass(frozen=True, slots=True)
class TheoryPrediction:
    """Everything that is printed; with `--json`, the document."""

    alpha: float
    c: float
    c_hat: float
    tokens: int | None
    improves: bool
    guaranteed_factor: float
    oracle_factor: float | None  # None: no bound, at alpha 1 and c 0
    optimal: GammaRow
    asked: GammaRow | None
    table: list[GammaRow]


def theory(
    alpha: Annotated[float, Option("--alpha", help="How likely a guess is kept, in [0, 1].")],
    c: Annotated[float, Option("--c", help="Time of a drafter's run over that of a target's.")],
    c_hat: Annotated[
        float | None, Option("--c-hat", help="The same ratio in operations; left out: c.")
    ] = None,
    gamma: Annotated[int | None, Option("--gamma", help="A gamma to point out.")] = None,
    max_gamma: Annotated[int, Option("--max-gamma", help="The last gamma of the table.")] = 16,
    tokens: Annotated[
        int | None, Option("--tokens", help="How many are generated; left out: very many.")
    ] = None,
    plot: Annotated[
        Path | None, Option("--plot", help="Folder for the paper's figures 2 to 4 (SVG).")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Predict the gain of speculation from alpha and c, and the best gamma."""
    if plot and not find_spec("matplotlib"):
        raise InputError("--plot draws; give it matplotlib: pip install 'foretoken[plot]'")
    prediction = _predict(alpha, c, c if c_hat is None else c_hat, gamma, max_gamma, tokens)
    if as_json:
        print(json.dumps(asdict(prediction), allow_nan=False))
    else:
        _show(prediction, Console())
    if plot:
        from foretoken_lab.curves import draw  # late: matplotlib takes a second to import

        draw(plot, alpha)


def _predict(
    alpha: float, c: float, c_hat: float, gamma: int | None, max_gamma: int, tokens: int | None
) -> TheoryPrediction:
    from foretoken import checked  # late: NumPy, which `--help` does without
    from foretoken import theory as section3

    checked.count("max_gamma", max_gamma)

    def row(gamma: int) -> GammaRow:
        time = section3.walltime_factor(alpha, gamma, c, tokens=tokens)
        work = section3.operations_factor(alpha, gamma, c_hat)
        return GammaRow(gamma, section3.expected_tokens(alpha, gamma), time, work)

    oracle = section3.oracle_factor(alpha, c)
    last = max(max_gamma, section3.MAX_GAMMA)
    best = section3.optimal_gamma(alpha, c, max_gamma=last, tokens=tokens)
    return TheoryPrediction(
        alpha=alpha,
        c=c,
        c_hat=c_hat,
        tokens=tokens,
        improves=section3.improves(alpha, c),
        guaranteed_factor=section3.guaranteed_factor(alpha, c),
        oracle_factor=oracle if math.isfinite(oracle) else None,
        optimal=row(best),
        asked=None if gamma is None else row(gamma),
        table=[row(g) for g in range(max_gamma + 1)],
    )


def _show(p: TheoryPrediction, console: Console) -> None:
    from foretoken.theory import MAX_GAMMA

    best = p.optimal
    console.print(f"optimal gamma {best.gamma}: {best.walltime_factor:.2f}x", style="bold")
    if best.gamma == max(len(p.table) - 1, MAX_GAMMA):
        console.print("that is the last gamma looked at; a larger --max-gamma looks further")
    if p.improves:
        least = f"gamma 1 alone gains {p.guaranteed_factor:.2f}x"
        console.print(f"alpha {p.alpha:g} > c {p.c:g}: speculation can pay, {least}")
    else:
        console.print(f"alpha {p.alpha:g} <= c {p.c:g}: no gamma pays, decode plainly")
    if p.oracle_factor is None:
        console.print("oracle bound unbounded")
    else:
        more = p.oracle_factor / best.walltime_factor - 1
        bound = f"oracle bound {p.oracle_factor:.2f}x"
        console.print(f"{bound}: {more:.0%} more, were gamma ideal in every run")
    console.print(_table(p))


def _table(p: TheoryPrediction) -> Table:
    time = "walltime" if p.tokens is None else f"walltime, {p.tokens} tokens"
    table = Table()
    for heading in ("gamma", "tokens per run", time, "operations"):
        table.add_column(heading, justify="right")
    table.add_column("")
    rows = {row.gamma: row for row in [*p.table, p.optimal]}
    if p.asked is not None:
        rows[p.asked.gamma] = p.asked
    for gamma, row in sorted(rows.items()):
        best, asked = row == p.optimal, row == p.asked
        table.add_row(
            str(gamma),
            f"{row.expected_tokens:.2f}",
            f"{row.walltime_factor:.2f}x",
            f"{row.operations_factor:.2f}x",
            ", ".join(["optimal"] * best + ["asked"] * asked),
            style="bold green" if best else "bold" if asked else None,
        )
    return table
