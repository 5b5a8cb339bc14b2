"""What is given is guessed without a draft; other rows are drafted for as usual."""

from __future__ import annotations

from dataclasses import replace

import torch

from foretoken.drafters.known_tokens import KnownTokensDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams

V = 5


class Asked(UniformDrafter):
    """Remembers what it was asked for."""

    asked: list[int] | None = None

    def propose(self, gamma, draw):
        self.asked = list(gamma)
        return super().propose(gamma, draw)


def drawn(B: int) -> Draw:
    params = [SamplingParams(1.0)] * B
    return Draw([RowKey(0, b) for b in range(B)], [3] * B, params, [None] * B)


def proposed(given: list[list[int]], gamma: list[int], predicted: frozenset[int] = frozenset()):
    inner = Asked(V)
    draft = KnownTokensDrafter(inner, given, predicted).propose(gamma, drawn(len(gamma)))
    return draft, inner.asked


def test_given_tokens_cost_nothing() -> None:
    draft, budgets = proposed([[1, 2]], [2], frozenset({0}))
    assert draft.tokens.tolist() == [[1, 2]] and draft.q is None and budgets is None
    assert draft.predicted == {0} and not draft.calls


def test_invalid_logits_of_the_drafter_are_seen_beside_given_tokens() -> None:
    class Sick(UniformDrafter):
        def propose(self, gamma, draw):
            draft = super().propose(gamma, draw)
            return replace(draft, tops=torch.full(draft.tokens.shape, torch.nan))

    draft = KnownTokensDrafter(Sick(V), [[4, 2], []]).propose([2, 1], drawn(2))
    assert draft.tops is not None
    assert draft.tops.isnan().tolist() == [[False, False], [True, False]]


def test_rows_side_by_side() -> None:
    draft, budgets = proposed([[4], [], []], [3, 2, 1], frozenset({0}))
    assert budgets == [0, 2, 1] and draft.lengths.tolist() == [1, 2, 1]
    assert draft.q is not None and draft.predicted == {0}
    assert draft.q[0, 0].tolist() == [0, 0, 0, 0, 1]  # certain
    torch.testing.assert_close(draft.q[1], torch.full((2, V), 1 / V).double())


def test_the_drafter_hears_what_was_kept_and_who_leaves() -> None:
    heard: list[object] = []

    class Hears(UniformDrafter):
        def start(self, rows, prompts, sources):
            heard.append((rows, prompts, sources))

        def commit(self, tokens):
            heard.append(tokens)

        def leave(self, rows):
            heard.append(rows)

    drafter = KnownTokensDrafter(Hears(V), [[1]])
    drafter.start([0], [[2]], None)
    drafter.commit([[1, 3]])
    drafter.leave([0])
    assert heard == [([0], [[2]], None), [[1, 3]], [0]]
