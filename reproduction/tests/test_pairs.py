"""Pairs: texts of the target's own distribution, tables, cascades, and errors that are told
once."""

from __future__ import annotations

import pytest

from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.errors import ForetokenError, RefusedError
from foretoken.sampling.params import SamplingParams
from reproduction import pairs as module
from reproduction.ngram import NGramDrafter
from reproduction.pairs import Pairs, written
from reproduction.recipe import Prompts, RecipeDraft
from reproduction.tests.laboratory import TablePairs, recipe


def test_texts_are_the_targets_and_as_many_as_asked_for():
    pairs = TablePairs(recipe())
    texts = pairs.texts(1.0)
    assert 100 <= sum(len(text.tokens) for text in texts) < 100 + 16 * 12
    assert pairs.texts(1.0) is texts
    spec, prompts = pairs.spec("small"), pairs.prompts
    params = SamplingParams(1.0, max_new_tokens=12)
    drawn = spec.generate(prompts, params, gamma=0, seed=[(0, i) for i in range(len(prompts))])
    assert [text.tokens for text in texts[:3]] == [one.tokens for one in drawn]
    assert [text.request.prompt for text in texts[:3]] == prompts
    assert texts[3].tokens != texts[0].tokens  # another seed


def test_a_prompt_has_one_greedy_text():
    pairs = TablePairs(recipe())
    assert [text.request.prompt for text in pairs.texts(0.0)] == pairs.prompts
    few = written(pairs.spec("small"), pairs.prompts, 1, SamplingParams(max_new_tokens=4), 0)
    assert len(few) == 3  # those of one call


def test_tables_are_fitted_once_to_other_texts(monkeypatch):
    monkeypatch.setattr(module, "LEAST", 200)
    pairs = TablePairs(recipe())
    spec = pairs.spec("bigram")
    assert isinstance(spec.drafter, NGramDrafter) and spec.drafter.table.order == 2
    assert pairs.spec("bigram").drafter is spec.drafter
    monkeypatch.setattr(module, "written", None)  # other orders are fitted to the same texts
    unigram = RecipeDraft(label="unigram", order=1)
    other = pairs._with_table(unigram, 1)
    assert isinstance(other.drafter, NGramDrafter) and other.drafter.table.order == 1
    assert spec.target is pairs.spec("small").target and spec.draft_name == "bigram"


def test_a_pair_that_cannot_be_loaded_is_tried_once(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    drafts = [RecipeDraft(label="wrong", draft="nowhere")]
    pairs = Pairs(recipe(drafts=drafts, prompts=Prompts(file=str(tmp_path / "prompts.txt"))))
    asked: list[object] = []

    def load(target, draft, **options):
        asked.append(draft)
        raise RefusedError("nowhere is no model")

    monkeypatch.setattr(module, "load", load)
    for _ in range(2):
        with pytest.raises(ForetokenError, match="nowhere is no model"):
            pairs.spec("wrong")
    assert asked == ["nowhere"]


def test_a_cascade_drafts_for_a_model_only(monkeypatch):
    monkeypatch.setattr(module, "LEAST", 200)
    pairs = TablePairs(recipe())
    spec = pairs.cascade("small", None)
    assert isinstance(spec.drafter, CascadeDrafter)
    assert isinstance(spec.drafter.drafter, LookupDrafter)
    assert spec.draft_name == "small < lookup"
    with pytest.raises(RefusedError, match="bigram is no model"):
        pairs.cascade("bigram", None)


def test_one_pair_is_held_at_a_time(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    drafts = [RecipeDraft(label="one", draft="one/one"), RecipeDraft(label="two", draft="two/two")]
    pairs = Pairs(recipe(drafts=drafts, prompts=Prompts(file=str(tmp_path / "prompts.txt"))))
    asked: list[object] = []
    spec = TablePairs(recipe()).spec("small")
    monkeypatch.setattr(module, "load", lambda target, draft, **how: asked.append(draft) or spec)
    for label in ("one", "one", "two", "one"):
        pairs.spec(label)
    assert asked == ["one/one", "two/two", "one/one"]
