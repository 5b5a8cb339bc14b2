"""Rows that join while others are on their way, and rows of different gammas, keep their
distributions.

The real scheduler, batch and step run, chance is integrated out: every course that the rows of a
batch can take together is run with its probability, and the joint distribution of their texts is
compared with the product of the target's own. 1e-12 is rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from exact.worlds import Table, World, WorldDraw
from foretoken.costing.gamma import FixedGamma
from foretoken.drafters.base import Draft, Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.engine.core import EngineCore
from foretoken.engine.prefill_budget import PrefillBudget
from foretoken.engine.scheduler import SequenceTask
from foretoken.inputs import resolve_verifier
from foretoken.request import Request, SequenceState
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from oracle import Text, joint, random_model

V = 2
P, Q = random_model(1, V), random_model(2, V)
VISIBLE = 1e-3
MANY = 10**6


@dataclass(frozen=True)
class Arrival:
    """A row, and the step before which it comes."""

    prompt: tuple[int, ...]
    limit: int
    gamma: int
    comes: int = 0


LATE = (Arrival((0,), 3, 1), Arrival((1, 0, 1, 1, 0, 0, 1), 2, 1, 1), Arrival((1,), 2, 1, 2))
GAMMAS = (Arrival((0,), 3, 2), Arrival((1, 1), 2, 1), Arrival((0, 1), 1, 0))
# it has to be read by the drafter only when the second comes, of whom the first knows nothing
PLAIN_FIRST = (Arrival((0, 1), 3, 0), Arrival((1, 0, 0, 1, 0), 2, 1, 1))
COMES = {"late": LATE, "gammas": GAMMAS, "plain-first": PLAIN_FIRST}


class TwoByTwo(PrefillBudget):
    """Every long prompt is read two tokens a step."""

    def compute_budget(self, running: int, reading: int) -> int:
        return 2

    def schedule_tokens(self, rows: list[SequenceState], already: int = 0) -> list[int]:
        return [min(2, row.num_pending) for row in rows]


@dataclass
class Course:
    """What runs, and what is seen of it."""

    arrivals: tuple[Arrival, ...]
    rule: str = "block"
    target: Callable[[], Table] = lambda: Table(P, V)
    drafter: Callable[[], Drafter] = lambda: LMDrafter(Table(Q, V), V)
    draw: type[WorldDraw] = WorldDraw
    beside: int = 0  # steps in which some rows were read and others went on

    def distribution(self, patch: pytest.MonkeyPatch) -> dict[tuple[Text, ...], float]:
        """New tokens of the rows -> probability."""
        distribution: dict[tuple[Text, ...], float] = {}
        wave = [World({})]
        while wave:
            for world, texts in zip(wave, self._run(wave, patch), strict=True):
                distribution[texts] = distribution.get(texts, 0.0) + world.weight
            wave = [World(path) for world in wave for path in world.others]
        return distribution

    def _run(self, wave: list[World], patch: pytest.MonkeyPatch) -> list[tuple[Text, ...]]:
        verifier = resolve_verifier(1, self.rule, 1.0)
        patch.setattr(type(verifier), "draw_class", type("ThisWave", (self.draw,), {"wave": wave}))
        core = EngineCore(self.target(), self.drafter(), MANY)
        core.scheduler.prefill_budget = TwoByTwo()
        sampled = SamplingParams(1.0)
        rows = {
            (w, b): SequenceState.from_request(
                Request(
                    list(each.prompt), each.limit, SequenceKey(w, b), frozenset(), params=sampled
                )
            )
            for w in range(len(wave))
            for b, each in enumerate(self.arrivals)
        }
        for now in range(40):
            coming = [name for name in rows if self.arrivals[name[1]].comes == now]
            policies = [FixedGamma(self.arrivals[b].gamma) for _, b in coming]
            tasks = zip(coming, policies, strict=True)
            core.add([SequenceTask(rows[name], verifier, policy) for name, policy in tasks])
            core.step()
            behind = {row.num_pending > 1 for row in core.batch.seqs}
            self.beside += behind == {True, False}
        assert all(row.finish_reason == "length" for row in rows.values())
        texts = [tuple(row.new_tokens) for row in rows.values()]
        width = len(self.arrivals)
        return [tuple(texts[w * width : (w + 1) * width]) for w in range(len(wave))]


def expected(arrivals: tuple[Arrival, ...]) -> dict[tuple[Text, ...], float]:
    """The product of the target's distributions."""
    distributions = [
        joint(lambda text, each=each: P((*each.prompt, *text)), each.limit) for each in arrivals
    ]
    result: dict[tuple[Text, ...], float] = {}
    for texts in product(*distributions):
        chances = [
            distribution[text] for distribution, text in zip(distributions, texts, strict=True)
        ]
        result[texts] = float(torch.tensor(chances, dtype=torch.float64).prod())
    return result


def off(course: Course, patch: pytest.MonkeyPatch) -> float:
    """Total variation of the joint distribution from the product."""
    distribution, own = course.distribution(patch), expected(course.arrivals)
    assert abs(sum(distribution.values()) - 1) < 1e-12
    return 0.5 * sum(
        abs(distribution.get(t, 0.0) - own.get(t, 0.0)) for t in distribution.keys() | own.keys()
    )


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "lm": lambda: LMDrafter(Table(Q, V), V),
    "short-context": lambda: LMDrafter(Table(Q, V, context=6), V),
    "lookup": lambda: LookupDrafter(),
    "mixture": lambda: MixtureDrafter([(LookupDrafter(), 1), (LMDrafter(Table(Q, V), V), None)]),
}


@pytest.mark.parametrize("come", COMES)
def test_rows_that_come_and_go_keep_their_joint_distribution(come, monkeypatch):
    course = Course(COMES[come])
    assert off(course, monkeypatch) < 1e-12
    assert (course.beside > 0) == (come != "gammas")


@pytest.mark.prove
@pytest.mark.parametrize("rule", ["speculative", "block", "match", "rejection"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("come", COMES)
def test_proof_with_every_drafter(come, kind, rule, monkeypatch):
    course = Course(COMES[come], rule, drafter=DRAFTERS[kind])
    assert off(course, monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("more", [1, 2])
def test_proof_larger(more, monkeypatch):
    longer = tuple(replace(each, gamma=each.gamma + more - 1) for each in LATE[:2])
    course = Course((replace(longer[0], limit=4), replace(longer[1], limit=3)))
    assert off(course, monkeypatch) < 1e-12 and course.beside > 0


# --- a wrong batch is seen ---


class OthersLogits(Table):
    """Where some rows are only read, the others get the logits of the row before them."""

    def score(self, blocks, need):
        logits = super().score(blocks, need)
        return logits.roll(1, 0) if 0 in need else logits


class WrongChunk(Table):
    """Of what is read beside others the last token is kept wrongly."""

    def score(self, blocks, need):
        logits = super().score(blocks, need)
        for text, wanted in zip(self._texts, need, strict=True):
            if not wanted:
                text[-1] ^= 1
        return logits


class FirstRowsDraws(WorldDraw):
    """Numbers of the first rows of the batch for those that go on."""

    def select(self, rows: list[int]) -> Draw:
        return super().select(list(range(len(rows))))


class OthersDistributions(LMDrafter):
    """Says of its draft tokens that they are from the distribution of the row before."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = super().propose(gamma, draw)
        return replace(draft, q=None if draft.q is None else draft.q.roll(1, 0))


SHORT = tuple(replace(each, limit=min(2, each.limit)) for each in LATE)
WRONG = {
    "logits-of-a-mate": Course(SHORT, target=lambda: OthersLogits(P, V)),
    "a-wrong-token-of-a-chunk": Course(SHORT, target=lambda: WrongChunk(P, V)),
    "draws-of-the-first-rows": Course(SHORT, draw=FirstRowsDraws),
    "laws-of-a-mate": Course(GAMMAS, drafter=lambda: OthersDistributions(Table(Q, V), V)),
}


@pytest.mark.parametrize("lie", WRONG)
def test_a_wrong_batch_is_seen(lie, monkeypatch):
    assert off(replace(WRONG[lie]), monkeypatch) > VISIBLE
