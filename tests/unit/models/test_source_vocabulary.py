"""Sources are read in the encoder's vocabulary, which need not be the decoder's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from foretoken import load
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import InputError
from foretoken.models.stock.small_copy import randomize_weights
from tiny import llama
from tiny_families import BART


def marian(source: int, target: int) -> MarianMTModel:
    """With two vocabularies of these sizes."""
    torch.manual_seed(0)
    settings: dict[str, Any] = BART | {
        "vocab_size": source,
        "decoder_vocab_size": target,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    model = MarianMTModel(MarianConfig(**settings)).eval()
    randomize_weights(model)
    return model


@pytest.mark.prove
@pytest.mark.parametrize(
    "runtime", ["transformers", pytest.param("native", marks=pytest.mark.native)]
)
@pytest.mark.parametrize(("source", "target"), [(96, 64), (48, 64)])
def test_prompts_are_checked_against_what_reads_them(
    source: int, target: int, runtime: str
) -> None:
    model = marian(source, target)
    spec = load(model, "lookup", runtime=runtime)
    assert (spec.target.source_vocab_size, spec.target.vocab_size) == (source, target)
    ids = torch.tensor([[5, source - 1, 7]])
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    stock = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for gamma in (0, 3, None):
        (completion,) = spec.generate(ids.tolist(), max_new_tokens=6, gamma=gamma)
        assert completion.tokens == stock[0, 1:].tolist()
    with pytest.raises(
        InputError, match=rf"holds the id {source}; ids must be in 0\.\.{source - 1}"
    ):
        spec.generate([[5, source]])


@pytest.mark.parametrize("draft", ["decoder", "encoder-decoder"])
def test_a_draft_that_does_not_know_the_source_falls_silent(draft: str) -> None:
    model = marian(96, 64)
    other = llama(64, eos_token_id=None) if draft == "decoder" else marian(80, 64)
    spec = load(model, other)
    assert isinstance(spec.drafter, LMDrafter)
    known, unknown = spec.generate([[5, 6, 7], [5, 90, 7]], max_new_tokens=8, gamma=3)
    assert known.stats.drafted > 0 and unknown.stats.drafted == 0
