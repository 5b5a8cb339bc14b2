"""What is done to logits before a token is drawn, as numbers that are checked.

Knows no tensors: a mistake on the command line is reported before torch is imported, which takes
seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretoken.errors import InputError, as_float, real, shown, whole

GREEDY_BELOW = 1e-5  # the one threshold under which a temperature means argmax


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What is done to logits before a token is drawn; 0, 1.0 and 0.0 switch top-k, top-p and
    min-p off. Whole numbers and fractions of any kind are taken, and kept as int and float."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, counted = getattr(self, name), name == "top_k"
            if not (whole(value) if counted else real(value)):
                what = "whole number" if counted else "number"
                raise InputError(f"{name} is {shown(value)}; give a {what}")
            object.__setattr__(self, name, int(value) if counted else as_float(value))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.top_k < 0:
            raise InputError(f"top_k is {shown(self.top_k)}; give 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a number in (0, 1], 1 being off")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}; give a number in [0, 1], 0 being off")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW
