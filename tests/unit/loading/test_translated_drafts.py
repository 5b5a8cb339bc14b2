"""A draft with another tokenizer: it drafts, the better way is found, and what cannot be is
refused.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import foretoken
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import RefusedError
from foretoken.loading import translated_drafts
from foretoken.loading.translated_drafts import make_dictionary
from foretoken.models.vocabularies.translated import TextDrafting, TranslatedModel
from loads import refused
from tiny import byte_level, folder, legacy, llama, metaspace, t5

PROMPT = "the old man was asleep"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("pair") / "target", llama(320), byte_level())


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = llama(len(metaspace()), seed=1, num_hidden_layers=1)
    return folder(tmp_path_factory.mktemp("pair") / "draft", network, metaspace())


def translated(spec: foretoken.Speculator) -> TranslatedModel:
    assert isinstance(spec.drafter, LMDrafter)
    assert isinstance(spec.drafter.model, TranslatedModel)
    return spec.drafter.model


def test_a_draft_with_another_tokenizer_drafts(target, draft, caplog):
    with caplog.at_level(logging.INFO, "foretoken"):
        spec = foretoken.load(target, draft)
    (message,) = [text for each in caplog.records if "another tokenizer" in (text := each.message)]
    assert str(draft) in message and "at temperature 0" in message
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert not spec._has_warned.is_set()
    model = translated(spec)
    plain = foretoken.load(target, "none").generate(PROMPT, max_new_tokens=20, temperature=0.0)
    for by_text in (True, False):
        model.by_text = TextDrafting(by_text, by_text)
        for temperature in (0.0, 1.0):
            options = {"max_new_tokens": 20, "temperature": temperature}
            (completion,) = spec.generate(PROMPT, gamma=3, **options)
            assert completion.stats.drafted and completion.stats.draft_calls
            assert temperature or completion.tokens == plain[0].tokens


@pytest.mark.prove
def test_the_way_is_the_same_each_time(target, draft):
    assert translated(foretoken.load(target, draft)).by_text == (
        translated(foretoken.load(target, draft)).by_text
    )


@pytest.mark.daily("better0")
@pytest.mark.parametrize("better", [TextDrafting(True, False), TextDrafting(False, True)])
def test_the_way_that_keeps_more_is_taken(better, target, draft, monkeypatch):
    tried = translated_drafts._run_trial

    def told(target, drafter, *, greedy):
        trial = tried(target, drafter, greedy=greedy)
        by_text, best = drafter.model.by_text[0], better.greedy if greedy else better.sampled
        return trial._replace(tokens_per_step=2.0 if by_text == best else 1.0)

    monkeypatch.setattr(translated_drafts, "_run_trial", told)
    assert translated(foretoken.load(target, draft)).by_text == better


def test_a_target_that_cannot_read_the_trial_gets_the_usual_ways(draft, tmp_path):
    small = folder(tmp_path / "small", llama(320, context=4), byte_level())
    spec = foretoken.load(small, draft)
    assert translated(spec).by_text == TextDrafting()
    assert spec.generate([5], gamma=1, max_new_tokens=3)[0].stats.drafted


@pytest.mark.prove
def test_it_drafts_for_an_encoder_decoder(draft, tmp_path):
    spec = foretoken.load(folder(tmp_path / "t5", t5(320), byte_level()), draft)
    for temperature in (0.0, 1.0):
        (completion,) = spec.generate(PROMPT, gamma=3, max_new_tokens=12, temperature=temperature)
        assert completion.stats.drafted


def test_vocabularies_without_a_common_word_are_refused(target, tmp_path):
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"\u2581\u4e00{i}": i for i in range(2, 20)}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="</s>")
    strange = folder(tmp_path / "strange", llama(32, seed=1), tokenizer)
    says = "no token in common with .* .18 and 319 tokens.; give .*draft='lookup'"
    refused(RefusedError, says, target, strange)


def test_ids_that_mean_the_same_need_no_dictionary():
    assert make_dictionary(("d", byte_level(), 320), ("t", byte_level(), 400)) is None
    assert make_dictionary(("d", None, 320), ("t", byte_level(), 320)) is None
    assert make_dictionary(("d", legacy(), 320), ("t", byte_level(), 320)) is not None
