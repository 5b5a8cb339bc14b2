"""The ragged cache against lists of rows, and which models it admits."""

from __future__ import annotations

import random

import pytest
import torch

from foretoken.errors import RefusedError
from foretoken.models.stock import cache
from foretoken.models.stock.cache import RaggedCache, RaggedLayer, make_cache_argument
from foretoken.models.stock.model import CausalModel
from tiny_families import build

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
        seen = self.cache.to_slot_order(block)
        for layer in (0, 1):
            keys, values = self.cache.update(seen + layer, -seen, layer)
        assert keys.shape == values.shape == (len(tokens), 2, self.cache.max_context + width, 3)
        self.cache.advance(tokens)
        new = block.transpose(1, 2)
        self.rows = [torch.cat([row, new[b, : tokens[b]]]) for b, row in enumerate(self.rows)]

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        for b, row in enumerate(self.rows):
            for i, layer in enumerate(self.cache.list_parts()):
                if len(row):
                    keys, values = layer.get_row(self.cache.slots[b], len(row))
                    assert torch.equal(keys.transpose(0, 1), row + i)
                    assert torch.equal(values.transpose(0, 1), -row)


class Old:
    def forward(self, ids, past_key_values=None): ...


class New:
    def forward(self, ids, cache=None): ...


class Own(New):
    def forward(self, **more): ...


class Outdated(New):
    def forward(self, past_key_values=None, **more): ...


class Free:
    def forward(self, **more): ...


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Old, "past_key_values"),
        (New, "cache"),
        (Own, "cache"),
        (Outdated, "past_key_values"),
        (Free, "past_key_values"),
    ],
)
def test_a_forward_gets_its_cache_by_the_name_it_has_for_it(kind: type, name: str) -> None:
    cache = object()
    assert make_cache_argument(kind(), cache) == {name: cache}  # pyright: ignore[reportArgumentType]


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
    storage = pair.cache.list_parts()[0].arrays[0].data_ptr()
    pair.append([1, 1])
    assert pair.cache.list_parts()[0].arrays[0].data_ptr() == storage
    assert pair.cache.get_query_offset() == 5  # one number: stock masks, or none


def test_rows_that_stay_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row joins in a gap, or behind the others; the last ones close what gaps are left."""
    put: list[tuple[int, int]] = []
    write = RaggedLayer.put

    def noted(self: RaggedLayer, place: int, row: tuple[torch.Tensor, torch.Tensor]) -> None:
        put.append((place, row[0].shape[1]))
        write(self, place, row)

    monkeypatch.setattr(RaggedLayer, "put", noted)
    pair, one = Pair(5), Pair(1)
    one.append([2])

    def join() -> None:
        pair.cache.join(one.cache)
        pair.rows += one.rows

    def leave(*gone: int) -> None:
        stay = [b for b in range(len(pair.rows)) if b not in gone]
        pair.cache.select(stay)
        pair.rows = [pair.rows[b] for b in stay]

    pair.append([9, 8, 7, 6, 5])
    arrays = pair.cache.list_parts()[0].arrays
    join()
    join()
    assert put == [(5, 2)] * 2 + [(6, 2)] * 2
    leave(1, 3)
    join()
    assert put[4:] == [(1, 2)] * 2 and pair.cache.slots == [0, 2, 4, 5, 6, 1]
    pair.check()
    pair.append([1] * 6)
    assert put[6:] == [(3, 2)] * 2 and pair.cache.slots == [0, 2, 4, 5, 3, 1]
    pair.check()
    pair.cache.select([5, 4, 3, 2, 1, 0])
    pair.rows.reverse()
    pair.append([1] * 6)
    pair.check()
    assert len(put) == 8 and pair.cache.list_parts()[0].arrays is arrays


def test_nothing_stale_is_left_in_a_place_that_is_taken() -> None:
    """What a mask hides is multiplied by zero, which NaN would survive."""
    pair, one = Pair(4), Pair(1)
    pair.append([5, 9, 7, 3])
    one.append([2])
    for layer in pair.cache.list_parts():
        for x in layer.arrays:
            x[[0, 2]] = float("nan")
    pair.cache.select([1, 3])
    pair.cache.join(one.cache)
    pair.cache.prepare(1)  # the last row has moved into the other gap
    assert sorted(pair.cache.slots) == [0, 1, 2]
    assert all(x[:3].isfinite().all() for layer in pair.cache.list_parts() for x in layer.arrays)


def test_room_for_rows_that_have_left_goes_when_slots_grow() -> None:
    pair = Pair(8)
    pair.append([1] * 8)
    pair.cache.select([3])
    pair.rows = [pair.rows[3]]
    pair.append([cache.CAPACITY_MULTIPLE])
    assert pair.cache.list_parts()[0].arrays[0].shape[0] == pair.cache.rows == 1
    pair.check()


@pytest.mark.parametrize("version", ["5.18.0", "6.0.0", "4.57.1"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    # its own reference: import order decides which of transformers' two module objects that is
    monkeypatch.setattr(cache.transformers, "__version__", version)
    with pytest.raises(RefusedError, match=f"transformers {version} is not supported; .*>=5.20,<6"):
        CausalModel(model)
