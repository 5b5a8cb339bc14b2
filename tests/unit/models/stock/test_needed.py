"""Which positions of a padded batch are needed, by hand."""

from __future__ import annotations

import pytest
import torch

from foretoken.models.stock.attention import Needed

CPU = torch.device("cpu")
X = torch.arange(8).reshape(2, 4, 1)  # two blocks of width 4


def places(blocks: list[int], need: list[int]) -> list[list[int]]:
    return Needed(blocks, need, [0, 1], CPU).of(X)[..., 0].tolist()


def test_each_row_keeps_its_last() -> None:
    assert places([4, 4], [2, 2]) == [[2, 3], [6, 7]]
    assert places([4, 3], [2, 1]) == [[2, 3], [6, 0]]  # even starts: a slice
    ragged = places([4, 2], [1, 2])
    assert ragged == [[3, 0], [4, 5]]
    assert places([4, 0], [4, 0]) == [[0, 1, 2, 3], [0] * 4]
    assert places([4, 2], [0, 0]) == [[], []]


def test_rows_are_found_in_their_places() -> None:
    """The first row stands behind the other one."""
    assert Needed([4, 4], [2, 2], [1, 0], CPU).of(X)[..., 0].tolist() == [[6, 7], [2, 3]]
    assert Needed([4, 3], [1, 2], [1, 0], CPU).of(X)[..., 0].tolist()[1] == [1, 2]


def test_a_row_that_needs_nothing_does_not_unsettle_the_others() -> None:
    needed = Needed([4, 1], [2, 0], [0, 1], CPU)
    assert needed.even
    assert needed.of(X).shape == (2, 2, 1)


@pytest.mark.parametrize(("counts", "need"), [([4, 4], [2, 0]), ([4, 2], [1, 2]), ([4, 3], [2, 1])])
def test_padding_is_finite_whatever_stands_there(counts: list[int], need: list[int]) -> None:
    sick = torch.full((2, 4, 1), torch.nan)
    sick_rows = Needed(counts, need, [0, 1], CPU).of(sick)[..., 0].isnan().tolist()
    assert sick_rows == [[i < n for i in range(max(need))] for n in need]


def test_none_may_be_needed_of_rows_in_any_places() -> None:
    for places in ([0, 1], [1, 0]):
        assert Needed([2, 1], [0, 0], places, CPU).of(X).shape == (2, 0, 1)


def test_logits_are_cut_once() -> None:
    needed, layer = Needed([4, 4], [1, 1], [0, 1], CPU), torch.nn.Identity()
    assert needed.logits(X).shape == (2, 1, 1)  # a head that is no layer
    layer.register_forward_pre_hook(needed.enter)
    assert needed.logits(layer(X)).tolist() == [[[3]], [[7]]]


def test_more_than_a_block_has_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="more than a block has"):
        Needed([1, 2], [2, 2], [0, 1], CPU)
