"""Speculative against plain decoding of one prompt, side by side, and what section 3 predicts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from foretoken import theory
from foretoken.costs import of
from foretoken.gamma import MAX_GAMMA
from foretoken.request import Completion, StepRecord
from foretoken.speculator import Prompt, Speculator


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over alternating runs; times are of decoding, without the prefill."""

    plain_seconds_per_token: float
    seconds_per_token: float
    gamma: int | None  # None: automatic
    mean_gamma: float  # guesses asked for in a step
    formula_gamma: int | None  # what v, paper and predicted are for: gamma, or the best fixed one
    alpha: float | None
    c: float | None
    v: float | None  # a target pass over formula_gamma + 1 tokens against one over one
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
    steps = [step for c in fast for step in c.steps]
    return Comparison(
        plain_seconds_per_token=median(map(_per_token, plain)),
        seconds_per_token=median(map(_per_token, fast)),
        gamma=options.get("gamma"),
        mean_gamma=fmean(step.gamma for step in steps),
        **_predictions([step for c in plain for step in c.steps], steps, options, fast[0]),
    )


def _predictions(
    plain: list[StepRecord], steps: list[StepRecord], options: dict[str, Any], done: Completion
) -> dict[str, Any]:
    """What section 3 makes of the measured alpha, c and v; None where nothing was drafted."""
    overlaps = [overlap for step in steps for overlap in step.overlaps]
    if not overlaps:
        return dict.fromkeys(("formula_gamma", "alpha", "c", "v", "paper", "predicted"))
    known, alpha, tokens = of([*plain, *steps]), fmean(overlaps), len(done.tokens)
    gamma = options.get("gamma")
    if gamma is None:
        limits: dict[str, Any] = {"max_gamma": MAX_GAMMA, "tokens": tokens}
        gamma = theory.optimal_gamma(alpha, known.c, v=known.v, **limits)
    return {
        "formula_gamma": gamma,
        "alpha": alpha,
        "c": known.c,
        "v": known.v(gamma + 1),
        "paper": theory.walltime_factor(alpha, gamma, known.c),
        "predicted": theory.walltime_factor(alpha, gamma, known.c, v=known.v, tokens=tokens),
    }


def _run(spec: Speculator, prompt: Prompt, options: dict[str, Any], **changed: Any) -> Completion:
    (done,) = spec.generate(prompt, **(options | changed))
    if done.finish_reason == "interrupted":
        raise KeyboardInterrupt
    return done


def _per_token(completion: Completion) -> float:
    stats = completion.stats
    return (stats.seconds - stats.prefill_seconds) / len(completion.tokens)
