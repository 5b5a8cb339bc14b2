"""The budget of chunked prefill: the number of prompt tokens that a step prefills alongside the
running sequences.

The budget is chosen from measured step times, so that a step with prefill takes at most a few times
as long as a step without prefill, or at most `UNNOTICED_STEP_SECONDS`. It does not affect outputs.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from foretoken.request import SequenceState, SequenceStatus

MAX_STEP_SLOWDOWN = 1.75  # time of a step with one sequence in prefill / time without prefill
UNNOTICED_STEP_SECONDS = 0.03  # a step with prefill may always take this long
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 16, 512
FIRST_CHUNK_TOKENS = 64  # until a step with prefill has been measured
MAX_MEASURED_STEPS = 32  # maximum of stored steps with prefill, and of steps without prefill


class PrefillBudget:
    """Records each step's time, number of running sequences and number of prefilled tokens, and
    computes the prefill budget of the next step from these records."""

    def __init__(self) -> None:
        # two queues: in a single queue, the steps of a long prompt would displace all other steps
        # each entry: running sequences, prefilled tokens, seconds
        self._plain_steps: deque[tuple[int, int, float]] = deque(maxlen=MAX_MEASURED_STEPS)
        self._prefill_steps: deque[tuple[int, int, float]] = deque(maxlen=MAX_MEASURED_STEPS)

    def compute_budget(self, num_running: int, num_prefilling: int) -> int:
        """Return the number of prompt tokens to prefill in a step with `num_running` running
        sequences: the total over all `num_prefilling` sequences in prefill."""
        if not num_running:
            return MAX_CHUNK_TOKENS
        if not self._prefill_steps:
            return FIRST_CHUNK_TOKENS
        base_seconds, token_seconds = self._fit_costs(num_running)
        longer = max(
            (MAX_STEP_SLOWDOWN - 1) * base_seconds * num_prefilling,
            UNNOTICED_STEP_SECONDS - base_seconds,
        )
        return int(min(MAX_CHUNK_TOKENS, max(MIN_CHUNK_TOKENS, longer / token_seconds)))

    def schedule_tokens(self, seqs: list[SequenceState], already_prefilled: int = 0) -> list[int]:
        """Return, for each sequence, the number of tokens to score in the next step, without draft
        tokens: 1 for a running sequence; 0 while prompt logprobs are missing, as these take a
        separate forward pass. Other sequences in prefill share, in order, the budget that remains
        after `already_prefilled` tokens."""
        room = 0
        running = sum(seq.status is SequenceStatus.RUNNING for seq in seqs)
        if running < len(seqs):
            room = max(
                MIN_CHUNK_TOKENS,
                self.compute_budget(running, len(seqs) - running) - already_prefilled,
            )
        num_scheduled: list[int] = []
        for seq in seqs:
            runs = seq.status is SequenceStatus.RUNNING
            count = 1 if runs else min(seq.num_pending, room) * (not seq.needs_prompt_logprobs)
            room -= 0 if runs else count
            num_scheduled.append(count)
        return num_scheduled

    def record_step(self, num_scheduled: list[int], seconds: float) -> None:
        """Record the time of a step that scored `num_scheduled[b]` tokens of sequence b."""
        more = sum(count for count in num_scheduled if count > 1)
        (self._prefill_steps if more else self._plain_steps).append(
            (num_scheduled.count(1), more, seconds)
        )

    def _fit_costs(self, running: int) -> tuple[float, float]:
        """Return the seconds of a step of `running` sequences without prefill, and the seconds that
        each prefilled token adds, from a linear fit of the recorded steps. The fit minimizes
        relative errors, because some steps take many times as long as others of the same size."""
        steps = np.array([*self._plain_steps, *self._prefill_steps])
        weights = 1 / np.maximum(steps[:, 2], 1e-9)
        weighted = np.column_stack([np.ones(len(steps)), steps[:, :2]]) * weights[:, None]
        base, row, token = _positive_fit(weighted)
        return base + row * running, max(1e-9, token)


def _positive_fit(columns: NDArray[np.float64]) -> list[float]:
    """Return one factor per column, 0 or more, such that the sum of the columns times the factors
    is nearest to 1 by least squares. Negative factors are excluded because noise could make one
    cost negative and the others too large."""
    count, best, min_error = columns.shape[1], [0.0] * columns.shape[1], np.inf
    for chosen in chain.from_iterable(combinations(range(count), n) for n in range(count, 0, -1)):
        selected = columns[:, chosen]
        factors = np.linalg.lstsq(selected, np.ones(len(selected)))[0]
        error = float(((selected @ factors - 1) ** 2).sum())
        if (factors >= 0).all() and error < min_error:
            best, min_error = [0.0] * count, error
            for i, factor in zip(chosen, factors.tolist(), strict=True):
                best[i] = factor
            if len(chosen) == count:  # a subset of the columns cannot fit better
                break
    return best
