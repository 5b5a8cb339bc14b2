"""What `beam_search` refuses, what it falls back to, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch

import foretoken
from foretoken import InputError, NumericsError, RefusedError, Speculator
from foretoken.beam.search import Beam, BeamTask, beam_stats
from foretoken.drafters.lm import LMDrafter
from foretoken.models.table import TableModel
from pairs import PROMPTS, relative, speculator, target
from pairs import random as network

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
        ({"gamma": True}, "gamma is True; give a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True; give a whole number"),
        ({"length_penalty": 1e308}, "length_penalty is 1e\\+308; give a number from -50 to 50"),
        ({"length_penalty": -1e308}, "length_penalty is -1e\\+308; give a number from -50 to 50"),
    ],
)
def test_what_cannot_be_asked_for(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tables().beam_search([1], **options)


@pytest.mark.parametrize("penalty", [-50, 50])
def test_the_widest_length_penalties(penalty: int) -> None:
    assert tables().beam_search([1], length_penalty=penalty)[0][0].score <= 0


@pytest.mark.parametrize("name", ["gamma", "max_new_tokens"])
def test_generate_takes_no_bool_for_a_number(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is True; give a whole number"):
        tables().generate([1], **{name: True})


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
    stats_of = beam_stats(BeamTask(None), "table", "none")
    long = Beam(None, [1] * 400, -0.12345, "length", stats_of)
    assert repr(long).startswith("Beam(tokens=[1, 1, ") and len(repr(long)) < 140
    assert repr(long).endswith("..., 400 tokens, score=-0.1235, finish_reason='length')")
