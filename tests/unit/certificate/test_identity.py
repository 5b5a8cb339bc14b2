"""Greedy texts beside the target's own, but for rounding."""

from __future__ import annotations

import torch

from exact.drafters import Certain, FunctionDrafter
from foretoken.certificate.greedy_identity import (
    ShapeNoise,
    find_first_difference,
    measure_shape_noise,
    replay,
    score_token_by_token,
)
from foretoken.drafters.none import NoDrafter
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from oracle import random_model
from table import TableModel

V = 5
REQUEST = Request([0], 9, SequenceKey(0, 0))


def test_a_difference_is_rounding_or_a_bug():
    distribution = [0.30, 0.30000001, 0.2, 0.1, 0.1]
    target = TableModel(lambda text: distribution, V)
    noisy = ShapeNoise("float32", 10, 1e-6, 1e-7, allowed=1e-3)

    def parted(plain, fast, shapes=noisy):
        return find_first_difference(target, REQUEST, plain, fast, shapes, (0, 2))

    assert parted([1, 2], [1, 2]) is None
    near = parted([1, 1, 3], [1, 0, 4])
    assert (near.place, near.plain, near.speculative) == (1, 1, 0)
    assert near.verdict == "float noise" and 0 < near.gap < 4e-6
    wrong = parted([1, 1], [1, 2])
    assert wrong.verdict == "bug"
    assert parted([1, 1], [1, 0], ShapeNoise("float32", 10, 1.0, 0.5, 1e-3)).verdict == "bug"
    ended = parted([1, 1], [1])
    assert (ended.plain, ended.speculative, ended.gap, ended.verdict) == (1, None, None, "bug")


P, Q = random_model(1, V), random_model(2, V)
REQUESTS = [
    Request([0], 9, SequenceKey(0, 0)),
    Request([2, 1], 9, SequenceKey(0, 1), forced={1: 4}),
]
TEXTS = [[1, 2, 3], [3, 4]]


def test_a_replay_has_the_distributions_of_both():
    params = SamplingParams(1.0)
    target, drafter = TableModel(P, V), FunctionDrafter(Q)
    places = list(replay(target, drafter, REQUESTS, TEXTS, params))
    assert [place.rows for place in places] == [[0, 1], [0, 1], [0]]
    assert [place.tokens.tolist() for place in places] == [[1, 3], [2, 4], [3]]
    own = torch.stack([torch.from_numpy(P((0, 1))), torch.eye(V).double()[4]])
    torch.testing.assert_close(places[1].p, own)
    torch.testing.assert_close(places[2].q[0], torch.from_numpy(Q((0, 1, 2))))
    assert not target._texts and not drafter.texts  # left idle
    (certain, *_) = replay(target, Certain(Q), REQUESTS[:1], TEXTS[:1], params)
    assert certain.q[0].tolist() == torch.eye(V)[int(Q((0,)).argmax())].tolist()
    (silent, *_) = replay(target, NoDrafter(), REQUESTS[:1], TEXTS[:1], params)
    assert silent.q.sum() == 0


def test_a_row_alone():
    logits = score_token_by_token(TableModel(P, V), REQUESTS[0], [1, 2])
    own = torch.stack([torch.from_numpy(P(text)) for text in ((0,), (0, 1))])
    torch.testing.assert_close(logits.exp(), own)


P_SHAPES = random_model(1, V)


class Late(TableModel):
    """The places of a block behind the first are a little off."""

    def score(self, blocks, need):
        logits = super().score(blocks, need)
        logits[:, 1:, 0] += 1e-4
        return logits


def test_blocks_against_single_tokens():
    texts = [[1, 2, 3, 4, 0, 1, 2, 3], [3, 4]]
    # The first row runs alone too; that a place is forced changes no logits
    same = measure_shape_noise(TableModel(P_SHAPES, V), REQUESTS, texts, 3)
    assert same.positions == 18 and same.noise < 1e-12 and same.ok
    off = measure_shape_noise(Late(P_SHAPES, V), REQUESTS, texts, 3)
    assert abs(off.noise - 1e-4) < 1e-9 and 0 < off.variation < 1e-4 and not off.ok
    assert off.dtype == "float64"
    single = Late(P_SHAPES, V)
    single.compute_dtype = "float32"
    assert measure_shape_noise(single, REQUESTS, texts, 3).ok
