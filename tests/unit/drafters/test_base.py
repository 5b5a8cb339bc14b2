"""Which drafters may stand together over a target: each model or drafter has one place's rows."""

from __future__ import annotations

import pytest

import foretoken
import tiny
from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.speculator import Speculator
from table import TableModel


def table() -> TableModel:
    return TableModel.markov([[0.6, 0.4], [0.3, 0.7]])


def refused(target: TableModel, drafter: Drafter, kind: str) -> None:
    with pytest.raises(InputError, match=f"^one {kind} is used in two places .*; make another"):
        Speculator(target, drafter)


def test_one_drafter_in_two_parts() -> None:
    lookup, lm = LookupDrafter(), LMDrafter(table())
    refused(table(), MixtureDrafter([(lookup, 1), (lookup, None)]), "LookupDrafter")
    refused(table(), MixtureDrafter([(CascadeDrafter(table(), lm), 1), (lm, 1)]), "LMDrafter")


def test_one_model_in_two_drafters() -> None:
    model = table()
    lm = LMDrafter(model)
    refused(table(), MixtureDrafter([(lm, 1), (LMDrafter(model), None)]), "TableModel")
    refused(table(), CascadeDrafter(model, lm), "TableModel")
    refused(model, lm, "TableModel")


class FourAlone:
    """Repeats the last token; it has the methods of the contract and nothing else."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def start(self, rows, prompts, sources) -> None:
        self.texts += [list(prompt) for prompt in prompts]

    def propose(self, gamma, draw) -> Draft:
        return pack([text[-1:] * g for text, g in zip(self.texts, gamma, strict=True)])

    def commit(self, tokens) -> None:
        for text, new in zip(self.texts, tokens, strict=True):
            text += new

    def leave(self, rows) -> None:
        self.texts = [text for b, text in enumerate(self.texts) if b not in rows]


class ForthAndBack(FourAlone):
    def rewind(self, counts) -> None:
        for text, count in zip(self.texts, counts, strict=True):
            del text[len(text) - count :]


class OfTheProtocol(ForthAndBack, Drafter):
    pass


class OfTheProtocolForth(FourAlone, Drafter):
    pass


@pytest.mark.parametrize("kind", [ForthAndBack, OfTheProtocol])
def test_with_rewind_they_stand_in_cascades_and_mixtures(kind) -> None:
    parts = [(CascadeDrafter(table(), kind(), gamma=2), 2), (kind(), None)]
    spec = Speculator(table(), MixtureDrafter(parts))
    made = spec.generate([[0], [1]], gamma=4, max_new_tokens=9)
    plain = spec.generate([[0], [1]], gamma=0, max_new_tokens=9)
    assert [c.tokens for c in made] == [c.tokens for c in plain]
    twice = kind()
    refused(table(), MixtureDrafter([(twice, 1), (twice, None)]), kind.__name__)


@pytest.mark.parametrize("kind", [FourAlone, OfTheProtocolForth])
def test_without_rewind_they_do_not(kind) -> None:
    says = f"^{kind.__name__} cannot rewind, but the parts of .*; define a method rewind"
    with pytest.raises(RefusedError, match=says):
        CascadeDrafter(table(), kind())
    with pytest.raises(RefusedError, match=says):
        MixtureDrafter([(kind(), 1)])


def test_a_method_that_is_missing_is_named() -> None:
    class Half:
        def propose(self, gamma, draw) -> None: ...
        def commit(self, tokens) -> None: ...

    class HalfOfTheProtocol(Half, Drafter):
        pass

    for kind in (Half, HalfOfTheProtocol):
        says = f"^{kind.__name__} lacks start and leave; a drafter has the methods start, propose,"
        with pytest.raises(InputError, match=says):
            foretoken.load(tiny.llama(), kind())  # pyright: ignore[reportAbstractUsage]
