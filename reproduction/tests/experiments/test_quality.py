"""Scores by hand, the baselines, and that speculation leaves the scores as they are."""

from __future__ import annotations

import math

import pytest

from foretoken import SamplingParams, load
from foretoken.errors import InputError
from pairs import relative
from reproduction.experiments import quality
from reproduction.experiments.quality import (
    lead,
    looked_up,
    nats,
    rouge,
    translation,
    with_and_without,
)
from tiny import TEXT, byte_level, t5

SOURCES = [line[:40] for line in TEXT.splitlines()] * 2


def test_bleu_and_chrf_by_hand():
    text, reference = "the old house was cold today .", "the old house is cold today ."
    precisions = [6 / 7, 4 / 6, 2 / 5, 1 / 8]  # of 1 to 4 words, the last smoothed: none of 4
    assert translation([reference], [reference]) == pytest.approx({"bleu": 100, "chrf": 100})
    scores = translation([text], [reference])
    assert scores["bleu"] == pytest.approx(100 * math.prod(precisions) ** (1 / 4))
    assert 0 < translation(["cold"], [reference])["chrf"] < scores["chrf"] < 100


def test_rouge_by_hand():
    score = rouge(["the cat sat", "a dog"], ["the cat slept", "a dog"])
    assert score["rouge1"] == pytest.approx(100 * (2 / 3 + 1) / 2)
    assert score["rouge2"] == pytest.approx(100 * (1 / 2 + 1) / 2)
    assert score["rougeL"] == pytest.approx(100 * (2 / 3 + 1) / 2)


def test_a_missing_library_is_said(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(quality, "import_module", missing)
    with pytest.raises(InputError, match="rouge-score is missing"):
        rouge(["a"], ["a"])


def test_the_lead_is_the_first_sentences():
    article = 'One. "Two?" Three, of 3.5 miles!\n Four. '
    assert lead(article) == 'One. "Two?" Three, of 3.5 miles!'
    assert lead(article, 9) == 'One. "Two?" Three, of 3.5 miles! Four.' and lead("") == ""


def test_the_look_up_takes_the_most_alike():
    known = [("a man walks a dog", "eins"), ("a man walks home", "zwei"), ("a man walks", "drei")]
    known += [("Two dogs", "vier"), ("two dogs", "five")]
    asked = {
        "a man walks a dog": "eins",
        "A man walks": "drei",
        "the man walks home": "zwei",
        "two dogs": "vier",  # of equals the first
        "nothing alike": "vier",  # the shortest, where nothing is shared
    }
    assert looked_up(known, asked) == list(asked.values())
    with pytest.raises(InputError, match="no pair to look up"):
        looked_up([], asked)


@pytest.fixture(scope="module")
def pair():
    target = t5(320).double()
    return load(target, relative(target, 0.3), tokenizer=byte_level())


@pytest.mark.parametrize(
    "score, names",
    [(translation, ["bleu", "chrf"]), (rouge, ["rouge1", "rouge2", "rougeL"])],
)
def test_greedy_texts_score_the_same_with_and_without_draft_tokens(pair, score, names):
    references = [source[::-1] for source in SOURCES]
    comparison = with_and_without(pair, SOURCES, references, score, gamma=3, max_new_tokens=12)
    assert comparison["same"] == 1 and comparison["plain"] == comparison["speculative"]
    assert list(comparison["plain"]) == names


def test_the_loss_of_sampled_texts_is_the_same_within_noise(pair):
    """Two estimates of one number from 40 texts each. Their difference is beyond four standard
    errors, twice the intervals' root of squares, in 1 of 16,000 runs; the seeds are fixed."""
    params = SamplingParams(temperature=1.0, max_new_tokens=8, logprobs=0)
    plain, drafted = (
        nats(pair.generate(SOURCES * 4, params, gamma=gamma, seed=gamma)) for gamma in (0, 3)
    )
    assert plain.low > 0 and plain.error > 0
    assert abs(plain.value - drafted.value) < 2 * math.hypot(plain.error, drafted.error)
    greedily = nats(pair.generate(SOURCES, max_new_tokens=10, logprobs=0, temperature=0.0))
    assert greedily.value < plain.value - plain.error  # the likeliest tokens cost less
    with pytest.raises(InputError, match="0 texts have logprobs"):
        nats(pair.generate(SOURCES[:1], max_new_tokens=2))
