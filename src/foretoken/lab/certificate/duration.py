"""How long a certificate will take: its parts are timed in small, and there are so many of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from foretoken.lab.certificate.certify import PLAIN, SAMPLED, Plan, require
from foretoken.lab.certificate.sampled import against_the_law, completions
from foretoken.options import Prompt
from foretoken.speculator import BATCH, Speculator

STREAM = 5  # of random numbers: that of no part
CONTROLS = 0.4  # texts with guesses for the planted bugs, of a law's: a quarter, half of them twice
GREEDY = 6  # lone greedy texts a prompt: plain, with guesses, for the controls, and along them


def expected(spec: Speculator, prompts: list[Prompt], plan: Plan) -> float:
    """About the seconds that `certify` takes, from a hundredth of its work. Raises as it does."""
    require(spec, prompts, plan)
    few = prompts[:SAMPLED]
    trial = replace(plan.trial(plan.laws[0]), texts=-(-BATCH // len(few)))
    plain = replace(trial, gamma=0, rule=PLAIN)
    guessed_seconds = _seconds(
        lambda: against_the_law(
            spec, spec.drafter, few, trial, 0.5, lambda numbers, what: numbers, stream=STREAM
        )
    )
    plain_seconds = _seconds(
        lambda: list(completions(spec, few, plain, STREAM, lambda numbers, what: numbers, ""))
    )
    token_seconds = (
        _seconds(
            lambda: spec.generate(
                prompts[:1], max_new_tokens=plan.length, gamma=0, rule=PLAIN, ignore_eos=True
            )
        )
        / plan.length
    )
    texts = plan.texts / trial.texts
    sampled = texts * len(plan.laws) * (guessed_seconds + 2 * plain_seconds)
    controls = texts * CONTROLS * guessed_seconds
    return sampled + controls + GREEDY * len(prompts) * plan.greedy * token_seconds


def _seconds(work: Callable[[], object]) -> float:
    """Of its second run: the first one is slower."""
    work()
    start = perf_counter()
    work()
    return perf_counter() - start
