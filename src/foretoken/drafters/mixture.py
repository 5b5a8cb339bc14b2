"""Drafters that combine or replace other drafters: several drafters one after the other within a
step (paper, section 5: varying M_q), predicted or forced tokens in place of a drafter's tokens, and
a drafter that drafts only for the first rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from foretoken.drafters.base import (
    Draft,
    Drafter,
    pack,
    require_rewindable,
    require_vocabulary,
)
from foretoken.errors import InputError, is_whole_number
from foretoken.sampling.draw import Draw
from foretoken.transfer import to_list


class MixtureDrafter(Drafter):
    """Several drafters that propose one after the other (paper, section 5: varying M_q).

    Each part continues after the draft tokens of the parts before it. If a part proposes fewer
    tokens than it may, the next part proposes the rest. For example, if the first part is a look-up
    and the second a model, the model drafts only if the look-up proposes fewer than gamma tokens.
    Each draft token comes with the distribution of the part that proposed it.

    Args:
        parts: Pairs of a drafter and its maximum number of draft tokens in a step. The last maximum
            may be None: the last drafter may then propose all tokens that are left of gamma.

    Raises:
        InputError: The parts are invalid, or their vocabularies differ.
        RefusedError: A part cannot rewind.

    Examples:
        >>> import foretoken
        >>> small = foretoken.load("novels", draft="none").target
        >>> parts = [(foretoken.LMDrafter(small), 2), (foretoken.LookupDrafter(), None)]
        >>> spec = foretoken.load("novels", draft=foretoken.MixtureDrafter(parts))
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=4)
        >>> out.text
        ' at the doctor, and the doctor said'
    """

    has_own_speed = True  # its speed depends on its parts

    def __init__(self, parts: list[tuple[Drafter, int | None]]) -> None:
        is_list = isinstance(cast(object, parts), list | tuple)
        if not is_list or not all(map(_is_pair, parts)):
            raise InputError(
                f"parts is {parts!r:.60}; give a list of pairs (drafter, number of draft tokens)"
            )
        counts = [most for _, most in parts]
        numbers = counts[:-1] if counts and counts[-1] is None else counts
        if not parts or any(not is_whole_number(n) or (n or 0) < 1 for n in numbers):
            raise InputError(
                f"the parts' numbers of draft tokens are {counts}; give 1 or more for each part, "
                "or None for the last part"
            )
        self.parts = [(require_rewindable(drafter, "a mixture"), most) for drafter, most in parts]
        self.holds = tuple(drafter for drafter, _ in self.parts)
        sizes = [part.vocab_size for part, _ in self.parts if part.vocab_size is not None]
        self.vocab_size = sizes[0] if sizes else None
        for drafter, _ in self.parts:
            require_vocabulary(drafter, sizes[0] if sizes else 0, "another part of the mixture")
        runtimes = {drafter.runtime: None for drafter, _ in self.parts}
        self.runtime = "+".join(runtimes)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        for drafter, _ in self.parts:
            copies = sources and [list(source) for source in sources]
            drafter.start(rows, [list(prompt) for prompt in prompts], copies)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft_tokens: list[list[int]] = [[] for _ in gamma]
        drafts: list[Draft] = []
        for drafter, max_tokens in self.parts:
            room = [g - len(x) for g, x in zip(gamma, draft_tokens, strict=True)]
            gammas = room if max_tokens is None else [min(n, max_tokens) for n in room]
            if any(gammas):
                drafts.append(_continue(drafter, draft_tokens, gammas, draw))
                extend_tokens(draft_tokens, drafts[-1])
        packed = pack(
            draft_tokens, join_distributions(drafts), sum(draft.calls for draft in drafts)
        )
        return replace(packed, tops=join_tops(drafts))

    def commit(self, tokens: list[list[int]]) -> None:
        for drafter, _ in self.parts:
            drafter.commit([list(new) for new in tokens])

    def rewind(self, counts: list[int]) -> None:
        for drafter, _ in self.parts:
            drafter.rewind(list(counts))

    def leave(self, rows: list[int]) -> None:
        for drafter, _ in self.parts:
            drafter.leave(rows)


class _ForOneStep(Drafter):
    """A drafter that takes the place of `drafter` during one step, over the same sequences."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.drafter.start(rows, prompts, sources)

    def leave(self, rows: list[int]) -> None:
        self.drafter.leave(rows)


class KnownTokensDrafter(_ForOneStep):
    """For one step, a drafter that proposes `known_tokens[b]` in sequence b: tokens that its
    request predicts or its grammar forces. For sequences without known tokens, it proposes the
    draft tokens of `drafter`. Known tokens are certain, cost nothing and are verified like all
    draft tokens.

    predicted: As in `Draft`.
    """

    def __init__(
        self,
        drafter: Drafter,
        known_tokens: list[list[int]],
        predicted: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(drafter)
        self.known_tokens, self.predicted = known_tokens, predicted

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = replace(pack(self.known_tokens), predicted=self.predicted)
        budget = [0 if x else g for x, g in zip(self.known_tokens, gamma, strict=True)]
        if not any(budget):
            return draft
        drafts = [draft, self.drafter.propose(budget, draw)]
        drafted = zip(to_list(drafts[1].tokens), to_list(drafts[1].lengths), strict=True)
        draft_tokens = [
            x or ids[:n] for x, (ids, n) in zip(self.known_tokens, drafted, strict=True)
        ]
        packed = pack(draft_tokens, join_distributions(drafts), drafts[1].calls)
        return replace(packed, tops=join_tops(drafts), predicted=self.predicted)

    def commit(self, tokens: list[list[int]]) -> None:
        self.drafter.commit(tokens)


class FirstRowsDrafter(_ForOneStep):
    """For one step, a drafter that uses `drafter` for the first `num_rows` sequences of the batch,
    the only sequences that `drafter` has. The other sequences get no draft tokens."""

    def __init__(self, drafter: Drafter, num_rows: int) -> None:
        super().__init__(drafter)
        self.num_rows = num_rows

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        if not self.num_rows:
            return pack([[] for _ in gamma])
        draft = self.drafter.propose(gamma[: self.num_rows], draw.select([*range(self.num_rows)]))
        more = len(gamma) - self.num_rows
        return replace(
            draft,
            tokens=pad(draft.tokens, (0, 0, 0, more)),
            lengths=pad(draft.lengths, (0, more)),
            q=None if draft.q is None else pad(draft.q, (0, 0, 0, 0, 0, more)),
            tops=None if draft.tops is None else pad(draft.tops, (0, 0, 0, more)),
        )

    def commit(self, tokens: list[list[int]]) -> None:
        if self.num_rows:
            self.drafter.commit(tokens[: self.num_rows])


def _is_pair(part: object) -> bool:
    return isinstance(part, list | tuple) and len(cast(Sequence[object], part)) == 2


def _continue(
    drafter: Drafter, draft_tokens: list[list[int]], gammas: list[int], draw: Draw
) -> Draft:
    """Return the draft of `drafter` after the draft tokens of other drafters. Then rewind `drafter`
    to the committed tokens."""
    if not any(draft_tokens):
        return drafter.propose(gammas, draw)
    counts = [len(x) for x in draft_tokens]
    drafter.commit([list(x) for x in draft_tokens])
    draft = drafter.propose(gammas, draw.continue_after(draft_tokens))
    drafter.rewind(counts)
    return draft


def extend_tokens(draft_tokens: list[list[int]], draft: Draft) -> None:
    """Append the draft tokens of each sequence in `draft` to its list in `draft_tokens`."""
    for x, ids, n in zip(draft_tokens, to_list(draft.tokens), to_list(draft.lengths), strict=True):
        x += ids[:n]


def join_distributions(drafts: list[Draft]) -> Tensor | None:
    """Join drafts that follow one another in each sequence: return a tensor `[B, G, V]` with the
    distributions of all their tokens, one-hot for certain tokens. Returns None if all tokens are
    certain."""
    distributions = [draft.q for draft in drafts if draft.q is not None]
    if not distributions:
        return None
    # the widest dtype represents all values exactly
    like = max(distributions, key=lambda q: q.element_size())
    ids = torch.arange(like.shape[-1], device=like.device)
    rows: list[list[Tensor]] = [[] for _ in like]
    for draft in drafts:
        x = draft.tokens.to(like.device)
        q = x[..., None] == ids if draft.q is None else draft.q
        for row, distribution, n in zip(rows, q.to(like), to_list(draft.lengths), strict=True):
            row.append(distribution[:n])
    return pad_sequence([torch.cat(row) for row in rows], batch_first=True)


def join_tops(drafts: list[Draft]) -> Tensor | None:
    """Join drafts that follow one another in each sequence: return a tensor `[B, G]` with the
    `tops` of all their tokens, 0 for a draft without `tops`. Returns None if no draft has
    `tops`."""
    if all(draft.tops is None for draft in drafts):
        return None
    rows: list[list[Tensor]] = [[] for _ in drafts[0].lengths]
    for draft in drafts:
        tops = torch.zeros(draft.tokens.shape) if draft.tops is None else draft.tops.cpu()
        for row, top, n in zip(rows, tops, to_list(draft.lengths), strict=True):
            row.append(top[:n])
    return pad_sequence([torch.cat(row) for row in rows], batch_first=True)
