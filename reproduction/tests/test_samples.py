"""Texts sampled from a target."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken import load
from foretoken.errors import InputError, RefusedError
from foretoken.train.corpus import PROMPT_TOKENS
from reproduction.samples import samples
from tiny import llama, t5

IDS = np.arange(40, dtype=np.uint16)
OPTIONS = {"prompts": IDS, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def spec():
    return load(llama(V=64, eos_token_id=None), "none")


def test_as_many_tokens_as_asked_for_and_the_same_again(spec):
    texts = list(samples(spec, 50, **OPTIONS))
    written = [len(text) for text in texts]
    assert sum(written) >= 50 > sum(written[:-1]) - max(written)  # a few more at most
    assert texts == list(samples(spec, 50, **OPTIONS))
    assert texts != list(samples(spec, 50, **{**OPTIONS, "seed": 4}))


def test_prompts_are_cut_from_the_ids(spec, monkeypatch):
    seen: list[list[int]] = []

    def generate(self, prompts, **options):
        seen.extend(prompts)
        return original(self, prompts, **options)

    original = type(spec).generate
    monkeypatch.setattr(type(spec), "generate", generate)
    list(samples(spec, 1, **OPTIONS))
    assert seen and all(p == list(range(p[0], p[0] + PROMPT_TOKENS)) for p in seen)


def test_what_cannot_be_sampled(spec):
    with pytest.raises(InputError, match="tokens is 0"):
        samples(spec, 0, **OPTIONS)
    with pytest.raises(InputError, match="temperature is -1"):
        samples(spec, 1, **{**OPTIONS, "temperature": -1})
    with pytest.raises(InputError, match=f"the text gives {PROMPT_TOKENS} tokens; give more than"):
        samples(spec, 1, **{**OPTIONS, "prompts": np.zeros(PROMPT_TOKENS, dtype=np.uint16)})
    with pytest.raises(RefusedError, match="leaves no room to sample in"):
        samples(load(llama(V=64, context=PROMPT_TOKENS), "none"), 1, **OPTIONS)
    with pytest.raises(RefusedError, match="an encoder-decoder has no text of its own"):
        samples(load(t5(), "none"), 1, **OPTIONS)


def test_an_interruption_is_raised_again(spec, monkeypatch):
    (completion,) = spec.generate([[1]], max_new_tokens=2)
    object.__setattr__(completion, "finish_reason", "interrupted")
    monkeypatch.setattr(type(spec), "generate", lambda *args, **options: [completion])
    with pytest.raises(KeyboardInterrupt):
        list(samples(spec, 1, **OPTIONS))
