"""alpha of the pair that ships, of other drafts for its target, or of another pair, over the length
of the text: at temperature 0 and 1, behind each of the 40 prompts of recipes/prompts/novels.txt.

Expected: about 0.68 at temperature 1, a little more when greedy, as long as the text is no longer
than what the draft was trained on.

    python benchmarks/alpha.py [DRAFT ...] [--target TARGET]    # two minutes each
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from foretoken.lab.estimate import Estimate, ratio

PROMPTS = Path(__file__).parents[1] / "recipes" / "prompts" / "novels.txt"
TOKENS, SPAN, GAMMA = 480, 160, 3  # tokens of a text, of a column


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafts", nargs="*", default=[None])
    parser.add_argument("--target", help="left out: the one that ships")
    arguments = parser.parse_args()
    spans = [f"{at}-{at + SPAN}" for at in range(0, TOKENS, SPAN)]
    table = Table("draft", "T", *spans)
    rows: list[dict[str, Any]] = []
    for draft in arguments.drafts:
        for temperature in (0.0, 1.0):
            alphas = _alphas(foretoken.load(arguments.target, draft), temperature)
            names = {"target": arguments.target or "shipped", "draft": draft or "shipped"}
            figures = [asdict(alpha) for alpha in alphas]
            rows.append({**names, "temperature": temperature, "alpha": figures})
            cells = [f"{alpha.value:.3f} ± {alpha.error:.3f}" for alpha in alphas]
            table.add_row(draft or "shipped", f"{temperature:g}", *cells)
    Console().print(table)
    print(machine.save("alpha", {"span": SPAN, "gamma": GAMMA, "rows": rows}))


def _alphas(spec: foretoken.Speculator, temperature: float) -> list[Estimate]:
    """Mean of sum min(p, q) over the guesses judged in each span of new tokens (Cor 3.6), with an
    interval over texts."""
    spans: list[list[list[float]]] = [[] for _ in range(TOKENS // SPAN)]
    options = {"temperature": temperature, "gamma": GAMMA, "max_new_tokens": TOKENS}
    for text in spec.generate(PROMPTS.read_text().splitlines(), **options):
        for span in spans:
            span.append([])
        place = 0
        for step in text.steps:
            spans[place // SPAN][-1] += step.overlaps
            place += len(step.kept)
    alphas = [ratio([*map(sum, span)], [*map(len, span)], 0, 1) for span in spans]
    return [alpha for alpha in alphas if alpha is not None]


if __name__ == "__main__":
    main()
