"""The cache of fixed shapes, and the guard against what cannot be recorded."""

from __future__ import annotations

import pytest
import torch

from foretoken.errors import RefusedError
from foretoken.models.graphs import FixedCache, Recordable, bucket, power, wide
from foretoken.models.stock.cache import RaggedCache, RaggedLayer

CPU = torch.device("cpu")


def test_buckets() -> None:
    assert [power(n) for n in (0, 1, 2, 3, 4, 5)] == [0, 1, 2, 4, 4, 8]
    assert [bucket(n) for n in (0, 1, 64, 65, 129)] == [0, 64, 64, 128, 256]
    assert [wide(n) for n in (1, 2, 3, 4, 5, 6, 9, 10, 17)] == [1, 2, 3, 5, 5, 9, 9, 17, 17]


def filled(lengths: list[int]) -> RaggedCache:
    """One layer, one head, width 1: the values of row b are b + 1."""
    cache = RaggedCache([RaggedLayer()], len(lengths), CPU)
    cache.prepare(max(lengths))
    block = torch.arange(1.0, len(lengths) + 1).view(-1, 1, 1, 1).expand(-1, -1, max(lengths), 1)
    cache.update(block, block, 0)
    cache.advance(lengths)
    return cache


def test_rows_join_and_change_places_within_the_same_tensors() -> None:
    cache = FixedCache([RaggedLayer()], CPU)
    cache.join(filled([3, 70]))
    assert cache.room == (2, 128) and cache.lengths == [3, 70]
    (layer,) = cache.kept()
    keys = layer.arrays[0]
    cache.select([1])
    cache.join(filled([2]))
    assert cache.room == (2, 128) and layer.arrays[0] is keys
    assert cache.lengths == [70, 2] and cache.places == [1, 0]
    assert keys[1, 0, :70].eq(2).all() and keys[0, 0, :2].eq(1).all()
    cache.select([1, 0, 1])
    assert cache.room == (4, 128) and cache.lengths == [2, 70, 2]
    assert layer.arrays[0][cache.places, 0, 0, 0].tolist() == [1, 2, 1]


def test_the_guard_lets_fixed_shapes_through_and_names_others() -> None:
    x = torch.arange(4.0)
    with Recordable("Mine"):
        chosen = x[torch.tensor([0, 2])]
    assert chosen.tolist() == [0, 2]
    for depends in (lambda: x[x > 1], lambda: x.nonzero(), lambda: float(x.sum())):
        with pytest.raises(RefusedError, match="Mine cannot be run in fixed shapes"):
            with Recordable("Mine"):
                depends()
