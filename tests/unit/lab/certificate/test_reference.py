"""The reference: distributions from single-token passes, of rows side by side and of one alone."""

from __future__ import annotations

import torch

from exact.drafters import Certain, FunctionDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.lab.certificate.identity import replay, singly
from foretoken.models.table import TableModel
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import RowKey
from oracle import random_model

V = 5
P, Q = random_model(1, V), random_model(2, V)
REQUESTS = [Request([0], 9, RowKey(0, 0)), Request([2, 1], 9, RowKey(0, 1), forced={1: 4})]
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
    logits = singly(TableModel(P, V), REQUESTS[0], [1, 2])
    own = torch.stack([torch.from_numpy(P(text)) for text in ((0,), (0, 1))])
    torch.testing.assert_close(logits.exp(), own)
