"""alpha of the pair that ships, or of another draft for its target, over the length of the text.

Expected: about 0.65 at temperature 1, a little more when greedy; less where the text is longer
than what the draft was trained on.

    python benchmarks/alpha.py [DRAFT ...]    # a minute each
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from default_pair import PROMPTS

TOKENS, SPAN, GAMMA, TEXTS = 480, 160, 3, 2  # tokens of a text, of a column; texts a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafts", nargs="*", default=[None])
    spans = [f"{at}-{at + SPAN}" for at in range(0, TOKENS, SPAN)]
    table = Table("draft", "T", *spans)
    rows: list[dict[str, Any]] = []
    for draft in parser.parse_args().drafts:
        for temperature in (0.0, 1.0):
            alphas = _alphas(foretoken.load(None, draft), temperature)
            rows.append({"draft": draft or "shipped", "temperature": temperature, "alpha": alphas})
            figures = [f"{alpha:.3f}" for alpha in alphas]
            table.add_row(draft or "shipped", f"{temperature:g}", *figures)
    Console().print(table)
    print(machine.save("alpha", {"span": SPAN, "gamma": GAMMA, "rows": rows}))


def _alphas(spec: foretoken.Speculator, temperature: float) -> list[float]:
    """Mean of sum min(p, q) over the guesses judged in each span of new tokens (Cor 3.6)."""
    by_span: list[list[float]] = [[] for _ in range(TOKENS // SPAN)]
    options = {"temperature": temperature, "gamma": GAMMA, "max_new_tokens": TOKENS}
    for text in spec.generate(list(PROMPTS) * TEXTS, **options):
        place = 0
        for step in text.steps:
            by_span[place // SPAN] += step.overlaps
            place += len(step.kept)
    return [fmean(overlaps) for overlaps in by_span]


if __name__ == "__main__":
    main()
