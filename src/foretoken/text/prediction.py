"""A request's predicted text, and the position of the text within it.

A function of the text alone: what was read of it is remembered only to save time. Knows no models
and no tokenizer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MAX_MATCH_TOKENS = 16  # tokens that are compared where the text stands elsewhere than foretold
MAX_NEARBY_POSITIONS = 64  # places on either side that are looked at


class PredictedOutput:
    """The ids of a text that is expected.

    Where the text goes on otherwise, it is looked for again: behind the longest end of it that
    occurs in the prediction, of several the next one behind the last place that was certain. A find
    that does not go on as it should doubles the length that the next one must have, up to
    `MAX_MATCH_TOKENS`, so that a prediction of another text soon falls silent.
    """

    prior = (4.0, 0.9)  # as `Costs.prior`: whoever sends it expects it

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._positions_after: dict[int, list[int]] = {}  # the places behind each token
        for position, token in enumerate(self.ids, 1):
            self._positions_after.setdefault(token, []).append(position)
        self._reset()

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        """At most so many tokens that follow `text`; [] where it does not stand in the
        prediction."""
        if new_tokens[: len(self._tokens)] != self._tokens:
            self._reset()
        for token in new_tokens[len(self._tokens) :]:
            self._tokens.append(token)
            self._append(token)
        return (
            [] if self._position is None else self.ids[self._position : self._position + max_tokens]
        )

    def _reset(self) -> None:
        """No text yet: it begins as the prediction does."""
        self._tokens: list[int] = []
        self._position: int | None = 0
        self._last_certain = 0  # the last place that the text was led to by going on as foretold
        self._min_match_tokens = 1  # tokens that must agree

    def _append(self, token: int) -> None:
        position = self._position
        if position is not None and self.ids[position : position + 1] == [token]:
            self._position = self._last_certain = position + 1
            self._min_match_tokens = max(1, self._min_match_tokens // 2)
            return
        if position not in (None, self._last_certain):  # it was found there wrongly
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
        """Count the tokens before that place that are the last ones of the text."""
        max_tokens = min(MAX_MATCH_TOKENS, position, len(self._tokens))
        differ = (
            n for n in range(max_tokens) if self.ids[position - 1 - n] != self._tokens[-1 - n]
        )
        return next(differ, max_tokens)
