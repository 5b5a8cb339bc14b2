"""What blockwise heads keep on the pair that ships, beside its draft, without a clock.

Expected: with one guess a call nearly what the small model keeps, with more soon no more: later
heads do not see the guesses before theirs.

    python benchmarks/heads.py FILE    # of `foretoken train heads`; two minutes
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import fmean

from rich.console import Console
from rich.table import Table

import foretoken
from default_pair import PROMPTS

GAMMAS, TOKENS, SEEDS = (1, 2, 4), 128, range(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    table = Table("draft", "temperature", *(f"alpha, tokens a call at gamma {g}" for g in GAMMAS))
    for draft in (f"heads:{parser.parse_args().file}", None):
        spec = foretoken.load(None, draft)
        for temperature in (0.0, 1.0):
            figures = [kept(spec, temperature, gamma) for gamma in GAMMAS]
            table.add_row("shipped" if draft is None else "heads", f"{temperature:g}", *figures)
    Console().print(table)


def kept(spec: foretoken.Speculator, temperature: float, gamma: int) -> str:
    options = {"temperature": temperature, "gamma": gamma, "max_new_tokens": TOKENS}
    texts = [
        spec.generate(prompt, seed=seed, **options)[0].stats
        for seed, prompt in product(SEEDS, PROMPTS)
    ]
    alpha = fmean(stats.alpha or 0.0 for stats in texts)
    return f"{alpha:.3f}, {fmean(stats.tokens_per_call or 0.0 for stats in texts):.2f}"


if __name__ == "__main__":
    main()
