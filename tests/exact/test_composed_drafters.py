"""Drafters made of drafters, and drafts with a standardization of their own: two consecutive steps
leave the target's distribution as it is, and what looks like a short cut does not.
"""

from __future__ import annotations

import sys
from functools import cache

import pytest
import torch
from torch import Tensor

from exact.drafters import Certain, FunctionDrafter
from exact.test_negative_controls import GridDraw, on_a_grid
from exact.worlds import Case, Table, bias, distribution_of
from foretoken.drafters.base import Draft
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.choice import DrafterChoice
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, block, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import Purpose, SequenceKey
from oracle import Model, random_model

pytestmark = pytest.mark.daily

V, GAMMA = 2, 2
VISIBLE = 1e-3
P, M, Q, R = 1, 2, 3, 4  # seeds of the target, the middle model and two drafts


@cache
def distribution(seed: int, V: int) -> Model:
    return random_model(seed, V)


class Rewound(FunctionDrafter):
    """A Guesser that can go back."""

    def rewind(self, counts: list[int]) -> None:
        self.texts = [text[: len(text) - n] for text, n in zip(self.texts, counts, strict=True)]


class CertainRewound(Certain, Rewound):
    """Certain of its draft tokens, and can go back."""


def table(seed: int, **changes) -> Table:
    return Table(distribution(seed, V), V, **changes)


def lm(seed: int) -> LMDrafter:
    return LMDrafter(table(seed))


def cascade(drafter, gamma: int = 1, **changes) -> CascadeDrafter:
    return CascadeDrafter(table(M, **changes), drafter, gamma)


CASCADES = {
    "lm": lambda: cascade(lm(Q)),
    "lm-guesses-past-the-end": lambda: cascade(lm(Q), gamma=3),
    "lookup": lambda: cascade(LookupDrafter()),
    "uniform": lambda: cascade(UniformDrafter(V)),
    "certain": lambda: cascade(CertainRewound(distribution(Q, V))),
    "stops": lambda: cascade(Rewound(distribution(Q, V), after=lambda q, x: q[x] < 0.5), gamma=2),
    "no-guesses": lambda: cascade(lm(Q), gamma=0),
    "middle-outgrown": lambda: cascade(lm(Q), context=3),
    "depth-3": lambda: cascade(CascadeDrafter(table(Q), lm(R), 1)),
    "mixture-within": lambda: cascade(MixtureDrafter([(LookupDrafter(), 1), (lm(Q), None)]), 2),
}
MIXTURES = {
    "two-models": lambda: MixtureDrafter([(lm(Q), 1), (lm(R), None)]),
    "one-part": lambda: MixtureDrafter([(lm(Q), None)]),
    "lookup-then-model": lambda: MixtureDrafter([(LookupDrafter(), 2), (lm(Q), None)]),
    "model-then-certain": lambda: MixtureDrafter(
        [(lm(Q), 1), (CertainRewound(distribution(R, V)), None)]
    ),
    "model-then-uniform": lambda: MixtureDrafter([(lm(Q), 1), (UniformDrafter(V), 1)]),
    "cascades": lambda: MixtureDrafter([(cascade(lm(Q)), 1), (cascade(lm(R)), None)]),
    "first-stops": lambda: MixtureDrafter(
        [(Rewound(distribution(Q, V), before=lambda q, i: bool(q.max() < 0.7)), 2), (lm(R), None)]
    ),
}


class Switching(DrafterChoice):
    """Chooses by the tokens that were committed."""

    def propose(self, gamma, draw):
        self.chosen = [int(text[-1] == 1) for text in self.parts[0].texts]
        return super().propose(gamma, draw)


CHOICES = {
    "two-distributions": lambda: Switching(
        [FunctionDrafter(distribution(Q, V)), FunctionDrafter(distribution(R, V))]
    ),
    "certain-or-not": lambda: Switching(
        [Certain(distribution(Q, V)), FunctionDrafter(distribution(R, V))]
    ),
    "models-and-fewer": lambda: Switching(
        [FunctionDrafter(distribution(Q, V), after=lambda q, x: q[x] < 0.5), lm(R)]
    ),
    "fixed": lambda: DrafterChoice([lm(Q), lm(R)]),
}


def case(drafter, rule=speculative, **changes) -> Case:
    return Case(lambda: table(P), drafter, rule, GAMMA, **changes)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", CASCADES)
def test_cascades(kind, rule, monkeypatch):
    """The middle model's draft tokens are cut at gamma, a count that their values have no say
    in."""
    assert bias(case(CASCADES[kind], EXACT_RULES[rule]), distribution(P, V), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures(kind, rule, monkeypatch):
    assert bias(case(MIXTURES[kind], EXACT_RULES[rule]), distribution(P, V), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", CHOICES)
def test_choices(kind, rule, monkeypatch):
    assert bias(case(CHOICES[kind], EXACT_RULES[rule]), distribution(P, V), monkeypatch) < 1e-12


@pytest.mark.parametrize("kind", ["two-distributions", "certain-or-not"])
def test_sequences_that_chose_otherwise_share_a_step(kind, monkeypatch):
    """Their joint distribution is the product of the targets'."""
    rows = tuple(Request([last], 100, SequenceKey(0, last)) for last in (0, 1))
    found = distribution_of(case(CHOICES[kind], rows=rows, steps=1), monkeypatch)
    firsts: dict[tuple[int, int], float] = {}
    for (a, b), weight in found.items():
        firsts[a[0], b[0]] = firsts.get((a[0], b[0]), 0.0) + weight
    own = distribution(P, V)
    assert len(firsts) == V * V
    for (a, b), weight in firsts.items():
        assert weight == pytest.approx(float(own((0,))[a] * own((1,))[b]), abs=1e-12)


OWN = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.4),
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.5, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.5),
]


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("own", OWN, ids=str)
def test_a_draft_with_a_standardization_of_its_own(own, rule, monkeypatch):
    """Wider or narrower than the target's, and so with draft tokens that the target cannot make."""
    p, q = random_model(1, 3), random_model(2, 3)
    for params in (
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.6),
        SamplingParams(temperature=0.0),
    ):
        setting = Case(
            lambda: Table(p, 3),
            lambda: LMDrafter(Table(q, 3), 3, own),
            EXACT_RULES[rule],
            2,
            params,
        )
        assert bias(setting, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["lm", "depth-3", "mixture-within"])
def test_cascades_at_other_temperatures(kind, temperature, monkeypatch):
    params = SamplingParams(temperature)
    assert bias(case(CASCADES[kind], params=params), distribution(P, V), monkeypatch) < 1e-12


class InnerClaim(CascadeDrafter):
    """Says that its draft tokens are the inner drafter's."""

    def propose(self, gamma, draw):
        draft = super().propose(gamma, draw)
        if draft.q is None:
            return draft
        q = draft.q.clone()
        for b, (text, x) in enumerate(
            zip(self._sequences.token_ids, self._draft_tokens, strict=True)
        ):
            for i in range(len(x)):
                q[b, i] = torch.from_numpy(distribution(Q, V)((*text, *x[:i])))
        return Draft(draft.tokens, draft.lengths, q)


class Choosy(CascadeDrafter):
    """Drops a last draft token that is unlikely."""

    def propose(self, gamma, draw):
        draft = super().propose(gamma, draw)
        if draft.q is None:
            return draft
        last = draft.tokens.shape[1] - 1
        likely = draft.q[:, last].gather(1, draft.tokens[:, last:])[:, 0] > 0.5
        return Draft(
            draft.tokens, draft.lengths - (~likely & (draft.lengths > last)).long(), draft.q
        )


class FirstClaim(MixtureDrafter):
    """Says that all draft tokens are the first part's."""

    def propose(self, gamma, draw):
        draft = super().propose(gamma, draw)
        assert draft.q is not None
        return Draft(draft.tokens, draft.lengths, draft.q[:, :1].expand_as(draft.q))


class ChosenByTokens(DrafterChoice):
    """Chooses the second drafter where the first one drew 0: after the draw."""

    def propose(self, gamma, draw):
        self.chosen = [0] * len(gamma)
        first = super().propose(gamma, draw)
        self.chosen = [int(ids[:1] == [0]) for ids in first.tokens.tolist()]
        return super().propose(gamma, draw)


class TargetsClaim(LMDrafter):
    """Draws by its own temperature, and says that it was the target's."""

    def propose(self, gamma, draw):
        draft = super().propose(gamma, draw)
        assert draft.q is not None and self.params is not None
        q = draft.q**self.params.temperature
        return Draft(draft.tokens, draft.lengths, q / q.sum(-1, keepdim=True))


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(
    "liar",
    [
        lambda: InnerClaim(table(M), lm(Q), 1),
        lambda: Choosy(table(M), lm(Q), 1),
        lambda: FirstClaim([(lm(Q), 1), (lm(R), None)]),
        lambda: ChosenByTokens(
            [FunctionDrafter(distribution(Q, V)), FunctionDrafter(distribution(R, V))]
        ),
        lambda: TargetsClaim(table(Q), V, SamplingParams(temperature=0.4)),
    ],
    ids=["inner-q", "drops", "first-q", "chosen-late", "target-q"],
)
def test_lies_are_seen(liar, rule, monkeypatch):
    assert bias(case(liar, EXACT_RULES[rule]), distribution(P, V), monkeypatch) > VISIBLE


class NewInEveryStep(GridDraw):
    """The middle model's own tokens are drawn on the grid."""

    def draw_next_token(self, distribution: Tensor) -> Tensor:
        if self.keys[0].number == 0:  # the target's own
            return super().draw_next_token(distribution)
        return self.shared(distribution, [(length, 0, Purpose.NEXT) for length in self.lengths])


class OldNoise(NewInEveryStep):
    """What a cascade draws is not named by the outer step."""

    def derive_keys(self) -> list[SequenceKey]:
        return [SequenceKey(key.seed, 1 + key.number) for key in self.keys]


def test_noise_that_is_named_by_the_inner_step_alone(monkeypatch):
    """A guess that is made again after an outer rejection would meet its old noise."""
    monkeypatch.setattr(GridDraw, "CELLS", 4)
    p, m = on_a_grid(5, V, 4), on_a_grid(6, V, 4)

    def found(draw: type[GridDraw]) -> float:
        drafter = lambda: CascadeDrafter(Table(m, V), UniformDrafter(V), 0)  # noqa: E731
        return bias(Case(lambda: Table(p, V), drafter, block, GAMMA, draw=draw), p, monkeypatch)

    assert found(NewInEveryStep) < 1e-12
    assert found(OldNoise) > VISIBLE


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", [*CASCADES, *MIXTURES, *CHOICES])
@pytest.mark.parametrize(("size", "gamma", "steps"), [(3, 2, 2), (2, 3, 2), (2, 2, 3)])
def test_proof_larger(size, gamma, steps, kind, rule, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "V", size)
    drafter = (CASCADES | MIXTURES | CHOICES)[kind]
    larger = Case(lambda: table(P), drafter, EXACT_RULES[rule], gamma, steps=steps)
    assert bias(larger, distribution(P, V), monkeypatch) < 1e-12
