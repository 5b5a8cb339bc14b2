"""The first difference of two greedy texts: rounding or a bug."""

from __future__ import annotations

from foretoken.lab.certificate.identity import Identity, ShapeNoise, first_difference
from foretoken.models.table import TableModel
from foretoken.request import Request
from foretoken.sampling.keys import RowKey

V = 5
REQUEST = Request([0], 9, RowKey(0, 0))


def test_a_difference_is_rounding_or_a_bug():
    distribution = [0.30, 0.30000001, 0.2, 0.1, 0.1]
    target = TableModel(lambda text: distribution, V)
    noisy = ShapeNoise("float32", 10, 1e-6, 1.0, 1e-7, allowed=1e-3)

    def parted(plain, fast, shapes=noisy):
        return first_difference(target, REQUEST, plain, fast, shapes, (0, 2))

    assert parted([1, 2], [1, 2]) is None
    near = parted([1, 1, 3], [1, 0, 4])
    assert (near.place, near.plain, near.speculative) == (1, 1, 0)
    assert near.verdict == "float noise" and 0 < near.gap < 4e-6
    wrong = parted([1, 1], [1, 2])
    assert wrong.verdict == "bug"
    assert parted([1, 1], [1, 0], ShapeNoise("float32", 10, 1.0, 1.0, 0.5, 1e-3)).verdict == "bug"
    ended = parted([1, 1], [1])
    assert (ended.plain, ended.speculative, ended.gap, ended.verdict) == (1, None, None, "bug")
    assert Identity([2], 1, 3, 1, [near]).ok
    identity = Identity([2], 2, 5, 2, [near, wrong])
    assert identity.bugs == [wrong] and not identity.ok
