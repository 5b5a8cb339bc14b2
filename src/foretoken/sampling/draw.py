"""The one place where chance enters: guesses, how many of them are kept, and next tokens.

Knows laws and keys; knows no models and no rules.
"""

from __future__ import annotations

from copy import copy
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from foretoken.sampling.distributions import SamplingParams, locate
from foretoken.sampling.keys import Purpose, RowKey, exponentials, uniform, within
from foretoken.sampling.verify import Outcome
from foretoken.transfer import sent


class Draw:
    """The draws of one step: each number is keyed by row, committed length, offset and purpose.

    Drafters are handed it and call `draw(law, i)`. `params` is how the target's logits are
    standardized; a drafter that standardizes its own likewise is the usual choice, but any law is
    allowed. `require_mass(masses)` checks the laws, once per step: nothing here waits for a device.
    """

    coupled: ClassVar[bool] = False  # whether a position has one noise, in every step

    def __init__(self, keys: list[RowKey], lengths: list[int], params: SamplingParams) -> None:
        self.keys, self.lengths, self.params = keys, lengths, params
        self.masses: list[Tensor] = []  # [B] of every law that was drawn from
        self.offsets = [0] * len(keys)  # of guess 0 in each row's block
        self._ahead: Tensor | None = None  # [guesses + 2, B]

    def ahead(self, guesses: int, device: torch.device) -> None:
        """Send the step's numbers to a device in one copy, for as many guesses."""
        names = [(0, Purpose.ACCEPT), (0, Purpose.NEXT)]
        names += [(i, Purpose.DRAFT) for i in range(guesses)]
        self._ahead = sent(torch.stack([self._numbers(*name) for name in names]), device)

    def __call__(self, law: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        """Guess i (from 0) of every row, `[B]`, from `law [B, V]`.

        A drafter that has kept its law's `running_sum` gives it as `cdf`: that is quicker.
        """
        return self._drawn(law, i, Purpose.DRAFT, cdf)

    def behind(self, guesses: list[int]) -> Draw:
        """The same step's draws for a drafter that goes on after each row's guesses of others."""
        later = copy(self)  # `masses` stays one list
        later.offsets = [n + count for n, count in zip(self.offsets, guesses, strict=True)]
        later._ahead = None
        return later

    def within(self) -> list[RowKey]:
        """Keys for a drafter that takes steps of its own: what it draws under them is independent
        of this step and of every other."""
        return [within(*name) for name in zip(self.keys, self.lengths, self.offsets, strict=True)]

    def kept(self, outcome: Outcome) -> Tensor:
        """How many guesses every row keeps, `[B]`."""
        return outcome.n(self._uniforms(0, Purpose.ACCEPT, outcome.survival.device))

    def next_token(self, law: Tensor) -> Tensor:
        """The target's own token of every row, `[B]`, from `law [B, V]`."""
        return self._drawn(law, 0, Purpose.NEXT)

    def _drawn(self, law: Tensor, i: int, purpose: Purpose, cdf: Tensor | None = None) -> Tensor:
        ids, mass = locate(law, self._uniforms(i, purpose, law.device), cdf)
        self.masses.append(mass)
        return ids

    def _uniforms(self, offset: int, purpose: Purpose, device: torch.device) -> Tensor:
        if self._ahead is None or self._ahead.device != device:
            return sent(self._numbers(offset, purpose), device)
        return self._ahead[{Purpose.ACCEPT: 0, Purpose.NEXT: 1}.get(purpose, 2 + offset)]

    def _numbers(self, offset: int, purpose: Purpose) -> Tensor:
        names = zip(self.keys, self.lengths, self.offsets, strict=True)
        numbers = [uniform(key, length, first + offset, purpose) for key, length, first in names]
        return torch.tensor(numbers, dtype=torch.float64)


class SharedDraw(Draw):
    """The draws of coupled mode: at position t the id with the least E_t / law, whoever draws.

    The exponential noise E_t belongs to the absolute position, so draft and target meet the same
    one, and with equal laws choose the same id (Daliri, Musco, Suresh 2024, arXiv 2408.07978).
    """

    coupled: ClassVar[bool] = True

    def __init__(self, keys: list[RowKey], lengths: list[int], params: SamplingParams) -> None:
        super().__init__(keys, lengths, params)
        self._noise: dict[tuple[int, int], Tensor] = {}  # by offset and ids, [B, V]

    def ahead(self, guesses: int, device: torch.device) -> None:
        """Nothing is sent ahead: the noise is as wide as the law, which is not known yet."""

    def __call__(self, law: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        self.masses.append(law.sum(-1, dtype=torch.float64))
        return self.winners(law[:, None], i).squeeze(1)

    def behind(self, guesses: list[int]) -> Draw:
        later = super().behind(guesses)
        assert isinstance(later, SharedDraw)
        later._noise = {}
        return later

    def within(self) -> list[RowKey]:
        """The same keys: at any depth a position has its one noise."""
        return self.keys

    def winners(self, laws: Tensor, first: int = 0) -> Tensor:
        """The ids of consecutive positions, `[B, n]`, from their `laws [B, n, V]`; the first
        position is `first` behind the committed text."""
        _, n, V = laws.shape
        noise = torch.stack([self._exponentials(first + i, V) for i in range(n)], 1)
        return (sent(noise, laws.device) / laws).argmin(-1)  # in float64; where the law is 0, inf

    def _exponentials(self, offset: int, V: int) -> Tensor:
        if (offset, V) not in self._noise:
            rows = [exponentials(key, position, V) for key, position in self._places(offset)]
            self._noise[offset, V] = torch.from_numpy(np.stack(rows))
        return self._noise[offset, V]

    def _places(self, offset: int) -> list[tuple[RowKey, int]]:
        """Each row's key, and the absolute position at that offset."""
        names = zip(self.keys, self.lengths, self.offsets, strict=True)
        return [(key, length + first + offset) for key, length, first in names]
