"""The examples' output: speculative execution as measured, against the formula."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from statistics import mean

from reproduction import theory
from reproduction.execute import Execution


def options(
    parser: ArgumentParser, arguments: list[str] | None, least: dict[str, int]
) -> Namespace:
    """The parsed arguments; an error for one below its least value."""
    namespace = parser.parse_args(arguments)
    for name, bound in least.items():
        value = getattr(namespace, name)
        if not value >= bound:
            parser.error(f"argument --{name}: {value} is less than {bound}")
    return namespace


def report(plain: list[Execution], runs: list[Execution]) -> str:
    """plain: executions without guesses, which time f and g alone; runs: with guesses.

    The formula assumes a free core for everything that runs side by side, so its prediction and the
    measurement may differ: both are printed.
    """
    f, g = (mean(getattr(run.seconds, name) for run in plain) for name in "fg")
    q, beta = mean(run.seconds.q for run in runs), mean(run.beta for run in runs)
    before, after = (mean(run.seconds.total for run in executions) for executions in (plain, runs))
    right = sum(run.kept is not None for run in runs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    factor = theory.execution_factor(beta, f, g, q)
    gains = theory.execution_improves(beta, f, g, q)
    sign, predicted = ("<", "a gain") if gains else (">=", "no gain")
    verification = "a gain" if after < before else "no gain"
    return "\n".join(
        [
            f"{right} of {len(runs)} calls began with the right guess; beta {beta:.3f}",
            f"alone: f {1000 * f:.1f} ms, g {1000 * g:.1f} ms, q {1000 * q:.1f} ms",
            f"f and then g: {1000 * before:.1f} ms; side by side: {1000 * after:.1f} ms",
            f"formula:  x {factor:.2f}, {predicted} where cores are free, as q {sign} "
            f"beta min(f, g) = {1000 * beta * min(f, g):.1f} ms",
            f"measured: x {before / after:.2f} on {cores} core{'s' * (cores != 1)}, {verification}",
        ]
    )
