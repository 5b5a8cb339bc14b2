"""The drafter alone: which state it takes, how many draft tokens it makes, from which
distributions."""

from __future__ import annotations

import torch

import tiny
from foretoken.sampling.distributions import SamplingParams, probabilities
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from reproduction.blockwise import Heads, ends_of
from reproduction.heads import HeadsDrafter

V, H, K = 50, 32, 3
NETWORK = tiny.llama(V)
OUTPUT, WORDS = ends_of(NETWORK)
SAMPLED, GREEDY = SamplingParams(temperature=0.7, top_k=20), SamplingParams()


class Target:
    """Hidden states of a pass over four tokens of three rows, all different."""

    def __init__(self) -> None:
        self.hidden = torch.randn(3, 4, H, generator=torch.Generator().manual_seed(0))


def heads() -> Heads:
    fresh_heads = Heads.fresh(NETWORK, K)
    torch.nn.init.normal_(fresh_heads.outer, generator=torch.Generator().manual_seed(1))
    return fresh_heads


def drafter(target: Target) -> HeadsDrafter:
    heads_drafter = HeadsDrafter(target, heads(), OUTPUT, WORDS)  # pyright: ignore[reportArgumentType]
    heads_drafter.start([0, 1, 2], [[1], [2, 3], [4]], None)
    return heads_drafter


def draw(rows: int, params: SamplingParams = SAMPLED) -> Draw:
    return Draw([SequenceKey(5, b) for b in range(rows)], [9] * rows, [params] * rows)


@torch.inference_mode()
def expected(hidden: torch.Tensor, token: int, k: int) -> torch.Tensor:
    """Head k's logits, written out."""
    both = [x / x.pow(2).mean().sqrt() for x in (hidden, WORDS.weight[token])]
    fresh_heads = heads()
    wide = fresh_heads.inner[k] @ torch.cat(both)
    return OUTPUT.weight @ (hidden + fresh_heads.outer[k] @ (wide * wide.sigmoid()))


@torch.inference_mode()
def test_nothing_before_the_first_step_and_then_as_many_as_asked_for_and_known():
    mine = drafter(Target())
    silent = mine.propose([2, 2, 2], draw(3))
    assert silent.lengths.tolist() == [0, 0, 0] and silent.calls == 0
    mine.commit([[7], [8, 9], [10, 11, 12]])
    draft = mine.propose([2, 0, 9], draw(3))
    assert draft.lengths.tolist() == [2, 0, K] and draft.tokens.shape == (3, K)
    assert draft.calls == 1 and draft.q is not None and draft.q.shape == (3, K, V)
    assert mine.propose([0, 0, 0], draw(3)).tokens.shape == (3, 0)


@torch.inference_mode()
def test_a_row_that_is_still_being_read_has_no_state_yet():
    mine = drafter(Target())
    mine.commit([[7], [], [10]])
    draft = mine.propose([2, 2, 2], draw(3))
    assert draft.lengths.tolist() == [2, 0, 2]


@torch.inference_mode()
def test_distributions_are_those_of_the_state_that_chose_the_last_token():
    target = Target()
    mine = drafter(target)
    mine.commit([[7], [8, 9], [10, 11, 12]])
    target.hidden.zero_()  # the next pass writes over it
    states = Target().hidden
    draft, dice = mine.propose([K] * 3, draw(3)), draw(3)
    assert draft.q is not None
    for b, (place, last) in enumerate([(0, 7), (1, 9), (2, 12)]):
        for k in range(K):
            q = probabilities(expected(states[b, place], last, k), SAMPLED)
            assert torch.allclose(draft.q[b, k], q, atol=1e-5)
    for k in range(K):
        assert torch.equal(draft.tokens[:, k], dice(draft.q[:, k], k))
    best = mine.propose([K] * 3, draw(3, GREEDY))
    assert best.q is None and int(best.tokens[1, 2]) == int(expected(states[1, 1], 9, 2).argmax())


@torch.inference_mode()
def test_rows_leave_and_join():
    target = Target()
    mine = drafter(target)
    mine.commit([[7], [8, 9], [10, 11, 12]])
    before = mine.propose([1] * 3, draw(3, GREEDY)).tokens[:, 0].tolist()
    mine.leave([1])
    mine.start([2], [[5, 6]], None)
    draft = mine.propose([1] * 3, draw(3, GREEDY))
    assert draft.lengths.tolist() == [1, 1, 0]
    assert draft.tokens[:2, 0].tolist() == [before[0], before[2]]


@torch.inference_mode()
def test_a_row_that_keeps_no_token_leaves():
    """Its controls left none; other rows go on."""
    mine = drafter(Target())
    mine.commit([[7], [], [10, 11, 12]])
    mine.leave([1])
    other = drafter(Target())
    other.commit([[7], [8, 9], [10, 11, 12]])
    other.leave([1])
    drafts = [each.propose([K] * 2, draw(2, GREEDY)).tokens for each in (mine, other)]
    assert torch.equal(*drafts)
