"""Tokens a target call by rule and lenience, on the pair that ships, without a clock.

Expected: block above Algorithm 1, token matching and single-try rejection hardly above plain
decoding; lenience keeps more (the alpha measured is then alpha_l), and the law departs from p.

    python benchmarks/acceptance.py    # a minute
"""

from __future__ import annotations

from itertools import product
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
from default_pair import PROMPTS

RULES = ("block", "speculative", "match", "rejection")
LENIENCES = (1.0, 0.5, 0.3, 0.1)
HOW: dict[str, Any] = {"gamma": 4, "max_new_tokens": 128}
SEEDS = range(2)


def main() -> None:
    spec = foretoken.load()
    table = Table("temperature", "rule", "lenience", "alpha", "bias", "tokens a call")
    cases = [(1.0, rule, 1.0) for rule in RULES]
    cases += [(1.0, "speculative", lenience) for lenience in LENIENCES[1:]]
    cases += [(0.0, "any", lenience) for lenience in LENIENCES]
    for temperature, rule, lenience in cases:
        options = {"rule": "block" if rule == "any" else rule, "lenience": lenience}
        texts = [
            spec.generate(prompt, temperature=temperature, seed=seed, **options, **HOW)[0].stats
            for seed, prompt in product(SEEDS, PROMPTS)
        ]
        alpha = fmean(stats.alpha or 0.0 for stats in texts)
        calls = fmean(stats.tokens_per_call or 0.0 for stats in texts)
        bias = fmean(stats.bias for stats in texts)
        figures = f"{alpha:.3f}", f"{bias:.3f}", f"{calls:.2f}"
        table.add_row(f"{temperature:g}", rule, f"{lenience:g}", *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
