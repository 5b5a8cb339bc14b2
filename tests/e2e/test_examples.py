"""The example runs, and prints what it promises."""

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy.stats import chisquare

import tiny
from pairs import relative, stock

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("speculative_in_40_lines")


@pytest.fixture
def algorithm(example: ModuleType):
    """The 40 lines, and a small target with a draft that is like it."""
    model = tiny.llama(V=8, context=32)
    return example, model, relative(model, noise=0.3)


def test_40_lines_are_greedy(algorithm) -> None:
    module, model, draft = algorithm
    prompt = [1, 5, 2]
    expected = stock(model, prompt, 12)
    for gamma in (0, 1, 4):
        ids = module.generate(model, draft, prompt, 12, gamma=gamma, temperature=0)
        assert ids == prompt + expected


def test_40_lines_keep_the_distribution(algorithm) -> None:
    """The first two tokens, which one step may give both; fails by chance once in a million runs,
    if the seed changes."""
    module, model, draft = algorithm
    torch.manual_seed(0)
    number, counts = 600, Counter()
    for _ in range(number):
        counts[tuple(module.generate(model, draft, [1, 5], 2, gamma=2)[2:])] += 1
    expected = {}
    with torch.inference_mode():
        first = module.distribution(model(torch.tensor([[1, 5]])).logits[0, -1], 1.0)
        for a in range(8):
            second = module.distribution(model(torch.tensor([[1, 5, a]])).logits[0, -1], 1.0)
            expected |= {(a, b): float(first[a] * second[b]) for b in range(8)}
    common = [pair for pair, p in expected.items() if p * number >= 5]
    seen = [counts[pair] for pair in common]
    rest = number - sum(seen)
    wanted = [number * expected[pair] for pair in common]
    assert len(common) > 8
    result = chisquare([*seen, rest], [*wanted, number - sum(wanted)])
    assert result.pvalue > 1e-6


def test_40_lines_on_the_pair_that_ships(example: ModuleType, capsys) -> None:
    example.main("It was")
    assert capsys.readouterr().out.startswith("It was")
