"""Greedy texts with and without guesses: whether their first difference is rounding or a bug.

It is rounding where the target's logits of the two tokens are no further apart than a few times
the noise between a block and single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.controls.chain import chain
from foretoken.lab.certificate.reference import singly
from foretoken.lab.certificate.shapes import Shapes
from foretoken.models.base import Model
from foretoken.request import Request

MARGIN = 4  # times the noise measured: both logits move, and more passes would show more noise


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy texts differ first."""

    prompt: int
    gamma: int
    place: int  # among the new tokens
    plain: int | None  # the tokens there, None where the text had ended
    speculative: int | None
    gap: float | None  # between the logits of the two, from single-token passes
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
    def bugs(self) -> list[Difference]:
        return [one for one in self.differences if one.verdict == "bug"]

    @property
    def ok(self) -> bool:
        return not self.bugs


def first_difference(
    target: Model,
    request: Request,
    plain: Sequence[int],
    fast: Sequence[int],
    shapes: Shapes,
    where: tuple[int, int],
) -> Difference | None:
    """None where the texts are equal; `where`: prompt and gamma."""
    pairs = enumerate(zip(plain, fast, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(fast)))
    if place == len(plain) == len(fast):
        return None
    if place in (len(plain), len(fast)):  # one text is longer: never rounding
        a, b = [text[place] if place < len(text) else None for text in (plain, fast)]
        return Difference(*where, place, a, b, None, shapes.noise, "bug")
    a, b = plain[place], fast[place]
    logits = singly(target, request, list(plain[: place + 1]))[place].double()
    if (controls := chain(request, target.vocab_size)) is not None:
        logits = controls.shape(logits, list(plain[:place]))
    gap = float((logits[a] - logits[b]).abs())
    noise = shapes.ok and gap <= MARGIN * shapes.noise
    return Difference(*where, place, a, b, gap, shapes.noise, "float noise" if noise else "bug")
