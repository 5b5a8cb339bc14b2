"""Table 3 of the paper for the pair that ships: alpha of a unigram, a bigram and the draft.

As there: the mean of sum min(p, q) over 10,000 tokens that the target wrote, at temperature 0 and
1. The tables are fitted to other texts of the target. Expected: unigram and bigram well below the
draft, all of them higher at temperature 0. The latter did not come out (docs/paper_map.md).

    python benchmarks/table3.py    # two minutes
"""

from __future__ import annotations

import argparse
from itertools import count
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

import foretoken
import machine
from figures import TEXTS
from foretoken.drafters.base import Drafter
from foretoken.drafters.ngram import NGramDrafter
from foretoken.lab.agreement import overlaps
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.train.ngram import fit

LENGTH, LIMIT = 250, 480  # tokens of a text; at most, for the pair's context
Written = tuple[Request, list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000)
    tokens = parser.parse_args().tokens
    spec = foretoken.load()
    learned = [text for _, text in written(spec, 2 * tokens, 1.0, first=1000)]
    drafters: dict[str, Drafter] = {
        name: NGramDrafter(fit(learned, spec.target.vocab_size, order))
        for name, order in (("unigram", 1), ("bigram", 2))
    } | {"draft": spec.drafter}
    table = Table("T", *drafters, "tokens")
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        texts = written(spec, tokens, temperature, first=0)
        n = sum(len(text) for _, text in texts)
        alphas = {
            name: alpha(spec, drafter, texts, temperature) for name, drafter in drafters.items()
        }
        rows.append({"temperature": temperature, "tokens": n, "alpha": alphas})
        table.add_row(f"{temperature:g}", *(f"{one:.3f}" for one in alphas.values()), str(n))
    Console().print(table)
    print(machine.save("table3", {"prompts": TEXTS, "rows": rows}))


def written(spec: foretoken.Speculator, n: int, temperature: float, first: int) -> list[Written]:
    """About n tokens of the target's own, prompt by prompt with new seeds; a prompt has but one
    greedy text."""
    length = LENGTH if temperature else min(LIMIT, n // len(TEXTS))
    way: dict[str, Any] = {"max_new_tokens": length, "temperature": temperature, "gamma": 3}
    texts: list[Written] = []
    for seed in count(first):
        requests = spec.requests(list(TEXTS), SamplingParams(max_new_tokens=length), seed)
        done = spec.generate(list(TEXTS), seed=seed, **way)
        texts += [(r, one.tokens) for r, one in zip(requests, done, strict=True)]
        if sum(len(text) for _, text in texts) >= n or temperature == 0:
            return texts
    raise AssertionError


def alpha(
    spec: foretoken.Speculator, drafter: Drafter, texts: list[Written], temperature: float
) -> float:
    """Corollary 3.6 on the target's own texts."""
    params, betas = SamplingParams(temperature), []
    for request, text in texts:
        betas += overlaps(spec.target, drafter, request, text, params)
    return fmean(beta or 0.0 for beta in betas)


if __name__ == "__main__":
    main()
