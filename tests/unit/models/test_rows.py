"""Rows' places, padding, and the checks of rows and sources."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from foretoken.errors import InputError
from foretoken.models.rows import (
    Padding,
    beyond,
    by_place,
    check_lengths,
    check_room,
    check_sources,
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


def run(sizes: list[int], change: float, room: int = 16) -> list[int]:
    padding = Padding()
    padding.price(float, change, single=True)
    return [n + padding.missing(n, room) for n in sizes]


def test_small_passes_take_the_last_size_until_that_has_cost_a_change():
    assert run([6, 5, 4, 6, 3, 3], change=4.0) == [6, 6, 6, 6, 6, 3]
    assert run([6, 5, 5, 7, 6], change=0.0) == [6, 5, 5, 7, 6]
    assert run([6, 5], change=9.0, room=0) == [6, 5]
    assert run([512, 2, 1], change=4.0) == [512, 2, 2]


def test_plain_decoding_is_not_padded_unless_it_is_a_draft_s():
    for single in (True, False):
        padding = Padding()
        padding.price(float, 9.0, single=single)
        assert [padding.missing(n, 9, single=n == 2) for n in (4, 2)] == [0, 2 * single]
        padding.forget()
        assert padding.missing(2, 9) == 0


def test_nothing_is_padded_before_costs_are_known():
    padding = Padding()
    assert [padding.missing(n, 9) for n in (6, 5)] == [0, 0]
    padding.price(float, 9.0, single=True)
    assert [padding.missing(n, 9) for n in (6, 5)] == [0, 1]
    padding.price(None, 0.0, single=True)
    assert [padding.missing(n, 9) for n in (6, 5)] == [0, 0]


def cost(asked: list[int], taken: list[int], change: float) -> float:
    return sum(taken) + change * sum(a != b for a, b in zip(taken, taken[1:], strict=False))


def test_it_costs_at_most_twice_the_best_in_hindsight():
    for change in (1.0, 3.0):
        for asked in product((1, 2, 4), repeat=6):
            own = cost(list(asked), run(list(asked), change), change)
            ways = product(*([m for m in (1, 2, 4) if m >= n] for n in asked))
            assert own <= 2 * min(cost(list(asked), list(way), change) for way in ways)


CPU = torch.device("cpu")


def test_those_that_do_not_leave() -> None:
    assert staying(4, [2, 0]) == [1, 3] and staying(2, []) == [0, 1] and staying(0, []) == []


def test_lengths_only_go_back() -> None:
    check_lengths([3, 1], [0, 1])
    for new in ([4, 1], [-1, 1], [3]):
        with pytest.raises(InputError, match="can only go back"):
            check_lengths([3, 1], new)


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


def test_every_prompt_has_a_source_that_fits() -> None:
    check_sources([[], [1]], [[1], [2, 3]], 2)
    for sources in (None, [[1]], [[1], []]):
        with pytest.raises(InputError, match="one non-empty source for each prompt"):
            check_sources([[], [1]], sources, None)
    with pytest.raises(InputError, match="a source of 3 tokens, the encoder takes 2"):
        check_sources([[]], [[1, 2, 3]], 2)
