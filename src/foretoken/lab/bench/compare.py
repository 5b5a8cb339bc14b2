"""Speculative against plain decoding of one prompt, side by side, and what section 3 predicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from foretoken import theory
from foretoken.costing import contention
from foretoken.costing.costs import of
from foretoken.lab.uninterrupted import uninterrupted
from foretoken.records import StepRecord
from foretoken.request import Completion
from foretoken.speculator import Prompt, Speculator

FEW = 8  # guesses of all runs: from fewer neither alpha nor what they cost is known


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over alternating runs; times are of decoding, without the prefill."""

    plain_seconds_per_token: float
    seconds_per_token: float
    gamma: int | None  # None: automatic
    mean_gamma: float  # guesses made in a step
    silent: float  # share of the steps in which none was made
    # What section 3 makes of the measured alpha, c and v; None where fewer than FEW were made
    alpha: float | None = None
    c: float | None = None
    v: float | None = None  # a target pass over the longest block against one over one token
    paper: float | None = None  # Theorem 3.8 for the guesses made; it takes v as 1
    predicted: float | None = None  # the same with the measured v
    others: float | None = None  # share of the processors that other processes took

    @property
    def speedup(self) -> float:
        return self.plain_seconds_per_token / self.seconds_per_token


def compare(spec: Speculator, prompt: Prompt, repeats: int = 3, **options: Any) -> Comparison:
    """Generate `repeats` times plainly and speculatively, alternating; options are `generate`'s.

    Raises KeyboardInterrupt where one was interrupted.
    """
    plain: list[Completion] = []
    fast: list[Completion] = []
    few = max(4, options.get("min_new_tokens") or 0)
    _run(spec, prompt, options, max_new_tokens=few)  # warm up: first calls are slow
    reading = contention.read()
    for _ in range(repeats):
        plain.append(_run(spec, prompt, options, gamma=0))
        fast.append(_run(spec, prompt, options))
    span = contention.taken(reading)
    steps = [step for completion in fast for step in completion.steady.steps]
    comparison = Comparison(
        plain_seconds_per_token=median(map(_per_token, plain)),
        seconds_per_token=median(map(_per_token, fast)),
        gamma=options.get("gamma"),
        mean_gamma=fmean(step.drafted for step in steps),
        silent=fmean(not step.drafted for step in steps),
        others=contention.share([span]),
    )
    plain_steps = [step for completion in plain for step in completion.steady.steps]
    if sum(step.drafted for step in steps) < FEW:
        return comparison
    overlaps = [
        overlap for completion in fast for step in completion.steps for overlap in step.overlaps
    ]
    return _predicted(comparison, overlaps, steps, plain_steps)


def _predicted(
    comparison: Comparison, overlaps: list[float], steps: list[StepRecord], plain: list[StepRecord]
) -> Comparison:
    """With the predictions of section 3 for the guesses that the steps made."""
    costs, alpha = of([*plain, *steps]), min(1.0, fmean(overlaps))
    made = Counter(step.drafted for step in steps)
    return replace(
        comparison,
        alpha=alpha,
        c=costs.c,
        v=costs.v(max(made) + 1),
        paper=theory.steps_factor(alpha, made, costs.c),
        predicted=theory.steps_factor(alpha, made, costs.c, v=costs.v),
    )


def _run(spec: Speculator, prompt: Prompt, options: dict[str, Any], **changed: Any) -> Completion:
    (completion,) = uninterrupted(spec.generate(prompt, **(options | changed)))
    return completion


def _per_token(completion: Completion) -> float:
    return completion.steady.seconds / completion.steady.tokens
