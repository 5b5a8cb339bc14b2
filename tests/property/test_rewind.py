"""A drafter that has gone back guesses as if what it took back had never come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.drafters.base import Draft, Drafter
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import random_model
from table import TableModel

V = 3
Q, R = random_model(1, V), random_model(2, V)
IDS = st.lists(st.integers(0, V - 1), max_size=4)


def lm(vocab_size: int = V) -> LMDrafter:
    model = TableModel(lambda t: R(t)[:vocab_size] + 0.1, vocab_size, context=9)
    return LMDrafter(model, V)


DRAFTERS = {
    "none": NoDrafter,
    "uniform": lambda: UniformDrafter(V),
    "lookup": lambda: LookupDrafter(),
    "copy": CopyDrafter,
    "lm": lm,
    "lm of fewer tokens": lambda: lm(V - 1),
    "cascade": lambda: CascadeDrafter(TableModel(Q, V, context=8), LookupDrafter(), 2),
    "cascade of a cascade": lambda: CascadeDrafter(
        TableModel(Q, V), CascadeDrafter(TableModel(R, V), lm(), 1), 2
    ),
    "mixture": lambda: MixtureDrafter([(LookupDrafter(), 1), (lm(), None)]),
}


def same(one: Draft, other: Draft) -> bool:
    lengths = one.lengths.tolist()
    if lengths != other.lengths.tolist() or (one.q is None) != (other.q is None):
        return False
    for b, n in enumerate(lengths):
        if not torch.equal(one.tokens[b, :n], other.tokens[b, :n]):
            return False
        if one.q is not None and not torch.equal(one.q[b, :n], other.q[b, :n]):
            return False
    return True


def draw(lengths: list[int], temperature: float) -> Draw:
    keys = [SequenceKey(0, b) for b in range(len(lengths))]
    return Draw(keys, lengths, [SamplingParams(temperature)] * len(keys))


@pytest.mark.daily("lookup", "lm", "cascade of a cascade", "mixture")
@pytest.mark.parametrize("kind", DRAFTERS)
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_going_back(kind, data):
    """Rows of different length; guesses may or may not have been made in between."""
    texts = [[0], [1, 0, 2]]
    drafter: Drafter = DRAFTERS[kind]()
    drafter.start([0, 1], [list(text) for text in texts], None)
    temperature = data.draw(st.sampled_from([0.0, 1.0]))
    new: list[list[int]] = [[], []]
    for _ in range(3):
        commits = [data.draw(IDS) for _ in texts]
        if data.draw(st.booleans()):  # what is kept is then some draft tokens and one more token
            draft = drafter.propose(
                [data.draw(st.integers(0, 3)) for _ in texts], draw([1, 3], 1.0)
            )
            draft_tokens = zip(draft.tokens.tolist(), draft.lengths.tolist(), commits, strict=True)
            commits = [[*ids[: min(n, len(own))], 1] for ids, n, own in draft_tokens]
        drafter.commit([list(x) for x in commits])
        new = [x + y for x, y in zip(new, commits, strict=True)]
        back = [data.draw(st.integers(0, len(x))) for x in new]
        if data.draw(st.booleans()):
            drafter.propose([2, 3], draw([1, 3], 1.0))
        drafter.rewind(back)
        new = [x[: len(x) - n] for x, n in zip(new, back, strict=True)]
    fresh = DRAFTERS[kind]()
    fresh.start([0, 1], [list(text) for text in texts], None)
    fresh.commit([list(x) for x in new])
    lengths = [len(text) + len(x) for text, x in zip(texts, new, strict=True)]
    gamma = [data.draw(st.integers(0, 4)) for _ in texts]
    proposal = drafter.propose(list(gamma), draw(lengths, temperature))
    assert same(proposal, fresh.propose(list(gamma), draw(lengths, temperature)))
