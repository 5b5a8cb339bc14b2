"""The pair that ships against its own plain decoding, by gamma.

Expected before the first run: c about 0.15 (one layer against sixteen, plus what every call costs),
v(5) about 1.3, alpha about 0.6, so 1.3x to 1.6x.

    python benchmarks/default_pair.py            # four minutes; nothing else should run
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from foretoken.lab.bench.compare import Comparison, compare

PROMPTS = (
    "The old house stood at the end of the lane, and",
    "It was a cold morning in November when the letter came.",
    '"You cannot mean it," said the doctor, rising from his chair. "',
    "When the ship had passed the harbour mouth, the captain",
)
LAWS = ({"temperature": 0.0}, {"temperature": 1.0})
GAMMAS = (1, 2, 3, 4, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rule", default="block")
    arguments = parser.parse_args()
    spec = foretoken.load()
    table = Table("T", "gamma", "alpha", "c", "v", "predicted", "measured", "slowest prompt")
    rows = []
    for law in LAWS:
        for gamma in GAMMAS:
            row = _measure(spec, arguments, {**law, "gamma": gamma})
            rows.append({**law, "asked": gamma, **row})
            values = [row[name] for name in ("alpha", "c", "v", "predicted", "speedup", "slowest")]
            number = f"{row['gamma']}" if gamma is not None else f"auto ({row['mean_gamma']:.1f})"
            table.add_row(f"{law['temperature']:g}", number, *(f"{value:.2f}" for value in values))
    Console().print(table)
    print(machine.save(f"default-pair-{arguments.rule}", {"prompts": PROMPTS, "rows": rows}))


def _measure(spec: Any, arguments: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Medians over prompts; a prompt's own figures are medians over its repeats."""
    prompts: list[Comparison] = [
        compare(
            spec,
            prompt,
            arguments.repeats,
            max_new_tokens=arguments.tokens,
            rule=arguments.rule,
            **options,
        )
        for prompt in PROMPTS
    ]
    figures = [asdict(one) | {"speedup": one.speedup} for one in prompts]
    row = {name: median(figure[name] or 0.0 for figure in figures) for name in figures[0]}
    return row | {
        "gamma": prompts[0].gamma,
        "alpha": fmean(one.alpha or 0.0 for one in prompts),
        "slowest": min(one.speedup for one in prompts),
    }


if __name__ == "__main__":
    main()
