"""Hybrids, whose states go back by row: their greedy texts are those of `generate`, whatever drafts
and whatever was read before.

On torch models are in float64, natively in float32. That no choice of a text is within rounding is
asserted, so equal means equal.
"""

from __future__ import annotations

import copy
from functools import cache
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
    InputError,
    LookupDrafter,
    MixtureDrafter,
    Speculator,
    load,
)
from hybrids import FAMILIES, PROMPTS
from tiny import byte_level, folder

LIMIT = 40
DRAFTS: dict[str, Any] = {
    "hybrid": hybrids.draft,
    "plain": lambda name: pairs.target("Llama"),
    "lookup": lambda name: "lookup",
    "self:int8": lambda name: "self:int8",
    "self:0": lambda name: "self:0",
}
OFTEN = "Qwen3_5ForCausalLM"
NATIVE = pytest.param("native", marks=pytest.mark.native)


@cache
def speculator(name: str, draft: str, runtime: str) -> Speculator:
    both = hybrids.hybrid(name), DRAFTS[draft](name)
    if runtime == "native":
        both = tuple(x if isinstance(x, str) else copy.deepcopy(x).float() for x in both)
    return load(*both, runtime=runtime)


def expected(name: str, prompt: list[int], limit: int = LIMIT) -> list[int]:
    """The greedy text, of which no choice is within float32's rounding."""
    model = hybrids.hybrid(name)
    assert hybrids.margin(model, tuple(prompt), limit) > 1e-4
    return hybrids.greedy(model, tuple(prompt), limit)


CASES = [
    *(("transformers", n, d) for n in FAMILIES for d in ("hybrid", "plain", "lookup")),
    *(("native", n, d) for n in FAMILIES if n != "KimiLinearForCausalLM" for d in DRAFTS),
]


@pytest.mark.daily(f"transformers {OFTEN} hybrid", f"native {OFTEN} self:int8")
@pytest.mark.parametrize(
    ("runtime", "name", "draft"),
    [
        pytest.param(*x, id=" ".join(x), marks=[pytest.mark.native][: x[0] == "native"])
        for x in CASES
    ],
)
def test_texts_are_those_of_generate(runtime: str, name: str, draft: str) -> None:
    """Alone and together; of a hybrid draft's tokens some are kept and some are not."""
    spec = speculator(name, draft, runtime)
    for gamma in (0, 1, 4, 16, None):
        (alone,) = spec.generate(PROMPTS[:1], max_new_tokens=LIMIT, gamma=gamma)
        together = spec.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
        for found, prompt in zip([alone, *together], [PROMPTS[0], *PROMPTS], strict=True):
            assert found.tokens == expected(name, prompt)
        kept, made = (sum(getattr(t.stats, n) for t in together) for n in ("accepted", "drafted"))
        assert draft not in ("hybrid", "self:int8") or gamma in (0, None) or 0 < kept <= made


def test_more_draft_tokens_than_any_part_goes_back_by_are_refused_beforehand() -> None:
    """Also where a hybrid is within another drafter."""
    small = speculator("FalconH1ForCausalLM", "hybrid", "transformers").drafter
    parts = MixtureDrafter([(LookupDrafter(), 1), (small, None)])
    for drafter in (parts, CascadeDrafter(small.model, LookupDrafter(), 2)):
        spec = load(pairs.target("Llama"), drafter, runtime="transformers")
        with pytest.raises(InputError, match="gamma is 40, .* roll back only 32 tokens"):
            spec.generate([[3, 4]], max_new_tokens=2, gamma=40)


def served(engine: Engine, prompt: list[int], **options: Any) -> Any:
    """The completion of a request that runs alone."""
    engine.add(prompt, **options)
    events = [event for _ in range(9) for event in engine.step()]
    (done,) = (event.completion for event in events if event.completion is not None)
    return done


@pytest.mark.parametrize("runtime", ["transformers", NATIVE])
def test_ten_turns_of_a_conversation(runtime: str) -> None:
    """Native states are stored at the end of each sequence, so that the next turn reads what is
    new. On torch each is read anew, and nobody says that it was cached."""
    text = PROMPTS[2]
    with Engine(speculator(OFTEN, "lookup", runtime), prefix_cache=True) as engine:
        for turn in range(10):
            done = served(engine, text, max_new_tokens=7, gamma=4)
            assert done.tokens == expected(OFTEN, text, 7)
            cached = done.stats.cached_tokens
            assert cached >= len(text) - 4 if turn and runtime == "native" else cached == 0
            text = [*text, *done.tokens, 9, 40 + turn]


@pytest.mark.native
@pytest.mark.parametrize("common", [128, 300])
def test_the_third_of_prompts_that_begin_alike_reads_the_rest_alone(common: int) -> None:
    """Of requests that come one after another; their texts are as they were."""
    begin = [3 + (11 * i * i + 5 * i) % 60 for i in range(common)]
    model = hybrids.hybrid(OFTEN)
    plain = load(copy.deepcopy(model).float(), "none", runtime="native")
    with Engine(load(copy.deepcopy(model).float(), "lookup", runtime="native")) as engine:
        for turn in range(4):
            prompt = [*begin, *(3 + (i * (turn + 7)) % 59 for i in range(turn, turn + 20))]
            done = served(engine, prompt, max_new_tokens=5, gamma=3)
            assert done.tokens == plain.generate([prompt], max_new_tokens=5)[0].tokens
            assert done.stats.cached_tokens == (common if turn > 1 else 0)


@pytest.mark.native
def test_a_copy_drafts_behind_what_the_target_has_read() -> None:
    """A prompt's end that the target has yet to read is not read by the copy first: the target's
    states would be built over the copy's. Also within inference mode, and outside it again."""
    spec = speculator(OFTEN, "self:int8", "native")
    for n in (64, 65, 97, 130, 300):
        text = (PROMPTS[2] * 5)[:n]
        with torch.inference_mode(n % 2 == 0):
            (done,) = spec.generate([text], max_new_tokens=12, gamma=8)
        assert done.tokens == expected(OFTEN, text, 12)
        assert done.stats.drafted


@pytest.mark.prove
@pytest.mark.native
def test_commands_take_hybrids(tmp_path: Path, console: Run) -> None:
    model, prompts = hybrids.random("FalconH1ForCausalLM", 0, 320).float(), tmp_path / "prompts"
    target = folder(tmp_path / "target", model, byte_level())
    draft = folder(tmp_path / "draft", pairs.relative(model, 0.03), byte_level())
    prompts.write_text("It was\nThe old man\n")
    few = ("--target", target, "--prompts", prompts)
    on_torch = ("--runtime", "transformers", *few, "--draft", draft)
    for options in (on_torch, ("--runtime", "native", *few, "--draft", "self:int8")):
        measured = console("bench", *options, "--repeats", 1, "--max-new-tokens", 8, "--gamma", 2)
        assert measured.code == 0 and "plain decoding" in measured.out, measured.err
    refused = console("bench", *on_torch, "--gamma", 32, "--json")
    assert (
        refused.code == 2 and "gamma is 32" in refused.err and "only 32 tokens; give" in refused.err
    )
    certified = console("certify", *on_torch)
    assert certified.code == 0 and "LOSSLESS" in certified.out, certified.err
    how = ("--target", target, "--gamma", 2, "--max-new-tokens", 8, "It")
    texts = [console("generate", *how, "--draft", each) for each in ("none", draft)]
    assert texts[0].out == texts[1].out and not any(each.code for each in texts)
