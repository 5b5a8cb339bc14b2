"""Nothing that is generated depends on memory that nobody has set: it may hold another request's
data, or NaN, which even a mask lets through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import foretoken
from foretoken.sampling.params import SamplingParams
from tiny import llama

V = 64
PROMPTS = [[int(x) for x in np.random.default_rng(n).integers(0, V, n)] for n in (3, 70, 1, 20, 9)]
COUNTS = [80, 30, 70, 5, 20]
SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 9},
    {},
    {"temperature": 0.7, "min_p": 0.02},
]
PARAMS = [
    SamplingParams(max_new_tokens=n, ignore_eos=True, **shape)
    for n, shape in zip(COUNTS, SHAPES, strict=True)
]


@contextmanager
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory of torch and numpy holds NaN, or the largest number."""
    empty = np.empty

    def nan(*args: Any, **kwargs: Any) -> Any:
        made = empty(*args, **kwargs)
        most = {"f": lambda: np.nan, "b": lambda: True}
        made.fill(most.get(made.dtype.kind, lambda: np.iinfo(made.dtype).max)())
        return made

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", nan)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert torch.empty(3).isnan().all() and np.isnan(np.empty(3)).all()
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "runtime", ["transformers", "graphs", pytest.param("native", marks=pytest.mark.prove)]
)
def test_memory_that_nobody_set(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of several lengths, which join and leave at different times."""

    def generate() -> list[list[list[int]]]:
        made: list[list[list[int]]] = []
        for draft in (llama(V, 256, seed=1), "uniform"):
            spec = foretoken.load(llama(V, 256), draft, runtime=runtime)
            outputs = spec.generate(PROMPTS, PARAMS, gamma=3)
            made.append([output.tokens for output in outputs])
        return made

    plain = generate()
    with filled(monkeypatch):
        assert generate() == plain
    assert [[len(ids) for ids in each] for each in plain] == [COUNTS] * 2
