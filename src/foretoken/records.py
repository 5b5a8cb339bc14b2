"""Records of each step of a request, and their sum: the only instrumentation there is.

Imports no torch: an engine's process sends them to processes that do without it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Effect of one step on one row."""

    gamma: int  # guesses asked for
    guesses: tuple[int, ...]
    accepted: int  # of the guesses, kept
    kept: tuple[int, ...]  # tokens gained: accepted guesses, the target's own, cut at an end
    overlaps: tuple[float, ...]  # sum min(p, q) at every guess judged, the first rejected included
    draft_calls: int
    draft_seconds: float  # all three are those of the whole batch
    score_seconds: float
    verify_seconds: float
    rows: int  # how many rows shared the step
    biases: tuple[float, ...] = ()  # total variation from the target's law there; () where exact
    padding: int = 0  # positions that the whole batch's target pass computed for no row
    predicted: bool = False  # the guesses are of the row's foresight, not of its draft

    @property
    def drafted(self) -> int:
        return len(self.guesses)


@dataclass(frozen=True, slots=True)
class Stats:
    """Costs of a completion. `alpha` is the mean of sum min(p, q) over judged guesses (Cor
    3.6), never accepted/drafted, which stands beside it; with lenience of sum min(p/l, q). Times
    are of the batch the row was in, from the start of its prefill: of what was read before the
    first step, which often reads the prompt's end, to that step's end, and to the last one's."""

    target_calls: int  # without the prefill of all but the last prompt token
    draft_calls: int
    drafted: int
    accepted: int
    rounds: int
    alpha: float | None
    accepted_per_drafted: float | None
    tokens_per_call: float | None
    seconds: float
    prefill_seconds: float
    first_seconds: float
    runtime: str
    draft_runtime: str
    cached_tokens: int = 0  # of the prompt, that had been read for other texts
    bias: float = 0.0  # total variation, a token's mean, of the law it was drawn from; 0: exact
    draft_prefill_seconds: float = 0.0  # of `prefill_seconds`, the drafter's
    encoder_seconds: float = 0.0  # of the rest of these, the target's encoder's
    draft_encoder_seconds: float = 0.0  # of the drafter's, its encoders'

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Begun(NamedTuple):
    """Beginning of a text that another engine wrote."""

    steps: list[StepRecord]
    shown: int = 0  # characters of the text that were shown
