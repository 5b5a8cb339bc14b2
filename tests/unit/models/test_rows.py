"""Rows' places, padding, and the checks of rows and sources."""

from __future__ import annotations

import pytest
import torch

from foretoken.errors import InputError
from foretoken.models.row_slots import (
    add_spare_rows,
    allocate_slots,
    check_room,
    compute_max_positions,
    count_needed_slots,
    find_repeated_rows,
    find_rows_to_compact,
    list_remaining_rows,
    order_by_slot,
    pad_blocks,
    reassign_slots,
)


def test_places_are_taken_from_the_first_on() -> None:
    assert allocate_slots([], 2) == [0, 1] and allocate_slots([3, 0, 1], 3) == [3, 0, 1, 2, 4, 5]
    assert find_repeated_rows([2, 0, 2, 2]) == [2, 3] and reassign_slots([2, 0, 2, 2], [2, 3]) == [
        2,
        0,
        1,
        3,
    ]
    assert find_rows_to_compact([4, 0, 3]) == [0, 2] and reassign_slots([4, 0, 3], [0, 2]) == [
        1,
        0,
        2,
    ]
    assert order_by_slot([4, 0, 3]) == [1, 2, 0]
    assert count_needed_slots([4, 0, 3]) == 5 and count_needed_slots([]) == 0
    assert [add_spare_rows(n) for n in (0, 1, 2, 15)] == [0, 1, 3, 22]


def test_slots_of_arrays_that_are_never_twice_as_long() -> None:
    assert compute_max_positions([5, 64, 1], 64) == 3 * 2 * 128
    assert compute_max_positions([], 64) == 0


CPU = torch.device("cpu")


def test_those_that_do_not_leave() -> None:
    assert (
        list_remaining_rows(4, [2, 0]) == [1, 3]
        and list_remaining_rows(2, []) == [0, 1]
        and list_remaining_rows(0, []) == []
    )


def test_rows_end_with_the_context() -> None:
    check_room([5, 9], [3, 0], 8)  # a row that is too long already gains nothing
    check_room([5], [3000], None)
    with pytest.raises(InputError, match="1 would have 9 tokens, but the context length is 8"):
        check_room([5, 7], [3, 2], 8)
    with pytest.raises(InputError, match="2 blocks for 1 sequences; give one block each"):
        check_room([5], [1, 1], None)


def test_blocks_are_padded_on_the_right() -> None:
    assert pad_blocks([[1, 2], [], [3]], CPU).tolist() == [[1, 2], [0, 0], [3, 0]]
    assert pad_blocks([[], []], CPU).shape == (2, 0)
    block = torch.tensor([[1, 2]])
    assert pad_blocks(block, CPU) is block
