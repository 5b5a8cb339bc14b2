"""A copy of a model over the model's own rows: it sees what the target has read, and leaves no
trace of its draft tokens."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from foretoken.certificate.planted import OffByOne
from foretoken.drafters.base import require_apart
from foretoken.drafters.lm import LMDrafter, token_by_token
from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Continues
from foretoken.models.companion import Companion, require_alike
from foretoken.models.openvino import conversion, weights
from foretoken.models.openvino.thinned import thinned
from foretoken.models.stock.cache import given
from foretoken.models.stock.selfcheck import deviation, stir
from tiny_families import build

pytestmark = pytest.mark.cpu_only
FAMILIES = ["Mistral", "Qwen2", "T5", "BART"]  # on pages, with a window or without, and explicit
ROUNDED = [("Mistral", "int8"), ("Qwen2", "int4"), ("T5", "int4")]  # of every day
ROUNDED += [
    pytest.param(name, dtype, marks=pytest.mark.prove)
    for name in FAMILIES
    for dtype in ("int8", "int4")
    if (name, dtype) not in ROUNDED
]


@cache
def network(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        twin = build(name)
        stir(twin)
    return twin


def hosted(
    network: PreTrainedModel, dtype: str = "float32", layers: tuple[int, ...] = ()
) -> tuple[Any, Companion[Any]]:
    (way, *_) = conversion.ways(network)
    target: Any = way.run(network)
    rounding = conversion.Conversion(None, dtype, lambda: copy.deepcopy(network), dict, layers)
    copied = rounding.companion(target)
    assert isinstance(copied, Companion)
    return target, copied


class Hosted:
    """A model whose copy guesses before each pass: some of the block that comes, one token a pass,
    and others behind them."""

    def __init__(self, target: Any, drafting: Companion[Any]) -> None:
        self.target, self.drafting, self.dice = target, drafting, random.Random(5)
        self.apart = 0.0  # how far the copy's logits are from the target's
        self.drafted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def start(self, prompts: list[list[int]], sources: Any = None) -> None:
        self.target.start(prompts, sources)
        self.drafting.start(prompts, sources)

    def score(self, blocks: list[list[int]], need: list[int]) -> Tensor:
        draft_tokens = self.guess(blocks)
        logits = self.target.score(blocks, need)
        for b, (block, n) in enumerate(zip(blocks, need, strict=True)):
            for i in range(max(len(block) - n, 0), min(len(block), len(draft_tokens[b]))):
                own = logits[b, i - (len(block) - n)]
                self.apart = max(self.apart, float((draft_tokens[b][i] - own).abs().max()))
                self.drafted += 1
        return logits

    def guess(self, blocks: list[list[int]]) -> list[list[Tensor]]:
        """The copy's logits behind each token that it took of a row's block."""
        counts = [self.dice.randint(0, len(block)) for block in blocks]
        before = list(self.target.lengths)
        tensors: list[list[Tensor]] = [[] for _ in blocks]
        for i in range(max(counts, default=0)):
            feed = [[block[i]] if i < n else [] for block, n in zip(blocks, counts, strict=True)]
            logits = self.drafting.score(feed, [len(token) for token in feed])
            for b, token in enumerate(feed):
                if token:
                    tensors[b].append(logits[b, 0].clone())
        self.drafting.score([[self.dice.randrange(2, 60)] for _ in blocks], [1] * len(blocks))
        assert self.target.lengths == before
        return tensors

    def set_lengths(self, lengths: list[int]) -> None:
        self.target.set_lengths(lengths)
        self.drafting.set_lengths(lengths)

    def permute(self, rows: list[int]) -> None:
        self.target.permute(rows)
        self.drafting.permute(rows)

    def leave(self, rows: list[int]) -> None:
        self.target.leave(rows)
        self.drafting.leave(rows)


@pytest.mark.prove
@pytest.mark.parametrize("name", FAMILIES)
def test_an_exact_copy_scores_what_the_target_scores(name: str) -> None:
    """Through joins, rollbacks, copied rows and leaving: it reads the target's keys and values."""
    both = Hosted(*hosted(network(name)))
    assert deviation(network(name), both) < 1e-5  # pyright: ignore[reportArgumentType]
    assert both.drafted > 20 and both.apart < 1e-4


@pytest.mark.prove
@pytest.mark.parametrize(("name", "dtype"), ROUNDED)
def test_draft_tokens_leave_no_trace(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every pass the target's logits are those of a text that was never guessed."""
    monkeypatch.setattr(weights, "WORTH", 0)  # small weights too
    both = Hosted(*hosted(network(name), dtype))
    assert deviation(network(name), both) < 1e-5  # pyright: ignore[reportArgumentType]
    assert both.drafted > 20 and both.apart > 1e-4


def test_some_layers_read_the_same_layers_of_the_target() -> None:
    """As transformers computes it, over those layers' keys and values of the whole model."""
    whole = network("Qwen2")
    last = whole.config.num_hidden_layers - 1
    target, drafting = hosted(whole, layers=(last,))
    text, more = [3, 9, 4, 7, 5], [8, 6]
    target.start([text])
    drafting.start([text])
    logits = drafting.score([more], [2])[0]

    cached = DynamicCache(config=whole.config)
    whole(input_ids=torch.tensor([text]), **given(whole, cached), use_cache=True)
    dynamic = DynamicCache()
    dynamic.update(cached.layers[last].keys, cached.layers[last].values, 0)
    with torch.no_grad():
        ids = torch.tensor([more])
        own = thinned(whole, (last,))
        expected = own(input_ids=ids, **given(own, dynamic), use_cache=True)
    assert torch.allclose(logits, expected.logits[0], atol=1e-4)
    assert deviation(whole, Hosted(*hosted(whole, layers=(0,)))) < 1e-5  # pyright: ignore


def test_what_the_target_reads_meanwhile_is_there() -> None:
    target, drafting = hosted(network("Mistral"))
    target.start([[5, 6], [7]])
    drafting.start([[5, 6], [7]])
    drafting.score([[8, 9], [3]], [1, 1])
    assert drafting.lengths == [4, 2] and target.lengths == [2, 1]
    target.score([[8], [4, 5, 6]], [1, 1])
    assert drafting.lengths == [4, 4]
    drafting.set_lengths([3, 4])
    assert drafting.lengths == [3, 4]
    with pytest.raises(InputError, match="a row can only go back"):
        drafting.set_lengths([3, 5])


def test_another_form_of_the_cache_is_refused() -> None:
    with pytest.raises(RefusedError, match="another form"):
        require_alike({"key_cache.0": (2, 32, 8)}, {"key_cache.0": (4, 32, 8)})


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_copy_drafts_for_what_wraps_its_target_and_for_no_other(wrapped: bool) -> None:
    target, drafting = hosted(network("Llama"))
    require_apart(OffByOne(target) if wrapped else target, LMDrafter(drafting))
    with pytest.raises(InputError, match="a copy of itself"):
        require_apart(hosted(network("Llama"))[0], LMDrafter(drafting))


def test_a_copy_goes_on_over_the_rows_of_the_target() -> None:
    """As token by token, behind what the target has read, whose rows stay as they are."""
    target, copied = hosted(network("Qwen2"))
    prompts = [[5, 6, 7], list(range(2, 33))]
    target.start(prompts)
    copied.start(prompts)
    stepwise = token_by_token(copied, [[9], [8]], [4, 2], None)
    lengths = copied.lengths
    copied.set_lengths(target.lengths)
    assert isinstance(copied, Continues)
    assert copied.go_on([[9], [8]], [4, 2], None).ids == stepwise.ids
    assert copied.lengths == lengths and target.lengths == [3, 31]
    copied.set_lengths(target.lengths)
