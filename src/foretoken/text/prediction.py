"""A request's predicted text, and the position of the text within it.

A function of the text alone: what was read of it is remembered only to save time. Knows no models
and no tokenizer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LONGEST = 16  # tokens that are compared where the text stands elsewhere than foretold
NEAR = 64  # places on either side that are looked at


class Prediction:
    """The ids of a text that is expected.

    Where the text goes on otherwise, it is looked for again: behind the longest end of it that
    occurs in the prediction, of several the next one behind the last place that was certain. A find
    that does not go on as it should doubles the length that the next one must have, up to
    `LONGEST`, so that a prediction of another text soon falls silent.
    """

    prior = (4.0, 0.9)  # as `Costs.prior`: whoever sends it expects it

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self._behind: dict[int, list[int]] = {}  # the places behind each token
        for place, token in enumerate(self.ids, 1):
            self._behind.setdefault(token, []).append(place)
        self._begin()

    def predict_next(self, new_tokens: list[int], max_tokens: int) -> list[int]:
        """At most so many tokens that follow `text`; [] where it does not stand in the
        prediction."""
        if new_tokens[: len(self._text)] != self._text:
            self._begin()
        for token in new_tokens[len(self._text) :]:
            self._text.append(token)
            self._follow(token)
        return [] if self._place is None else self.ids[self._place : self._place + max_tokens]

    def _begin(self) -> None:
        """No text yet: it begins as the prediction does."""
        self._text: list[int] = []
        self._place: int | None = 0
        self._certain = 0  # the last place that the text was led to by going on as foretold
        self._least = 1  # tokens that must agree

    def _follow(self, token: int) -> None:
        place = self._place
        if place is not None and self.ids[place : place + 1] == [token]:
            self._place = self._certain = place + 1
            self._least = max(1, self._least // 2)
            return
        if place not in (None, self._certain):  # it was found there wrongly
            self._least = min(LONGEST, 2 * self._least)
        self._place = self._find(token)

    def _find(self, token: int) -> int | None:
        places = self._behind.get(token, [])
        first = bisect_left(places, self._certain)
        near = [*places[first : first + NEAR], *places[max(0, first - NEAR) : first][::-1]]
        place = max(near, key=self._agreement, default=None)
        return None if place is None or self._agreement(place) < self._least else place

    def _agreement(self, place: int) -> int:
        """Count the tokens before that place that are the last ones of the text."""
        most = min(LONGEST, place, len(self._text))
        differ = (n for n in range(most) if self.ids[place - 1 - n] != self._text[-1 - n])
        return next(differ, most)
