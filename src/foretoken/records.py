"""Records of the steps of a sequence, and the statistics that are computed from these records.

This module imports no torch, as an engine's process sends records to processes without torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step of one sequence.

    Attributes:
        gamma: Maximum number of draft tokens.
        draft_tokens: The draft tokens.
        accepted: Number of draft tokens that were accepted.
        new_tokens: Output tokens of the step: the accepted draft tokens and one token of the
            target, up to the token that ends the sequence, if any.
        overlaps: beta, sum min(p, q), at every draft token that was verified, including the first
            rejected one.
        draft_calls: Number of draft forwards.
        draft_seconds: Seconds of drafting for the whole batch.
        score_seconds: Seconds of the target's forward for the whole batch.
        verify_seconds: Seconds of the verification for the whole batch.
        rows: Number of sequences in the step's batch.
        biases: Total variation distance from the target at each verified draft token; () if exact.
        padding: Number of padding positions in the target's forward for the whole batch.
        predicted: True if the draft tokens come from the request's prediction, from the sequence
            itself or from its grammar, not from the drafter.
        grade: The drafter's confidence in its draft tokens before verification: for a look-up, 0
            without a match, 1 after a short match, 2 after a longer match; 0 if the drafter reports
            no confidence or gamma is fixed. For a draft "A+B", the index of the draft that drafted
            (unless `predicted` is True).

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> [token for step in out.steps for token in step.new_tokens] == out.tokens
        True
    """

    gamma: int
    draft_tokens: tuple[int, ...]
    accepted: int
    new_tokens: tuple[int, ...]
    overlaps: tuple[float, ...]
    draft_calls: int
    draft_seconds: float
    score_seconds: float
    verify_seconds: float
    rows: int
    biases: tuple[float, ...] = ()
    padding: int = 0
    predicted: bool = False
    grade: int = 0

    @property
    def drafted(self) -> int:
        """The number of draft tokens."""
        return len(self.draft_tokens)


@dataclass(frozen=True, slots=True)
class Stats:
    """Costs and acceptance of a completion.

    Times are those of the sequence's whole batch, from the start of the sequence's prefill.

    Attributes:
        target_calls: Number of target forwards, not counting the prefill before the first step.
        draft_calls: Number of draft forwards.
        drafted: Number of draft tokens.
        accepted: Number of draft tokens that were accepted.
        rounds: Number of steps.
        alpha: Mean of sum min(p, q) over all verified draft tokens (paper, Corollary 3.6); with a
            lenience l, mean of sum min(p / l, q). None if no draft token was verified.
        accepted_per_drafted: accepted / drafted, which differs from alpha; None if drafted is 0.
        tokens_per_call: New tokens for each target forward.
        seconds: Time until the end of the last step.
        prefill_seconds: Time of the target's prefill before the first step. The first step often
            prefills the end of the prompt; this time is not included.
        first_seconds: Time until the end of the first step.
        runtime: The target's backend.
        draft_runtime: The drafter's backend.
        cached_tokens: Prompt tokens found in the prefix cache.
        bias: Mean total variation distance from the target's distribution per new token; 0: exact.
        draft_prefill_seconds: Time of the drafter's prefill, usually after the first step.
        encoder_seconds: Time of the target's encoder, included in prefill_seconds.
        draft_encoder_seconds: Time of encoders, included in draft_prefill_seconds.
        prefill_end_seconds: Time until the end of the first step and of the drafter's prefill.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.stats.tokens_per_call == len(out.tokens) / out.stats.target_calls
        True
    """

    target_calls: int
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
    cached_tokens: int = 0
    bias: float = 0.0
    draft_prefill_seconds: float = 0.0
    encoder_seconds: float = 0.0
    draft_encoder_seconds: float = 0.0
    prefill_end_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that `json.dumps` accepts.

        Returns:
            Values by field.
        """
        return asdict(self)


class PartialOutput(NamedTuple):
    """The beginning of an output, as records of the steps in which another engine generated it."""

    steps: list[StepRecord]
