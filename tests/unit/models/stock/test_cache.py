"""The ragged cache against lists of rows, and which models it admits."""

from __future__ import annotations

import random

import pytest
import torch

from foretoken.errors import RefusedError
from foretoken.models.families import build
from foretoken.models.stock import cache
from foretoken.models.stock.cache import RaggedCache, RaggedLayer
from foretoken.models.stock.causal import CausalModel

CPU = torch.device("cpu")


class Pair:
    """A ragged cache of two layers, and the same rows as plain tensors [tokens, heads, dim]."""

    def __init__(self, rows: int) -> None:
        self.cache = RaggedCache([RaggedLayer(), RaggedLayer()], rows, CPU)
        self.rows = [torch.zeros(0, 2, 3) for _ in range(rows)]

    def append(self, tokens: list[int]) -> None:
        width = max(tokens)
        self.cache.prepare(width)
        block = torch.randn(len(tokens), 2, width, 3)
        for layer in (0, 1):
            keys, values = self.cache.update(block + layer, -block, layer)
        assert keys.shape == values.shape == (len(tokens), 2, self.cache.longest + width, 3)
        self.cache.advance(tokens)
        new = block.transpose(1, 2)
        self.rows = [torch.cat([row, new[b, : tokens[b]]]) for b, row in enumerate(self.rows)]

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        for b, row in enumerate(self.rows):
            for i, layer in enumerate(self.cache.kept()):
                if len(row):
                    assert torch.equal(layer.keys[b].transpose(0, 1)[: len(row)], row + i)
                    assert torch.equal(layer.values[b].transpose(0, 1)[: len(row)], -row)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_what_was_written(seed: int) -> None:
    """Appends, rollbacks, joins and selections in random order, past several capacities."""
    torch.manual_seed(seed)
    dice, pair = random.Random(seed), Pair(3)
    for _ in range(30):
        rows = len(pair.rows)
        match dice.randrange(5):
            case 0 | 1:
                pair.append([dice.choice([0, 1, 7, 40]) for _ in range(rows - 1)] + [3])
            case 2:
                lengths = [dice.randint(len(row) // 2, len(row)) for row in pair.rows]
                pair.cache.lengths = lengths
                pair.rows = [row[:n] for row, n in zip(pair.rows, lengths, strict=True)]
            case 3:
                other = Pair(dice.randint(1, 2))
                if dice.random() < 0.7:
                    other.append([dice.randint(1, 90) for _ in other.rows])
                pair.cache.join(other.cache)
                pair.rows += other.rows
            case _:
                chosen = [dice.randrange(rows) for _ in range(min(rows, 4))]
                pair.cache.select(chosen)
                pair.rows = [pair.rows[b] for b in chosen]
        pair.check()


def test_even_rows_are_written_in_place() -> None:
    pair = Pair(2)
    pair.append([5, 5])
    storage = pair.cache.kept()[0].keys.data_ptr()
    pair.append([1, 1])
    assert pair.cache.kept()[0].keys.data_ptr() == storage
    assert pair.cache.get_query_offset() == 5  # one number: stock masks, or none


@pytest.mark.parametrize("version", ["5.18.0", "6.0.0", "4.57.1"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    # its own reference: import order decides which of transformers' two module objects that is
    monkeypatch.setattr(cache.transformers, "__version__", version)
    with pytest.raises(RefusedError, match=f"transformers {version}: .*>=5.20,<6"):
        CausalModel(model)
