"""Controls that make what has occurred, or an end, less or more likely.

`control(scores, history) -> scores`: the scores `[V]` of one position are its own to change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretoken.controls.history import History

CERTAIN = 1e30  # times a score: beyond all others, and still a float32


@dataclass(frozen=True, slots=True)
class Repetition:
    """Ids of the text, prompt included, are less likely above 1 (Keskar et al. 2019, arXiv
    1909.05858)."""

    penalty: float

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return scaled(scores, history.every.ids(scores.device), self.penalty)


class Encoder:
    """Ids of the source, or of a decoder's prompt, are more likely above 1."""

    def __init__(self, penalty: float, source: list[int], V: int) -> None:
        self.factor = 1 / penalty
        self.ids = torch.tensor(sorted({i for i in source if i < V}), dtype=torch.long)

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return scaled(scores, self.ids.to(scores.device), self.factor)


@dataclass(frozen=True, slots=True)
class Occurrence:
    """OpenAI's penalties: of every new token's id the logit falls by `presence`, and by `frequency`
    for each time it has occurred. The prompt does not count."""

    presence: float
    frequency: float

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        ids = history.new.ids(scores.device)
        if not len(ids):
            return scores
        return scores.index_add_(
            0, ids, -(self.presence + self.frequency * history.new.counts(scores))
        )


class Decay:
    """From `start` new tokens on ends become likelier, by `factor` to the power of how far behind
    it the text is."""

    def __init__(self, start: int, factor: float, ends: list[int]) -> None:
        self.start, self.factor = start, factor
        self.ends = torch.tensor(ends, dtype=torch.long)

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        behind = history.done - self.start
        if behind <= 0 or not len(self.ends):
            return scores
        ends = self.ends.to(scores.device)
        now = scores[ends]
        raised = now + now.abs() * (self._growth(behind) - 1)
        return scores.index_copy_(0, ends, torch.where(now.isfinite(), raised, now))

    def _growth(self, behind: int) -> float:
        """The factor's power; from some point on the end is certain anyway."""
        try:
            return min(self.factor**behind, CERTAIN)
        except OverflowError:
            return CERTAIN


def scaled(scores: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Scores of the ids divided by the penalty, or multiplied where they are negative."""
    if not len(ids):
        return scores
    if scores.is_cpu:  # NumPy needs a quarter of torch's time for few numbers
        array, at = scores.numpy(), ids.numpy()
        now = array[at]
        array[at] = np.where(now < 0, now * penalty, now / penalty)
        return scores
    now = scores[ids]
    return scores.index_copy_(0, ids, torch.where(now < 0, now * penalty, now / penalty))
