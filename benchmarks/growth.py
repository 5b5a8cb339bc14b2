"""What a step costs as the work grows: context, vocabulary, rows, parameters. Random models, so
times only.

Expected: draft, verify and rest do not grow with the context; verify grows with the vocabulary in
proportion; the target's pass grows with parameters in proportion (bytes over bandwidth) and with
the context by its keys and values.

    python benchmarks/growth.py --folder DIR     # makes the models in DIR, some GB, once
    python benchmarks/growth.py --folder DIR --sweeps rows vocabulary --dtype int8
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from foretoken import Speculator, load
from machine import save

GAMMA, STEPS, PARTS = 4, 9, ("draft", "score", "verify", "rest")
SWEEPS = ["context", "rows", "vocabulary", "parameters"]
PAIRS = Path(__file__).parent / "pairs.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--largest", default="1B", help="the largest model")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=SWEEPS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def note(name: str, value: Any, spec: Speculator, **options: Any) -> None:
        for temperature in (0.0, 1.0):
            parts = step_parts(spec, temperature=temperature, **options)
            rows.append({"what": name, "value": value, "temperature": temperature, **parts})
            print(rows[-1], file=sys.stderr, flush=True)

    def pair(size: str, vocabulary: int) -> Speculator:
        place = made(arguments.folder, size, vocabulary)
        spec = load(
            str(place / "target"),
            str(place / "draft"),
            dtype=arguments.dtype,
            runtime=arguments.runtime,
        )
        runtimes.add(spec.target.runtime)
        return spec

    runtimes = set[str]()
    small = pair("30M", 32000)
    if "context" in arguments.sweeps:
        for context in (64, 256, 1024, 2048, 4096):
            note("context", context, small, context=context - STEPS * (GAMMA + 1) - 1)
    if "rows" in arguments.sweeps:
        for count in (1, 2, 4, 8, 16, 32):
            note("rows", count, small, context=64, count=count)
    if "vocabulary" in arguments.sweeps:
        for vocabulary in (4096, 32000, 128000, 256000):
            large = pair("400M", vocabulary)
            note("vocabulary", vocabulary, large, context=64)
    if "parameters" in arguments.sweeps:
        for size in ("10M", "100M", "400M", arguments.largest):
            note("parameters", size, pair(size, 32000), context=64)
    document = {"gamma": GAMMA, "steps": STEPS, "dtype": arguments.dtype, "rows": rows}
    name = f"growth-{arguments.dtype}"
    print(save(name, document | {"runtimes": sorted(runtimes)}), file=sys.stderr)
    show(rows)


def made(folder: Path, params: str, vocabulary: int) -> Path:
    """A folder with a random pair, made where it is missing."""
    place = folder / f"{params}-{vocabulary}"
    if not (place / "target" / "config.json").exists():
        draft = max(9e6, 270 * vocabulary)  # its tables alone are 256 numbers an id
        sizes = ["--params", params, "--draft-params", f"{draft / 1e6:g}M"]
        sizes += ["--vocab", str(vocabulary), "--context", "4096"]
        subprocess.run([sys.executable, PAIRS, "random", place, *sizes], check=True)
    return place


def step_parts(
    spec: Speculator, *, context: int, count: int = 1, temperature: float
) -> dict[str, float]:
    """Milliseconds of a step's parts, medians over steps, all rows at about `context` tokens."""
    prompt = [1 + i % 1000 for i in range(max(8, context))]
    most = STEPS * (GAMMA + 1)
    options: dict[str, Any] = {"max_new_tokens": most, "gamma": GAMMA, "temperature": temperature}
    for _ in range(2):  # the first warms up
        completions = spec.generate([prompt] * count, **options)
    first = completions[0]
    steady = first.steady
    full = [step for step in steady.steps if step.drafted == GAMMA]
    parts = {
        name: 1e3 * median(getattr(step, f"{name}_seconds") for step in full) for name in PARTS[:-1]
    }
    seconds = sum(s.draft_seconds + s.score_seconds + s.verify_seconds for s in steady.steps)
    rest = (steady.seconds - seconds) / len(steady.steps)
    return parts | {"rest": 1e3 * rest}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("", "", "T", *(f"{name} ms" for name in PARTS))
    for row in rows:
        figures = (f"{row[name]:.2f}" for name in PARTS)
        table.add_row(row["what"], str(row["value"]), f"{row['temperature']:g}", *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
