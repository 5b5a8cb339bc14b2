"""Families with states of their own, as tiny random models: every logit over our cache is that of
the stock model's forward of the whole text, whatever passes, rollbacks and mates there were."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from census import build
from foretoken.errors import RefusedError
from foretoken.models.rewindable_states import RecurrentStateLayer
from foretoken.models.stock import recurrences
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import check

ALL = ["Qwen3_5", "NemotronH", "FalconH1", "Lfm3", "Jamba", "Qwen3Next", "KimiLinear", "Bamba"]
ALL += ["GraniteMoeHybrid", "Zamba2", "Lfm2", "Lfm2Moe", "FalconMamba", "Zamba", "OlmoHybrid"]
ALL += ["Mamba"]
NEAR = 3e-5  # of the spread, in float32, of which stock forwards of Zamba themselves miss 1e-5
EXACT = 1e-13  # in float64
ONE_TYPE = ("Lfm2", "Lfm2Moe", "Lfm3")  # their code computes all in the model's type
TEXT = [3 + (i * i + i // 3) % 47 for i in range(400)]
Texts = list[list[int]]

moe = pytest.mark.parametrize("name", ["GraniteMoeHybrid", "Lfm2Moe"])


@cache
def network(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = build(f"{name}ForCausalLM").to(dtype)
    if dtype == torch.float64:  # the product of experts by groups has no float64
        model.set_experts_implementation("eager")
    return model


class Wide(TorchFunctionMode):
    """Compute in float64 what a family's code computes in float32 in every type, as norms and
    states: what is left is the difference of the algorithms, on every processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = [torch.float64 if x is torch.float32 else x for x in args]
        named = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*wide, **named)


class Rows:
    """Rows of a model and their texts; `worst`: how far a logit was from a forward of its text."""

    def __init__(self, model: Any, texts: Texts) -> None:
        self.stock, self.model = model, CausalModel(model)
        self.texts, self.worst = [list(text) for text in texts], 0.0
        self.model.start(texts)

    def score(self, blocks: Texts) -> list[Tensor]:
        """Read blocks and compare the logits of all their tokens, which are returned by row."""
        logits = self.model.score(blocks, [len(block) for block in blocks])
        self.texts = [text + block for text, block in zip(self.texts, blocks, strict=True)]
        some = [logits[b, : len(block)] for b, block in enumerate(blocks)]
        for whole, text, own in zip(wholes(self.stock, self.texts), self.texts, some, strict=True):
            if len(own):
                assert own.dtype == whole.dtype == self.stock.dtype
                expected = whole[len(text) - len(own) : len(text)]
                self.worst = max(self.worst, apart(own, expected))
        return some

    def back(self, lengths: list[int]) -> None:
        self.model.set_lengths(lengths)
        self.texts = [text[:n] for text, n in zip(self.texts, lengths, strict=True)]

    def drafts(self, width: int) -> None:
        """Read so many more tokens in every row, others in each."""
        ends = [len(text) + 7 * b for b, text in enumerate(self.texts)]
        self.score([[TEXT[(end + i) % len(TEXT)] for i in range(width)] for end in ends])


def wholes(model: Any, texts: Texts) -> list[Tensor]:
    """The logits of whole texts, by stock forwards without a cache; a forward from the beginning
    is causal, so that padding on the right does no harm."""
    made: list[Tensor] = []
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        for some in ids.split(64):
            made += model(input_ids=some, use_cache=False).logits
    return made


def apart(logits: Tensor, expected: Tensor) -> float:
    difference = (logits - expected).abs().max() / (expected.max() - expected.min())
    return float(difference.nan_to_num(torch.inf))


def arrays(model: CausalModel) -> list[tuple[str, Tensor]]:
    parts = [
        part for part in model.cache.list_filled_parts() if isinstance(part, RecurrentStateLayer)
    ]
    return [each for part in parts for each in part.arrays.items()]


@pytest.mark.daily("Qwen3_5", "FalconH1", "Jamba")
@pytest.mark.parametrize("name", ALL)
def test_widths_are_token_by_token(name: str) -> None:
    """All widths up to 9 behind one text."""
    model = network(name, torch.float64)
    assert one_by_one(network(name)) < NEAR
    with nullcontext() if name in ONE_TYPE else Wide():
        assert one_by_one(model) < EXACT


def one_by_one(model: Any) -> float:
    """The worst difference of blocks from forwards of their texts and from single tokens."""
    rows = Rows(model, [TEXT[:11], TEXT[5:18]])
    starts, alone = [11, 13], []
    blocks = [TEXT[50:59], TEXT[70:79]]
    for i in range(9):
        alone.append(rows.score([block[i : i + 1] for block in blocks]))
    for width in range(1, 10):
        rows.back(starts)
        for b, own in enumerate(rows.score([block[:width] for block in blocks])):
            single = torch.cat([each[b] for each in alone[:width]])
            rows.worst = max(rows.worst, apart(own, single))
    return rows.worst


@pytest.mark.parametrize("name", ["NemotronH", "Zamba2"])
def test_time_steps_have_their_floor_at_every_width(name: str) -> None:
    """Stock functions for single tokens have none."""
    model = deepcopy(network(name))
    with torch.no_grad():
        for part in model.modules():
            if hasattr(part, "dt_bias"):
                part.dt_bias.fill_(-9.0)
    rows = Rows(model, [TEXT[:9]])
    for width in (1, 4, 1, 1):
        rows.drafts(width)
    assert rows.worst < NEAR


def test_a_text_in_two_blocks_over_the_stock_cache_is_no_reference() -> None:
    """Negative control: transformers' own scan begins the second at nothing."""
    model = network("Jamba")
    (whole,) = wholes(model, [TEXT[:8]])
    with torch.inference_mode():
        kept = model(input_ids=torch.tensor([TEXT[:3]]), use_cache=True).past_key_values
        stock = model(input_ids=torch.tensor([TEXT[3:8]]), past_key_values=kept).logits[0]
    rows = Rows(model, [TEXT[:3]])
    rows.score([TEXT[3:8]])
    assert apart(stock, whole[3:]) > 0.01 and rows.worst < NEAR


def test_positions_of_several_axes() -> None:
    rows = Rows(build("Qwen3_5ForConditionalGeneration"), [TEXT[:1], TEXT[2:40], []])
    for width in (5, 1, 3):
        rows.drafts(width)
    assert rows.worst < NEAR


@moe
def test_experts_do_not_see_mates(name: str) -> None:
    alone, among = (
        Rows(network(name), [TEXT[:9]]),
        Rows(network(name), [TEXT[:9], TEXT[2:70], []]),
    )
    (own,) = alone.score([TEXT[9:12]])
    (mates, *_) = among.score([TEXT[9:12], [4], TEXT[:12]])
    assert apart(mates, own) < 1e-6 and among.worst < NEAR


@pytest.mark.daily("Qwen3_5")
@pytest.mark.parametrize("name", ["Qwen3_5", "Bamba", "Jamba", "KimiLinear"])
def test_states_are_float32_in_a_bfloat16_model(name: str) -> None:
    model = CausalModel(network(name, torch.bfloat16))
    model.start([TEXT[:9], []])
    logits = model.score([[5], [6, 7]], [1, 1])
    assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())
    kinds = {key[0]: x.dtype for key, x in arrays(model)}
    assert kinds["S"] == kinds["k"] == kinds["u"] == torch.float32
    assert kinds.get("c", torch.float64) == torch.float64 and kinds["0"] == torch.bfloat16


def test_two_runs_of_one_model_in_two_threads() -> None:
    """And the user's own `generate` beside them, before and after."""
    model = network("Qwen3_5")

    def written() -> list[int]:
        ids = torch.tensor([TEXT[:6]])
        return model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()

    def run(seed: int) -> float:
        rows, dice = Rows(model, [TEXT[seed:9], TEXT[: 3 + seed]]), random.Random(seed)
        for _ in range(12):
            rows.drafts(dice.randint(1, 5))
            rows.back([len(text) - dice.randint(0, 2) for text in rows.texts])
        return rows.worst

    before = written()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, seed) for seed in (1, 2)]
        between = written()
        assert max(each.result() for each in runs) < NEAR
    assert before == between == written()


FUNCTIONS = {"Qwen3_5": "torch_chunk_gated_delta_rule", "KimiLinear": "chunk_kimi_delta_attention"}
FUNCTIONS |= {"Bamba": "mamba2_chunk_scan", "Jamba": "mamba_selective_scan"}


@pytest.mark.daily("Qwen3_5")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_ours_is_called_whatever_a_kernel_package_puts_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, function = network(name), FUNCTIONS[name]
    rows = Rows(model, [])
    calls, ours = [0], recurrences.RECURRENCE_REPLACEMENTS[function]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return ours(*args, **kwargs)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it begins at nothing")

    (whole,) = wholes(model, [TEXT[:12]])
    monkeypatch.setitem(recurrences.RECURRENCE_REPLACEMENTS, function, counted)
    monkeypatch.setattr(sys.modules[type(model).__module__], function, kernel)
    recurrences._make_row_forward.cache_clear()
    rows.model.start([TEXT[:8]])
    assert apart(rows.model.score([TEXT[8:12]], [4])[0], whole[8:12]) < NEAR
    recurrences._make_row_forward.cache_clear()
    assert calls[0] and calls[0] % 2 == 0  # in each of two passes


@pytest.mark.daily("Qwen3_5")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mixer_that_calls_a_function_unknown_here_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(name)
    monkeypatch.delitem(recurrences.RECURRENCE_REPLACEMENTS, FUNCTIONS[name])
    recurrences._make_row_forward.cache_clear()
    with pytest.raises(RefusedError, match="by an unknown function"):
        check(model)
    recurrences._make_row_forward.cache_clear()
