"""Rows' places, padding, and the checks of rows and sources."""

from __future__ import annotations

import pytest
import torch

from foretoken.errors import InputError
from foretoken.models.rows import (
    beyond,
    by_place,
    check_room,
    joined,
    most_slots,
    moved,
    padded,
    repeated,
    room,
    roomy,
    staying,
)


def test_places_are_taken_from_the_first_on() -> None:
    assert joined([], 2) == [0, 1] and joined([3, 0, 1], 3) == [3, 0, 1, 2, 4, 5]
    assert repeated([2, 0, 2, 2]) == [2, 3] and moved([2, 0, 2, 2], [2, 3]) == [2, 0, 1, 3]
    assert beyond([4, 0, 3]) == [0, 2] and moved([4, 0, 3], [0, 2]) == [1, 0, 2]
    assert by_place([4, 0, 3]) == [1, 2, 0]
    assert room([4, 0, 3]) == 5 and room([]) == 0
    assert [roomy(n) for n in (0, 1, 2, 15)] == [0, 1, 3, 22]


def test_slots_of_arrays_that_are_never_twice_as_long() -> None:
    assert most_slots([5, 64, 1], 64) == 3 * 2 * 128
    assert most_slots([], 64) == 0


CPU = torch.device("cpu")


def test_those_that_do_not_leave() -> None:
    assert staying(4, [2, 0]) == [1, 3] and staying(2, []) == [0, 1] and staying(0, []) == []


def test_rows_end_with_the_context() -> None:
    check_room([5, 9], [3, 0], 8)  # a row that is too long already gains nothing
    check_room([5], [3000], None)
    with pytest.raises(InputError, match="row 1 would hold 9 tokens, the model 8"):
        check_room([5, 7], [3, 2], 8)
    with pytest.raises(InputError, match="2 blocks for 1 rows: give one per row"):
        check_room([5], [1, 1], None)


def test_blocks_are_padded_on_the_right() -> None:
    assert padded([[1, 2], [], [3]], CPU).tolist() == [[1, 2], [0, 0], [3, 0]]
    assert padded([[], []], CPU).shape == (2, 0)
    block = torch.tensor([[1, 2]])
    assert padded(block, CPU) is block
