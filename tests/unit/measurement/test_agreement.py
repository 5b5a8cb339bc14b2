"""beta at every position of the target's own text, against the two distributions."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.measurement.agreement import POSITIONS_PER_FORWARD, compute_overlaps
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from oracle import random_model
from table import TableModel

V = 6
P, Q = random_model(1, V), random_model(2, V)
SAMPLED = SamplingParams(temperature=1.0)
NEW = np.random.default_rng(0).integers(0, V, 2 * POSITIONS_PER_FORWARD + 5).tolist()


def request(prompt=(1, 2), **settings) -> Request:
    return Request(list(prompt), len(NEW), SequenceKey(0, 0), **settings)


def prefixes(head=(1, 2)) -> list[tuple[int, ...]]:
    return [(*head, *NEW[:i]) for i in range(len(NEW))]


def test_a_model_as_draft():
    target, draft = TableModel(P, V), TableModel(Q, V)
    drafter = LMDrafter(draft, V)
    expected = [np.minimum(P(text), Q(text)).sum() for text in prefixes()]
    for _ in range(2):  # both are left idle, so that it can be done again
        assert compute_overlaps(target, drafter, request(), NEW, SAMPLED) == pytest.approx(expected)


def test_a_source():
    target = TableModel(P, V, encoder_decoder=True)
    drafter = LMDrafter(TableModel(Q, V), V)  # reads the source as the head of its prompt
    shares = compute_overlaps(target, drafter, request([0], source=[3, 4]), NEW, SAMPLED)
    texts = prefixes((3, 4, 0))
    assert shares == pytest.approx([np.minimum(P(t), Q(t)).sum() for t in texts])


def test_greedy_is_whether_the_argmax_agrees():
    shares = compute_overlaps(
        TableModel(P, V), LMDrafter(TableModel(Q, V), V), request(), NEW, SamplingParams()
    )
    assert shares == [float(np.argmax(P(t)) == np.argmax(Q(t))) for t in prefixes()]


def test_copies_overlap_by_p_and_silence_is_told():
    new = [3, 1, 2, 3]
    shares = compute_overlaps(TableModel(P, V), LookupDrafter(), request(), new, SAMPLED)
    texts = [(1, 2), (1, 2, 3), (1, 2, 3, 1), (1, 2, 3, 1, 2)]
    assert shares[:2] == [None, None]  # nothing occurred before
    assert shares[2:] == pytest.approx([P(texts[2])[2], P(texts[3])[3]])


def test_a_forced_token_has_all_of_p():
    shares = compute_overlaps(
        TableModel(P, V), UniformDrafter(V), request(forced={1: 4}), NEW[:3], SAMPLED
    )
    assert shares[1] == pytest.approx(1 / V) and shares[0] > 1 / V and shares[2] > 1 / V
