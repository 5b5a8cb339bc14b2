"""Greedy texts with and without guesses, and what their first difference is: rounding or a bug.

A difference is rounding where the target itself hardly prefers one of the two tokens: by no more
than its logits differ between a block and single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.certificate.reference import singly
from foretoken.lab.certificate.shapes import Shapes
from foretoken.models.base import Model
from foretoken.request import Request

MARGIN = 4  # times the noise seen: both logits move, and a longer look would have seen more


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy texts part."""

    prompt: int
    gamma: int
    place: int  # among the new tokens
    plain: int | None  # the tokens there, None where the text had ended
    speculative: int | None
    gap: float | None  # between their logits, a token a pass
    noise: float
    verdict: str  # "float noise" or "bug"


@dataclass(frozen=True, slots=True)
class Identity:
    """Greedy texts, speculative against plain."""

    gammas: list[int]
    texts: int
    tokens: int
    same: int  # tokens up to the first difference of each text
    differences: list[Difference]

    @property
    def ok(self) -> bool:
        return all(one.verdict != "bug" for one in self.differences)


def first_difference(
    target: Model,
    request: Request,
    plain: Sequence[int],
    found: Sequence[int],
    shapes: Shapes,
    where: tuple[int, int],
) -> Difference | None:
    """None where the texts are one; `where`: prompt and gamma."""
    pairs = enumerate(zip(plain, found, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(found)))
    if place == len(plain) == len(found):
        return None
    if place in (len(plain), len(found)):  # the same text, ended elsewhere: never rounding
        a, b = [text[place] if place < len(text) else None for text in (plain, found)]
        return Difference(*where, place, a, b, None, shapes.noise, "bug")
    a, b = plain[place], found[place]
    logits = singly(target, request, list(plain[: place + 1]))[place].double()
    gap = float((logits[a] - logits[b]).abs())
    noise = shapes.ok and gap <= MARGIN * shapes.noise
    return Difference(*where, place, a, b, gap, shapes.noise, "float noise" if noise else "bug")
