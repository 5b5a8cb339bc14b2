"""Hybrids, whose states go back by row: their greedy texts are those of `generate`, by whatever
draft and in whatever company.

The models are in float64, where ours and `generate` differ by float32's rounding within a family's
own code at most. That no choice is that close is asserted, so equal means equal.
"""

from __future__ import annotations

import copy
import random
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrids
import pairs
from console import Run
from foretoken import (
    CascadeDrafter,
    Engine,
    EngineStats,
    InputError,
    LookupDrafter,
    MixtureDrafter,
    Speculator,
    load,
)
from foretoken.models.stock.selfcheck import deviation
from hybrids import FAMILIES, LONG, PROMPTS
from moving import require_accounted, require_empty
from tiny import byte_level, folder

GAMMAS = (0, 1, 4, 8, None)
SHORT = 30  # tokens of every day's texts
DRAFTS: dict[str, Any] = {
    "hybrid": hybrids.draft,
    "plain": lambda name: pairs.target("Llama"),
    "lookup": lambda name: "lookup",
}
OFTEN = ("Qwen3_5ForCausalLM", "FalconH1ForCausalLM")
SOME = [OFTEN[0], pytest.param(OFTEN[1], marks=pytest.mark.prove)]
EVERY = [pytest.param(n, marks=() if n in OFTEN else pytest.mark.prove) for n in FAMILIES]


def _proof(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.prove)


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


@pytest.mark.daily("hybrid")
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", SOME)
def test_texts_are_those_of_generate(name: str, draft: str) -> None:
    for gamma in (4, None):
        require_texts(name, draft, gamma, SHORT)


@pytest.mark.prove
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_proof_long_texts_are_those_of_generate(name: str, draft: str) -> None:
    for gamma in GAMMAS:
        require_texts(name, draft, gamma, LONG)


def taken(model: Any) -> int:
    """Bytes that the arrays of a model hold, keys and states."""
    held = [part.arrays for part in model.cache.filled()]
    arrays = chain.from_iterable(x.values() if isinstance(x, dict) else x for x in held)
    return sum(x.nbytes for x in arrays)


def come_and_go(
    name: str, draft: str, limits: tuple[int, ...], allowed: list[int], every: int, seed: int = 0
) -> EngineStats:
    """Rows join at any step, within the memory of rows as long as `allowed`; at every so many steps
    one is broken off or has to wait."""
    spec, dice = speculator(name, draft), random.Random(seed)
    parts = [part for part in (spec.target, spec.drafter.model) if part is not None]
    memory = sum(part.memory(allowed, [0] * len(allowed)) for part in parts)
    waiting = [(prompt, limit) for prompt in PROMPTS for limit in limits] * 2
    dice.shuffle(waiting)
    asked: dict[int, tuple[list[int], int]] = {}
    texts: dict[int, list[int]] = {}
    with Engine(spec, 5, kv_memory=memory) as engine:
        for turn in count(1):
            if waiting and dice.random() < 0.4:
                prompt, limit = waiting.pop()
                id = engine.add(prompt, max_new_tokens=limit, gamma=dice.choice(GAMMAS))
                asked[id], texts[id] = (prompt, limit), []
            if asked and turn % (2 * every) == every:
                engine.abort(id := dice.choice([*asked]))
                del asked[id]
            if engine.running > 1 and turn % every == every - 1:
                spec.core.preempt()
            for event in engine.step():
                texts[event.id] += event.tokens
                if event.completion is not None:
                    assert texts[event.id] == expected(name, *asked.pop(event.id))
                    assert event.completion.stats.cached_tokens == 0
            require_accounted(spec)
            assert sum(map(taken, parts)) <= memory
            if not waiting and not asked:
                break
        stats = engine.stats()
    require_empty(spec)
    return stats


@pytest.mark.prove
@pytest.mark.parametrize("name", EVERY)
def test_rows_that_come_and_go(name: str) -> None:
    stats = come_and_go(name, "hybrid", (3, 30), [100] * 5, 7)
    assert stats.finished and stats.aborted and stats.preempted


@pytest.mark.prove
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_proof_rows_that_come_and_go(name: str, draft: str) -> None:
    for seed in range(2):
        stats = come_and_go(name, draft, (7, 90, 300), [370] * 4, 30, seed)
        assert stats.finished and stats.aborted and stats.preempted
    stats = come_and_go(name, draft, (250,), [150] * 2, LONG * LONG)
    assert stats.preempted, "memory runs short where two grow"


def test_more_draft_tokens_than_any_part_goes_back_by_are_refused_beforehand() -> None:
    """Also where a hybrid is within another drafter."""
    plain, small = pairs.target("Llama"), speculator("FalconH1ForCausalLM", "hybrid").drafter
    parts = MixtureDrafter([(LookupDrafter(), 1), (small, None)])
    cascade = CascadeDrafter(small.model, LookupDrafter(), 2)
    message = "gamma is 40, but the model's states go back by 32 tokens"
    for drafter in (parts, cascade):
        spec = load(plain, drafter, runtime="transformers")
        with pytest.raises(InputError, match=message):
            spec.generate([[3, 4]], max_new_tokens=2, gamma=40)


@pytest.mark.daily("hybrid")
@pytest.mark.parametrize("draft", ["hybrid", "lookup"])
def test_ten_turns_of_a_conversation(draft: str) -> None:
    """Each is read anew: states of a text's beginning are not kept, and nobody says they were."""
    name, text = OFTEN[0], PROMPTS[0]
    with Engine(speculator(name, draft), prefix_cache=True) as engine:
        for turn in range(10):
            engine.add(text, max_new_tokens=7, gamma=4)
            events = [event for _ in range(9) for event in engine.step()]
            (done,) = (event.completion for event in events if event.completion is not None)
            model = hybrids.hybrid(name)
            assert hybrids.margin(model, tuple(text), 7) > 10 * rounding(name)
            assert done.tokens == hybrids.greedy(model, tuple(text), 7)
            assert done.stats.cached_tokens == 0
            text = [*text, *done.tokens, 9, 40 + turn]


@pytest.mark.native
@pytest.mark.parametrize("draft", ["lookup", pytest.param("self:int8", marks=pytest.mark.prove)])
def test_ten_turns_of_a_conversation_on_the_native_decoder(draft: str) -> None:
    """States are stored at the end of each sequence, so that the next turn reads what is new."""
    model = hybrids.hybrid(OFTEN[0])
    text = PROMPTS[2]
    with Engine(load(copy.deepcopy(model).float(), draft, runtime="native")) as engine:
        for turn in range(10):
            engine.add(text, max_new_tokens=7, gamma=4)
            events = [event for _ in range(9) for event in engine.step()]
            (done,) = (event.completion for event in events if event.completion is not None)
            assert hybrids.margin(model, tuple(text), 7) > 1e-4
            assert done.tokens == hybrids.greedy(model, tuple(text), 7)
            assert done.stats.cached_tokens >= (len(text) - 4 if turn else 0)
            text = [*text, *done.tokens, 9, 40 + turn]


NATIVE = ["Qwen3_5ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM"]
NATIVE += ["FalconH1ForCausalLM"]
NATIVE_DRAFTS = [*DRAFTS, "self:int8", "self:0"]


@pytest.mark.daily("plain", "self:int8")
@pytest.mark.native
@pytest.mark.parametrize("draft", NATIVE_DRAFTS)
@pytest.mark.parametrize("name", [NATIVE[0], *(_proof(name) for name in NATIVE[1:])])
def test_texts_on_the_native_decoder_are_those_of_generate(name: str, draft: str) -> None:
    """In float32, alone and together, and to the bit the same."""
    target = copy.deepcopy(hybrids.hybrid(name)).float()
    made = DRAFTS[draft](name) if draft in DRAFTS else draft
    made = made if isinstance(made, str) else copy.deepcopy(made).float()
    spec = load(target, made, runtime="native")
    for gamma in (0, 1, 4, 16, None):
        (alone,) = spec.generate(PROMPTS[:1], max_new_tokens=SHORT, gamma=gamma)
        together = spec.generate(PROMPTS, max_new_tokens=SHORT, gamma=gamma)
        for found, prompt in zip([alone, *together], [PROMPTS[0], *PROMPTS], strict=True):
            assert hybrids.margin(hybrids.hybrid(name), tuple(prompt), SHORT) > 1e-4
            assert found.tokens == hybrids.greedy(hybrids.hybrid(name), tuple(prompt), SHORT)
        unlike = draft == "plain" or (draft == "lookup" and name.startswith("Falcon"))
        assert gamma in (0, None) or unlike or sum(t.stats.accepted for t in together)


@pytest.mark.daily(128, 300)
@pytest.mark.native
@pytest.mark.parametrize("common", [40, 128, 300, 460])
def test_the_third_of_prompts_that_begin_alike_reads_the_rest_alone(common: int) -> None:
    """Of requests that come one after another; their texts are as they were."""
    model = hybrids.hybrid(OFTEN[0])
    begin = [3 + (11 * i * i + 5 * i) % 60 for i in range(common)]
    plain = load(copy.deepcopy(model).float(), "none", runtime="native")
    with Engine(load(copy.deepcopy(model).float(), "lookup", runtime="native")) as engine:
        for turn in range(4):
            prompt = [*begin, *(3 + (i * (turn + 7)) % 59 for i in range(turn, turn + 20))]
            engine.add(prompt, max_new_tokens=5, gamma=3)
            events = [event for _ in range(9) for event in engine.step()]
            (done,) = (event.completion for event in events if event.completion is not None)
            assert done.tokens == plain.generate([prompt], max_new_tokens=5)[0].tokens
            assert done.stats.cached_tokens == (common if turn > 1 else 0)


@pytest.mark.native
def test_a_copy_drafts_behind_what_the_target_has_read() -> None:
    """A prompt's end that the target has yet to read is not read by the copy first: the target's
    states would be built over the copy's. Also within inference mode, and outside it again."""
    model = hybrids.hybrid(OFTEN[0])
    spec = load(copy.deepcopy(model).float(), "self:int8", runtime="native")
    for n in (64, 65, 97, 130, 300):
        text = (PROMPTS[2] * 5)[:n]
        assert hybrids.margin(model, tuple(text), 12) > 1e-4
        with torch.inference_mode(n % 2 == 0):
            (done,) = spec.generate([text], max_new_tokens=12, gamma=8)
        assert done.tokens == hybrids.greedy(model, tuple(text), 12)
        assert done.stats.drafted


@pytest.mark.prove
@pytest.mark.native
def test_the_copies_that_have_a_form_are_measured(tmp_path: Path, console: Run) -> None:
    target, prompts = tmp_path / "lfm2", tmp_path / "prompts"
    folder(target, hybrids.random("Lfm2ForCausalLM", 0, 320).float(), byte_level())
    prompts.write_text("It was\nThe old man\n")
    few = ("--runtime", "native", "--prompts", prompts, "--max-new-tokens", 8)
    drafts = ("--draft", "self:int8", "--draft", "lookup", "--gamma", 2, "--repeats", 1)
    measured = console("bench", target, *drafts, *few)
    assert measured.code == 0, measured.err
    assert "self:int8" in measured.out and "lookup" in measured.out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    base, model = tmp_path_factory.mktemp("pair"), hybrids.random(OFTEN[1], 0, 320).float()
    folder(base / "target", model, byte_level())
    folder(base / "draft", pairs.relative(model, 0.03), byte_level())
    (base / "prompts").write_text("It was\nThe old man\n")
    return base, ("--target", base / "target"), ("--draft", base / "draft")


@pytest.mark.prove
def test_commands_take_hybrids(folders: Any, console: Run) -> None:
    base, target, draft = folders
    few = ("--runtime", "transformers", "--prompts", base / "prompts")
    few += ("--repeats", 1)
    measured = console("bench", *target, *draft, *few, "--max-new-tokens", 16)
    assert measured.code == 0 and "plain decoding" in measured.out
    refused = console("bench", *target, *draft, *few, "--gamma", 32, "--json")
    assert refused.code == 2
    told = refused.err.splitlines()[-1]
    assert told.startswith("error: gamma is 32, but the model's states go back by 32 tokens; give")
    texts = [
        console("generate", *target, "--draft", each, "--gamma", 2, "--max-new-tokens", 8, "It")
        for each in ("none", base / "draft")
    ]
    assert texts[0].out == texts[1].out and not any(each.code for each in texts)


@pytest.mark.prove
def test_proof_a_certificate(folders: Any, console: Run) -> None:
    base, target, draft = folders
    few = ("--runtime", "transformers", "--prompts", base / "prompts")
    for each in (draft, ("--draft", "lookup")):
        result = console("certify", *target, *each, *few)
        assert result.code == 0 and "LOSSLESS" in result.out, result.err
