"""Cascades and mixtures on the pair that ships, against its draft alone.

The middle model is the draft; lookup or a trigram fitted to the target's samples guesses for it. A
guess then costs (g c + v(g+1)) (1 - a) / (1 - a^(g+1)) runs of the draft, a being the inner
acceptance rate, c the inner drafter's share of a run. Expected before the first run: the draft has
one layer, so that a run is mostly the call and a law over 4096 tokens for every guess, and v(4)
with its verdict is near 2; a is about 0.3, which makes 1.4 tokens a run: 0.7x to 0.9x of the draft
alone. A mixture saves runs of the draft at the later guesses: near 1.0x.

    python benchmarks/cascades.py    # five minutes; nothing else should run
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
from foretoken import CascadeDrafter, LMDrafter, LookupDrafter, MixtureDrafter, NGram, NGramDrafter
from foretoken.drafters.base import Drafter
from foretoken.speculator import Speculator
from foretoken.train.ngram import fit
from foretoken.train.samples import samples
from foretoken_lab.turns import Runs, in_turn, seconds_per_token, tokens_per_call, way

TEMPERATURES, GAMMAS, INNER = (0.0, 1.0), (2, 4), 3
ALONE = "draft"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--samples", type=int, default=20_000, help="that the trigram is fitted to")
    arguments = parser.parse_args()
    spec = foretoken.load()
    texts = samples(spec, arguments.samples, prompts=None, temperature=1.0, seed=0)
    pairs = {
        name: Speculator(spec.target, drafter, spec.tokenizer, spec.ends)
        for name, drafter in drafters(fit(texts, spec.target.vocab_size, 3)).items()
    }
    rows = [
        {"temperature": T, "gamma": gamma, "draft": name, **figures}
        for T in TEMPERATURES
        for gamma in GAMMAS
        for name, figures in measure(pairs, arguments, temperature=T, gamma=gamma).items()
    ]
    table = Table("T", "gamma", "draft", "alpha", "runs a guess", "tokens a call", "ms", "times")
    for row in rows:
        numbers = (row[name] for name in ("alpha", "runs", "tokens", "ms", "times"))
        cells = (f"{value:.2f}" for value in numbers)
        table.add_row(f"{row['temperature']:g}", str(row["gamma"]), row["draft"], *cells)
    Console().print(table)
    settings = vars(arguments) | {"prompts": PROMPTS, "inner_gamma": INNER}
    print(machine.save("cascades", settings | {"rows": rows}))


def drafters(table: NGram) -> dict[str, Drafter]:
    """Each with models of its own."""

    def draft() -> LMDrafter:
        drafter = foretoken.load().drafter
        assert isinstance(drafter, LMDrafter)
        return drafter

    return {
        ALONE: draft(),
        "draft < lookup": CascadeDrafter(draft().model, LookupDrafter(), INNER),
        "draft < trigram": CascadeDrafter(draft().model, NGramDrafter(table), INNER),
        "draft, then trigram": MixtureDrafter([(draft(), 1), (NGramDrafter(table), None)]),
        "trigram": NGramDrafter(table),
        "lookup": LookupDrafter(),
    }


def measure(
    pairs: dict[str, Speculator], arguments: argparse.Namespace, **options: Any
) -> dict[str, dict[str, float]]:
    """Figures of every draft, runs alternating; `times` is its speed over the draft's alone."""
    ways = {name: way(spec, **options) for name, spec in pairs.items()}
    completions = in_turn(ways, PROMPTS, repeats=arguments.repeats, tokens=arguments.tokens)
    base = seconds_per_token(completions[ALONE])
    return {name: _figures(runs, base) for name, runs in completions.items()}


def _figures(runs: Runs, base: float) -> dict[str, float]:
    stats = [text.stats for texts in runs for text in texts]
    seconds = seconds_per_token(runs)
    drafted = sum(s.drafted for s in stats)
    return {
        "alpha": fmean([s.alpha for s in stats if s.alpha is not None] or [0.0]),
        "runs": sum(s.draft_calls for s in stats) / drafted if drafted else 0.0,
        "tokens": tokens_per_call(runs),
        "ms": seconds * 1e3,
        "times": base / seconds,
    }


if __name__ == "__main__":
    main()
