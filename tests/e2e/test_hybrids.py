"""Hybrids, whose states go back by row: their greedy texts are those of `generate`, by whatever
draft and in whatever company.

The models are in float64, where ours and `generate` differ by float32's rounding within a family's
own code at most. That no choice is that close is asserted, so equal means equal.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import hybrids
import pairs
from foretoken import (
    CascadeDrafter,
    Engine,
    InputError,
    LookupDrafter,
    MixtureDrafter,
    Speculator,
    load,
)
from foretoken.models.stock.selfcheck import deviation
from hybrids import FAMILIES, LONG, PROMPTS
from moving import require_accounted, require_empty

GAMMAS = (0, 1, 4, 8, None)
SHORT = 30  # tokens of every day's texts
DRAFTS: dict[str, Any] = {
    "hybrid": hybrids.draft,
    "plain": lambda name: pairs.target("Llama"),
    "lookup": lambda name: "lookup",
}
OFTEN = ("Qwen3_5ForCausalLM", "FalconH1ForCausalLM")
EVERY = [pytest.param(n, marks=() if n in OFTEN else pytest.mark.prove) for n in FAMILIES]


@cache
def speculator(name: str, draft: str) -> Speculator:
    return load(hybrids.hybrid(name), DRAFTS[draft](name), runtime="transformers")


def expected(name: str, prompt: list[int], limit: int) -> list[int]:
    """The greedy text, of which no choice is within rounding."""
    model, whole = hybrids.hybrid(name), SHORT if limit <= SHORT else LONG
    text = hybrids.greedy(model, tuple(prompt), whole)
    assert hybrids.margin(model, tuple(prompt), whole) > 10 * rounding(name)
    return text[:limit]


@cache
def rounding(name: str) -> float:
    """How far ours are from full forwards, as a share of the spread of logits."""
    share = deviation(hybrids.hybrid(name))
    assert share < 1e-5
    return share


def require_texts(name: str, draft: str, gamma: int | None, limit: int) -> None:
    """Alone and together; with a hybrid draft some guesses are kept and some are not."""
    spec = speculator(name, draft)
    alone = spec.generate(PROMPTS[:1], max_new_tokens=limit, gamma=gamma)
    together = spec.generate(PROMPTS, max_new_tokens=limit, gamma=gamma)
    for found, prompt in zip([*alone, *together], [PROMPTS[0], *PROMPTS], strict=True):
        assert found.tokens == expected(name, prompt, limit)
    kept, made = (sum(getattr(t.stats, n) for t in together) for n in ("accepted", "drafted"))
    assert draft != "hybrid" or gamma in (0, None) or 0 < kept < made


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", OFTEN)
def test_texts_are_those_of_generate(name: str, draft: str) -> None:
    for gamma in (4, None):
        require_texts(name, draft, gamma, SHORT)


@pytest.mark.prove
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_proof_long_texts_are_those_of_generate(name: str, draft: str) -> None:
    for gamma in GAMMAS:
        require_texts(name, draft, gamma, LONG)


def come_and_go(name: str, draft: str, seed: int, limits: tuple[int, ...]) -> int:
    """Rows join and leave at any step, are broken off and made to wait; how many waited because
    memory ran short."""
    spec, dice = speculator(name, draft), random.Random(seed)
    parts = [part for part in (spec.target, spec.drafter.model) if part is not None]
    fewer = sum(part.memory([70 + limits[0]] * 4, [0] * 4) for part in parts)
    waiting = [(prompt, limit) for prompt in PROMPTS for limit in limits] * 2
    dice.shuffle(waiting)
    asked: dict[int, tuple[list[int], int]] = {}
    texts: dict[int, list[int]] = {}
    made_to_wait = 0
    with Engine(spec, 5, kv_memory=fewer) as engine:
        while waiting or asked:
            if waiting and dice.random() < 0.4:
                prompt, limit = waiting.pop()
                id = engine.add(prompt, max_new_tokens=limit, gamma=dice.choice(GAMMAS))
                asked[id], texts[id] = (prompt, limit), []
            if asked and dice.random() < 0.03:
                engine.abort(id := dice.choice([*asked]))
                del asked[id]
            if engine.running > 1 and dice.random() < 0.05:
                spec.scheduler.preempt()
                made_to_wait += 1
            for event in engine.step():
                texts[event.id] += event.tokens
                if event.completion is not None:
                    assert texts[event.id] == expected(name, *asked.pop(event.id))
                    assert event.completion.stats.cached_tokens == 0
            require_accounted(spec)
        stats = engine.stats()
        assert stats.finished and stats.aborted and made_to_wait, stats
    require_empty(spec)
    return stats.preempted - made_to_wait


@pytest.mark.parametrize("name", EVERY)
def test_rows_that_come_and_go(name: str) -> None:
    come_and_go(name, "hybrid", 0, (3, 30))


@pytest.mark.prove
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_proof_rows_that_come_and_go(name: str, draft: str) -> None:
    assert all(come_and_go(name, draft, seed, (7, 90, 300)) for seed in range(3))


def test_more_draft_tokens_than_any_part_goes_back_by_are_refused_beforehand() -> None:
    """Also where a hybrid is within another drafter, and where beams look ahead."""
    plain, small = pairs.target("Llama"), speculator("FalconH1ForCausalLM", "hybrid").drafter
    parts = MixtureDrafter([(LookupDrafter(), 1), (small, None)])
    cascade = CascadeDrafter(small.model, LookupDrafter(), 2)
    message = "gamma is 40, but the model's states go back by 32 tokens"
    for drafter in (parts, cascade):
        spec = load(plain, drafter, runtime="transformers")
        with pytest.raises(InputError, match=message):
            spec.generate([[3, 4]], max_new_tokens=2, gamma=40)
    for pair in (speculator("FalconH1ForCausalLM", "hybrid"), load(plain, small)):
        with pytest.raises(InputError, match=message):
            pair.beam_search([[3, 4]], num_beams=2, max_new_tokens=2, gamma=40)
        assert pair.beam_search([[3, 4]], num_beams=2, max_new_tokens=2, gamma=2)
