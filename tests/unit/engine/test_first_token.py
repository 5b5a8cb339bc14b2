"""The first token waits for the target alone, not for a draft's prefill nor its draft tokens. What
steps cost is measured before it or never: no sequence that runs waits for a measurement."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.costing import pair_costs
from foretoken.costing.gamma import FixedGamma
from foretoken.drafters.base import Drafter
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.engine.core import EngineCore
from foretoken.engine.engine import Engine
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verifier import make_verifier
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel

V = 6
P, Q, R = (random_model(seed, V) for seed in (1, 2, 3))
SAMPLED = SamplingParams(temperature=1.0)


class Counting(TableModel):
    """Counts the tokens that it reads."""

    def __init__(self, P: Any) -> None:
        super().__init__(P, V)
        self.tokens = 0

    def start(self, prompts, sources=None):
        self.tokens += sum(map(len, prompts))
        super().start(prompts, sources)

    def score(self, blocks, need):
        self.tokens += sum(map(len, blocks))
        return super().score(blocks, need)


def drafters(model: TableModel) -> dict[str, Drafter]:
    return {
        "lm": LMDrafter(model, V),
        "copy": CopyDrafter(),
        "lookup": LookupDrafter(),
        "cascade": CascadeDrafter(TableModel(R, V), LMDrafter(model, V), 2),
        "mixture": MixtureDrafter([(LookupDrafter(), 2), (LMDrafter(model, V), None)]),
    }


NAMES = tuple(drafters(TableModel(Q, V)))


def rows(*prompts: list[int], limit: int = 12) -> list[SequenceState]:
    keys = [SequenceKey(7, i) for i in range(len(prompts))]
    return [
        SequenceState.from_request(Request(p, limit, k, params=SAMPLED))
        for p, k in zip(prompts, keys, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_draft_reads_and_makes_nothing_before_it(name):
    target, draft = Counting(P), Counting(Q)
    row = rows([0, 1, 2, 0, 1, 2, 0, 1])[0]
    steps = EngineCore(target, drafters(draft)[name], 3).run(
        [row], make_verifier(block), FixedGamma(3)
    )
    next(steps)
    assert len(row.new_tokens) == 1 and draft.tokens == 0 and target.tokens == 8
    assert row.records[0].gamma == row.records[0].drafted == 0
    next(steps)
    assert (row.records[1].drafted > 0 and draft.tokens > 0) == (name not in ("copy", "lookup"))
    steps.close()


def pair(name: str = "lm") -> Speculator:
    return Speculator(TableModel(P, V), drafters(TableModel(Q, V))[name])


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements, which must find no sequence that runs or waits."""
    probed: list[str] = []

    def noted(name: str) -> Any:
        probe = getattr(pair_costs, name)
        return lambda *args: (probed.append(name), probe(*args))[1]

    for name in ("probe", "probe_shared"):
        monkeypatch.setattr(pair_costs, name, noted(name))
    return probed


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_measured_before_it_and_serve_every_sampling(name, probed):
    spec = pair(name)
    asked = {"max_new_tokens": 12, "seed": 3}
    pieces = spec.stream([0, 1, 2, 0, 1], temperature=1.0, **asked)
    assert probed == ["probe"]
    text = [token for piece in pieces for token in piece.tokens]
    (again,) = spec.generate([[0, 1, 2, 0, 1]], temperature=1.0, **asked)
    assert again.tokens == text
    for other in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}, {"top_p": 0.5}):
        spec.generate([[0, 1, 2, 0, 1]], **asked, **other)
    assert probed == ["probe"]


def test_nothing_is_measured_beside_a_sequence(probed):
    """Costs of one sequence serve several; without any, nothing is drafted."""
    spec, asked = pair(), {"max_new_tokens": 6, "temperature": 1.0}
    first = spec.stream([0, 1, 2], gamma=0, **asked)
    next(first)
    (plain,) = spec.generate([[3, 4]], **asked)
    assert not probed and plain.stats.drafted == 0 and len(plain.tokens) == 6
    list(first)
    with Engine(spec, 4) as engine:
        ids = [engine.add([0, 1], **asked)]
        assert probed == ["probe", "probe_shared"]
        engine.step()
        ids += [
            engine.add([i, 2], **(asked | {"temperature": t})) for i, t in enumerate((0.0, 2.0))
        ]
        while engine.running or engine.waiting:
            engine.step()
    assert probed == ["probe", "probe_shared"]


def test_a_text_is_the_same_whether_costs_are_known_or_not():
    """Rows that begin beside those that wait for costs too."""
    asked = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    prompts = [[0, 1, 2], [3], [4, 5, 4, 5]]
    spec = pair()
    unknown, known = spec.generate(prompts, **asked), spec.generate(prompts, **asked)
    assert [each.tokens for each in unknown] == [each.tokens for each in known]
    assert [[s.drafted for s in each.steps] for each in unknown] == [
        [s.drafted for s in each.steps] for each in known
    ]


def test_a_text_of_one_token_measures_nothing(monkeypatch):
    monkeypatch.setattr(pair_costs, "probe", lambda *args: pytest.fail("it was measured"))
    (completion,) = pair().generate([[0, 1]], max_new_tokens=1)
    assert len(completion.tokens) == 1
