"""Parts that run nothing take the seconds that were measured, and keep draft tokens as they
were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.costing.costs import Costs
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verifier import ScoredBlock
from reproduction.costs import ServingCosts
from reproduction.fleet import (
    PaperDrafter,
    PaperParts,
    PaperTarget,
    PaperText,
    PaperVerifier,
)

COSTS = Costs(
    draft=((0, 0.0), (2, 0.5)),
    score=((1, 1.0), (5, 2.0)),
    verify=((1, 0.25), (2, 0.5)),
    rows=((1, 1.0), (2, 2.0)),
    change=8.0,
)
READING = ((1, 1.0), (9, 9.0))
SERVING = ServingCosts(2, COSTS, READING, ((0, 0.0), (4, 2.0)), ((1, 0.0),), 0.0)


@pytest.fixture
def parts() -> PaperParts:
    texts = [PaperText(0, 3, (0.5, None, 1.0)), PaperText(1, 1, (0.25,))]
    return PaperParts(texts, SERVING)


def test_a_pass_takes_what_is_judged_and_what_is_only_read(parts: PaperParts):
    target = PaperTarget(parts)
    target.start([[0, 0]])
    assert parts.clock() == 8 + 1 + 1  # another size; a pass; a second token that is read
    logits = target.score([[0, 0]], [2])
    assert parts.clock() == 10 + 1.25  # the same size; two positions that are judged
    p = logits.softmax(-1)[0, :, 0]
    assert p.tolist() == [0.5, 0.0]  # where the draft is silent nothing can be kept
    target.set_lengths([3])
    target.start([[1]])
    assert parts.clock() == 11.25 + 8 + 1
    logits = target.score([[0], [0]], [1, 1])
    assert logits.softmax(-1)[:, 0, 0].tolist() == [0.0, 0.25]
    target.leave([0])
    assert target.score([[0]], [1]).softmax(-1)[0, 0, 0] == 0.25  # over and over


def test_a_draft_is_as_long_as_it_was_not_silent(parts: PaperParts):
    drafter = PaperDrafter(parts)
    drafter.start([0, 1], [[0, 0, 0], [1]], None)
    assert parts.clock() == 1.0  # two tokens are read
    draw = Draw([SequenceKey(0, 0), SequenceKey(0, 1)], [3, 1], [SamplingParams()] * 2)
    draft = drafter.propose([2, 2], draw)
    assert draft.lengths.tolist() == [1, 2] and draft.q is None and draft.calls == 2
    assert parts.clock() == 1 + 0.5 * 1.5  # a second row takes as much again
    drafter.commit([[0, 1], [1]])
    drafter.leave([1])
    draw = Draw([SequenceKey(0, 0)], [5], [SamplingParams()])
    assert drafter.propose([2], draw).lengths.tolist() == [2]


def test_rows_at_work_take_longer_than_rows_alike(parts: PaperParts):
    parts.serving = replace(SERVING, drafts=((1, 1.0), (2, 3.0)), passes=((1, 1.0), (2, 2.0)))
    target, drafter = PaperTarget(parts), PaperDrafter(parts)
    target.start([[0], [1]])
    began = parts.clock()
    target.score([[0], [0]], [1, 1])
    assert parts.clock() - began == 2 * 1.25
    drafter.start([0, 1], [[0, 0, 0], [1]], None)
    began = parts.clock()
    drafter.propose(
        [1, 1], Draw([SequenceKey(0, 0), SequenceKey(0, 1)], [3, 1], [SamplingParams()] * 2)
    )
    assert parts.clock() - began == pytest.approx(3 * COSTS.draft_seconds(1, 2, 2))


def test_a_verification_takes_what_follows_a_pass(parts: PaperParts):
    verifier = PaperVerifier(parts)
    draw = Draw([SequenceKey(0, 0)], [3], [SamplingParams(temperature=0.0)])
    logits = torch.tensor([[[0.0, -1.0], [-1.0, 0.0]]])
    block = ScoredBlock(logits, torch.tensor([[0]]), torch.tensor([1]), None)
    verification = verifier(block, draw)
    assert parts.clock() == 0.5
    assert verification.n.tolist() == [1] and verification.t.tolist() == [1]
