"""Tables from benchmarks/results/NAME/bench.json, with quartiles and every gamma.

python benchmarks/tables.py NAME...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
HEAD = "| | ms a token (quartiles) | first token, ms | tokens a call | speed-up | of the formula |"

RATES = "| at once | | tokens/s (quartiles) | over plain | rows a call | padding |"


def main() -> None:
    for name in sys.argv[1:]:
        show(name, json.loads((RESULTS / name / "bench.json").read_text()))


def show(name: str, bench: dict[str, Any]) -> None:
    """Print a race's tables."""
    batched = "batches" in bench
    print(f"**{name}**, {bench['date']}\n\n{RATES if batched else HEAD}\n|---|---|---|---|---|---|")
    for at in bench.get("batches", [bench]):
        for figure in at["figures"]:
            print(rates(at["batch"], figure) if batched else line(figure))
        if batched:
            print("".join(map(against, at.get("duels", []))))
    if not batched:
        if over := bench["automatic_over_best"]:
            print(f"\nAutomatic gamma: {over:.2f} of the best fixed one.", end="")
        print("".join(map(against, bench["duels"])), end="\n\n")


def line(figure: dict[str, Any]) -> str:
    times, first = figure["seconds_per_token"], figure["first_seconds"]["median"]
    spread = f"{1e3 * times['q1']:.2f}-{1e3 * times['q3']:.2f}"
    peer = "" if figure["name"] == "foretoken" else f"{figure['name']}, "
    calls, formula = figure["tokens_per_call"], figure["measured_over_predicted"]
    cells = [
        f"{peer}{figure['variant']}",
        f"{1e3 * times['median']:.2f} ({spread})",
        f"{1e3 * first:.0f}",
        f"{calls:.2f}" if calls else "",
        f"{figure['speedup']:.2f}x",
        f"{formula:.2f}" if formula else "",
    ]
    return f"| {' | '.join(cells)} |"


def rates(texts: int, figure: dict[str, Any]) -> str:
    """A line of a table of texts at once."""
    rate, shares = figure["tokens_per_second"], (figure["occupancy"], figure["padding"])
    peer = "" if figure["name"] == "foretoken" else f"{figure['name']}, "
    cells = [
        str(texts),
        f"{peer}{figure['variant']}",
        f"{rate['median']:.1f} ({rate['q1']:.1f}-{rate['q3']:.1f})",
        f"{figure['speedup']:.2f}x",
        *("" if share is None else f"{share:.0%}" for share in shares),
    ]
    return f"| {' | '.join(cells)} |"


def against(duel: dict[str, Any]) -> str:
    return (
        f" Against {duel['name']}: plain {duel['plain']:.2f}x, each at its best gamma "
        f"({duel['gamma']}; {duel['peer_gamma']}) {duel['best']:.2f}x."
    )


if __name__ == "__main__":
    main()
