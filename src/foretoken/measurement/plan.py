"""Plans from measurements: the draft and gamma to use, or the advice not to speculate.

The gain of a gamma is section 3.5 with measured rates in place of alpha^i. Tokens follow from how
often draft token i was kept, or not made (for draft tokens beyond the measured gamma, from alpha
and how often the last two were made), time from the steps of the measured runs, with v(n) for how a
pass grows with gamma. Compares measurements of one target on one machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from math import hypot, sqrt
from statistics import median
from typing import Any

import numpy as np

from foretoken.errors import InputError
from foretoken.measurement.estimate import Estimate
from foretoken.measurement.result import Measurement, MeasureOptions

LEAST = 1e-9  # seconds of a pass at the low end of its interval


@dataclass(frozen=True, slots=True)
class Basis:
    """The numbers that a prediction is computed from; times in seconds."""

    alpha: float  # where a draft token is made
    kept: tuple[float, ...]  # P(draft token i is made and kept | all before it were), i = 1, 2, ..
    offered: tuple[float, ...]  # share of steps in which the drafter makes draft token i
    guess: float
    passes: tuple[float, ...]  # over 1, 2, .. tokens; the first in plain runs, others beside drafts
    plain: float  # other work of a step without draft tokens
    loop: float  # of a step with len(kept) guesses

    @property
    def max_gamma(self) -> int:
        return len(self.passes) - 1

    def survival(self, gamma: int) -> list[float]:
        """Return s_0, .., s_gamma: P(the first i draft tokens are kept)."""
        beyond = [self.alpha * self.goes_on] * (gamma - len(self.kept))
        return np.cumprod([1.0, *self.kept[:gamma], *beyond]).tolist()

    @property
    def goes_on(self) -> float:
        """P(another guess | the drafter made the last measured one)."""
        *_, before, last = 1.0, 1.0, *self.offered
        return min(1.0, last / before) if len(self.offered) > 1 and before else 1.0

    def round(self, gamma: int) -> float:
        """Return the seconds of a step."""
        last = self.offered[-1] if self.offered else 1.0
        beyond = [last * self.goes_on**i for i in range(1, gamma + 1)]
        shares = [*self.offered, *beyond][:gamma]
        reached = [1.0, *shares, 0.0]  # P(d guesses or more), d = 0, 1, ..
        score = sum((reached[d] - reached[d + 1]) * self.passes[d] for d in range(gamma + 1))
        other = self.plain + (self.loop - self.plain) * gamma / max(1, len(self.kept))
        return score + self.guess * sum(shares) + other

    def speedups(self, tokens: int) -> list[float]:
        """Return plain over speculative seconds for a text of this many tokens, at gamma 0, 1, ..

        Near the end gamma is cut to the tokens still missing less one, as in generation.
        """
        rounds = [self.round(g) for g in range(self.max_gamma + 1)]
        distributions = [_gains(self.survival(g)) for g in range(self.max_gamma + 1)]
        speedups: list[float] = []
        for gamma in range(self.max_gamma + 1):
            cost = np.zeros(tokens + 1)  # of n tokens
            for n in range(1, tokens + 1):
                g = min(gamma, n - 1)
                cost[n] = rounds[g] + distributions[g] @ cost[n - g - 1 : n][::-1]
            speedups.append(tokens * rounds[0] / float(cost[tokens]))
        return speedups


@dataclass(frozen=True, slots=True)
class GammaPrediction:
    """A prediction for one gamma; its interval follows from those of the measured speed-up, alpha,
    draft time and passes, 95 % each and taken as independent."""

    gamma: int
    tokens_per_call: float  # of a long text
    speedup: Estimate


def predictions(measured: Measurement) -> list[GammaPrediction]:
    """Predict gamma 0, 1, .. as far as passes were measured; keep the measured speed-up."""
    basis, clock = _basis(measured), measured.speedup
    ends = [[_shares(measured, end) for end in both] for both in _ends(measured, basis)]
    table = [GammaPrediction(0, 1.0, Estimate(1.0, 1.0, 1.0))]  # plain decoding
    for gamma, share in list(enumerate(_shares(measured, basis)))[1:]:
        halves = [(high[gamma] - low[gamma]) / 2 for low, high in ends]
        error, value = clock.value * sqrt(sum(half * half for half in halves)), clock.value * share
        below, above = (
            hypot(share * (end - clock.value), error) for end in (clock.low, clock.high)
        )
        speedup = Estimate(value, max(0.0, value - below), value + above)
        table.append(GammaPrediction(gamma, sum(basis.survival(gamma)), speedup))
    return table


def _ends(measured: Measurement, basis: Basis) -> list[tuple[Basis, Basis]]:
    """Return the basis at both ends of each uncertain number's interval, the others as they are."""

    def around(make: Callable[[float], Basis], error: float) -> tuple[Basis, Basis]:
        return make(-error), make(error)

    def drafting(error: float) -> Basis:
        return replace(basis, guess=max(0.0, basis.guess + error))

    def plain_pass(error: float) -> Basis:
        return replace(basis, passes=(max(LEAST, basis.passes[0] + error), *basis.passes[1:]))

    def passing(n: int) -> Callable[[float], Basis]:
        def moved(error: float) -> Basis:
            times = [each.median for each in measured.passes]
            times[n] = max(LEAST, times[n] + error)
            return replace(basis, passes=(basis.passes[0], *_passes(measured, times)[1:]))

        return moved

    draft_token = measured.draft_seconds
    return [
        around(lambda error: _moved(basis, error), measured.alpha.error),
        around(drafting, draft_token.error if draft_token else 0.0),
        around(plain_pass, measured.plain_pass.error),
        *(around(passing(n), each.error) for n, each in enumerate(measured.passes) if n),
    ]


def _moved(basis: Basis, error: float) -> Basis:
    """The basis with another alpha; what was kept moves in proportion."""
    share = 1 + error / basis.alpha if basis.alpha else 1.0
    kept = tuple(min(1.0, max(0.0, rate * share)) for rate in basis.kept)
    return replace(basis, alpha=min(1.0, max(0.0, basis.alpha + error)), kept=kept)


def formula(measured: Measurement) -> float:
    """Predict the speed-up of the measured gamma from alpha and costs alone."""
    return _basis(measured).speedups(_length(measured))[measured.options.gamma]


def _shares(measured: Measurement, basis: Basis) -> list[float]:
    """Return speed-ups at gamma 0, 1, .. over the measured gamma's, by the formula."""
    speedups = basis.speedups(_length(measured))
    return [one / speedups[measured.options.gamma] for one in speedups]


def _length(measured: Measurement) -> int:
    return max(1, round(measured.tokens))


def best(table: list[GammaPrediction]) -> GammaPrediction:
    """Return the fastest prediction above gamma 0; the smallest gamma on ties."""
    return max(table[1:], key=lambda one: one.speedup.value)


def _gains(survival: list[float]) -> np.ndarray:
    """Return P(a step gives 1, 2, .. tokens)."""
    return -np.diff([*survival, 0.0])


def _passes(measured: Measurement, times: list[float]) -> tuple[float, ...]:
    """Return the seconds of the target's pass in a step with 0, 1, .. guesses.

    With 0 it is as in the plain runs; else the time alone, from `times`, times the median slow-down
    of passes beside a draft in the runs.
    """
    # where they exceed those of larger passes, the machine was busy
    alone = np.minimum.accumulate(times[::-1])[::-1].tolist()
    steps = [step for one in measured.prompts for step in one.loop.steps if step.drafted]
    slower = [step.score_seconds / alone[step.drafted] for step in steps]
    beside = median(slower) if slower else 1.0
    return (measured.plain_pass.median, *(beside * seconds for seconds in alone[1:]))


def _basis(measured: Measurement) -> Basis:
    alpha = measured.alpha.value
    made = 1 - measured.silent  # without a draft token, beta counts as 0
    return Basis(
        alpha=min(1.0, alpha / made) if made else 0.0,
        kept=tuple(p.kept / p.asked if p.asked else alpha for p in measured.positions),
        offered=tuple(p.offered for p in measured.positions),
        guess=measured.draft_seconds.median if measured.draft_seconds else 0.0,
        passes=_passes(measured, [each.median for each in measured.passes]),
        plain=measured.plain_overhead.median,
        loop=measured.loop_overhead.median,
    )


# "prompts" is the file's name: its text may not differ. Not every version knew the bytes, which
# follow from name and dtype
BYTES = ("weight_bytes", "pass_bytes", "cache_bytes")
MAY_DIFFER = ("draft", "draft_dtype", "draft_taps", "draft_revision", "gamma", "seed", "prompts")
MAY_DIFFER += BYTES


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft and its fastest gamma."""

    measurement: Measurement
    best: GammaPrediction

    @property
    def draft(self) -> str:
        return self.measurement.draft.name


@dataclass(frozen=True, slots=True)
class Plan:
    """Candidates, the fastest first."""

    candidates: list[Candidate]

    @property
    def first(self) -> Candidate:
        return self.candidates[0]

    @property
    def gamma(self) -> int:
        """Gamma to generate with; 0 if no draft is predicted to speed the target up."""
        return self.first.best.gamma if self.first.best.speedup.value > 1 else 0

    @property
    def command(self) -> str:
        """Shell command that generates with this draft and gamma."""
        return command(self.first.measurement.options, self.gamma)


def plan(measurements: Sequence[tuple[str, Measurement]]) -> Plan:
    """Make a plan from measurements and their names, which errors use.

    Raises InputError where two differ in target, machine, prompts or sampling parameters.
    """
    for name, measurement in measurements[1:]:
        _require_same(*measurements[0], name, measurement)
    candidates = [Candidate(one, best(predictions(one))) for _, one in measurements]
    return Plan(sorted(candidates, key=lambda c: -c.best.speedup.value))


def command(options: MeasureOptions, gamma: int) -> str:
    """Return `foretoken generate` with the options of a measurement and this gamma."""
    arguments = ["foretoken", "generate", "--prompt-file", options.prompts]
    for name in ("target", "draft"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", getattr(options, name)]
    return shlex.join([*arguments, "--gamma", str(gamma), *flags(options, apart=("gamma",))])


def flags(options: Any, apart: tuple[str, ...] = ()) -> list[str]:
    """Spell a dataclass of options as flags: fields that differ from their default, but `apart`."""
    flags: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in apart and field.default is not MISSING and value != field.default:
            flags.append(f"--{field.name.replace('_', '-')}")
            flags += [] if value is True else [str(value)]
    return flags


def _require_same(name: str, one: Measurement, other_name: str, other: Measurement) -> None:
    for part, a, b in [
        ("target", asdict(one.target), asdict(other.target)),
        ("machine", asdict(one.machine), asdict(other.machine)),
        ("options", asdict(one.options), asdict(other.options)),
    ]:
        for key in a:
            if a[key] != b[key] and key not in MAY_DIFFER:
                raise InputError(
                    f"{name} and {other_name} differ in {part}: {key} is {a[key]} and {b[key]}; "
                    "measure again with the same target, machine, prompts and options"
                )
