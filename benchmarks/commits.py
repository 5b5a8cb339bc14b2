"""Two checkouts of this project against each other, turn by turn: is a change of the code felt?

Both run under this interpreter, so with the same libraries; only the source differs. Every turn is
a process of its own: an import of the package, `foretoken --help`, or `foretoken bench` with the
arguments behind `--`. Ratios are NEW over OLD: above 1 is slower.

Expected of a change that only moves code: medians of 0.97 to 1.03, 1 within the quartiles.

    python benchmarks/commits.py NAME OLD NEW -- --prompts FILE    # nothing else should run
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from tempfile import gettempdir
from typing import Any

from machine import save

STARTS = {"import": ["-c", "import foretoken"], "help": ["-m", "foretoken", "--help"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--starts", type=int, default=15)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, bench = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    old, new = (checkout.resolve() for checkout in arguments.checkouts)
    seconds: dict[str, dict[Path, list[float]]] = {}

    def note(name: str, checkout: Path, value: float) -> None:
        seconds.setdefault(name, {}).setdefault(checkout, []).append(value)

    for turn in range(arguments.starts + 1):
        for checkout in (old, new) if turn % 2 else (new, old):
            for what, command in STARTS.items():
                start = time.perf_counter()
                run(checkout, command)
                if turn:  # the first one compiles the bytecode
                    note(what, checkout, time.perf_counter() - start)
    for turn in range(arguments.turns):
        for checkout in (old, new) if turn % 2 else (new, old):
            document = json.loads(run(checkout, ["-m", "foretoken", "bench", *bench, "--json"]))
            for figure in document["figures"]:
                per_token = figure["seconds_per_token"]["median"]
                note(f"gamma {figure['gamma']}, a token", checkout, per_token)
            print(f"turn {turn + 1} of {arguments.turns}: {checkout.name}", file=sys.stderr)
    rows = {what: compared(times[old], times[new]) for what, times in seconds.items()}
    for what, row in rows.items():
        print(what, row)
    commits = [
        output(["git", "rev-parse", "HEAD"], cwd=checkout).strip() for checkout in (old, new)
    ]
    print(save(arguments.name, {"commits": commits, "bench": bench, "times": rows}))


def run(checkout: Path, command: list[str]) -> str:
    """What Python prints under a checkout's source, with a cache of its own: conversions depend on
    the source, and would else be made anew at every turn."""
    cache = Path(gettempdir()) / f"commits-{checkout.name}"
    cache.mkdir(mode=0o700, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "XDG_CACHE_HOME": str(cache),
    }
    return output([sys.executable, *command], env=environment)


def output(command: list[str], **options: Any) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def compared(old: list[float], new: list[float]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "old": round(median(old), 6),
        "new": round(median(new), 6),
        "ratio": round(median(ratios), 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "turns": len(ratios),
    }


if __name__ == "__main__":
    main()
