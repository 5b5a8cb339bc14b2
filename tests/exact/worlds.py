"""All the ways a few steps can go, with the probability of each: chance is integrated out.

The real engine and the real step run. Only the uniforms are replaced: at each draw the numbers in
[0, 1) fall into intervals on which its outcome is the same, and every interval is tried, its
length being the probability. A world is one such course; one batch runs many worlds, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.controls.chain import Matcher, build_chain
from foretoken.costing.gamma import FixedGamma
from foretoken.drafters.base import Drafter
from foretoken.engine.batch import Batch
from foretoken.inputs import resolve_verifier
from foretoken.models.base import Model
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import Outcome, Rule
from foretoken.sampling.distributions import SamplingParams, sample
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import Purpose, SequenceKey
from oracle import Model as Distribution
from oracle import Text, extend, joint, standardize, tv
from running import running
from table import TableModel

Name = tuple[Hashable, ...]  # of a draw, as row, committed length, offset and purpose
Path = dict[Name, tuple[int, float]]  # the outcome taken wherever there were several; its chance


@dataclass
class World:
    """One course: follows `path`, then the first possible outcome; `others` branch off it.

    A draw that is thrown away, for a row that wanted no draft token, may come or not, as the other
    rows have it: it counts by being on the path.
    """

    path: Path
    others: list[Path] = field(default_factory=list)

    @property
    def weight(self) -> float:
        return math.prod(chance for _, chance in self.path.values())

    def take(self, name: Name, distribution: list[float]) -> int:
        """The outcome of the draw of that name; a second draw of one name is no new chance."""
        possible = [k for k, mass in enumerate(distribution) if mass > 0]
        if len(possible) == 1:  # a number that decides nothing is as good as new
            return possible[0]
        if name not in self.path:
            ways = [{**self.path, name: (k, distribution[k] / sum(distribution))} for k in possible]
            self.path = ways[0]
            self.others += ways[1:]
        return self.path[name][0]


class WorldDraw(Draw):
    """A Draw whose key names worlds: row b belongs to world `key.seed` of the wave at hand."""

    wave: list[World]

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        ids = sample(distribution, self.middles(distribution, i, Purpose.DRAFT))
        self._remember(ids, i)
        return ids

    def derive_keys(self) -> list[SequenceKey]:
        names = zip(self.keys, self.lengths, self.offsets, strict=True)
        return [SequenceKey(key.seed, hash((key.number, *name))) for key, *name in names]

    def draw_accepted(self, outcome: Outcome) -> Tensor:
        # the most draft tokens are kept for the least u
        return outcome.n(1 - self.middles(outcome.n_distribution, 0, Purpose.ACCEPT))

    def draw_next_token(self, distribution: Tensor) -> Tensor:
        return sample(distribution, self.middles(distribution, 0, Purpose.NEXT))

    def middles(self, distributions: Tensor, i: int, purpose: Purpose) -> Tensor:
        """For each row the middle of the interval of [0, 1), cut by its distribution, that it
        takes."""
        middles = []
        names = zip(self.keys, self.lengths, self.offsets, distributions.tolist(), strict=True)
        for key, length, first, distribution in names:
            k = self.wave[key.seed].take((key.number, length, first + i, purpose), distribution)
            middles.append((sum(distribution[:k]) + distribution[k] / 2) / sum(distribution))
        return torch.tensor(middles, dtype=torch.float64)


class Table(TableModel):
    """Rows that draw a draft token which nobody asked for meet a certain distribution: no world
    branches there."""

    def score(self, blocks: list[list[int]], need: list[int]) -> Tensor:
        logits = super().score(blocks, need)
        for b, wanted in enumerate(need):
            logits[b, wanted:, 1:] = -1e9
        return logits


@dataclass(frozen=True)
class Case:
    """What runs: how a fresh target and drafter are made, and what each world asks for.

    `together` False runs every world as a batch of its own: its rows then have no other
    neighbours. `params` None: each request's own. `matcher`: of a grammar that every row must
    match.
    """

    target: Callable[[], Model]
    drafter: Callable[[], Drafter]
    rule: Rule | str
    gamma: int
    params: SamplingParams | None = SamplingParams(temperature=1.0)
    rows: tuple[Request, ...] = (Request([0], 100, SequenceKey(0, 0)),)
    steps: int = 2
    draw: type[Draw] = WorldDraw  # with a `wave`
    together: bool = True
    controls: Callable[[Any], Any] = lambda chain: chain  # what a row's controls become
    matcher: Callable[[], Matcher | None] = lambda: None
    lenience: float = 1.0
    behind: bool = False  # whether the drafter joins behind the first step


def distribution_of(case: Case, monkeypatch) -> dict[tuple[Text, ...], float]:
    """The distribution of what `case.steps` steps make of the rows: new tokens of each ->
    probability."""
    distribution: dict[tuple[Text, ...], float] = {}
    wave = [World({})]
    while wave:
        batches = [wave] if case.together else [[world] for world in wave]
        for batch in batches:
            for world, texts in zip(batch, _run(case, batch, monkeypatch), strict=True):
                distribution[texts] = distribution.get(texts, 0.0) + world.weight
        wave = [World(path) for world in wave for path in world.others]
    return distribution


def _run(case: Case, wave: list[World], monkeypatch) -> list[tuple[Text, ...]]:
    verifier = resolve_verifier(case.gamma, case.rule, case.lenience)
    draw = type("ThisWave", (case.draw,), {"wave": wave})
    monkeypatch.setattr(type(verifier), "draw_class", draw)
    target = case.target()
    rows = [
        SequenceState.from_request(
            replace(request, key=SequenceKey(w, b), params=case.params or request.params)
        )
        for w in range(len(wave))
        for b, request in enumerate(case.rows)
    ]
    for row in rows:
        controls = build_chain(row.request, target.vocab_size, matcher=case.matcher())
        row.controls = case.controls(controls)
    run = running(
        Batch(target, case.drafter()), rows, verifier, FixedGamma(case.gamma), behind=case.behind
    )
    for _ in range(1 + case.steps):  # the first yield is the prefill's
        next(run, None)
    run.close()
    texts = [tuple(row.new_tokens) for row in rows]
    width = len(case.rows)
    return [tuple(texts[w * width : (w + 1) * width]) for w in range(len(wave))]


def standardized(model: Distribution, params: SamplingParams, prompt: Text) -> Distribution:
    """The target's distribution of new tokens behind `prompt`; nothing but zeros where no token is
    left."""

    def distribution(text):
        possible = model((*prompt, *text))
        if not possible.any():
            return possible
        with np.errstate(divide="ignore"):
            logits = np.log(possible)
        return standardize(logits, params.temperature, params.top_k, params.top_p, params.min_p)

    return distribution


def bias(case: Case, model: Distribution, monkeypatch) -> float:
    """Total variation from the target's distribution, the texts of a single row completed by the
    target."""
    (request,) = case.rows
    distribution = {
        texts[0]: weight for texts, weight in distribution_of(case, monkeypatch).items()
    }
    prompt = (*(request.source or ()), *request.prompt)
    own = standardized(model, case.params or request.params, prompt)
    length = min(request.limit, case.steps * (case.gamma + 1))
    assert abs(sum(distribution.values()) - 1) < 1e-12
    return tv(extend(distribution, own, length, request.eos), joint(own, length, request.eos))
