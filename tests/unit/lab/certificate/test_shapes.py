"""Blocks against single tokens: the noise, and how much of it rounding explains."""

from __future__ import annotations

from foretoken.lab.certificate.identity import compare, row_groups
from foretoken.models.table import TableModel
from foretoken.request import Request
from foretoken.sampling.keys import RowKey
from oracle import random_model

V = 5
P = random_model(1, V)
REQUESTS = [Request([0], 9, RowKey(0, 0)), Request([2, 1], 9, RowKey(0, 1), forced={1: 4})]


class Late(TableModel):
    """The places of a block behind the first are a little off."""

    def score(self, blocks, need):
        logits = super().score(blocks, need)
        logits[:, 1:, 0] += 1e-4
        return logits


def test_blocks_against_single_tokens():
    texts = [[1, 2, 3, 4, 0, 1, 2, 3], [3, 4]]
    # The first row runs alone too; that a place is forced changes no logits
    same = compare(TableModel(P, V), REQUESTS, texts, 3)
    assert same.positions == 18 and same.noise < 1e-12 and same.ok
    off = compare(Late(P, V), REQUESTS, texts, 3)
    assert abs(off.noise - 1e-4) < 1e-9 and 0 < off.variation < 1e-4 and not off.ok
    assert off.dtype == "float64"
    single = Late(P, V)
    single.computed = "float32"
    assert compare(single, REQUESTS, texts, 3).ok


def test_rows_run_together_and_every_second_one_alone():
    assert row_groups(1) == [[0]]
    assert row_groups(3) == [[0, 1, 2], [0], [2]]
