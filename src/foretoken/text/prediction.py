"""A request's predicted output, and the position in the prediction that the output has reached.

The position depends on the output tokens alone: state is cached only to save time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_MATCH_TOKENS = 16  # tokens compared after the output has left the prediction
MAX_NEARBY_POSITIONS = 64  # positions searched on either side of the last certain position


class PredictedOutput:
    """Token ids of an expected output; proposes the ids that follow the output so far.

    If the output leaves the prediction, the position moves to the end of the longest suffix of the
    output that occurs in the prediction. Among equally long matches, the first one after the last
    certain position is used. If the next token contradicts such a match, the required length of the
    next match doubles, up to `MAX_MATCH_TOKENS`, so an unrelated prediction soon proposes nothing.
    """

    # a single grade: a client sends a prediction that it expects to match
    priors, grade = ((4.0, 0.9),), 0

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._positions_after: dict[int, list[int]] = {}  # token -> positions after it
        for position, token in enumerate(self.ids, 1):
            self._positions_after.setdefault(token, []).append(position)
        self._reset()

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that follow `new_tokens` in the prediction; [] if
        `new_tokens` have no position in it."""
        if new_tokens[: len(self._tokens)] != self._tokens:
            self._reset()
        for token in new_tokens[len(self._tokens) :]:
            self._tokens.append(token)
            self._append(token)
        return (
            [] if self._position is None else self.ids[self._position : self._position + max_tokens]
        )

    def _reset(self) -> None:
        """Start with an empty output, at the beginning of the prediction."""
        self._tokens: list[int] = []
        self._position: int | None = 0
        self._last_certain = 0  # the last position reached by a token that matched the prediction
        self._min_match_tokens = 1  # tokens that must match

    def _append(self, token: int) -> None:
        position = self._position
        if position is not None and self.ids[position : position + 1] == [token]:
            self._position = self._last_certain = position + 1
            self._min_match_tokens = max(1, self._min_match_tokens // 2)
            return
        if position not in (None, self._last_certain):  # the last match was wrong
            self._min_match_tokens = min(MAX_MATCH_TOKENS, 2 * self._min_match_tokens)
        self._position = self._find(token)

    def _find(self, token: int) -> int | None:
        positions = self._positions_after.get(token, [])
        first = bisect_left(positions, self._last_certain)
        near = [
            *positions[first : first + MAX_NEARBY_POSITIONS],
            *positions[max(0, first - MAX_NEARBY_POSITIONS) : first][::-1],
        ]
        position = max(near, key=self._count_matching_tokens, default=None)
        return (
            None
            if position is None or self._count_matching_tokens(position) < self._min_match_tokens
            else position
        )

    def _count_matching_tokens(self, position: int) -> int:
        """Count the tokens before `position` that equal the last tokens of the output."""
        max_tokens = min(MAX_MATCH_TOKENS, position, len(self._tokens))
        differ = (
            n for n in range(max_tokens) if self.ids[position - 1 - n] != self._tokens[-1 - n]
        )
        return next(differ, max_tokens)
