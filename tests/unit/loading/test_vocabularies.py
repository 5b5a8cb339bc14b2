"""A draft with another tokenizer: it drafts, and what cannot be is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import foretoken
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import RefusedError
from foretoken.models.vocabularies.translated import TranslatedModel
from tiny import byte_level, folder, llama, metaspace, t5

PROMPT = "the old man was asleep"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("pair") / "target", llama(320), byte_level())


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = llama(len(metaspace()), seed=1, num_hidden_layers=1)
    return folder(tmp_path_factory.mktemp("pair") / "draft", network, metaspace())


def test_a_draft_with_another_tokenizer_drafts(target, draft, caplog):
    with caplog.at_level(logging.INFO, "foretoken"):
        spec = foretoken.load(target, draft)
    messages = [r.getMessage() for r in caplog.records if "another tokenizer" in r.getMessage()]
    assert len(messages) == 1 and str(draft) in messages[0]
    assert messages[0].endswith("words are the target's too")
    assert isinstance(spec.drafter, LMDrafter)
    assert isinstance(spec.drafter.model, TranslatedModel)
    plain = foretoken.load(target, "none").generate(PROMPT, max_new_tokens=20, temperature=0.0)
    for temperature in (0.0, 1.0):
        (completion,) = spec.generate(PROMPT, gamma=3, max_new_tokens=20, temperature=temperature)
        assert completion.stats.drafted and completion.stats.draft_calls
        assert temperature or completion.tokens == plain[0].tokens


def test_it_drafts_for_an_encoder_decoder(draft, tmp_path):
    spec = foretoken.load(folder(tmp_path / "t5", t5(320), byte_level()), draft)
    for temperature in (0.0, 1.0):
        (completion,) = spec.generate(PROMPT, gamma=3, max_new_tokens=12, temperature=temperature)
        assert completion.stats.drafted


def test_it_looks_ahead_in_a_beam_search(target, draft):
    spec = foretoken.load(target, draft)
    (beams,) = spec.beam_search([PROMPT], num_beams=2, gamma=2, max_new_tokens=6)
    (plain,) = spec.beam_search([PROMPT], num_beams=2, gamma=0, max_new_tokens=6)
    assert beams[0].tokens == plain[0].tokens


def test_vocabularies_without_a_common_word_are_refused(target, tmp_path):
    vocabulary = {"<unk>": 0, "</s>": 1} | {f"\u2581\u4e00{i}": i for i in range(2, 20)}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="</s>")
    strange = folder(tmp_path / "strange", llama(32, seed=1), tokenizer)
    with pytest.raises(RefusedError, match="shares none of its 18 words with the 319 of") as error:
        foretoken.load(target, strange)
    assert "\n" not in str(error.value) and "draft='lookup'" in str(error.value)
