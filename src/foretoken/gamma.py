"""How many guesses to make: Theorem 3.8's optimum, from costs measured once on the pair at hand.

Frozen before generation starts, so that no clock that runs during it has a say in the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from foretoken.request import StepRecord
from foretoken.theory import optimal_gamma

PROBE = 4  # guesses a step while measuring
MAX_GAMMA = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """What gamma follows from: alpha, c = T_q/T_p, and v(n), a pass over n tokens against one."""

    alpha: float
    c: float
    slope: float  # of v, taken as a line through the two n that were measured

    def v(self, n: int) -> float:
        return 1 + self.slope * (n - 1)

    @property
    def gamma(self) -> int:
        """The best number of guesses; 0 where none pays."""
        return optimal_gamma(self.alpha, self.c, v=self.v, max_gamma=MAX_GAMMA)


def costs(plain: list[StepRecord], speculative: list[StepRecord]) -> Costs | None:
    """From steps with gamma 0 and steps with guesses; None where nothing was drafted."""
    drafted = [step for step in speculative if step.drafted]
    overlaps = [overlap for step in drafted for overlap in step.overlaps]
    if not plain or not overlaps:
        return None
    n = max(step.drafted for step in drafted)
    full = [step for step in drafted if step.drafted == n]
    T_p = median(step.score_seconds + step.verify_seconds for step in plain)
    T_q = median(step.draft_seconds / n for step in full)
    v = median(step.score_seconds + step.verify_seconds for step in full) / T_p
    return Costs(fmean(overlaps), T_q / T_p, max(0.0, (v - 1) / n))
