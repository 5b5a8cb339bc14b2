"""Keyed randomness: names give numbers, different names independent ones."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from foretoken.sampling.keys import (
    Purpose,
    SequenceKey,
    derive_key,
    draw_exponentials,
    draw_uniform,
)

NOISE = [0.07215561246322333, 2.0947124788524554, 0.1455634493359009]
NAMES = [
    (SequenceKey(seed, row), length, offset, purpose)
    for seed, row, length, offset, purpose in itertools.product(
        (0, 1, 2**63 - 1), (0, 1), (1, 2, 3, 1000), (0, 1, 2), Purpose
    )
]


def test_different_names_give_different_numbers():
    """Fails by chance for 1 in 1e11 seeds; the numbers are fixed."""
    assert len({draw_uniform(*name) for name in NAMES}) == len(NAMES)


def test_numbers_of_all_time():
    """A seed must give the same text in every version: these may never change."""
    assert draw_uniform(SequenceKey(0, 0), 1, 0, Purpose.DRAFT) == 0.21185954403345741
    assert draw_uniform(SequenceKey(7, 3), 20, 2, Purpose.NEXT) == 0.30200845539541765


def test_numbers_are_those_of_a_generator_made_for_the_name():
    for key, length, offset, purpose in NAMES:
        bits = np.random.Philox(key=key, counter=(0, length, offset, purpose)).random_raw()
        assert draw_uniform(key, length, offset, purpose) == (int(bits) >> 11) * 2.0**-53


def test_threads_do_not_disturb_each_other():
    expected = [draw_uniform(*name) for name in NAMES]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: [draw_uniform(*name) for name in NAMES * 5], range(8))
    assert all(numbers == expected * 5 for numbers in found)


def test_shared_noise_of_all_time():
    """A seed must give the same text in every version: these may never change."""
    values = draw_exponentials(SequenceKey(7, 3), 20, 3)
    assert values.tolist() == pytest.approx(NOISE, rel=1e-14)


def test_shared_noise_of_an_id_does_not_depend_on_how_many_there_are():
    key = SequenceKey(2**63 - 1, 1)
    assert np.array_equal(draw_exponentials(key, 5, 9), draw_exponentials(key, 5, 1000)[:9])


@pytest.mark.parametrize("along", ["position", "row", "seed", "id"])
def test_shared_noise_is_exponential_and_uncorrelated_with_its_neighbours(along):
    """Kolmogorov-Smirnov and rank correlation at 1e-6 each, fixed numbers."""
    N = 4000
    noise = {
        "position": lambda: [draw_exponentials(SequenceKey(5, 0), i, 1)[0] for i in range(N)],
        "row": lambda: [draw_exponentials(SequenceKey(5, i), 3, 1)[0] for i in range(N)],
        "seed": lambda: [draw_exponentials(SequenceKey(i, 0), 3, 1)[0] for i in range(N)],
        "id": lambda: draw_exponentials(SequenceKey(5, 0), 3, N),
    }[along]()
    assert np.min(noise) > 0 and np.max(noise) < np.inf
    assert stats.kstest(noise, "expon").pvalue > 1e-6
    assert stats.spearmanr(noise[1:], noise[:-1]).pvalue > 1e-6
    uniforms = [draw_uniform(SequenceKey(5, 0), i, 0, Purpose.DRAFT) for i in range(N)]
    assert stats.spearmanr(noise, uniforms).pvalue > 1e-6


def test_keys_within_differ_by_every_part_of_their_name_and_from_what_is_drawn_beside_them():
    names = [
        (SequenceKey(s, r), n, i) for s in (0, 1) for r in (0, 1) for n in range(4) for i in (0, 1)
    ]
    found = [derive_key(*name) for name in names]
    assert len(set(found)) == len(names) and found == [derive_key(*name) for name in names]
    assert all(0 <= part < 2**63 for key in found for part in key)
    deeper = [derive_key(key, 1, 0) for key in found]
    assert not set(deeper) & set(found)
