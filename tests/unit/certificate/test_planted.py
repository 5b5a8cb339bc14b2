"""Bugs that a certificate plants."""

from __future__ import annotations

import numpy as np
import torch

from exact.drafters import Certain, FunctionDrafter
from foretoken.certificate.planted_bugs import ArgmaxDrafter, OffByOneModel, break_rule
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from oracle import random_model
from table import TableModel

V = 5
P, Q = random_model(1, V), random_model(2, V)


def test_a_replacement_comes_from_one_position_too_far():
    p = torch.tensor(np.array([P(text) for text in ((0,), (0, 1), (0, 1, 2))]))[None]
    q = torch.tensor(np.array([Q(text) for text in ((0,), (0, 1))]))[None]
    x, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    honest, broken = block(p, q, x, lengths), break_rule(block)(p, q, x, lengths)
    torch.testing.assert_close(broken.survival, honest.survival)
    for n, row in ((0, 1), (1, 2), (2, 0)):
        torch.testing.assert_close(broken.compute_next_distribution(torch.tensor([n])), p[:, row])


def test_the_likeliest_draft_tokens_keep_their_q():
    drafts = []
    for drafter in (
        FunctionDrafter(Q),
        ArgmaxDrafter(FunctionDrafter(Q)),
        ArgmaxDrafter(Certain(Q)),
    ):
        drafter.start([0], [[0]], None)
        drafts.append(drafter.propose([1], Draw([SequenceKey(0, 0)], [1], [SamplingParams(1.0)])))
    honest, likeliest, certain = drafts
    torch.testing.assert_close(likeliest.q, honest.q)
    assert likeliest.tokens.tolist() == [[int(Q((0,)).argmax())]]
    assert certain.q is None


def test_logits_of_a_block_are_one_place_off():
    honest, broken = TableModel(P, V), OffByOneModel(TableModel(P, V))
    for model in (honest, broken):
        model.start([[0]], None)
    logits, off = (model.score([[1, 2, 3]], [3]) for model in (honest, broken))
    torch.testing.assert_close(off, logits.roll(1, 1))
    assert [broken.model] == list(broken.holds)
