"""Models with recurrences on the native decoder: rows go back, move and share prefixes as others
do, and their logits are the same bits as of the sequence read at once."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrids
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel
from interrupts import interrupted

pytestmark = pytest.mark.cpu_only
WHERE = ("native/model.py", "native/pages.py", "native/passes.py", "native/recurrent_states.py")
WHERE += ("models/prefixes.py",)
OFTEN = "Qwen3_5ForCausalLM"
FAMILIES = ["GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "FalconH1ForCausalLM"]
EVERY = [OFTEN, *(pytest.param(name, marks=pytest.mark.prove) for name in FAMILIES)]


@cache
def network(name: str) -> Any:
    return hybrids.random(name, 0).float()


@cache
def converted(name: str, dtype: str = "float32") -> NativeModel:
    return NativeConversion(None, dtype, lambda: network(name)).load_model()


def emptied(model: NativeModel) -> NativeModel:
    model.set_prefix_caching(False)
    model.permute([])
    return model


def ids(n: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 60) for _ in range(n)]


def expected(model: NativeModel, sequence: list[int], need: int) -> Tensor:
    """Logits of the last tokens of a sequence, read at once by a row of its own."""
    rows = len(model.lengths)
    model.start([[]])
    blocks = [[] for _ in range(rows)]
    made = model.score([*blocks, sequence], [0] * rows + [need])[rows, :need].clone()
    model.leave([rows])
    return made


@pytest.mark.parametrize("name", EVERY)
def test_a_prompt_that_begins_like_others_continues_where_states_are_stored(name: str) -> None:
    """At the end of a sequence, and where one has left another: of prompts that come one after
    another and share 70 tokens the third reads these from the cache."""
    model, text = emptied(converted(name)), ids(200, 1)
    model.set_prefix_caching(True)
    prompts: list[tuple[list[int], int]] = [
        ([*text[:70], *ids(30, 2)], 0),
        ([*text[:70], *ids(30, 3)], 0),
        ([*text[:70], *ids(30, 4)], 70),
        ([*text[:40], *ids(30, 5)], 0),
        ([*text[:40], *ids(30, 6)], 40),
        (text, 70),
        ([*text, 5, 6, 7, 9], 203),  # behind what was scored of the one before
    ]
    for prompt, recalled in prompts:
        assert model.count_cached_tokens(prompt) == recalled
        model.start([prompt])
        assert model.num_cached_tokens == [recalled]
        made = model.score([[5, 6, 7]], [3])[0].clone()
        model.leave([0])
        model.set_prefix_caching(False)
        assert torch.equal(made, expected(model, [*prompt, 5, 6, 7], 3))
        model.set_prefix_caching(True)
        for other, _ in prompts[: prompts.index((prompt, recalled)) + 1]:
            model.start([other])
            model.score([[5, 6, 7]], [3])
            model.leave([0])
    model.set_prefix_caching(False)
    assert model.count_cached_tokens(text) == 0


def test_an_invalid_token_leaves_what_is_before_it_to_others() -> None:
    other = hybrids.random(OFTEN, 0).float()
    other.get_input_embeddings().weight.data[60] = torch.nan
    model, text = NativeConversion(None, "float32", lambda: other).load_model(), ids(40, 1)
    right = expected(model, [*text, 5, 6], 2)
    model.set_prefix_caching(True)
    model.start([[*text, 60, 5], text])
    assert model.score([[60], [60, 3]], [1, 1]).isnan().all()
    model.set_lengths([42, 40])  # a draft token that is rejected
    assert torch.equal(model.score([[], [5, 6]], [0, 2])[1], right)
    model.leave([0, 1])
    for last, recalled in ((9, 0), (5, 40)):
        model.start([[*text, last]])
        assert model.num_cached_tokens == [recalled]
        made = model.score([[6]], [1])[0].clone()
        model.leave([0])
    assert torch.equal(made, right[1:])


@pytest.mark.prove
def test_a_ctrl_c_anywhere_leaves_no_wrong_state() -> None:
    model, text = emptied(converted(OFTEN)), ids(120, 1)
    right = expected(model, [*text, 5, 6], 2)
    model.set_prefix_caching(True)

    def use() -> None:
        model.start([text, text[:50]])
        model.permute([0, 0, 1])
        model.score([[4], [5, 6], [7] * 30], [1, 1, 1])
        model.set_lengths([120, 122, 60])
        model.leave([1])

    nth = 1
    while interrupted(use, nth, WHERE):
        model.leave(list(range(len(model.lengths))))
        model.start([text])
        assert torch.equal(model.score([[5, 6]], [2])[0], right), f"line {nth}"
        model.leave([0])
        nth += 11
    assert nth > 300
