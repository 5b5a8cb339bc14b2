"""Beam search's bookkeeping on logits written by hand."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.beam.hypotheses import BeamParams, Hypothesis, Search, continuations
from foretoken.beam.tree import Node, closure
from foretoken.controls.chain import chain
from foretoken.errors import InputError, NumericsError
from foretoken.request import Request
from foretoken.sampling.keys import RowKey


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
        ({"num_beams": 0}, "num_beams is 0; give a whole number from 1"),
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
