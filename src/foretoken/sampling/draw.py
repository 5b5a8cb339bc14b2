"""The random numbers of a step: they sample draft tokens, decide how many draft tokens are
accepted, and sample the next tokens. All randomness of decoding is here."""

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
    compute_row_probabilities,
    get_working_dtype,
    locate,
)
from foretoken.sampling.keys import (
    Purpose,
    SequenceKey,
    derive_key,
    draw_exponentials,
    draw_uniform,
)
from foretoken.transfer import send, to_list

NoisePositions = tuple[tuple[SequenceKey, int], ...]  # key and absolute position of every sequence


class LogitShaper(Protocol):
    """Protocol of a sequence's controls, such as penalties, bans or a grammar: the methods that
    sampling calls to change logits. `Chain` implements it."""

    V: int  # the target's vocabulary size

    def shape(self, logits: Tensor, draft_tokens: list[int]) -> Tensor:
        """Return the scores `[V]` of the token after the committed tokens and `draft_tokens`.
        Raises ControlError if the controls allow no token."""
        ...

    def find_forced_tokens(self, draft_tokens: list[int]) -> list[int]:
        """Return the tokens that the controls force after `draft_tokens`, as far as they can be
        determined without logits."""
        ...


class Draw:
    """The random numbers of one step, each keyed by sequence, committed length, offset and purpose.

    A drafter receives a Draw for each step and samples draft token i with it. Most drafters should
    call `draw.sample(logits, i)`, which applies each sequence's `params` and `controls` to the
    logits; `draw(q, i)` samples from any distribution. The host waits for the device only if a
    sequence has controls.

    Args:
        keys: The random key of each sequence.
        lengths: The number of committed tokens of each sequence.
        params: The sampling params of each sequence.
        controls: The controls of each sequence; None for a sequence without controls.

    Examples:
        >>> import foretoken, torch
        >>> from foretoken.sampling.keys import SequenceKey
        >>> draw = foretoken.Draw([SequenceKey(0, 0)], [5], [foretoken.SamplingParams(1.0)])
        >>> draw(torch.tensor([[0.0, 1.0, 0.0]]), 0).tolist()
        [1]
    """

    coupled: ClassVar[bool] = False  # whether draft and target share the noise of a position
    lenient: ClassVar[bool] = False  # whether draft tokens change a greedy output

    def __init__(
        self,
        keys: list[SequenceKey],
        lengths: list[int],
        params: Sequence[SamplingParams],
        controls: Sequence[LogitShaper | None] | None = None,
    ) -> None:
        self.keys, self.lengths, self.params = keys, lengths, params
        self.controls = [None] * len(keys) if controls is None else controls
        self.masses: list[Tensor] = []  # [B] each: sums of the distributions that were sampled from
        # draft tokens of this step, by drafters that ran before this one
        self.previous_draft_tokens: list[list[int]] = [[] for _ in keys]
        # this drafter's draft tokens, for the controls
        self._draft_tokens: list[list[int]] = [[] for _ in keys]
        self._prefetched: Tensor | None = None  # [num_draft_tokens + 2, B]
        self._host_numbers: Tensor | None = None  # the same on the host

    @property
    def greedy(self) -> bool:
        """True if every sequence takes the most probable token."""
        return all(params.greedy for params in self.params)

    @property
    def controlled(self) -> bool:
        """True if any sequence has controls."""
        return any(controls is not None for controls in self.controls)

    def select(self, rows: list[int]) -> Self:
        """Return the random numbers of the same step for some of the sequences.

        Args:
            rows: Indices of these sequences in the batch.

        Returns:
            A Draw for these sequences.
        """
        some = copy(self)  # shares the list `masses`
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
        some._host_numbers = None if self._host_numbers is None else self._host_numbers[:, rows]
        return some

    def sample(
        self, logits: Tensor, i: int, params: SamplingParams | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sample draft token i of every sequence from a draft model's logits.

        Args:
            logits: `[B, V]`, before each sequence's controls.
            i: Index of the token among this drafter's draft tokens of the step, from 0.
            params: Sampling params to use for all sequences; None: each sequence's own.

        Returns:
            Ids `[B]`, and the distribution that they were sampled from, `[B, V]`: None if every
            sequence takes the most probable token.
        """
        logits = self._apply_controls(logits, i)
        rules = self.params if params is None else [params] * len(self.params)
        if all(each.greedy for each in rules):
            ids = argmax_ids(logits)
            self._remember(ids, i)
            return ids, None
        q = compute_row_probabilities(logits, rules)
        return self(q, i), q

    def _apply_controls(self, logits: Tensor, i: int) -> Tensor:
        """Apply each sequence's controls to its logits. If the controls allow no token, the logits
        stay unchanged, which is valid because q may be any distribution."""
        if not self.controlled:
            return logits
        V = next(controls.V for controls in self.controls if controls is not None)
        scores = logits.to(get_working_dtype(logits.dtype))
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
        except ControlError:
            # not verified: an earlier draft token is rejected, or the target raises this error too
            return scores

    def _remember(self, ids: Tensor, i: int) -> None:
        """Store draft token i for the controls of later draft tokens."""
        if self.controlled:
            for draft_tokens, token in zip(self._draft_tokens, to_list(ids), strict=True):
                draft_tokens[i:] = [token]

    def prefetch(self, num_draft_tokens: int, device: torch.device) -> None:
        """Send the step's random numbers to a device in one copy.

        Args:
            num_draft_tokens: Maximum number of draft tokens in the step.
            device: The device.
        """
        names = [(0, Purpose.ACCEPT), (0, Purpose.NEXT)]
        names += [(i, Purpose.DRAFT) for i in range(num_draft_tokens)]
        self._host_numbers = self._compute_numbers(*names)
        self._prefetched = send(self._host_numbers, device)

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        """Sample draft token i of every sequence from a distribution.

        Args:
            distribution: `[B, V]`.
            i: Index of the token among this drafter's draft tokens of the step, from 0.
            cdf: Result of `compute_cdf` for this distribution, to save time; None: computed here.

        Returns:
            Ids, `[B]`.
        """
        ids = self._draw_ids(distribution, i, Purpose.DRAFT, cdf)
        self._remember(ids, i)
        return ids

    def continue_after(self, draft_tokens: list[list[int]]) -> Draw:
        """Return the random numbers with which another drafter continues this step's draft.

        Args:
            draft_tokens: The draft tokens to continue, for each sequence.

        Returns:
            A Draw whose token 0 follows these draft tokens.
        """
        later = copy(self)  # shares the list `masses`
        later.previous_draft_tokens = [
            [*x, *new] for x, new in zip(self.previous_draft_tokens, draft_tokens, strict=True)
        ]
        later._draft_tokens = [[] for _ in draft_tokens]
        later._prefetched = later._host_numbers = None
        return later

    @property
    def offsets(self) -> list[int]:
        """Offset of this drafter's token 0 in each sequence's block."""
        return [len(x) for x in self.previous_draft_tokens]

    def derive_keys(self) -> list[SequenceKey]:
        """Return random keys for a drafter that itself drafts and verifies in inner steps.

        Random numbers with these keys are independent of the random numbers of all steps.

        Returns:
            A key for each sequence.
        """
        return [
            derive_key(*name) for name in zip(self.keys, self.lengths, self.offsets, strict=True)
        ]

    def draw_draft_numbers(self, count: int) -> Tensor:
        """Return the random numbers that sample the draft tokens of every sequence.

        Args:
            count: Number of draft tokens.

        Returns:
            `[count, B]`, in float64, on the host.
        """
        if self._host_numbers is not None and count <= len(self._host_numbers) - 2:
            return self._host_numbers[2 : 2 + count]
        return self._compute_numbers(*((i, Purpose.DRAFT) for i in range(count)))

    def draw_verification_numbers(self) -> tuple[Tensor, Tensor]:
        """Return the random numbers that decide how many draft tokens are accepted, and the random
        numbers that sample the tokens after the accepted draft tokens.

        Returns:
            `[B]` each, in float64.
        """
        accept, following = self._compute_numbers((0, Purpose.ACCEPT), (0, Purpose.NEXT))
        return accept, following

    def draw_accepted(self, outcome: Outcome) -> Tensor:
        """Sample the number of accepted draft tokens of every sequence.

        Args:
            outcome: The result of the rule, which contains the distribution of this number.

        Returns:
            Counts, `[B]`.
        """
        if not outcome.survival.shape[1]:  # plain decoding
            return torch.zeros_like(outcome.lengths)
        return outcome.n(self._get_uniforms(0, Purpose.ACCEPT, outcome.survival.device))

    def draw_next_token(self, distribution: Tensor) -> Tensor:
        """Sample the token after the accepted draft tokens of every sequence.

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
        """Return the random numbers of each (offset, purpose), `[len(names), B]`."""
        seqs = list(zip(self.keys, self.lengths, self.offsets, strict=True))
        numbers = [
            [draw_uniform(key, length, first + offset, purpose) for key, length, first in seqs]
            for offset, purpose in names
        ]
        return torch.as_tensor(np.array(numbers).reshape(len(names), len(seqs)))


class LenientDraw(Draw):
    """The random numbers of a step with lenience. With lenience, even greedy outputs depend on the
    draft tokens."""

    lenient: ClassVar[bool] = True


class SharedDraw(Draw):
    """The random numbers of coupled mode: at position t, draft and target both choose the id with
    the smallest E_t / probability.

    Draft and target use the same exponential noise E_t, which depends on the absolute position t,
    so they choose the same id if their distributions are equal (Daliri, Musco, Suresh 2024, arXiv
    2408.07978).
    """

    coupled: ClassVar[bool] = True

    @cached_property
    def _noise(self) -> dict[tuple[NoisePositions, int], Tensor]:
        """The noise `[B, V]` by positions and V."""
        return {}

    def prefetch(self, num_draft_tokens: int, device: torch.device) -> None:
        """Do nothing: the noise has one number per id, and the number of ids is not known yet."""

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        self.masses.append(distribution.sum(-1, dtype=torch.float64))
        ids = self.find_winners(distribution[:, None], i).squeeze(1)
        self._remember(ids, i)
        return ids

    def derive_keys(self) -> list[SequenceKey]:
        """Return the keys unchanged: inner steps must use the same noise at the same position."""
        return self.keys

    def find_winners(self, distributions: Tensor, first: int = 0) -> Tensor:
        """Return the ids chosen at n consecutive positions, `[B, n]`, from `distributions [B, n,
        V]`. The first position is at offset `first` after the committed tokens."""
        _, n, V = distributions.shape
        noise = torch.stack([self._exponentials(first + i, V) for i in range(n)], 1)
        # in float64; inf for probability 0
        return (send(noise, distributions.device) / distributions).argmin(-1)

    def _exponentials(self, offset: int, V: int) -> Tensor:
        positions = self._noise_positions(offset)
        if (positions, V) not in self._noise:
            rows = [draw_exponentials(key, position, V) for key, position in positions]
            self._noise[positions, V] = torch.as_tensor(np.stack(rows))
        return self._noise[positions, V]

    def _noise_positions(self, offset: int) -> NoisePositions:
        """Return each sequence's key and absolute position at this offset."""
        names = zip(self.keys, self.lengths, self.offsets, strict=True)
        return tuple((key, length + first + offset) for key, length, first in names)
