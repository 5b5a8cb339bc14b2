"""exact_shapes=True on the pair that ships: the same text to the bit, with and without draft
tokens.

The longer proof is the comparison of `benchmarks/exact_shapes.py`, over 10,000 tokens; that also
shows that without it bfloat16 texts differ.
"""

from __future__ import annotations

import pytest

import foretoken
from pairs import assert_greedy, relative, target
from scripts import benchmark

DTYPES = [pytest.param("float32", marks=pytest.mark.prove), "bfloat16"]

PROMPTS = ["In the morning they", "The old house stood at the end of the lane, and"]
WAYS = {"greedy": {}, "coupled": {"rule": "coupled", "temperature": 1.0}}


@pytest.mark.prove
@pytest.mark.parametrize(("way", "dtype"), [("greedy", "bfloat16"), ("coupled", "float32")])
def test_ten_thousand_tokens(way: str, dtype: str) -> None:
    script = benchmark("exact_shapes")
    spec = foretoken.load(dtype=dtype, runtime="transformers", exact_shapes=True)
    comparison = script.compare(spec, script.WAYS[way])
    assert comparison["tokens"] >= script.TOKENS == 10_000 and comparison["accepted"] > 1_000
    assert comparison["first_differences"] == [] and comparison["texts_that_differ"] == 0


@pytest.mark.prove
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_pair(dtype: str) -> None:
    """Greedy and coupled; the plain texts alone, the others together."""
    spec = foretoken.load(dtype=dtype, exact_shapes=True)
    for way in WAYS.values():
        options = {"max_new_tokens": 16, **way}
        plain = [
            spec.generate(prompt, gamma=0, seed=[(0, i)], **options)[0].tokens
            for i, prompt in enumerate(PROMPTS)
        ]
        accepted = 0
        for gamma in (1, 7):
            fast = spec.generate(PROMPTS, gamma=gamma, **options)
            assert [completion.tokens for completion in fast] == plain
            accepted += sum(completion.stats.accepted for completion in fast)
        assert accepted


def test_automatic_gamma() -> None:
    model = target("Llama")
    spec = foretoken.load(model, relative(model), exact_shapes=True)
    (plain,) = spec.generate([5, 17, 33], gamma=0, max_new_tokens=24)
    assert spec.generate([5, 17, 33], max_new_tokens=24)[0].tokens == plain.tokens


@pytest.mark.parametrize("name", ["T5", "Gemma 3"])
def test_it_is_transformers_own_text(name: str) -> None:
    model = target(name)
    spec = foretoken.load(model, relative(model), exact_shapes=True)
    prompt = [5, 17, 33]
    for gamma in (0, 3):
        assert_greedy(spec.generate(prompt, gamma=gamma, max_new_tokens=24)[0], model, prompt, 24)
