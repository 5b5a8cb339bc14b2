"""The one place where chance enters: guesses, how many of them are kept, and next tokens.

Knows distributions and keys; knows no models and no rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foretoken.errors import ControlError
from foretoken.sampling.acceptance_rules import Outcome
from foretoken.sampling.distributions import (
    SamplingParams,
    argmax_ids,
    locate,
    row_probabilities,
    working_dtype,
)
from foretoken.sampling.keys import Purpose, SequenceKey, derive_key, exponentials, uniform
from foretoken.transfer import send, to_list

NoisePositions = tuple[
    tuple[SequenceKey, int], ...
]  # a row's key and an absolute position, of every row


class LogitShaper(Protocol):
    """A row's controls, as whoever standardizes its logits knows them."""

    V: int  # the target's, whose ids controls speak of

    def shape(self, logits: Tensor, draft_tokens: list[int]) -> Tensor:
        """The scores `[V]` behind the committed text and the draft tokens `draft_tokens`;
        ControlError where there are none."""
        ...

    def find_forced_tokens(self, draft_tokens: list[int]) -> list[int]:
        """The tokens behind these that the controls leave no choice about, as far as they know."""
        ...


class Draw:
    """The draws of one step: each number is keyed by sequence, committed length, offset and
    purpose.

    Drafters are handed one and call `draw.sample(logits, i)`, or `draw(q, i)` with a distribution
    of their own. `params` and `controls` say how each sequence's logits become a distribution; a
    drafter that uses them is the usual choice, but any distribution is allowed. Nothing here waits
    for a device, except for sequences with controls.

    Args:
        keys: The key of each sequence's randomness.
        lengths: The committed length of each sequence, in tokens.
        params: The sampling params of each sequence.
        controls: The controls of each sequence, None where it has none.

    Examples:
        >>> import foretoken, torch
        >>> from foretoken.sampling.keys import SequenceKey
        >>> draw = foretoken.Draw([SequenceKey(0, 0)], [5], [foretoken.SamplingParams(1.0)])
        >>> draw(torch.tensor([[0.0, 1.0, 0.0]]), 0).tolist()
        [1]
    """

    coupled: ClassVar[bool] = False  # whether a position has one noise, in every step
    lenient: ClassVar[bool] = False  # whether draft tokens pass that are not the target's own

    def __init__(
        self,
        keys: list[SequenceKey],
        lengths: list[int],
        params: Sequence[SamplingParams],
        controls: Sequence[LogitShaper | None] | None = None,
    ) -> None:
        self.keys, self.lengths, self.params = keys, lengths, params
        self.controls = [None] * len(keys) if controls is None else controls
        self.masses: list[Tensor] = []  # [B] of every distribution that was drawn from
        # draft tokens of others, in each row's block
        self.previous_draft_tokens: list[list[int]] = [[] for _ in keys]
        # behind those, for controls to read
        self._draft_tokens: list[list[int]] = [[] for _ in keys]
        self._prefetched: Tensor | None = None  # [guesses + 2, B]

    @property
    def greedy(self) -> bool:
        """True where every sequence takes the likeliest token."""
        return all(params.greedy for params in self.params)

    @property
    def controlled(self) -> bool:
        """True where any sequence has controls."""
        return any(controls is not None for controls in self.controls)

    def select(self, rows: list[int]) -> Self:
        """Return the same step's draws for some of the sequences.

        Args:
            rows: Their indices in the batch.

        Returns:
            The draws.
        """
        some = copy(self)  # `masses` stays one list
        for name in (
            "keys",
            "lengths",
            "params",
            "controls",
            "previous_draft_tokens",
            "_draft_tokens",
        ):
            every = getattr(self, name)
            setattr(some, name, [every[b] for b in rows])
        some._prefetched = None if self._prefetched is None else self._prefetched[:, rows]
        return some

    def sample(
        self, logits: Tensor, i: int, params: SamplingParams | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draw draft token i of every sequence from a draft's logits.

        Args:
            logits: `[B, V]`; they are shaped by each sequence's controls.
            i: The token's number in the step, from 0.
            params: Sampling params in place of the sequences' own; None is their own.

        Returns:
            Ids `[B]`, and the distribution that they were drawn from, `[B, V]`; None in place of
            the latter where all are the likeliest.
        """
        logits = self._apply_controls(logits, i)
        rules = self.params if params is None else [params] * len(self.params)
        if all(each.greedy for each in rules):
            ids = argmax_ids(logits)
            self._remember(ids, i)
            return ids, None
        q = row_probabilities(logits, rules)
        return self(q, i), q

    def _apply_controls(self, logits: Tensor, i: int) -> Tensor:
        """Logits as the rows' controls leave them; where they leave nothing, as they are: any
        distribution may be guessed from."""
        if not self.controlled:
            return logits
        V = next(controls.V for controls in self.controls if controls is not None)
        scores = logits.to(working_dtype(logits.dtype))
        if scores.shape[-1] < V:
            scores = functional.pad(scores, (0, V - scores.shape[-1]), value=-torch.inf)
        return torch.stack([self._shape_row(b, i, row) for b, row in enumerate(scores)])

    def _shape_row(self, b: int, i: int, scores: Tensor) -> Tensor:
        controls = self.controls[b]
        if controls is None:
            return scores
        try:
            return controls.shape(
                scores, [*self.previous_draft_tokens[b], *self._draft_tokens[b][:i]]
            )
        except ControlError:  # a draft token of others is impossible, so this one is not judged
            return scores

    def _remember(self, ids: Tensor, i: int) -> None:
        """Remember draft token i for the controls of those behind it."""
        if self.controlled:
            for draft_tokens, token in zip(self._draft_tokens, to_list(ids), strict=True):
                draft_tokens[i:] = [token]

    def prefetch(self, num_draft_tokens: int, device: torch.device) -> None:
        """Send the step's numbers to a device in one copy.

        Args:
            num_draft_tokens: For as many draft tokens.
            device: The device.
        """
        names = [(0, Purpose.ACCEPT), (0, Purpose.NEXT)]
        names += [(i, Purpose.DRAFT) for i in range(num_draft_tokens)]
        self._prefetched = send(self._compute_numbers(*names), device)

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        """Draw draft token i of every sequence from a distribution.

        Args:
            distribution: `[B, V]`.
            i: The token's number in the step, from 0.
            cdf: The distribution's `running_sum`, where the drafter has kept it: that is quicker.

        Returns:
            Ids, `[B]`.
        """
        ids = self._draw_ids(distribution, i, Purpose.DRAFT, cdf)
        self._remember(ids, i)
        return ids

    def continue_after(self, draft_tokens: list[list[int]]) -> Draw:
        """Return the same step's draws for a drafter that goes on after other drafters' tokens.

        Args:
            draft_tokens: The draft tokens of the others, for each sequence.

        Returns:
            The draws.
        """
        later = copy(self)  # `masses` stays one list
        later.previous_draft_tokens = [
            [*x, *new] for x, new in zip(self.previous_draft_tokens, draft_tokens, strict=True)
        ]
        later._draft_tokens = [[] for _ in draft_tokens]
        later._prefetched = None
        return later

    @property
    def offsets(self) -> list[int]:
        """Offset of draft token 0 in each sequence's block."""
        return [len(x) for x in self.previous_draft_tokens]

    def derive_keys(self) -> list[SequenceKey]:
        """Return keys for a drafter that takes steps of its own.

        Draws under them are independent of this step and of every other.

        Returns:
            A key for each sequence.
        """
        return [
            derive_key(*name) for name in zip(self.keys, self.lengths, self.offsets, strict=True)
        ]

    def draft_numbers(self, count: int) -> Tensor:
        """Return the numbers that draw so many draft tokens of every sequence.

        Args:
            count: How many.

        Returns:
            `[count, B]`, in float64.
        """
        return self._compute_numbers(*((i, Purpose.DRAFT) for i in range(count)))

    def verification_numbers(self) -> tuple[Tensor, Tensor]:
        """Return the numbers that decide how many draft tokens are accepted, and those that draw
        the tokens after them.

        Returns:
            `[B]` each, in float64.
        """
        accept, following = self._compute_numbers((0, Purpose.ACCEPT), (0, Purpose.NEXT))
        return accept, following

    def draw_accepted(self, outcome: Outcome) -> Tensor:
        """Draw how many draft tokens of every sequence are accepted.

        Args:
            outcome: The probabilities of acceptance.

        Returns:
            Counts, `[B]`.
        """
        if not outcome.survival.shape[1]:  # plain decoding
            return torch.zeros_like(outcome.lengths)
        return outcome.n(self._get_uniforms(0, Purpose.ACCEPT, outcome.survival.device))

    def draw_next_token(self, distribution: Tensor) -> Tensor:
        """Draw the target's own token of every sequence.

        Args:
            distribution: `[B, V]`.

        Returns:
            Ids, `[B]`.
        """
        return self._draw_ids(distribution, 0, Purpose.NEXT)

    def _draw_ids(
        self, distribution: Tensor, i: int, purpose: Purpose, cdf: Tensor | None = None
    ) -> Tensor:
        ids, mass = locate(distribution, self._get_uniforms(i, purpose, distribution.device), cdf)
        self.masses.append(mass)
        return ids

    def _get_uniforms(self, offset: int, purpose: Purpose, device: torch.device) -> Tensor:
        if self._prefetched is None or self._prefetched.device != device:
            return send(self._compute_numbers((offset, purpose))[0], device)
        return self._prefetched[{Purpose.ACCEPT: 0, Purpose.NEXT: 1}.get(purpose, 2 + offset)]

    def _compute_numbers(self, *names: tuple[int, Purpose]) -> Tensor:
        """Return every sequence's numbers at these offsets, for these purposes, `[names, B]`."""
        rows = list(zip(self.keys, self.lengths, self.offsets, strict=True))
        numbers = [
            [uniform(key, length, first + offset, purpose) for key, length, first in rows]
            for offset, purpose in names
        ]
        return torch.as_tensor(np.array(numbers).reshape(len(names), len(rows)))


class LenientDraw(Draw):
    """The same, where draft tokens pass more easily: a greedy text depends on them too."""

    lenient: ClassVar[bool] = True


class SharedDraw(Draw):
    """The draws of coupled mode: at position t the id with the least E_t / distribution, whoever
    draws.

    The exponential noise E_t belongs to the absolute position, so draft and target meet the same
    one, and with equal distributions choose the same id (Daliri, Musco, Suresh 2024, arXiv
    2408.07978).
    """

    coupled: ClassVar[bool] = True

    @cached_property
    def _noise(self) -> dict[tuple[NoisePositions, int], Tensor]:
        """By whose positions it is and how many ids, `[B, V]`."""
        return {}

    def prefetch(self, num_draft_tokens: int, device: torch.device) -> None:
        """Nothing is sent ahead: the noise is as wide as the distribution, which is not known
        yet."""

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        self.masses.append(distribution.sum(-1, dtype=torch.float64))
        ids = self.find_winners(distribution[:, None], i).squeeze(1)
        self._remember(ids, i)
        return ids

    def derive_keys(self) -> list[SequenceKey]:
        """The same keys: at any depth a position has its one noise."""
        return self.keys

    def find_winners(self, distributions: Tensor, first: int = 0) -> Tensor:
        """The ids of consecutive positions, `[B, n]`, from their `distributions [B, n, V]`; the
        first position is `first` behind the committed text."""
        _, n, V = distributions.shape
        noise = torch.stack([self._exponentials(first + i, V) for i in range(n)], 1)
        # in float64; where the distribution is 0, inf
        return (send(noise, distributions.device) / distributions).argmin(-1)

    def _exponentials(self, offset: int, V: int) -> Tensor:
        places = self._noise_positions(offset)
        if (places, V) not in self._noise:
            rows = [exponentials(key, position, V) for key, position in places]
            self._noise[places, V] = torch.as_tensor(np.stack(rows))
        return self._noise[places, V]

    def _noise_positions(self, offset: int) -> NoisePositions:
        """Each row's key, and the absolute position at that offset."""
        names = zip(self.keys, self.lengths, self.offsets, strict=True)
        return tuple((key, length + first + offset) for key, length, first in names)
