"""A draft of another vocabulary, by the words that both have and by its text: the text is in the
target's distribution. A q with the mass that the target's words lack, or one of the draft's own
ids, shows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exact.worlds import Case, Table, bias
from foretoken.costing.gamma import FixedGamma
from foretoken.drafters.base import Draft
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.engine.batch import Batch
from foretoken.models.vocabularies import translated
from foretoken.models.vocabularies.translated import TextDrafting, TranslatedModel
from foretoken.models.vocabularies.translation import Translation, find_continuations
from foretoken.models.vocabularies.vocabulary import Vocabulary, VocabularyMap
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import EXACT_RULES, block
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import make_verifier
from oracle import random_model
from running import running

pytestmark = [pytest.mark.cpu_only, pytest.mark.daily]
GAMMA = 2
VISIBLE = 1e-3
# Ids that two vocabularies share stand for other words, most words are in one of them only, and
# texts can be cut in more than one way.
OURS = {0: b"b", 1: b"a", 2: b" ab"}
THEIRS = {0: b"a", 1: b"ab", 2: b" ", 3: b"b"}
SHARED = {0: 3, 1: 0}  # ids of "b" and "a", as the target and the draft have them
V = len(OURS)
P, Q = random_model(1, V), random_model(2, len(THEIRS))
DICTIONARY = VocabularyMap(Vocabulary(OURS), Vocabulary(THEIRS))


def draft(context: int | None = None) -> Table:
    return Table(Q, len(THEIRS), context=context)


def shared(**changes) -> TranslatedModel:
    """By the words that both have."""
    return TranslatedModel(
        draft(**changes), DICTIONARY, V, TextDrafting(greedy=False, sampled=False)
    )


def written(**changes) -> TranslatedModel:
    """By the draft's text."""
    return TranslatedModel(draft(**changes), DICTIONARY, V, TextDrafting(greedy=True, sampled=True))


def claimed(drafted: Draft, texts: list[list[int]], distribution) -> Draft:
    """The same draft tokens, said to be drawn from `distribution(text)`."""
    q = torch.zeros(*drafted.tokens.shape, V, dtype=torch.float64)
    for b, (text, x) in enumerate(zip(texts, drafted.tokens.tolist(), strict=True)):
        for i in range(int(drafted.lengths[b])):
            q[b, i] = distribution([*text, *x[:i]])
    return replace(drafted, q=q)


def own_distribution(text: list[int]) -> list[float]:
    """The draft's distribution of its own next word."""
    translation = Translation(DICTIONARY)
    translation.extend(text)
    return list(Q(tuple(translation.draft_ids)))


def unnormalized(text: list[int]) -> Tensor:
    """Words have the mass that they have among all of the draft's."""
    distribution, q = own_distribution(text), torch.zeros(V, dtype=torch.float64)
    for ours, theirs in SHARED.items():
        q[ours] = distribution[theirs]
    return q


def untranslated(text: list[int]) -> Tensor:
    """The draft's ids are read as the target's."""
    distribution = torch.tensor(own_distribution(text)[:V], dtype=torch.float64)
    return distribution / distribution.sum()


def smoothed(text: list[int]) -> Tensor:
    distribution = unnormalized(text) + 0.1
    return distribution / distribution.sum()


class Lies(LMDrafter):
    """By shared words, but for the distribution that it names."""

    def __init__(self, distribution) -> None:
        super().__init__(shared())
        self.distribution = distribution

    def propose(self, gamma, draw):
        return claimed(super().propose(gamma, draw), self._sequences.token_ids, self.distribution)


class ClaimsDistribution(LMDrafter):
    """Writes what is likeliest, and says that it was drawn."""

    def propose(self, gamma, draw):
        return claimed(super().propose(gamma, draw), self._sequences.token_ids, smoothed)


DRAFTERS = {
    "shared": lambda: LMDrafter(shared()),
    "written": lambda: LMDrafter(written()),
    "shared-outgrown": lambda: LMDrafter(shared(context=2)),
    "written-outgrown": lambda: LMDrafter(written(context=3)),
    "cascade": lambda: CascadeDrafter(shared(), LookupDrafter(), 1),
    "mixture": lambda: MixtureDrafter([(LookupDrafter(), 1), (LMDrafter(written()), None)]),
    "own-temperature": lambda: LMDrafter(written(), params=SamplingParams(temperature=0.5)),
}


def case(drafter, rule=block, **changes) -> Case:
    return Case(lambda: Table(P, V), drafter, rule, GAMMA, **changes)


def test_the_words_that_both_have():
    assert dict(zip(DICTIONARY.target_ids, DICTIONARY.draft_ids, strict=True)) == SHARED


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_draft_of_another_vocabulary(kind, rule, monkeypatch):
    assert bias(case(DRAFTERS[kind], EXACT_RULES[rule]), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("kind", ["shared", "written"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7), SamplingParams(top_k=2)],
    ids=str,
)
def test_at_other_settings(kind, params, monkeypatch):
    assert bias(case(DRAFTERS[kind], params=params), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("kind", ["shared", "written"])
def test_behind_a_longer_prompt(kind, monkeypatch):
    rows = (Request([2, 1, 1, 0, 2, 0], 4, SequenceKey(0, 0)),)
    assert bias(case(DRAFTERS[kind], rows=rows), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_ends_of_a_text_are_the_same_token(rule, by_text, monkeypatch):
    both = VocabularyMap(
        Vocabulary({0: b"b", 1: b"a"}, eos_id=2), Vocabulary({0: b"a", 1: b"b", 2: b"c"}, eos_id=3)
    )

    def drafter() -> LMDrafter:
        return LMDrafter(TranslatedModel(draft(), both, V, TextDrafting(by_text, by_text)))

    rows = (Request([0], 100, SequenceKey(0, 0), eos=frozenset({2})),)
    assert bias(case(drafter, EXACT_RULES[rule], rows=rows), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("kind", ["shared", "written"])
def test_its_draft_tokens_are_judged(kind, monkeypatch):
    """That something is proved at all, ways on at the seam included."""
    distributions = []

    def spied(text, before):
        distributions.extend(find_continuations(text, before))
        return find_continuations(text, before)

    monkeypatch.setattr(translated, "find_continuations", spied)
    rows = [SequenceState.from_request(Request([1, 0], 12, SequenceKey(0, b))) for b in range(8)]
    for _ in running(
        Batch(Table(P, V), DRAFTERS[kind]()), rows, make_verifier(block), FixedGamma(GAMMA)
    ):
        pass
    assert sum(step.accepted for row in rows for step in row.records) > 0
    assert distributions


@pytest.mark.parametrize("distribution", [unnormalized, untranslated])
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_q_of_other_words_is_seen(rule, distribution, monkeypatch):
    assert bias(case(lambda: Lies(distribution), EXACT_RULES[rule]), P, monkeypatch) > VISIBLE


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_text_that_is_said_to_be_drawn_is_seen(rule, monkeypatch):
    drafter = case(lambda: ClaimsDistribution(written()), EXACT_RULES[rule])
    assert bias(drafter, P, monkeypatch) > VISIBLE
