"""Places of rows, by hand."""

from __future__ import annotations

from foretoken.models.rows import (
    beyond,
    by_place,
    joined,
    most_slots,
    moved,
    repeated,
    room,
    roomy,
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
