"""Table 3 of the paper for the pair that ships: alpha of a unigram, a bigram and the draft.

As there: the mean of sum min(p, q) over 10,000 tokens that the target wrote, at temperature 0 and
1. The tables are fitted to other texts of the target. Expected: unigram and bigram well below the
draft, all of them higher at temperature 0; none is (docs/paper_map.md).
`foretoken-lab report` measures the same for any recipe.

    python benchmarks/table3.py    # two minutes
"""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from figures import TEXTS
from foretoken.drafters.base import Drafter
from foretoken.drafters.ngram import NGramDrafter
from foretoken.sampling.distributions import SamplingParams
from foretoken.train.ngram import fit
from foretoken_lab.experiments.acceptance import alpha
from foretoken_lab.recipes.pairs import written

LENGTH, LIMIT = 250, 480  # tokens of a text; at most, for the pair's context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    tokens = parser.parse_args().tokens
    spec, prompts = foretoken.load(), list(TEXTS)
    sampled = SamplingParams(1.0, max_new_tokens=LENGTH)
    learned = [text for _, text in written(spec, prompts, 2 * tokens, sampled, 1000)]
    drafters: dict[str, Drafter] = {
        name: NGramDrafter(fit(learned, spec.target.vocab_size, order))
        for name, order in (("unigram", 1), ("bigram", 2))
    } | {"draft": spec.drafter}
    table = Table("T", *drafters, "tokens")
    rows: list[dict[str, Any]] = []
    greedy = SamplingParams(max_new_tokens=min(LIMIT, tokens // len(TEXTS)))
    for params in (greedy, sampled):
        texts = written(spec, prompts, tokens, params, 0)
        n = sum(len(text) for _, text in texts)
        alphas = {
            name: alpha(spec.target, drafter, texts, params.temperature).value
            for name, drafter in drafters.items()
        }
        rows.append({"temperature": params.temperature, "tokens": n, "alpha": alphas})
        figures = (f"{one:.3f}" for one in alphas.values())
        table.add_row(f"{params.temperature:g}", *figures, str(n))
    Console().print(table)
    print(machine.save("table3", {"prompts": TEXTS, "rows": rows}))


if __name__ == "__main__":
    main()
