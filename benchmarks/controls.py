"""What controls cost: the part of a step that is spent outside the models, by what a row asks for.

The models' passes are timed where they are called; the rest of a step is ours: guesses,
distributions, controls, the verdict. Cases alternate in one process, medians of all steps.

Expected: without controls at temperature 0 next to nothing; with a repetition penalty and top-p 0.9
at most 5 % of a step of the 0.4B pair (V = 32,000, gamma 4).

    python benchmarks/controls.py --target DIR --draft DIR2    # nothing else should run
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import foretoken
from foretoken import SamplingParams
from machine import save

PROMPTS = ("It was the first day of the", "The captain looked at", "There is no")
CASES = {
    "greedy": SamplingParams(),
    "greedy, repetition penalty": SamplingParams(repetition_penalty=1.2),
    "temperature 1": SamplingParams(1.0),
    "top-p 0.9": SamplingParams(1.0, top_p=0.9),
    "top-p 0.9, repetition penalty": SamplingParams(1.0, top_p=0.9, repetition_penalty=1.2),
    "top-p 0.9, repetition penalty, no repeated 3-grams, 5 logprobs": SamplingParams(
        1.0, top_p=0.9, repetition_penalty=1.2, no_repeat_ngram_size=3, logprobs=5
    ),
}


class Timed:
    """A model whose passes are added up."""

    def __init__(self, model: Any) -> None:
        self.seconds, self._score = 0.0, model.score
        model.score = self

    def __call__(self, blocks: Any, need: list[int]) -> Any:
        start = time.perf_counter()
        logits = self._score(blocks, need)
        self.seconds += time.perf_counter() - start
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--name", default="controls")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    spec = foretoken.load(options.target, options.draft)
    models = [Timed(spec.target), Timed(spec.drafter.model)]
    prompts = PROMPTS if spec.tokenizer else ([1, 2, 3, 4] * 16,)
    shares: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for round_ in range(options.rounds + 1):
        for name, params in CASES.items():
            for model in models:
                model.seconds = 0.0
            steps, seconds = 0, 0.0
            for prompt in prompts:
                sampling = replace(params, max_new_tokens=options.tokens)
                (completion,) = spec.generate(prompt, sampling, gamma=options.gamma, seed=round_)
                steps += len(completion.steps)
                parts = (
                    (s.draft_seconds, s.score_seconds, s.verify_seconds) for s in completion.steps
                )
                seconds += sum(map(sum, parts))
            inside = sum(model.seconds for model in models)
            if round_:  # the first round warms up
                shares[name].append((seconds / steps, (seconds - inside) / steps))
    figures = {name: figure(rows) for name, rows in shares.items()}
    for name, figure_ in figures.items():
        print(name, figure_)
    facts = {"V": spec.target.vocab_size, "gamma": options.gamma, "runtime": spec.target.runtime}
    print(save(options.name, facts | {"tokens": options.tokens, "cases": figures}))


def figure(rows: list[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds of a step and of its part outside the models, and the share of that."""
    step, outside = (median(1e3 * row[i] for row in rows) for i in (0, 1))
    return {"step": round(step, 2), "outside": round(outside, 2), "share": round(outside / step, 4)}


if __name__ == "__main__":
    main()
