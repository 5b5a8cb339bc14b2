"""Exact shapes: to the bit the same logits however a text is cut, and the right ones."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from foretoken.errors import RefusedError
from foretoken.loading.named import asset
from foretoken.loading.sources import source
from foretoken.models.base import Model
from foretoken.models.families import CAUSAL, build
from foretoken.models.stock.grid import ON_A_GRID, WIDTH, ExactModel, steady
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import check, stir
from tiny import llama

DTYPES = [torch.float32, torch.bfloat16]
LENGTH = 3 * WIDTH + 5


@cache
def the_target(dtype: torch.dtype):
    """Of the pair that ships: large enough for kernels that differ by shape."""
    return source(asset("target"), None, trust=False).network(dtype, torch.device("cpu"))


def small(name: str, dtype: torch.dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(name)
        stir(model)
    return model.to(dtype)


def logits(model: Model, text: list[int], seed: int, read: int = 0) -> Tensor:
    """Behind every token from `read` on, the text being cut at random, with wrong draft tokens
    behind each part that are taken back."""
    dice = random.Random(seed)
    model.start([text[:read]], [[3, 4, 5]] if model.encoder_decoder else None)
    parts, at = [], read
    while at < len(text):
        n = min(dice.choice([1, 1, 2, 3, 5, WIDTH, 2 * WIDTH + 1]), len(text) - at)
        wrong = [dice.randrange(model.vocab_size) for _ in range(dice.choice([0, 1, 4, 9]))]
        scores = model.score([[*text[at : at + n], *wrong]], [n + len(wrong)])[0, :n]
        parts.append(scores.clone())
        at += n
        model.set_lengths([at])
    model.leave([0])
    return torch.cat(parts)


def text(V: int, n: int = LENGTH) -> list[int]:
    dice = random.Random(1)
    return [dice.randrange(V) for _ in range(n)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["default", "Gemma 3", "GPT-2", "T5", "BART"])
def test_logits_are_a_function_of_the_text(name: str, dtype: torch.dtype) -> None:
    model = ExactModel(the_target(dtype) if name == "default" else small(name, dtype))
    ids = text(model.vocab_size)
    whole = logits(model, ids, 0)
    for seed in (1, 2):
        assert torch.equal(logits(model, ids, seed), whole)
    assert torch.equal(logits(model, ids, 3, read=WIDTH + 3), whole[WIDTH + 3 :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_them_they_are_not(dtype: torch.dtype) -> None:
    """Negative control: the ragged cache, whose passes are as wide as their blocks."""
    model = CausalModel(the_target(dtype))
    ids = text(model.vocab_size)
    assert not torch.equal(logits(model, ids, 1), logits(model, ids, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_do_they_depend_on_batch_others(dtype: torch.dtype) -> None:
    """Rows that join, are copied, change places and leave."""
    model = ExactModel(the_target(dtype))
    ids = text(model.vocab_size)
    whole = logits(model, ids, 0)
    model.start([ids[:9], ids[4:30]])
    model.permute([1, 0, 0])
    rows = model.score([[7, 8], ids[9:20], ids[9:12]], [1, 11, 2])
    assert rows.shape == (3, 11, model.vocab_size)
    assert torch.equal(rows[1], whole[9:20]) and torch.equal(rows[2, :2], whole[10:12])
    model.leave([0])
    rows = model.score([[], ids[12:50]], [0, 38])
    assert torch.equal(rows[1], whole[12:50])
    assert torch.equal(model.score([ids[20:21], []], [1, 0])[0, 0], whole[20])


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "T5"])
def test_the_self_check_passes(name: str) -> None:
    assert check(build(name), ON_A_GRID).delta < 1e-5


def test_the_last_pass_ends_with_the_context() -> None:
    network = llama(context=WIDTH + 3)
    model, ragged = steady(ExactModel(network)), CausalModel(network)
    ids = text(model.vocab_size, WIDTH + 3)
    for one in (model, ragged):
        one.start([ids[:2]])
    assert torch.allclose(model.score([ids[2:]], [5]), ragged.score([ids[2:]], [5]), atol=1e-4)
    assert model.score([[]], [0]).shape == (1, 0, model.vocab_size)


def test_all_but_the_blocks_is_padding() -> None:
    model = ExactModel(llama())
    model.start([[1, 2], [3]])
    model.score([[4], [5] * WIDTH], [1, 1])
    assert model.padding == (WIDTH - 1) + (2 * WIDTH - WIDTH)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_experts_are_refused_unseen(dtype: torch.dtype) -> None:
    """One look at a pass may well find none of the rows that differ; in float64 none runs."""
    with pytest.raises(RefusedError, match="Mixtral.* has no exact shapes: .* behind a token"):
        ExactModel(small("Mixtral", dtype))


def test_experts_that_no_layer_has_are_none() -> None:
    settings = CAUSAL | {"intermediate_size": 48, "num_experts": 8, "mlp_only_layers": [0, 1]}
    ExactModel(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)))


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_logits_that_follow_what_stands_behind_are_refused(name: str) -> None:
    network = small(name, torch.float32)
    model = ExactModel(network)
    assert steady(model) is model and not model.rows
    network.lm_head.register_forward_hook(lambda head, args, out: out + out.mean(1, keepdim=True))
    with pytest.raises(RefusedError, match="no exact shapes"):
        steady(ExactModel(network))
