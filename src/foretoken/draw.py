"""The one place where chance enters: guesses, the number of them kept, and next tokens are drawn
here.

Knows laws and keys; knows no models and no rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.distributions import SamplingParams, sample
from foretoken.keys import Purpose, RowKey, uniform
from foretoken.verify import Outcome


class Draw:
    """The draws of one step: each number is keyed by row, committed length, offset and purpose.

    Drafters are handed it and call `draw(law, i)`. `params` is how the target's logits are
    standardized; a drafter that standardizes its own likewise is the usual choice, but any law is
    allowed.
    """

    def __init__(self, keys: list[RowKey], lengths: list[int], params: SamplingParams) -> None:
        self.keys, self.lengths, self.params = keys, lengths, params

    def __call__(self, law: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        """Guess i (from 0) of every row, `[B]`, from `law [B, V]`.

        A drafter that has kept its law's `running_sum` gives it as `cdf`: that is quicker.
        """
        return sample(law, self._uniforms(i, Purpose.DRAFT), cdf)

    def kept(self, outcome: Outcome) -> Tensor:
        """How many guesses every row keeps, `[B]`."""
        return outcome.n(self._uniforms(0, Purpose.ACCEPT).to(outcome.survival.device))

    def next_token(self, law: Tensor) -> Tensor:
        """The target's own token of every row, `[B]`, from `law [B, V]`."""
        return sample(law, self._uniforms(0, Purpose.NEXT))

    def _uniforms(self, offset: int, purpose: Purpose) -> Tensor:
        names = zip(self.keys, self.lengths, strict=True)
        numbers = [uniform(key, length, offset, purpose) for key, length in names]
        return torch.tensor(numbers, dtype=torch.float64)
