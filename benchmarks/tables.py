"""The tables of docs/performance.md from benchmarks/results/NAME/bench.json.

python benchmarks/tables.py NAME...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
HEAD = "| | ms a token (quartiles) | first token, ms | tokens a call | speed-up | of the formula |"


def main() -> None:
    for name in sys.argv[1:]:
        bench = json.loads((RESULTS / name / "bench.json").read_text())
        print(f"**{name}**, {bench['date']}\n\n{HEAD}\n|---|---|---|---|---|---|")
        for figure in bench["figures"]:
            print(line(figure))
        print(
            f"\nAutomatic gamma: {bench['automatic_over_best']:.2f} of the best fixed one.", end=""
        )
        print("".join(map(against, bench["duels"])), end="\n\n")


def line(figure: dict[str, Any]) -> str:
    times, first = figure["seconds_per_token"], figure["first_seconds"]["median"]
    spread = f"{1e3 * times['q1']:.2f}-{1e3 * times['q3']:.2f}"
    who = "" if figure["name"] == "foretoken" else f"{figure['name']}, "
    calls, formula = figure["tokens_per_call"], figure["measured_over_predicted"]
    cells = [
        f"{who}{figure['variant']}",
        f"{1e3 * times['median']:.2f} ({spread})",
        f"{1e3 * first:.0f}",
        f"{calls:.2f}" if calls else "",
        f"{figure['speedup']:.2f}x",
        f"{formula:.2f}" if formula else "",
    ]
    return f"| {' | '.join(cells)} |"


def against(duel: dict[str, Any]) -> str:
    return (
        f" Against {duel['name']}: plain {duel['plain']:.2f}x, each at its best gamma "
        f"({duel['gamma']}; {duel['peer_gamma']}) {duel['best']:.2f}x."
    )


if __name__ == "__main__":
    main()
