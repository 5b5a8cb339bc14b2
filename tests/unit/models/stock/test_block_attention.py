"""Attention that visits only blocks that a sequence has: the same logits as with a mask, and which
blocks it visits."""

from __future__ import annotations

import logging
import random
import shutil
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import pairs
import tiny_families
from foretoken import LMDrafter, Speculator
from foretoken.models.graph_pass import RecordingGuard
from foretoken.models.graphs import GraphModel, rehearse
from foretoken.models.stock import compiled
from foretoken.models.stock.block_attention import VisibleBlocks, find_visible_blocks
from foretoken.models.stock.model import CausalModel

SINKS = tiny_families.MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}
SINKS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
LENGTHS = 3, 50, 90, 70  # the context length is 128
WIDTHS = 2, 1, 2, 2, 2, 1, 5, 2, 2, 1, 5  # torch compiles for the second pass of a shape


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        tiny_families.FAMILIES, "gpt-oss", ("GptOssConfig", "GptOssForCausalLM", SINKS)
    )
    monkeypatch.setattr(pairs, "SINGLE", pairs.SINGLE | {"gpt-oss"})
    monkeypatch.setattr(compiled, "COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()


def ragged(lengths: list[int], width: int, end: int, window: int) -> Tensor:
    queries = torch.tensor(lengths)[:, None, None, None] + torch.arange(width)[:, None]
    keys = torch.arange(end)
    return (keys <= queries) & (keys > queries - window)


@pytest.mark.parametrize("additive", [False, True])
def test_visible_blocks(additive: bool) -> None:
    mask = ragged([0, 62, 63, 200], 2, 256, 256)
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    blocks = find_visible_blocks(mask)
    assert blocks.counts.flatten().tolist() == [1, 1, 2, 4]
    assert [row[:2] for row in blocks.indices.flatten(0, 2).tolist()] == [[0, 1]] * 4
    windowed = find_visible_blocks(ragged([0, 63, 200], 2, 256, 8))
    assert windowed.counts.flatten().tolist() == [1, 2, 1]
    assert [row[0] for row in windowed.indices.flatten(0, 2).tolist()] == [0, 0, 3]


def run_batch(model: Any) -> list[Tensor]:
    """Logits of ragged blocks, a rollback, a sequence that leaves, and one that joins."""
    numbers, logits = random.Random(0), []
    model.start([[numbers.randrange(2, 60) for _ in range(n)] for n in LENGTHS])
    for step, width in enumerate(WIDTHS):
        counts = [numbers.randint(1, width) for _ in model.lengths]
        blocks = [[numbers.randrange(2, 60) for _ in range(n)] for n in counts]
        logits.append(model.score(blocks, counts).clone())
        if step == 2:
            model.set_lengths([n - 2 for n in model.lengths])
        if step == 3:
            model.leave([1])
        if step == 7:
            model.start([[7] * 20])
    return logits


def compare(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits as the ragged cache's, and no sequence visits blocks after its end."""
    found: list[VisibleBlocks] = []

    def watched(mask: Tensor) -> VisibleBlocks:
        blocks = find_visible_blocks(mask)
        width, end = mask.shape[-2], 64 * blocks.indices.shape[-1]
        lengths = [runner.cache.lengths[b] for b in runner.cache.order]
        for b, count in enumerate(blocks.counts.flatten().tolist()):
            length = lengths[b] if b < len(lengths) else 0  # other rows are padding
            visited = blocks.indices[b].flatten()[:count]
            assert 64 * int(visited.max()) < length + width <= end
        found.append(blocks)
        return blocks

    monkeypatch.setattr(compiled, "find_visible_blocks", watched)
    model = pairs.random(name, 0)
    runner = GraphModel(model, compiled=True, by_blocks=True)
    logits, expected = run_batch(runner), run_batch(CausalModel(model))
    assert runner.layers is not None and runner.layers.by_blocks and not runner.layers.refusal
    assert len(found) > 4
    assert any(int(blocks.counts.sum()) < blocks.indices.numel() for blocks in found)
    # Gemma 2 and gpt-oss cast to float32
    deviation = max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))
    assert deviation < 1e-5 * float(expected[0].max() - expected[0].min())


@pytest.mark.prove  # torch traces for seconds
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2", "Gemma 3", "GPT-2", "gpt-oss"])
def test_logits_of_ragged_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs.must_record(name)
    compare(name, monkeypatch)


@pytest.mark.prove
@pytest.mark.filterwarnings("default")  # of torch, about its own code
@pytest.mark.skipif(
    pairs.DEVICE == "cpu" and shutil.which("g++") is None, reason="there is no compiler"
)
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2"])
def test_logits_of_compiled_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "COMPILE_BACKEND", "inductor")
    monkeypatch.setattr(pairs, "SINGLE", {name})  # the kernel for CPUs has no float64
    compare(name, monkeypatch)


def test_blocks_can_be_recorded() -> None:
    with RecordingGuard("Llama"):
        find_visible_blocks(ragged([0, 100], 1, 256, 256))


@pytest.mark.prove
@pytest.mark.filterwarnings("default")  # of torch, about its own code
@pytest.mark.skipif(
    pairs.DEVICE == "cpu" and shutil.which("g++") is None, reason="there is no compiler"
)
def test_kernels_visit_only_the_blocks_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_only(mask: Tensor) -> VisibleBlocks:
        blocks = find_visible_blocks(mask)
        return blocks._replace(counts=torch.ones_like(blocks.counts))

    monkeypatch.setattr(compiled, "COMPILE_BACKEND", "inductor")
    monkeypatch.setattr(compiled, "find_visible_blocks", first_only)
    model = pairs.random("Llama", 0).float()
    runner = GraphModel(model, compiled=True, by_blocks=True)
    pairs_of_logits = zip(run_batch(runner), run_batch(CausalModel(model)), strict=True)
    deviations = [(a - b).abs().amax((1, 2)) for a, b in pairs_of_logits]
    assert max(float(each[0]) for each in deviations) < 1e-3  # the first has a single block
    assert max(float(each.max()) for each in deviations) > 1e-2


@pytest.mark.prove
@pytest.mark.parametrize("wrong", ["other slots", "NaN"])
def test_wrong_attention_is_refused(
    wrong: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invert(mask: Tensor) -> VisibleBlocks:
        blocks = find_visible_blocks(mask)
        return blocks._replace(mask=~blocks.mask)

    def return_nan(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.full_like(query.transpose(1, 2), torch.nan)

    if wrong == "NaN":
        monkeypatch.setattr("foretoken.models.stock.attention.compute_block_attention", return_nan)
    else:
        monkeypatch.setattr(compiled, "find_visible_blocks", invert)
    with caplog.at_level(logging.WARNING, "foretoken"):
        runner = rehearse(GraphModel(pairs.random("Llama", 0), compiled=True, by_blocks=True))
    assert runner.runtime == "graphs" and "logits differ by" in caplog.text


@pytest.mark.prove
def test_layers_compile_with_a_mask_if_blocks_fail(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr("foretoken.models.stock.attention.compute_block_attention", fails)
    with caplog.at_level(logging.WARNING, "foretoken"):
        runner = rehearse(GraphModel(pairs.random("Llama", 0), compiled=True, by_blocks=True))
    assert "attention reads all slots" in caplog.text
    assert runner.runtime == "compiled" and runner.layers is not None
    assert not runner.layers.by_blocks and not runner.layers.refusal


@pytest.mark.prove
def test_greedy_texts() -> None:
    """Of a target and of a draft whose tokens are one recording."""
    model = pairs.target("Llama")
    target, draft = (
        GraphModel(each, compiled=True, by_blocks=True) for each in (model, pairs.relative(model))
    )
    pair = Speculator(target, LMDrafter(draft))
    texts = pair.generate(pairs.PROMPTS, max_new_tokens=24, gamma=3)
    for text, prompt in zip(texts, pairs.PROMPTS, strict=True):
        pairs.assert_greedy(text, model, prompt, 24)
    for each in (target, draft):
        assert each.layers is not None and each.layers.by_blocks and not each.layers.refusal
