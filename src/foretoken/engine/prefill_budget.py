"""The budget of chunked prefill: how many prompt tokens are read beside the rows that run, so that
a step takes at most a few times as long as one without prefill, or no longer than anybody notices.

Measured as steps go by. The budget changes how soon a row joins in, never its text.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from foretoken.request import SequenceState, SequenceStatus

MAX_STEP_SLOWDOWN = 1.75  # times a step that reads nothing
UNNOTICED_STEP_SECONDS = 0.03  # seconds that a step may take in any case
MIN_CHUNK_TOKENS, FIRST_CHUNK_TOKENS, MAX_CHUNK_TOKENS = (
    16,
    64,
    512,
)  # tokens of a step: in any case, as long as nothing is known
MAX_MEASURED_STEPS = 32  # of each kind that are remembered


class PrefillBudget:
    """Measured times of steps, by the rows that ran and the prompt tokens that were read."""

    def __init__(self) -> None:
        # apart, as for as long as a long prompt is read there are none of the others
        self._plain_steps: deque[tuple[int, int, float]] = deque(maxlen=MAX_MEASURED_STEPS)
        self._prefill_steps: deque[tuple[int, int, float]] = deque(maxlen=MAX_MEASURED_STEPS)

    def compute_budget(self, num_running: int, num_prefilling: int) -> int:
        """Tokens to read in a step beside so many rows that run, of so many others."""
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
        """Return how many tokens each row reads: running rows their last one, rows in prefill as
        many as the budget allows, first come first, where `already_prefilled` have been read. Rows
        that report logprobs of their prompts read these in forwards of their own."""
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
        """Note the time of a step."""
        more = sum(count for count in num_scheduled if count > 1)
        (self._prefill_steps if more else self._plain_steps).append(
            (num_scheduled.count(1), more, seconds)
        )

    def _fit_costs(self, running: int) -> tuple[float, float]:
        """Seconds of a step of so many rows that reads nothing, and of a token that it reads: a
        fit that is linear in both, of the least relative error, as some steps take many times as
        long as others like them."""
        steps = np.array([*self._plain_steps, *self._prefill_steps])
        weights = 1 / np.maximum(steps[:, 2], 1e-9)
        weighted = np.column_stack([np.ones(len(steps)), steps[:, :2]]) * weights[:, None]
        base, row, token = _positive_fit(weighted)
        return base + row * running, max(1e-9, token)


def _positive_fit(columns: NDArray[np.float64]) -> list[float]:
    """The factors of columns, none below 0, whose sum is nearest to 1: nothing takes less than no
    time, and noise that says so would leave all to the others."""
    count, best, least = columns.shape[1], [0.0] * columns.shape[1], np.inf
    for chosen in chain.from_iterable(combinations(range(count), n) for n in range(count, 0, -1)):
        some = columns[:, chosen]
        factors = np.linalg.lstsq(some, np.ones(len(some)))[0]
        error = float(((some @ factors - 1) ** 2).sum())
        if (factors >= 0).all() and error < least:
            best, least = [0.0] * count, error
            for i, factor in zip(chosen, factors.tolist(), strict=True):
                best[i] = factor
            if len(chosen) == count:  # fewer are no nearer
                break
    return best
