"""What a batch costs is measured in an engine of the asked size, which is gone afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.costing.costs import Costs
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.engine import Engine
from foretoken.errors import InputError, RefusedError
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model
from reproduction import serving as module
from reproduction.serving import betas, require, serving_costs
from table import TableModel

V = 6
COSTS = Costs(((0, 0.0), (8, 0.8)), ((1, 1.0), (8, 1.3)), ((1, 0.1),))
PARAMS = SamplingParams(0.0, max_new_tokens=3)


def speculator(**more: object) -> Speculator:
    target = TableModel(random_model(1, V), V, **more)  # pyright: ignore[reportArgumentType]
    pair = Speculator(target, LMDrafter(TableModel(random_model(2, V), V), V))
    pair.costing.measured.update({("greedy", 1): COSTS, ("greedy", 2): COSTS})
    return pair


def test_all_parts_are_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SIZES", (1, 4, 16, 64))
    spec = speculator(context=20)
    costs = serving_costs(spec, [[1, 2], [3]], PARAMS, 2)
    assert costs.rows == 2 and costs.costs == COSTS
    assert [n for n, _ in costs.reading] == [1, 4, 16]  # that the context holds
    assert [n for n, _ in costs.draft_reading] == [0, 1, 4, 16] and costs.draft_reading[0][1] < 1e-6
    for table in (costs.reading, costs.draft_reading):
        times = [seconds for _, seconds in table]
        assert times == sorted(times) and times[-1] > 0
    assert [n for n, _ in costs.around] == [1, 2] and all(0 < t < 1 for _, t in costs.around)
    assert 0 <= costs.joining < 1
    for table in (costs.drafts, costs.passes):
        assert [n for n, _ in table] == [1, 2] and all(share > 0 for _, share in table)
    with Engine(spec, 2) as engine:  # nothing is left in the models
        engine.add([1], PARAMS)


def test_one_row_is_a_batch_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SIZES", (1,))
    assert [n for n, _ in serving_costs(speculator(), [[1]], PARAMS, 1).around] == [1]


def test_betas_are_those_of_the_text_that_the_target_writes():
    spec = speculator()
    texts = betas(spec, [[1, 2], [3]], PARAMS, 0)
    assert [(text.prompt_tokens, len(text.betas)) for text in texts] == [(2, 3), (1, 3)]
    assert {beta for text in texts for beta in text.betas} <= {0.0, 1.0}  # greedy
    assert texts == betas(spec, [[1, 2], [3]], PARAMS, 0)


def test_what_cannot_be_simulated_is_refused():
    require(speculator())
    with pytest.raises(RefusedError, match="target is an encoder-decoder, .*"):
        require(speculator(encoder_decoder=True))
    with pytest.raises(InputError, match="makes no draft tokens"):
        require(Speculator(TableModel(random_model(1, V), V), NoDrafter()))
    heads = replace(speculator(), draft_name="heads:h.safetensors")
    with pytest.raises(RefusedError, match="heads guess worse the further ahead"):
        require(heads)
