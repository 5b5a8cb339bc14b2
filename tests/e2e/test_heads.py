"""At temperature 0 every text is the target's own, whatever heads guess: every family, in float64.

Heads that have learned the very texts are kept often, untrained ones hardly ever: both courses.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from foretoken import Completion, Speculator
from foretoken.drafters.blockwise import Heads
from foretoken.models.families import FAMILIES
from foretoken.request import Request
from foretoken.sampling.keys import RowKey
from foretoken.train.heads import distance
from foretoken.train.pair import LessonText
from pairs import PROMPTS, assert_greedy, speculator, stock, target

LIMIT = 24


def rehearsed(model: PreTrainedModel, prompt: list[int], count: int) -> Heads:
    """Heads that know the greedy text of one prompt."""
    heads = Heads.fresh(model, count).to(model.device, torch.float64)
    encoder_decoder = model.config.is_encoder_decoder
    start = [model.generation_config.decoder_start_token_id] if encoder_decoder else prompt
    request = Request(start, LIMIT, RowKey(0, 0), source=prompt if encoder_decoder else None)
    texts = [LessonText(request, stock(model, prompt, LIMIT))]
    steps = torch.optim.Adam(heads.parameters(), lr=0.02)
    for _ in range(40):
        distance(heads, model, texts).backward()
        steps.step()
        steps.zero_grad()
    return heads.float()


def compared(pair: Speculator, model: PreTrainedModel, gamma: int) -> list[Completion]:
    completions = pair.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
    for prompt, text in zip(PROMPTS, completions, strict=True):
        assert_greedy(text, model, prompt, LIMIT)
    return completions


@pytest.mark.parametrize("name", ["Llama", "T5", "BART"])
def test_trained_heads(name: str, tmp_path: Path) -> None:
    model = target(name)
    file = tmp_path / "heads.safetensors"
    rehearsed(model, PROMPTS[0], 3).save(file)
    pair = speculator(model, f"heads:{file}")
    for gamma in range(5):
        first, *others = compared(pair, model, gamma)
        (alone,) = pair.generate(PROMPTS[0], max_new_tokens=LIMIT, gamma=gamma)
        assert alone.tokens == first.tokens
        if gamma:
            assert first.stats.accepted > 0 and first.stats.target_calls < LIMIT
            assert any(text.stats.accepted < text.stats.drafted for text in others)
            assert max(step.drafted for step in first.steps) == min(gamma, 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    model, file = target(name), tmp_path / "heads.safetensors"
    heads = Heads.fresh(model, 2)
    torch.nn.init.normal_(heads.outer, std=0.1, generator=torch.Generator().manual_seed(0))
    heads.save(file)
    comparison = compared(speculator(model, f"heads:{file}"), model, 2)
    assert all(text.stats.drafted > text.stats.accepted for text in comparison)
