"""`theory`: the paper's section 3 for one alpha and c, as a table over gamma.

Without models or clocks: `foretoken.theory` computes what is printed. The optimum is also searched
beyond the table, so that a short table does not hide it.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Option

from foretoken.cli import option


def theory(
    alpha: Annotated[float, Option("--alpha", help="How likely a guess is kept, in [0, 1].")],
    c: Annotated[float, Option("--c", help="Time of a drafter's run over that of a target's.")],
    c_hat: Annotated[
        float | None, Option("--c-hat", help="The same ratio in operations; left out: c.")
    ] = None,
    max_gamma: Annotated[int, Option("--max-gamma", help="The last gamma of the table.")] = 16,
    tokens: Annotated[
        int | None, Option("--tokens", help="How many are generated; left out: very many.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Predict the gain of speculation from alpha and c, and the best gamma."""
    prediction = _predict(alpha, c, c if c_hat is None else c_hat, max_gamma, tokens)
    if as_json:
        print(json.dumps(prediction, allow_nan=False))
    else:
        _show(prediction, Console())


def _predict(
    alpha: float, c: float, c_hat: float, max_gamma: int, tokens: int | None
) -> dict[str, Any]:
    """All that is printed. `oracle_factor`: None where there is no bound, at alpha 1 and c 0."""
    from foretoken import argument_checks  # late: NumPy, which `--help` does without
    from foretoken import theory as section3
    from reproduction import theory as paper

    argument_checks.check_count("max_gamma", max_gamma)

    def row(gamma: int) -> dict[str, Any]:
        return {
            "gamma": gamma,
            "expected_tokens": section3.expected_tokens(alpha, gamma),
            "walltime_factor": section3.walltime_factor(alpha, gamma, c, tokens=tokens),
            "operations_factor": paper.operations_factor(alpha, gamma, c_hat),
        }

    oracle = paper.oracle_factor(alpha, c)
    last = max(max_gamma, section3.MAX_GAMMA)
    return {
        "alpha": alpha,
        "c": c,
        "c_hat": c_hat,
        "tokens": tokens,
        "improves": paper.improves(alpha, c),
        "guaranteed_factor": section3.walltime_factor(alpha, 1, c),
        "oracle_factor": oracle if math.isfinite(oracle) else None,
        "optimal": row(section3.optimal_gamma(alpha, c, max_gamma=last, tokens=tokens)),
        "searched": last,
        "table": [row(gamma) for gamma in range(max_gamma + 1)],
    }


def _show(p: dict[str, Any], console: Console) -> None:
    best, oracle = p["optimal"], p["oracle_factor"]
    console.print(f"optimal gamma {best['gamma']}: {best['walltime_factor']:.2f}x", style="bold")
    if best["gamma"] == p["searched"]:
        console.print("that is the last gamma looked at; a larger --max-gamma looks further")
    if p["improves"]:
        least = f"gamma 1 alone gains {p['guaranteed_factor']:.2f}x"
        console.print(f"alpha {p['alpha']:g} > c {p['c']:g}: speculation can pay, {least}")
    else:
        console.print(f"alpha {p['alpha']:g} <= c {p['c']:g}: no gamma pays, decode plainly")
    if oracle is None:
        console.print("oracle bound unbounded")
    else:
        more = oracle / best["walltime_factor"] - 1
        console.print(f"oracle bound {oracle:.2f}x: {more:.0%} more, were gamma ideal in every run")
    time = "walltime" if p["tokens"] is None else f"walltime, {p['tokens']} tokens"
    table = Table()
    for heading in ("gamma", "tokens per run", time, "operations"):
        table.add_column(heading, justify="right")
    rows = {row["gamma"]: row for row in [*p["table"], best]}
    for gamma, row in sorted(rows.items()):
        table.add_row(
            str(gamma),
            f"{row['expected_tokens']:.2f}",
            f"{row['walltime_factor']:.2f}x",
            f"{row['operations_factor']:.2f}x",
            style="bold green" if row == best else None,
        )
    console.print(table)
