"""Beam search, plain and speculative, against transformers' own."""

from __future__ import annotations

import math

import pytest
import torch

import foretoken
from foretoken import InputError, NumericsError, RefusedError, Speculator
from foretoken.beam.forest import Node, closure
from foretoken.beam.search import (
    Beam,
    BeamParams,
    BeamStats,
    Hypothesis,
    Search,
    continuations,
)
from foretoken.controls.chain import chain
from foretoken.drafters.lm import LMDrafter
from foretoken.request import Request
from foretoken.sampling.keys import RowKey
from pairs import PROMPTS, relative, speculator, target
from pairs import random as network
from table import TableModel


def search(limit: int = 3, eos: frozenset[int] = frozenset(), **options) -> Search:
    forced = options.pop("forced", {})
    request = Request([7], limit, RowKey(0, 0), eos, forced=forced)
    return Search(request, BeamParams(**options), chain(request, 3))


def logs(*distributions: list[float]) -> torch.Tensor:
    return torch.tensor(distributions, dtype=torch.float64).log()


def texts(hypotheses) -> list[list[int]]:
    return [x.node.new_tokens for x in hypotheses]


def test_continuations_are_the_best_of_all_beams() -> None:
    root = Node(0)
    beams = [Hypothesis(root.child(1), math.log(0.6)), Hypothesis(root.child(2), math.log(0.4))]
    longer = continuations(beams, logs([0.5, 0.3, 0.2], [0.9, 0.05, 0.05]), 3)
    assert texts(longer) == [[2, 0], [1, 0], [1, 1]]
    assert [math.exp(x.score) for x in longer] == pytest.approx([0.36, 0.3, 0.18])


def test_of_equal_scores_the_earlier_beam_comes_first_then_the_lower_id() -> None:
    root = Node(0)
    beams = [Hypothesis(root.child(5), -1.0), Hypothesis(root.child(3), -1.0)]
    longer = continuations(beams, torch.zeros(2, 4), 6)
    assert texts(longer) == [[5, 0], [5, 1], [5, 2], [5, 3], [3, 0], [3, 1]]


def test_what_is_impossible_is_no_continuation() -> None:
    longer = continuations([Hypothesis(Node(0), 0.0)], logs([0.0, 1.0, 0.0]), 3)
    assert texts(longer) == [[1]]


def test_a_forced_token_gets_all_the_mass() -> None:
    one = search(limit=2, num_beams=2, num_return_sequences=2, forced={1: 2})
    one.step(logs([0.2, 0.7, 0.1]))
    one.step(logs([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]))
    assert one.done and texts(one.finished) == [[1, 2], [0, 2]]
    assert one.finished[0].score == pytest.approx(math.log(0.7) / 2)


def test_an_end_among_the_best_is_finished_and_its_place_is_filled() -> None:
    one = search(eos=frozenset({0}), num_beams=2)
    one.step(logs([0.5, 0.3, 0.15, 0.05]))
    assert texts(one.finished) == [[0]] and texts(one.running) == [[1], [2]]
    assert one.finished[0].reason == "stop" and not one.done


def test_an_end_that_is_not_among_the_best_is_dropped() -> None:
    one = search(eos=frozenset({0}), num_beams=2)
    one.step(logs([0.1, 0.5, 0.4]))
    assert not one.finished and texts(one.running) == [[1], [2]]


@pytest.mark.parametrize(
    ("stopping", "penalty", "done"),
    [
        (True, 1.0, True),  # a text has ended
        (False, 1.0, True),  # log 0.4 <= log 0.5
        ("never", 1.0, False),  # log 0.4 / 3 > log 0.5
        ("never", 0.0, True),  # without a penalty as False
        ("never", -1.0, True),
    ],
)
def test_when_it_stops(stopping, penalty: float, done: bool) -> None:
    one = search(eos=frozenset({0}), num_beams=1, early_stopping=stopping, length_penalty=penalty)
    one.step(logs([0.5, 0.4, 0.1]))
    assert texts(one.finished) == [[0]] and texts(one.running) == [[1]]
    assert one.done == done


def test_invalid_logits_are_refused() -> None:
    one = search()
    with pytest.raises(NumericsError, match="invalid after 0 new tokens"):
        one.step(torch.full((1, 4), float("nan")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0; give 1 or more"),
        ({"num_beams": 2.5}, "num_beams is 2.5"),
        ({"num_return_sequences": 5}, "only 4 beams; give num_beams=5"),
        ({"length_penalty": math.inf}, "length_penalty is inf; give a number from -50 to 50"),
        ({"length_penalty": True}, "length_penalty is True; give a number"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
    ],
)
def test_what_cannot_be_asked_for(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BeamParams(**options)


def test_nodes_are_one_for_each_text() -> None:
    root = Node(4)
    deep = root.child(1).child(2)
    assert root.child(1).child(2) is deep and deep.new_tokens == [1, 2] and deep.depth == 2
    assert closure([deep, root.child(3)]) == [root, root.child(1), deep, root.child(3)]
    assert closure([deep, root.child(3)], {root, root.child(1)}) == [deep, root.child(3)]


FLAT = [[0.25] * 4] * 4


def tables(**draft) -> Speculator:
    chain = [[0.1, 0.6, 0.2, 0.1], [0.3, 0.1, 0.5, 0.1], [0.4, 0.1, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1]]
    model = TableModel(lambda text: FLAT[0], draft.pop("V", 4), **draft)
    return Speculator(TableModel.markov(chain), LMDrafter(model, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_beams": 3}, "draft_beams is 3; give num_beams=4 or more"),
        ({"gamma": -1}, "gamma is -1; give 0"),
        ({"gamma": 1.5}, "gamma is 1.5; give a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give 1 or more"),
        ({"num_beams": True}, "num_beams is True"),
        ({"length_penalty": -1e308}, "length_penalty is -1e\\+308; give a number from -50 to 50"),
    ],
)
def test_what_cannot_be_asked_for_search(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tables().beam_search([1], **options)


@pytest.mark.parametrize("penalty", [-50, 50])
def test_the_widest_length_penalties(penalty: int) -> None:
    assert tables().beam_search([1], length_penalty=penalty)[0][0].score <= 0


def test_no_prompts_give_no_beams() -> None:
    assert tables().beam_search([]) == []


def test_a_drafter_that_is_no_model_leaves_it_plain() -> None:
    spec = speculator(target("Llama"), "lookup")
    beam = spec.beam_search(PROMPTS[0], max_new_tokens=5)[0][0]
    assert beam.stats.draft_runtime == "none" and beam.stats.draft_calls == 0
    assert beam.stats.target_calls == beam.stats.steps == 5
    assert beam.stats.to_dict()["depths"] == (0,) * 5


def test_fewer_texts_than_beams() -> None:
    """Two steps over two tokens: four texts, whatever the width."""
    spec = Speculator(
        TableModel.markov([[0.6, 0.4], [0.3, 0.7]]),
        LMDrafter(TableModel.markov([[0.5, 0.5]] * 2), 2),
    )
    beams = spec.beam_search([0], num_beams=8, num_return_sequences=8, max_new_tokens=2)[0]
    assert [x.tokens for x in beams] == [[0, 0], [1, 1], [0, 1], [1, 0]]
    assert len(spec.beam_search([0], num_beams=8, num_return_sequences=8, max_new_tokens=1)[0]) == 2


@pytest.mark.parametrize("draft", [{"context": 3}, {"context": 1}, {"V": 2}])
def test_a_draft_that_cannot_follow_falls_silent(draft: dict) -> None:
    """Its context ends, or it does not know an id of the text."""
    options = {"num_return_sequences": 4, "max_new_tokens": 6}
    plain = tables().beam_search([[1, 0], [2]], gamma=0, **options)
    if draft.get("V") == 2:
        distribution = [0.5, 0.5]
        spec = Speculator(tables().target, LMDrafter(TableModel(lambda text: distribution, 2), 4))
    else:
        spec = tables(**draft)
    hypotheses = spec.beam_search([[1, 0], [2]], **options)
    assert [[b.tokens for b in beams] for beams in hypotheses] == [
        [b.tokens for b in beams] for beams in plain
    ]


def test_nothing_is_left_in_the_models() -> None:
    model = target("Llama")
    spec = speculator(model, relative(model))
    before = spec.generate(PROMPTS, max_new_tokens=8)
    spec.beam_search(PROMPTS, max_new_tokens=8)
    after = spec.generate(PROMPTS, max_new_tokens=8)
    assert [c.tokens for c in before] == [c.tokens for c in after]


def test_an_error_leaves_the_models_free() -> None:
    nan = float("nan")
    spec = Speculator(
        TableModel(lambda text: [0.5 if len(text) == 1 else nan] * 2, 2),
        LMDrafter(TableModel.markov([[0.5] * 2] * 2), 2),
    )
    with pytest.raises(NumericsError, match="invalid after 1 new tokens"):
        spec.beam_search([0], max_new_tokens=4)
    assert spec.beam_search([0], max_new_tokens=1)[0][0].tokens == [0]


def test_an_open_stream_has_the_models() -> None:
    spec = tables()
    stream = spec.stream([1], max_new_tokens=4)
    next(stream)
    with pytest.raises(RefusedError, match="still open"):
        spec.beam_search([1])


@pytest.mark.openvino
@pytest.mark.parametrize("name", ["Llama", pytest.param("T5", marks=pytest.mark.prove)])
def test_rows_on_openvino_find_the_same_beams(name: str) -> None:
    torch.manual_seed(0)
    model = network(name, 0).float()
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8}
    results = [
        speculator(model, relative(model), runtime=runtime).beam_search(PROMPTS, **options)
        for runtime in ("openvino", "transformers")
    ]
    for ours, theirs in zip(*results, strict=True):
        assert ours[0].stats.runtime == "openvino" and theirs[0].stats.runtime == "transformers"
        assert [b.tokens for b in ours] == [b.tokens for b in theirs]
        assert [b.score for b in ours] == pytest.approx([b.score for b in theirs], abs=1e-4)


def test_the_default_pair_saves_target_calls() -> None:
    spec = foretoken.load()
    prompt = "It was the first day of the"
    plain = spec.beam_search(prompt, max_new_tokens=24, gamma=0)[0][0]
    quick = spec.beam_search(prompt, max_new_tokens=24)[0][0]
    assert quick.tokens == plain.tokens and quick.text == plain.text
    assert quick.score == pytest.approx(plain.score, abs=1e-4)
    assert quick.stats.target_calls < plain.stats.target_calls == 24


def test_a_beam_is_shown_in_a_line():
    stats = BeamStats(1, 0, (0,), 1, 1, 0.0, "table", "none")
    long = Beam(None, [1] * 400, -0.12345, "length", stats)
    assert repr(long).startswith("Beam(tokens=[1, 1, ") and len(repr(long)) < 140
    assert repr(long).endswith("..., 400 tokens, score=-0.1235, finish_reason='length')")
