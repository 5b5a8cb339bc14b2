"""Beam search, plain and speculative, against transformers' own."""

from __future__ import annotations

import math

import pytest
import torch

import foretoken
from foretoken import ControlError, InputError, NumericsError, RefusedError, Speculator
from foretoken.controls.chain import build_chain
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.request import Request
from foretoken.sampling.keys import SequenceKey
from pairs import PROMPTS, relative, speculator, target
from reproduction.beam.search import BeamParams, Hypothesis, Search, continuations
from reproduction.beam.speculative import beam_search
from reproduction.beam.tree import Node
from table import TableModel


def search(limit: int = 3, eos: frozenset[int] = frozenset(), **options) -> Search:
    forced = options.pop("forced", {})
    request = Request([7], limit, SequenceKey(0, 0), eos, forced=forced)
    return Search(request, BeamParams(**options), build_chain(request, 3))


def logs(*distributions: list[float]) -> torch.Tensor:
    return torch.tensor(distributions, dtype=torch.float64).log()


def texts(hypotheses) -> list[list[int]]:
    return [x.node.new_tokens for x in hypotheses]


def test_continuations_are_the_best_of_all_beams() -> None:
    root = Node()
    beams = [Hypothesis(root.child(1), math.log(0.6)), Hypothesis(root.child(2), math.log(0.4))]
    longer = continuations(beams, logs([0.5, 0.3, 0.2], [0.9, 0.05, 0.05]), 3)
    assert texts(longer) == [[2, 0], [1, 0], [1, 1]]
    assert [math.exp(x.score) for x in longer] == pytest.approx([0.36, 0.3, 0.18])


def test_of_equal_scores_the_earlier_beam_comes_first_then_the_lower_id() -> None:
    root = Node()
    beams = [Hypothesis(root.child(5), -1.0), Hypothesis(root.child(3), -1.0)]
    longer = continuations(beams, torch.zeros(2, 4), 6)
    assert texts(longer) == [[5, 0], [5, 1], [5, 2], [5, 3], [3, 0], [3, 1]]


def test_what_is_impossible_is_no_continuation() -> None:
    longer = continuations([Hypothesis(Node(), 0.0)], logs([0.0, 1.0, 0.0]), 3)
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
        ({"num_beams": True}, "num_beams is True"),
        ({"num_return_sequences": 5}, "only 4 beams; give num_beams=5"),
        ({"length_penalty": math.inf}, "length_penalty is inf; give a number from -50 to 50"),
        ({"length_penalty": -1e308}, "length_penalty is -1e\\+308; give a number from -50 to 50"),
        ({"length_penalty": True}, "length_penalty is True; give a number"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
    ],
)
def test_what_cannot_be_asked_for(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BeamParams(**options)


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
    ],
)
def test_what_cannot_be_asked_for_search(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        beam_search(tables(), [1], **options)


@pytest.mark.parametrize("penalty", [-50, 50])
def test_the_widest_length_penalties(penalty: int) -> None:
    assert beam_search(tables(), [1], BeamParams(length_penalty=penalty))[0][0].score <= 0


def test_no_prompts_give_no_beams() -> None:
    assert beam_search(tables(), []) == []


def test_a_drafter_that_is_no_model_leaves_it_plain() -> None:
    spec = speculator(target("Llama"), "lookup")
    beam = beam_search(spec, PROMPTS[0], max_new_tokens=5)[0][0]
    assert beam.stats.draft_calls == 0 and beam.stats.depths == (0,) * 5
    assert beam.stats.target_calls == beam.stats.steps == 5


def test_fewer_texts_than_beams() -> None:
    """Two steps over two tokens: four texts, whatever the width."""
    spec = Speculator(
        TableModel.markov([[0.6, 0.4], [0.3, 0.7]]),
        LMDrafter(TableModel.markov([[0.5, 0.5]] * 2), 2),
    )
    params = BeamParams(num_beams=8, num_return_sequences=8)
    beams = beam_search(spec, [0], params, max_new_tokens=2)[0]
    assert [x.tokens for x in beams] == [[0, 0], [1, 1], [0, 1], [1, 0]]
    assert len(beam_search(spec, [0], params, max_new_tokens=1)[0]) == 2


@pytest.mark.parametrize("draft", [{"context": 3}, {"context": 1}, {"V": 2}])
def test_a_draft_that_cannot_follow_falls_silent(draft: dict) -> None:
    """Its context ends, or it does not know an id of the text."""
    params = BeamParams(num_return_sequences=4)
    plain = beam_search(tables(), [[1, 0], [2]], params, gamma=0, max_new_tokens=6)
    if draft.get("V") == 2:
        distribution = [0.5, 0.5]
        spec = Speculator(tables().target, LMDrafter(TableModel(lambda text: distribution, 2), 4))
    else:
        spec = tables(**draft)
    hypotheses = beam_search(spec, [[1, 0], [2]], params, max_new_tokens=6)
    assert [[b.tokens for b in beams] for beams in hypotheses] == [
        [b.tokens for b in beams] for beams in plain
    ]


def test_nothing_is_left_in_the_models() -> None:
    model = target("Llama")
    spec = speculator(model, relative(model))
    before = spec.generate(PROMPTS, max_new_tokens=8)
    beam_search(spec, PROMPTS, max_new_tokens=8)
    after = spec.generate(PROMPTS, max_new_tokens=8)
    assert [c.tokens for c in before] == [c.tokens for c in after]


def test_an_error_leaves_the_models_free() -> None:
    nan = float("nan")
    spec = Speculator(
        TableModel(lambda text: [0.5 if len(text) == 1 else nan] * 2, 2),
        LMDrafter(TableModel.markov([[0.5] * 2] * 2), 2),
    )
    with pytest.raises(NumericsError, match="invalid after 1 new tokens"):
        beam_search(spec, [0], max_new_tokens=4)
    assert beam_search(spec, [0], max_new_tokens=1)[0][0].tokens == [0]


def test_an_open_stream_has_the_models() -> None:
    spec = tables()
    stream = spec.stream([1], max_new_tokens=4)
    next(stream)
    with pytest.raises(RefusedError, match="still open"):
        beam_search(spec, [1])


def test_the_default_pair_saves_target_calls() -> None:
    spec = foretoken.load()
    prompt = "It was the first day of the"
    plain = beam_search(spec, prompt, max_new_tokens=24, gamma=0)[0][0]
    quick = beam_search(spec, prompt, max_new_tokens=24)[0][0]
    assert quick.tokens == plain.tokens and quick.text == plain.text
    assert quick.score == pytest.approx(plain.score, abs=1e-4)
    assert quick.stats.target_calls < plain.stats.target_calls == 24


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1.0), ("logprobs", 2), ("num_return_sequences", 2), ("stop_strings", "x")],
)
def test_what_a_beam_search_does_not_take(name, value) -> None:
    spec = foretoken.load(draft="none")
    drawn = {"temperature": 1.0} if name == "num_return_sequences" else {}
    named = "temperature" if drawn else name
    with pytest.raises(RefusedError, match=f"^beam search does not take {named}="):
        beam_search(spec, "It was", **drawn | {name: value})
    with pytest.raises(InputError, match="^beams is not an option of beam_search"):
        beam_search(spec, "It was", beams=2)


def test_a_text_that_outgrows_how_its_prompt_was_read_is_refused() -> None:
    class Switching(TableModel):
        max_context, long = 20, ()

        def set_long_context(self, enabled: bool) -> None: ...

    spec = Speculator(Switching(lambda text: [0.5, 0.5], 2, context=8), NoDrafter())
    assert beam_search(spec, [0, 1, 0], max_new_tokens=5)
    with pytest.raises(RefusedError, match="may reach 9 tokens"):
        beam_search(spec, [0, 1, 0], max_new_tokens=6)


def test_controls_that_leave_no_text() -> None:
    with pytest.raises(ControlError, match="leave no text"):
        beam_search(tables(), [1], suppress_tokens=range(4))
    ((beam,),) = beam_search(tables(), [1], suppress_tokens=[1, 2], max_new_tokens=3)
    assert not {1, 2} & {*beam.tokens}
