"""Decoders of pairs read real states, so their proof runs real transformers, tiny and in float64.

Every course of a few steps is enumerated, and the distribution of all that comes out is the
target's own, as full forwards have it; drafters that lie about what they drew from change it. The
first step has no state and guesses nothing, where the prompt is one token or its row is alone.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import cache, lru_cache
from typing import Any

import pytest
from torch import Tensor

import pairs
import tiny
from exact.worlds import Case, bias, distribution_of, standardized
from foretoken.drafters.base import Draft
from foretoken.drafters.mtp_stacks import MtpStackDrafter
from foretoken.drafters.pairs import PairsDrafter
from foretoken.models.stock.mtp_stacks import MtpStackNetwork, StockMtpStack
from foretoken.models.stock.pair_files import PairsDraft
from foretoken.models.stock.pairs import StockPairModel
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import Model, Text, extend, joint, tv
from pairdrafts import eagle_file, embedding, filed, mtp_draft, mtp_layer, mtp_stack, tapped

pytestmark = pytest.mark.daily

SAMPLED = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.6, top_p=0.9)
PROMPT = [1]


@cache
def network(V: int) -> Any:
    return tiny.llama(V, context=32, seed=3).double()


@cache
def own_distribution(V: int) -> Model:
    @lru_cache(None)
    def distribution(text: Text) -> Any:
        return pairs.scores(network(V), list(text))[-1].softmax(-1).numpy()

    return lambda text: distribution(text)


@cache
def draft(kind: str, V: int) -> PairsDraft:
    """Drafts whose distributions are their own."""
    if kind == "mtp":
        made = mtp_draft(network(V), filed(mtp_layer(network(V)), "mtp"))
    elif kind == "stack":
        made = mtp_draft(network(V), mtp_stack(network(V), 2)[1])
    else:
        kept = [0, 2] if kind == "some tokens" else None
        made = eagle_file(V, (0, 1, 2), kept, norm_output=True).read(network(V))
    made.network.double()
    return made


def case(
    kind: str,
    rule: str,
    V: int = 2,
    gamma: int = 2,
    drafter: type[PairsDrafter] | None = None,
    prompts: tuple[list[int], ...] = (PROMPT,),
    **options: Any,
) -> Case:
    """What runs, each drafter upon the target that was made before it."""
    made, own = list[Any](), draft(kind, V)
    drafter = drafter or (MtpStackDrafter if kind == "stack" else PairsDrafter)

    def target() -> Any:
        made.append(tapped(network(V), own.taps))
        return made[-1]

    def on_it() -> PairsDrafter:
        words, stack = embedding(network(V), own), isinstance(own.network, MtpStackNetwork)
        decoder = StockMtpStack(own.network) if stack else StockPairModel(own.network)
        ready = drafter(made[-1], decoder, words, own.ids)
        made[-1].expose_hidden_states(ready.count_cached_tokens)
        return ready

    rows = tuple(Request(list(text), 100, SequenceKey(0, b)) for b, text in enumerate(prompts))
    options = {"params": SAMPLED, "steps": 3} | options
    return Case(target, on_it, EXACT_RULES[rule], gamma, rows=rows, **options)


KINDS = [("all tokens", 2, SAMPLED), ("mtp", 2, SAMPLED), ("stack", 2, SAMPLED)]
KINDS += [("some tokens", 3, CUT)]


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("kind", "V", "params"), KINDS)
def test_three_steps_leave_the_distribution_as_it_is(kind, V, params, rule, monkeypatch):
    one = case(kind, rule, V, params=params)
    assert bias(one, own_distribution(V), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("kind", "V", "params"), KINDS)
def test_a_longer_prompt_too(kind, V, params, rule, monkeypatch):
    own = {"params": params, "steps": 2, "together": False}
    one = case(kind, rule, V, prompts=([0, 1, 1, 0],), **own)
    assert bias(one, own_distribution(V), monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("kind", "V", "params"), [*KINDS[:3], ("some tokens", 3, SAMPLED)])
def test_proof_larger(kind, V, params, rule, monkeypatch):
    one = case(kind, rule, V, 3 if V == 2 else 2, params=params)
    assert bias(one, own_distribution(V), monkeypatch) < 1e-12


class Likeliest(PairsDrafter):
    """Lies: takes the likeliest tokens, and says that they were drawn."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        lying: Any = copy.copy(draw)
        lying.sample = lambda logits, i, params: (logits.argmax(-1), logits.softmax(-1))
        return super().propose(gamma, lying)


class Raw(PairsDrafter):
    """Lies: says that it drew before temperature and top-p."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        lying: Any = copy.copy(draw)
        lying.sample = lambda logits, i, params: (draw.sample(logits, i)[0], logits.softmax(-1))
        return super().propose(gamma, lying)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("liar", "params"), [(Likeliest, SAMPLED), (Raw, CUT)])
def test_another_distribution_shows(liar, params, rule, monkeypatch):
    one = case("some tokens", rule, 3, 1, liar, params=params)
    assert bias(one, own_distribution(3), monkeypatch) > 1e-3


class NextLayers(MtpStackDrafter):
    """Lies: says that each layer of a stack drew from the other's distribution."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        honest = super().propose(gamma, draw)
        q = None if honest.q is None else honest.q.flip(1)
        return Draft(honest.tokens, honest.lengths, q, honest.calls, honest.tops)


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_another_layer_s_distribution_shows(rule, monkeypatch):
    one = case("stack", rule, drafter=NextLayers)
    assert bias(one, own_distribution(2), monkeypatch) > 1e-3


class Exchanging(PairsDrafter):
    """Lies: says that each of two rows drew from the other's distribution."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        honest = super().propose(gamma, draw)
        if honest.q is None:
            return honest
        q: Tensor = honest.q.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
        return Draft(honest.tokens, honest.lengths, q, honest.calls, honest.tops)


class StackExchanging(Exchanging, MtpStackDrafter):
    """As the class before, of a stack."""


def biases(one: Case, V: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each row's, in a batch."""
    joined = distribution_of(one, monkeypatch)
    found = []
    for b, request in enumerate(one.rows):
        alone: dict[Text, float] = defaultdict(float)
        for texts, weight in joined.items():
            alone[texts[b]] += weight
        own = standardized(own_distribution(V), SAMPLED, tuple(request.prompt))
        length = one.steps * (one.gamma + 1)
        found.append(tv(extend(alone, own, length), joint(own, length)))
    return found


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(
    "kind", ["mtp", *(pytest.param(k, marks=pytest.mark.prove) for k in ("stack", "all tokens"))]
)
def test_a_row_beside_changes_nothing(kind, rule, monkeypatch):
    prompts = ([0], [1])
    assert max(biases(case(kind, rule, prompts=prompts, steps=2), 2, monkeypatch)) < 1e-12
    liar = StackExchanging if kind == "stack" else Exchanging
    swapped = case(kind, rule, drafter=liar, prompts=prompts, steps=2)
    assert max(biases(swapped, 2, monkeypatch)) > 1e-3
