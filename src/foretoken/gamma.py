"""How many guesses to make: Theorem 3.8's optimum, from costs measured once on the pair at hand.

Frozen before generation starts, so that no clock that runs during it has a say in the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from foretoken.request import Row
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


def costs(plain: Row, probe: Row) -> Costs | None:
    """From a row of gamma 0 and one of gamma `PROBE`; None where nothing was drafted."""
    T_p = median(record.score_seconds + record.verify_seconds for record in plain.records)
    drafted = [record for record in probe.records if record.drafted]
    full = [record for record in drafted if record.drafted == PROBE] or drafted
    overlaps = [overlap for record in drafted for overlap in record.overlaps]
    if not overlaps:
        return None
    T_q = median(record.draft_seconds / record.drafted for record in full)
    n = median(record.drafted for record in full)
    v = median(record.score_seconds + record.verify_seconds for record in full) / T_p
    return Costs(fmean(overlaps), T_q / T_p, max(0.0, (v - 1) / n))
