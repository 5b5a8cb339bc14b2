"""How far passes are padded: at most twice what the best choice in hindsight costs."""

from __future__ import annotations

from itertools import product

from foretoken.models.rows import Padding


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
