"""Speculative against plain decoding of one prompt, side by side, and what section 3 predicts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from foretoken import theory
from foretoken.gamma import Costs, costs
from foretoken.request import Completion
from foretoken.speculator import Prompt, Speculator


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over alternating runs; times are of decoding, without the prefill."""

    plain_seconds_per_token: float
    seconds_per_token: float
    gamma: int
    alpha: float | None
    c: float | None
    v: float | None  # a target pass over gamma + 1 tokens against one over one
    paper: float | None  # Theorem 3.8 with the measured alpha and c, which takes v as 1
    predicted: float | None  # the same with the measured v, for this number of tokens

    @property
    def speedup(self) -> float:
        return self.plain_seconds_per_token / self.seconds_per_token


def compare(spec: Speculator, prompt: Prompt, repeats: int = 3, **options: Any) -> Comparison:
    """Generate `repeats` times plainly and speculatively, alternating; options are `generate`'s.

    Raises KeyboardInterrupt where one was interrupted: times of parts say nothing.
    """
    plain: list[Completion] = []
    fast: list[Completion] = []
    _run(spec, prompt, options, max_new_tokens=4)  # warm up: first calls are slow
    for _ in range(repeats):
        plain.append(_run(spec, prompt, options, gamma=0))
        fast.append(_run(spec, prompt, options))
    gamma = max((step.gamma for c in fast for step in c.steps), default=0)
    known = costs(
        [step for c in plain for step in c.steps], [step for c in fast for step in c.steps]
    )
    tokens = len(fast[0].tokens)
    return Comparison(
        plain_seconds_per_token=median(map(_per_token, plain)),
        seconds_per_token=median(map(_per_token, fast)),
        gamma=gamma,
        alpha=known and known.alpha,
        c=known and known.c,
        v=known and known.v(gamma + 1),
        paper=known and theory.walltime_factor(known.alpha, gamma, known.c),
        predicted=known and _predict(known, gamma, tokens),
    )


def _run(spec: Speculator, prompt: Prompt, options: dict[str, Any], **changed: Any) -> Completion:
    (done,) = spec.generate(prompt, **(options | changed))
    if done.finish_reason == "interrupted":
        raise KeyboardInterrupt
    return done


def _per_token(completion: Completion) -> float:
    stats = completion.stats
    return (stats.seconds - stats.prefill_seconds) / len(completion.tokens)


def _predict(known: Costs, gamma: int, tokens: int) -> float:
    return theory.walltime_factor(known.alpha, gamma, known.c, v=known.v, tokens=tokens)
