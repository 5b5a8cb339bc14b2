"""Penalties change the scores of ids depending on the tokens before. Bans forbid ids, or force one
id, depending on the position or the tokens before.

A control is a function `control(scores, history) -> scores` of one position; it may change `scores
[V]` in place. All tokens, also draft tokens, are pushed to and popped from the history one at a
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from foretoken.sampling.checks import Ids, ThinkingBudget


class Rewindable(Protocol):
    """State that follows a sequence token by token, and can be rolled back."""

    def push(self, token: int) -> None:
        """Update the state for a token that is appended to the sequence."""
        ...

    def pop(self) -> None:
        """Return to the state before the last token."""
        ...


class GrowingArray:
    """An array of integers that grows and shrinks at its end. `view` takes constant time."""

    def __init__(self, numbers: Collection[int] = ()) -> None:
        self._buffer, self._count = np.fromiter(numbers, np.int64, len(numbers)), len(numbers)

    def push(self, number: int) -> None:
        if self._count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros(max(64, self._count), np.int64)])
        self._buffer[self._count] = number
        self._count += 1

    def pop(self) -> None:
        self._count -= 1

    @property
    def view(self) -> np.ndarray:
        """All numbers, valid until the next push."""
        return self._buffer[: self._count]


class TokenCounts:
    """The ids that have occurred, in the order of their first occurrence, and their counts."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        counts = Counter(tokens)
        self.ids, self.counts = GrowingArray(counts), GrowingArray(counts.values())
        self._indices = {token: i for i, token in enumerate(counts)}

    def push(self, token: int) -> None:
        index = self._indices.setdefault(token, len(self._indices))
        if index == len(self.ids.view):
            self.ids.push(token)
            self.counts.push(0)
        self.counts.view[index] += 1

    def pop(self, token: int) -> None:
        """Remove `token`, which must be the last token pushed. A token that occurred only once is
        then also the last of `ids`."""
        index = self._indices[token]
        self.counts.view[index] -= 1
        if not self.counts.view[index]:
            del self._indices[token]
            self.ids.pop()
            self.counts.pop()


class TokenHistory:
    """The tokens of a sequence, of which the first `prompt` are the prompt, and the counts of each
    id in all tokens and in the new tokens. The time per token does not grow with the length."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens, self.prompt = list(prompt), len(prompt)
        self.all_counts, self.new_counts, self._ids = (
            TokenCounts(prompt),
            TokenCounts(),
            GrowingArray(prompt),
        )

    @property
    def num_new_tokens(self) -> int:
        """The number of new tokens so far."""
        return len(self.tokens) - self.prompt

    def push(self, token: int) -> None:
        self.tokens.append(token)
        for each in (self.all_counts, self.new_counts, self._ids):
            each.push(token)

    def pop(self) -> None:
        token = self.tokens.pop()
        self._ids.pop()
        for tally in (self.all_counts, self.new_counts):
            tally.pop(token)

    def to_tensor(self, device: torch.device) -> Tensor:
        """Return all tokens, `[n]`, as a copy that the caller may change."""
        return torch.from_numpy(self._ids.view.copy()).to(device)


class SuppressTokens:
    """Forbids `ids` for the new tokens `start` to `until` - 1; by default for all new tokens."""

    def __init__(self, ids: list[int], start: int = 0, until: int | None = None) -> None:
        self.ids, self.start, self.until = torch.tensor(ids, dtype=torch.long), start, until

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        if history.num_new_tokens < self.start or (
            self.until is not None and history.num_new_tokens >= self.until
        ):
            return scores
        return scores.index_fill_(0, self.ids.to(scores.device), -torch.inf)


class AllowTokens:
    """Forbids all ids except `ids`."""

    def __init__(self, ids: Ids, V: int) -> None:
        self.others = torch.ones(V, dtype=torch.bool)
        self.others[list(ids)] = False

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        return scores.masked_fill_(self.others.to(scores.device), -torch.inf)


@dataclass(frozen=True, slots=True)
class ForceTokens:
    """Forces ids at some positions: `token_at_position` maps indices of new tokens to ids."""

    token_at_position: dict[int, int]

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        token = self.token_at_position.get(history.num_new_tokens)
        if token is not None:
            scores.fill_(-torch.inf)
            scores[token] = 0.0
        return scores


class LimitThinking:
    """Forces the closing ids when the thinking budget is used up. If the grammar does not allow a
    closing id yet, for example within a character, this id is forced as soon as it is allowed."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self.budget = budget
        self._tokens: list[int] = []
        self._begun: int | None = None if budget.opening else 0  # new tokens before thinking
        self._closed: int | None = None

    def push(self, token: int) -> None:
        self._tokens.append(token)
        size, opening, closing = len(self._tokens), self.budget.opening, self.budget.closing
        if self._begun is None:
            self._begun = size if self._ends_with(opening) else None
        elif (
            self._closed is None and size - self._begun >= len(closing) and self._ends_with(closing)
        ):
            self._closed = size

    def pop(self) -> None:
        size = len(self._tokens)
        self._tokens.pop()
        if self._closed == size:
            self._closed = None
        elif self._begun == size and self.budget.opening:
            self._begun = None

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        if self._begun is None or self._closed is not None:
            return scores
        if len(self._tokens) - self._begun < self.budget.tokens:
            return scores
        closing = self.budget.closing
        sizes = range(len(closing) - 1, 0, -1)
        matched = next((size for size in sizes if self._ends_with(closing[:size])), 0)
        if scores[closing[matched]] > -torch.inf:
            scores.fill_(-torch.inf)
            scores[closing[matched]] = 0.0
        return scores

    def _ends_with(self, ids: Ids) -> bool:
        return tuple(self._tokens[-len(ids) :]) == ids


class SequenceBias:
    """Adds a bias to the score of an id that would complete a sequence of ids; a bias of -inf
    forbids that id."""

    def __init__(self, biases: dict[tuple[int, ...], float]) -> None:
        singles = {ids[0]: bias for ids, bias in biases.items() if len(ids) == 1}
        self.ids = torch.tensor(list(singles), dtype=torch.long)
        self.single_biases = torch.tensor(list(singles.values()), dtype=torch.float64)
        # sequences of two ids or more, by their last id but one
        self.sequences_by_token: dict[int, list[tuple[list[int], int, float]]] = {}
        for ids, bias in biases.items():
            if len(ids) > 1:
                self.sequences_by_token.setdefault(ids[-2], []).append(
                    (list(ids[:-1]), ids[-1], bias)
                )

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        if len(self.ids):
            scores.index_add_(0, self.ids.to(scores.device), self.single_biases.to(scores))
        tokens = history.tokens
        for before, token, bias in self.sequences_by_token.get(tokens[-1], ()):
            if tokens[-len(before) :] == before:
                scores[token] += bias
        return scores


class NoRepeatNgram:
    """Forbids every n-gram that occurred before in the sequence. It stores the tokens that followed
    each (n - 1)-gram."""

    def __init__(self, n: int, prompt: list[int]) -> None:
        self.n = n
        self.tokens: list[int] = []
        self.continuations: dict[tuple[int, ...], list[int]] = {}  # a stack for each (n - 1)-gram
        for token in prompt:
            self.push(token)

    def push(self, token: int) -> None:
        if len(self.tokens) >= self.n - 1:
            self.continuations.setdefault(self._get_suffix(), []).append(token)
        self.tokens.append(token)

    def pop(self) -> None:
        self.tokens.pop()
        if len(self.tokens) >= self.n - 1:
            self.continuations[self._get_suffix()].pop()

    def _get_suffix(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.tokens) - self.n + 1 :])

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        if len(self.tokens) < self.n - 1:
            return scores
        return ban_tokens(scores, self.continuations.get(self._get_suffix(), []))


class NoSourceNgram:
    """Forbids every n-gram of the encoder's input, or of a decoder-only model's prompt."""

    def __init__(self, n: int, source: list[int], V: int) -> None:
        self.n = n
        self.continuations: dict[tuple[int, ...], list[int]] = {}
        for i in range(len(source) - n + 1):
            *before, token = source[i : i + n]
            if token < V:
                self.continuations.setdefault(tuple(before), []).append(token)

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        first = len(history.tokens) - self.n + 1
        if first < 0:
            return scores
        return ban_tokens(scores, self.continuations.get(tuple(history.tokens[first:]), []))


def replace_nonfinite(scores: Tensor, history: TokenHistory) -> Tensor:
    """Replace NaN by 0, and infinities by the largest and lowest finite numbers."""
    return scores.nan_to_num_(0.0)


def ban_tokens(scores: Tensor, ids: list[int]) -> Tensor:
    """Set the scores of these ids to -inf, in place, and return all scores."""
    if not ids:
        return scores
    return scores.index_fill_(0, torch.tensor(ids, device=scores.device), -torch.inf)


MAX_GROWTH = 1e30  # limit of a factor: the score exceeds all others, but is finite in float32


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Makes ids of the prompt and the output less probable if `penalty` is above 1 (Keskar et al.
    2019, arXiv 1909.05858)."""

    penalty: float

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        ids = torch.from_numpy(history.all_counts.ids.view).to(scores.device)
        return scale_scores(scores, ids, self.penalty)


class EncoderRepetitionPenalty:
    """Makes ids of the encoder's input, or of a decoder-only model's prompt, more probable if
    `penalty` is above 1."""

    def __init__(self, penalty: float, source: list[int], V: int) -> None:
        self.factor = 1 / penalty
        self.ids = torch.tensor(sorted({i for i in source if i < V}), dtype=torch.long)

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        return scale_scores(scores, self.ids.to(scores.device), self.factor)


@dataclass(frozen=True, slots=True)
class OccurrencePenalty:
    """OpenAI's penalties: subtracts `presence` from the logit of every id in the output, and
    `frequency` for each occurrence of the id. The prompt does not count."""

    presence: float
    frequency: float

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        if not history.num_new_tokens:
            return scores
        counts = torch.from_numpy(history.new_counts.counts.view).to(scores)
        ids = torch.from_numpy(history.new_counts.ids.view).to(scores.device)
        return scores.index_add_(0, ids, -(self.presence + self.frequency * counts))


class ExponentialDecayPenalty:
    """After `start` new tokens, raises each score s of the EOS ids by |s| (`factor`^k - 1), with k
    the number of new tokens beyond `start`."""

    def __init__(self, start: int, factor: float, ends: list[int]) -> None:
        self.start, self.factor = start, factor
        self.ends = torch.tensor(ends, dtype=torch.long)

    def __call__(self, scores: Tensor, history: TokenHistory) -> Tensor:
        excess = history.num_new_tokens - self.start
        if excess <= 0 or not len(self.ends):
            return scores
        ends = self.ends.to(scores.device)
        now = scores[ends]
        raised = now + now.abs() * (self._compute_growth(excess) - 1)
        return scores.index_copy_(0, ends, torch.where(now.isfinite(), raised, now))

    def _compute_growth(self, excess: int) -> float:
        """Return `factor` to the power `excess`, at most `MAX_GROWTH`."""
        try:
            return min(self.factor**excess, MAX_GROWTH)
        except OverflowError:
            return MAX_GROWTH


def scale_scores(scores: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Divide positive scores of these ids by the penalty and multiply negative scores by the
    penalty, in place. Return all scores."""
    if not len(ids):
        return scores
    if scores.is_cpu:  # NumPy needs a quarter of torch's time for few numbers
        array, at = scores.numpy(), ids.numpy()
        now = array[at]
        array[at] = np.where(now < 0, now * penalty, now / penalty)
        return scores
    now = scores[ids]
    return scores.index_copy_(0, ids, torch.where(now < 0, now * penalty, now / penalty))
