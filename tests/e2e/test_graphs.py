"""Passes of fixed shapes through `load` and `generate`: greedy identity, and the same sampled
texts as on the ragged cache."""

from __future__ import annotations

from typing import Any

import pytest

from pairs import (
    PROMPTS,
    SINGLE,
    assert_greedy,
    must_record,
    relative,
    speculator,
    stock,
    target,
)
from tiny_families import FAMILIES, build

LIMIT = 24
CAUSAL = [name for name in FAMILIES if not build(name).config.is_encoder_decoder]
SOON = {"Llama", "Gemma 3"}  # all layers alike, and windows in some


def soon(name: str) -> Any:
    """The family, with the proofs where it is no other kind of cache."""
    return name if name in SOON else pytest.param(name, marks=pytest.mark.prove)


@pytest.mark.prove
@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_text_is_transformers_own(name: str) -> None:
    """Alone and in a ragged batch, whose rows end at different times."""
    must_record(name)
    model = target(name)
    eos = stock(model, PROMPTS[1], LIMIT)[9]
    pair = speculator(model, relative(model), eos, runtime="graphs")
    drafted = accepted = 0
    for gamma in 0, 1, 4:
        together = pair.generate(PROMPTS, max_new_tokens=LIMIT, gamma=gamma)
        for prompt, completion in zip(PROMPTS, together, strict=True):
            assert_greedy(completion, model, prompt, LIMIT, eos)
            assert completion.stats.runtime == "graphs"
            drafted += completion.stats.drafted
            accepted += completion.stats.accepted
    (alone,) = pair.generate(PROMPTS[2], max_new_tokens=LIMIT, gamma=4)
    assert_greedy(alone, model, PROMPTS[2], LIMIT, eos)
    assert 0 < accepted < drafted
    assert together[0].stats.draft_runtime == "graphs"


@pytest.mark.parametrize("kind", ["model", "lookup", "uniform"])
@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_sampled_texts_are_those_of_the_ragged_cache(kind: str, rule: str) -> None:
    """The same keyed numbers and, but for rounding, the same distributions: the same tokens."""
    model = target("Llama")
    drafts = {"model": relative(model)}
    how = {"max_new_tokens": LIMIT, "temperature": 0.9, "top_p": 0.95, "seed": 3, "rule": rule}
    texts = [
        speculator(model, drafts.get(kind, kind), runtime=runtime).generate(PROMPTS, gamma=3, **how)
        for runtime in ("transformers", "graphs")
    ]
    for ours, theirs in zip(*texts, strict=True):
        assert ours.tokens == theirs.tokens
        assert [r.guesses for r in ours.steps] == [r.guesses for r in theirs.steps]
        for one, other in zip(ours.steps, theirs.steps, strict=True):
            assert one.overlaps == pytest.approx(other.overlaps, abs=1e-5)


@pytest.mark.parametrize("name", [soon(n) for n in CAUSAL if n not in SINGLE])
def test_a_text_does_not_depend_on_its_batch_others(name: str) -> None:
    model = target(name)
    pair = speculator(model, relative(model), runtime="graphs")
    how = {"temperature": 1.0, "gamma": 3, "max_new_tokens": 12}
    seeds = [(7, 0), (8, 1), (9, 5)]
    together = pair.generate(PROMPTS, seed=seeds, **how)
    for prompt, seed, row in zip(PROMPTS, seeds, together, strict=True):
        (alone,) = pair.generate(prompt, seed=[seed], **how)
        assert alone.tokens == row.tokens


def test_automatic_gamma_and_streams() -> None:
    model = target("Llama")
    pair = speculator(model, relative(model), runtime="graphs")
    (completion,) = pair.generate(PROMPTS[0], max_new_tokens=LIMIT)
    assert_greedy(completion, model, PROMPTS[0], LIMIT)
    pieces = list(pair.stream(PROMPTS[0], max_new_tokens=LIMIT, gamma=2))
    assert [token for piece in pieces for token in piece.tokens] == completion.tokens
