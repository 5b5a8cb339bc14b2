"""`foretoken theory`: the paper's section 3 for one alpha and c, as a table over gamma.

Asks nothing of models or clocks: it only prints what `foretoken.theory` computes. The optimum is
looked for beyond the table too, so that a short table does not hide it.
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

from foretoken.errors import InputError


@dataclass(frozen=True, slots=True)
class Row:
    """What one gamma gives."""

    gamma: int
    expected_tokens: float
    walltime_factor: float
    operations_factor: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Everything that is printed, and the document of `--json`."""

    alpha: float
    c: float
    c_hat: float
    tokens: int | None
    improves: bool
    guaranteed_factor: float
    oracle_factor: float | None  # None: no bound, at alpha 1 and c 0
    optimal: Row
    asked: Row | None
    table: list[Row]


def theory(
    alpha: Annotated[float, Option("--alpha", help="How likely a guess is kept, in [0, 1].")],
    c: Annotated[float, Option("--c", help="Time of a run of the drafter over one of the target.")],
    c_hat: Annotated[
        float | None, Option("--c-hat", help="The same ratio in operations; c unless given.")
    ] = None,
    gamma: Annotated[int | None, Option("--gamma", help="A gamma to point out.")] = None,
    max_gamma: Annotated[int, Option("--max-gamma", help="The last gamma of the table.")] = 16,
    tokens: Annotated[
        int | None, Option("--tokens", help="How many are generated; very many unless given.")
    ] = None,
    plot: Annotated[
        Path | None, Option("--plot", help="Folder for the paper's figures 2 to 4 (SVG).")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
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
        from foretoken.lab.curves import draw  # late: matplotlib takes a second to import

        draw(plot, alpha)


def _predict(
    alpha: float, c: float, c_hat: float, gamma: int | None, max_gamma: int, tokens: int | None
) -> Prediction:
    from foretoken import checked  # late: NumPy, which `--help` needs not
    from foretoken import theory as section3

    checked.count("max_gamma", max_gamma)

    def row(gamma: int) -> Row:
        time = section3.walltime_factor(alpha, gamma, c, tokens=tokens)
        work = section3.operations_factor(alpha, gamma, c_hat)
        return Row(gamma, section3.expected_tokens(alpha, gamma), time, work)

    oracle = section3.oracle_factor(alpha, c)
    last = max(max_gamma, section3.MAX_GAMMA)
    best = section3.optimal_gamma(alpha, c, max_gamma=last, tokens=tokens)
    return Prediction(
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


def _show(found: Prediction, console: Console) -> None:
    from foretoken.theory import MAX_GAMMA

    best = found.optimal
    console.print(f"optimal gamma {best.gamma}: {best.walltime_factor:.2f}x", style="bold")
    if best.gamma == max(len(found.table) - 1, MAX_GAMMA):
        console.print("that is the last gamma looked at; a larger --max-gamma looks further")
    if found.improves:
        least = f"gamma 1 alone gains {found.guaranteed_factor:.2f}x"
        console.print(f"alpha {found.alpha:g} > c {found.c:g}: speculation can pay, {least}")
    else:
        console.print(f"alpha {found.alpha:g} <= c {found.c:g}: no gamma pays, decode plainly")
    if found.oracle_factor is None:
        console.print("oracle bound unbounded")
    else:
        more = found.oracle_factor / best.walltime_factor - 1
        bound = f"oracle bound {found.oracle_factor:.2f}x"
        console.print(f"{bound}: {more:.0%} more, were gamma ideal in every run")
    console.print(_table(found))


def _table(found: Prediction) -> Table:
    time = "walltime" if found.tokens is None else f"walltime, {found.tokens} tokens"
    table = Table()
    for heading in ("gamma", "tokens per run", time, "operations"):
        table.add_column(heading, justify="right")
    table.add_column("")
    rows = {row.gamma: row for row in [*found.table, found.optimal]}
    if found.asked is not None:
        rows[found.asked.gamma] = found.asked
    for gamma, row in sorted(rows.items()):
        best, asked = row == found.optimal, row == found.asked
        table.add_row(
            str(gamma),
            f"{row.expected_tokens:.2f}",
            f"{row.walltime_factor:.2f}x",
            f"{row.operations_factor:.2f}x",
            ", ".join(["optimal"] * best + ["asked"] * asked),
            style="bold green" if best else "bold" if asked else None,
        )
    return table
