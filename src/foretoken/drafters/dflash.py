"""Blocks of masks as the drafter: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

One pass guesses a whole block from the target's states at all positions before the last token.
DSpark then lets each guess follow the one before it, so that its draft tokens are drawn from the
law of just that; DFlash's guesses are blind to each other, so that drawn ones seldom fit together:
it takes the likeliest, which are certain. Where draft and target share their noise, drawn ones may
fit all the same: what was right more often counts, at each depth of a block (`SampleOrArgmax`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.drafters.base import Draft, Drafter, draw_token, pack, widen
from foretoken.errors import InputError, format_value
from foretoken.models.base import Model
from foretoken.models.hidden_states import append_new_states
from foretoken.models.row_slots import list_remaining_rows
from foretoken.sampling.distributions import SamplingParams, mask_invalid
from foretoken.sampling.draw import Draw
from foretoken.transfer import send, to_list

MAX_UNREAD_STATES = (
    32  # states of a row that drafts nothing, from which on they are read all the same
)
MIN_ACCEPTANCE_CHANCE = (
    0.2  # chance that a guess is judged and accepted, below which it costs more than it brings
)
GREEDY_PARAMS = SamplingParams(temperature=0.0)


class BlockModel(Protocol):
    """A model that guesses blocks, with rows of states that it has read."""

    runtime: str
    compute_dtype: str  # the precision of its arithmetic
    identity: str | None  # None: not known, so that costs are not kept
    context: int | None
    max_draft_tokens: int  # guesses of a block
    is_conditional: bool  # whether a guess depends on those before it
    ids: Tensor | None  # the target's ids that its outputs stand for, `[Vd]`; None: their numbers

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row whose states were read."""
        ...

    def start(self, rows: int) -> None:
        """So many rows join, of which nothing is read."""
        ...

    def permute(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was."""
        ...

    def leave(self, rows: list[int]) -> None:
        """Drop rows; those behind move up."""
        ...

    def append_context(self, states: list[Tensor]) -> int:
        """Append the target's states `[n, W]` to each row; return the passes that it took."""
        ...

    def predict_block(self, anchors: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return states `[B, G, H]` and logits `[B, G, Vd]` of counts[b] guesses behind a row's
        last token."""
        ...

    def condition_on_previous(
        self, states: Tensor, logits: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the logits of a guess behind `tokens`, its chance to be accepted, `[B]`, where
        that is known, and the `memory` for the next."""
        ...


@dataclass(slots=True)
class _BlockSequence:
    """A text; `carried`: the target's states at the positions behind those that were read."""

    tokens: list[int]
    carried: Tensor = field(default_factory=lambda: torch.empty(0, 0))


class SampleOrArgmax:
    """Guesses by the noise that the target will meet, or the likeliest ones, in coupled mode, whose
    texts do not depend on guesses. Both are made, so that counts at the same depth of the same
    blocks compare them: drawn ones suit broad distributions, likeliest ones sharp."""

    def __init__(self) -> None:
        self.num_correct: Counter[tuple[int, bool]] = (
            Counter()
        )  # by depth, and whether the likeliest
        self.attempts: list[dict[bool, Tensor]] = []  # in the last block, by depth

    def sample(self, draw: Draw, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Return guess i of each row, and the distributions that they are of."""
        use_argmax = self.num_correct[i, True] > self.num_correct[i, False]
        # the one that is taken comes last: controls of the next draft token depend on it
        tokens_by_way = {
            way: draw.sample(logits, i, GREEDY_PARAMS if way else None)
            for way in (not use_argmax, use_argmax)
        }
        self.attempts[i:] = [{way: ids for way, (ids, _) in tokens_by_way.items()}]
        ids, q = tokens_by_way[use_argmax]
        drawn = tokens_by_way[False][1]
        if use_argmax and drawn is not None:
            q = functional.one_hot(ids, drawn.shape[-1]).to(drawn)
        return ids, q

    def count_correct(self, lengths: list[int], tokens: list[list[int]]) -> None:
        """Count what was right, by the tokens that each row gained and how many guesses it had."""
        for i, ways in enumerate(self.attempts):
            for way, ids in ways.items():
                rows = zip(to_list(ids), lengths, tokens, strict=True)
                self.num_correct[i, way] += sum(
                    i < min(n, len(x)) and x[i] == y for y, n, x in rows
                )
        self.attempts = []


class BlockDrafter(Drafter):
    """Drafts with `model` from the states that `target` shows.

    Args:
        target: The target, whose `taps` are those that the model reads.
        model: The model of blocks.
    """

    reads_target = True  # its states come from the target's passes, so these cannot run ahead

    def __init__(self, target: Model, model: BlockModel) -> None:
        self.target: Model = target
        self.blocks = model
        self.runtime, self.holds, self.vocab_size = model.runtime, (model,), target.vocab_size
        self.identity = model.identity
        self.seqs: list[_BlockSequence] = []
        self.sampler = SampleOrArgmax()
        self.lengths: list[int] = []  # of the last blocks
        if model.ids is not None and int(model.ids.max()) >= target.vocab_size:
            raise InputError(
                f"the draft guesses id {format_value(int(model.ids.max()))}, the target has "
                f"{target.vocab_size} tokens; give a draft for this target"
            )

    def with_target(self, target: Model) -> BlockDrafter:
        """The same model on the states of another target that shows the same ones."""
        if target.taps != self.target.taps:
            raise InputError("give a target that exposes the states that the draft reads")
        return BlockDrafter(target, self.blocks)

    def count_cached_tokens(self, tokens: list[int]) -> int:
        return 0  # it has read none

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.blocks.start(len(prompts))
        self.seqs += [_BlockSequence(list(prompt)) for prompt in prompts]
        self._take_states()

    def _take_states(self) -> None:
        """Carry the states that the target has shown."""
        pairs = zip(self.seqs, self.blocks.lengths, self.target.take_hidden_states(), strict=True)
        for seq, read, new in pairs:
            seq.carried = append_new_states(seq.carried, new, read + len(seq.carried))

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        budget = list(map(self._limit_draft_tokens, self.seqs, self.blocks.lengths, gamma))
        if not any(budget):
            if any(len(seq.carried) >= MAX_UNREAD_STATES for seq in self.seqs):
                self._read_carried()
            return pack([[] for _ in gamma])
        calls = self._read_carried() + 1
        anchors = [seq.tokens[-1] for seq in self.seqs]
        states, logits = self.blocks.predict_block(anchors, budget)
        self.lengths, ids, distributions, tops = self._draw_block(
            anchors, budget, states, logits, draw
        )
        if not ids:
            return pack([[] for _ in gamma], calls=calls)
        return Draft(
            tokens=torch.stack(ids, 1),
            lengths=torch.tensor(self.lengths),
            q=torch.stack(distributions, 1) if distributions else None,
            calls=calls,
            tops=torch.stack(tops, 1),
        )

    def _draw_block(
        self, anchors: list[int], budget: list[int], states: Tensor, logits: Tensor, draw: Draw
    ) -> tuple[list[int], list[Tensor], list[Tensor], list[Tensor]]:
        """Draw one guess after another. Return how many each row has, and of each guess the ids,
        the distributions, if there are any, and the largest logits."""
        lengths = budget
        ids: list[Tensor] = []
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        before, memory, chances = torch.tensor(anchors), None, [1.0] * len(anchors)
        for i in range(max(budget)):
            scores, sure, memory = self.blocks.condition_on_previous(
                states[:, i], logits[:, i], before, memory
            )
            if sure is not None:  # before token i is drawn, by those before it alone
                chances = [c * s for c, s in zip(chances, to_list(sure), strict=True)]
                pairs = zip(lengths, chances, strict=True)
                lengths = [n if c >= MIN_ACCEPTANCE_CHANCE else min(n, i) for n, c in pairs]
                if max(lengths) <= i:
                    break
            scores, top = mask_invalid(scores)
            before, q = self._sample(draw, scores, i)
            ids.append(before)
            tops.append(top)
            distributions += [] if q is None else [q]
        return lengths, ids, distributions, tops

    def _limit_draft_tokens(self, seq: _BlockSequence, read: int, gamma: int) -> int:
        """Guesses for a row: none where states before its last token are missing, or no room is
        left."""
        if read + len(seq.carried) != len(seq.tokens) - 1:
            return 0
        room = gamma if self.blocks.context is None else self.blocks.context - len(seq.tokens)
        return max(0, min(gamma, self.blocks.max_draft_tokens, room))

    def _sample(self, draw: Draw, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        ids, V, chained = self.blocks.ids, self.target.vocab_size, self.blocks.is_conditional
        if ids is not None:
            ids = self.blocks.ids = send(ids, logits.device)  # where they stay
        if draw.coupled and not chained:
            return self.sampler.sample(draw, widen(logits, ids, V), i)
        return draw_token(draw, logits, i, ids, V, None if chained else GREEDY_PARAMS)

    def _read_carried(self) -> int:
        """Read what is carried; return the passes."""
        passes = self.blocks.append_context([seq.carried for seq in self.seqs])
        for seq in self.seqs:
            seq.carried = torch.empty(0, 0)
        return passes

    def commit(self, tokens: list[list[int]]) -> None:
        self.sampler.count_correct(self.lengths, tokens)
        for seq, new in zip(self.seqs, tokens, strict=True):
            seq.tokens += new
        self._take_states()

    def leave(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[b] for b in list_remaining_rows(len(self.seqs), rows)]
        self.blocks.leave(rows)
