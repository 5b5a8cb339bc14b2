"""Small random targets, drafts that half agree with them, and their greedy text without our code.

The text is transformers' own or, where float32 casts tip a near-tie, that of full forwards.
"""

from __future__ import annotations

import copy
import os
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken import Completion, Drafter, Speculator, load
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import build

DEVICE = os.environ.get("FORETOKEN_TEST_DEVICE", "cpu")  # "cuda": what is drawn here runs there
V = 64  # of all families
WINDOW = 8  # of those that have one
SINGLE = {"Mixtral"}  # its experts' grouped product knows no float64
POST_NORM = {"BART", "Marian"}  # larger weights do not make them livelier
PROMPTS = [
    [5, 17, 33],
    [60, 12, 7, 9, 44, 31, 2, 18, 50, 41, 23, 6],
    [3, 58, 20, 36, 11, 29, 47, 62, 15, 8, 27, 53, 40, 10, 34, 55, 21, 48, 13, 37, 26],
]
VARIED = 4  # different tokens that a text of 24 must have


def target(name: str) -> PreTrainedModel:
    """A model of that family, the first whose greedy text does not merely repeat itself. All tests
    share it: who would change it takes a copy."""
    model = _target(name)
    dtype = torch.float32 if name in SINGLE else torch.float64
    assert model.dtype == dtype, f"a test has turned the shared {name} into {model.dtype}"
    return model


@cache
def _target(name: str) -> PreTrainedModel:
    return next(model for seed in count() if varied(model := random(name, seed)))


def must_record(name: str) -> None:
    """Skip where this family cannot be recorded as a graph; a CPU does not record."""
    if DEVICE == "cuda" and name in SINGLE:
        pytest.skip("a grouped product of float32 cannot be recorded")


def random(name: str, seed: int) -> PreTrainedModel:
    """Far from flat, in float64 where it can, without an end of sequence."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(name)
        randomize_weights(model)
        model = model if name in SINGLE else model.double()
        # With the input's weights as its output layer a random model repeats its last token.
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings().weight
        head.weight = nn.Parameter(torch.randn_like(head.weight))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1 and weight is not head.weight and weight is not embeddings:
                    weight *= 1 if name in POST_NORM else 2
    model.generation_config.eos_token_id = None
    return model.requires_grad_(False).to(DEVICE)


def lively(kind: Any, config: PreTrainedConfig, scale: float = 1.5) -> PreTrainedModel:
    """A random model of that class whose greedy text varies, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval()
        randomize_weights(model)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight *= scale
    return model


def varied(model: PreTrainedModel) -> bool:
    return all(len(set(stock(model, prompt, 24))) >= VARIED for prompt in PROMPTS)


def relative(model: PreTrainedModel, noise: float = 0.03, seed: int = 0) -> PreTrainedModel:
    """A copy whose weights are off by that share: it guesses right at times."""
    model = copy.deepcopy(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            off = torch.randn(weight.shape, generator=random, dtype=weight.dtype)
            weight += noise * weight.std(correction=0) * off.to(weight.device)
    return model


def scores(model: PreTrainedModel, text: list[int], source: list[int] | None = None) -> Tensor:
    """Logits after every token of the text, `[len(text), V]`: one forward, no cache."""
    ids = torch.tensor([text], device=model.device)
    with torch.no_grad():
        if source is None:
            return model(input_ids=ids, use_cache=False).logits[0].cpu()
        read = torch.tensor([source], device=model.device)
        return model(input_ids=read, decoder_input_ids=ids, use_cache=False).logits[0].cpu()


def speculator(
    model: PreTrainedModel,
    draft: PreTrainedModel | Drafter | str,
    eos: int | None = None,
    runtime: str = "auto",
) -> Speculator:
    """`load` as users call it, the model's own end of sequence being `eos`."""
    model.generation_config.eos_token_id = eos
    try:
        return load(model, draft, runtime=runtime)
    finally:
        model.generation_config.eos_token_id = None  # others share the model


def stock(model: PreTrainedModel, prompt: list[int], limit: int, eos: int | None = None):
    """New tokens of transformers' own greedy decoding."""
    return _stock(model, tuple(prompt), limit, eos)


@cache
def _stock(model: PreTrainedModel, prompt: tuple[int, ...], limit: int, eos: int | None):
    ids = torch.tensor([prompt], device=model.device)
    ends = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": limit}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ends)
    return out[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()


def an_end(model: PreTrainedModel, prompt: list[int], limit: int) -> int:
    """A token that the greedy text reaches for the first time well inside it."""
    text = stock(model, prompt, limit)
    return max(
        set(text), key=lambda token: (text.index(token) <= 2 * limit // 3, text.index(token))
    )


def oracle(model: PreTrainedModel, prompt: list[int], limit: int, eos: int | None = None):
    """The same by full forwards and an argmax in the model's own precision."""
    settings, encoder_decoder = model.generation_config, model.config.is_encoder_decoder
    head, source = (
        ([settings.decoder_start_token_id], prompt) if encoder_decoder else (prompt, None)
    )
    new: list[int] = []
    while len(new) < limit and (not new or new[-1] != eos):
        forced = settings.forced_eos_token_id if len(new) == limit - 1 else None
        best = int(scores(model, [*head, *new], source)[-1].argmax())
        new.append(best if forced is None else forced)
    return new


def assert_greedy(
    found: Completion, model: PreTrainedModel, prompt: list[int], limit: int, eos: int | None = None
) -> None:
    """The completion is the greedy text, and says rightly why it ended."""
    expected = stock(model, prompt, limit, eos)
    if found.tokens != expected:  # transformers' argmax is one of float32
        expected = oracle(model, prompt, limit, eos)
    assert found.tokens == expected
    stopped = expected[-1] == eos
    assert found.finish_reason == ("stop" if stopped else "length")
    assert stopped or len(found.tokens) == limit
