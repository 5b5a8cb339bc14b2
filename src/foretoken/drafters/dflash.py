"""A drafter for models that predict a block of masked tokens: DFlash (arXiv 2602.06036),
DFlash2, DSpark (arXiv 2607.05147), Domino (arXiv 2605.29707) and JetSpec (arXiv 2606.18394).

One forward pass predicts a whole block from the target's hidden states at all positions before the
last token. DSpark, DFlash2 and Domino condition each draft token on the one before it and sample it
from the conditional distribution. DFlash and JetSpec predict the draft tokens of a block
independently of each other. Tokens sampled independently would seldom fit together, so the drafter
takes the most probable tokens, which are certain. In coupled mode sampled tokens may fit, and
`SampleOrArgmax` chooses between sampled and most probable tokens.
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

# while no sequence drafts, hidden states are appended to the contexts only when a sequence has this
# many of them, because each append takes a forward pass
MAX_UNREAD_STATES = 32
# a draft ends before a token if the probability that this token and all before it are accepted is
# lower than this: the token would cost more time than it saves
MIN_ACCEPTANCE_CHANCE = 0.2
GREEDY_PARAMS = SamplingParams(temperature=0.0)


class BlockModel(Protocol):
    """A model that predicts blocks of draft tokens. For each sequence it caches a context: keys and
    values computed from the target's hidden states."""

    runtime: str
    compute_dtype: str  # the dtype of its arithmetic
    identity: str | None  # key under which its costs are stored; None: they are not stored
    context: int | None
    max_draft_tokens: int  # maximum number of draft tokens in a block
    is_conditional: bool  # whether a draft token depends on those before it
    ids: Tensor | None  # target id of each draft logit, `[Vd]`; None: the first Vd ids

    @property
    def lengths(self) -> list[int]:
        """For each sequence, the number of tokens whose hidden states are in the sequence's
        context."""
        ...

    def start(self, rows: int) -> None:
        """Add `rows` sequences with empty contexts."""
        ...

    def permute(self, rows: list[int]) -> None:
        """Replace sequence b by the former sequence rows[b], for all b."""
        ...

    def leave(self, rows: list[int]) -> None:
        """Remove these sequences; later sequences move up."""
        ...

    def append_context(self, states: list[Tensor]) -> int:
        """Append the target's hidden states to the contexts: `[n, W]` for each sequence, with any
        n. Return the number of forward passes."""
        ...

    def predict_block(self, anchors: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Run the model on one block for each sequence b: the sequence's last token anchors[b],
        then counts[b] draft tokens. Return hidden states `[B, G, H]` and logits `[B, G, Vd]` at the
        draft tokens."""
        ...

    def condition_on_previous(
        self, states: Tensor, logits: Tensor, tokens: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the logits of the next draft token of each sequence, given the token before it.

        states, logits: Results of `predict_block` for this draft token. tokens: `[B]`, the token
        before this draft token. memory: None at the first draft token of a block, then the memory
        that the previous call returned.

        Returns the logits `[B, Vd]`, the probabilities `[B]` that the draft token is accepted (None
        if the model does not predict probabilities), and the memory for the next call.
        """
        ...


@dataclass(slots=True)
class _BlockSequence:
    """One sequence. `carried`, `[n, W]`: the target's hidden states that are not in the model's
    context yet."""

    tokens: list[int]
    carried: Tensor = field(default_factory=lambda: torch.empty(0, 0))


class SampleOrArgmax:
    """In coupled mode, the choice between draft tokens sampled with the target's noise and the most
    probable draft tokens.

    At each depth of a block, a token of each kind is computed, and the kind that was correct more
    often at this depth is used: sampling suits broad distributions, argmax suits sharp
    distributions. Earlier results may be used for this choice, because in coupled mode the output
    does not depend on the draft tokens.
    """

    def __init__(self) -> None:
        # keys: depth in the block, and True for argmax, False for sampling
        self.num_correct: Counter[tuple[int, bool]] = Counter()
        # tokens of the last block: an entry for each depth, with the same bool as key
        self.attempts: list[dict[bool, Tensor]] = []

    def sample(self, draw: Draw, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Return draft token i of each sequence, `[B]`, and q, `[B, V]`; q is None if the tokens
        are certain."""
        use_argmax = self.num_correct[i, True] > self.num_correct[i, False]
        # the method to use comes last: `draw` shapes the next logits by the token it sampled last
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
        """Count the correct tokens of the last block, for both kinds. Sequence b had `lengths[b]`
        draft tokens; then `tokens[b]` were committed."""
        for i, ways in enumerate(self.attempts):
            for way, ids in ways.items():
                rows = zip(to_list(ids), lengths, tokens, strict=True)
                self.num_correct[i, way] += sum(
                    i < min(n, len(x)) and x[i] == y for y, n, x in rows
                )
        self.attempts = []


class BlockDrafter(Drafter):
    """A drafter whose `model` predicts blocks from the hidden states of `target`.

    Args:
        target: The target; its `taps` must be the layers whose hidden states the model needs.
        model: The block model.
    """

    reads_target = True

    def __init__(self, target: Model, model: BlockModel) -> None:
        self.target: Model = target
        self.blocks = model
        self.runtime, self.holds, self.vocab_size = model.runtime, (model,), target.vocab_size
        self.identity = model.identity
        self.seqs: list[_BlockSequence] = []
        self.sampler = SampleOrArgmax()
        self.lengths: list[int] = []  # number of draft tokens of each sequence in the last block
        if model.ids is not None and int(model.ids.max()) >= target.vocab_size:
            raise InputError(
                f"the draft can propose token id {format_value(int(model.ids.max()))}, but the "
                f"target has only {target.vocab_size} tokens; give a draft for this target"
            )

    def with_target(self, target: Model) -> BlockDrafter:
        """Return a drafter without sequences, with the same model, for another target with the same
        taps. Raises InputError if the taps differ."""
        if target.taps != self.target.taps:
            raise InputError(
                "the target does not expose the hidden states that the draft needs; give a target "
                "that does"
            )
        return BlockDrafter(target, self.blocks)

    def count_cached_tokens(self, tokens: list[int]) -> int:
        return 0  # the model does not cache the contexts of sequences that have left

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.blocks.start(len(prompts))
        self.seqs += [_BlockSequence(list(prompt)) for prompt in prompts]
        self._take_states()

    def _take_states(self) -> None:
        """Append the hidden states of the target's last forward passes to `carried`."""
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
        """Choose the tokens of a block one after another.

        Returns the number of draft tokens of each sequence, and three lists with one tensor per
        depth: the ids, the distributions (an empty list if the tokens are certain) and the largest
        logits.
        """
        lengths = budget
        ids: list[Tensor] = []
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        before, memory, chances = torch.tensor(anchors), None, [1.0] * len(anchors)
        for i in range(max(budget)):
            scores, sure, memory = self.blocks.condition_on_previous(
                states[:, i], logits[:, i], before, memory
            )
            # the length must not depend on the sampled token i itself: that would change its q
            if sure is not None:
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
        """Return how many draft tokens a sequence gets: at most gamma, and none if hidden states
        before its last token are missing or its context is full."""
        if read + len(seq.carried) != len(seq.tokens) - 1:
            return 0
        room = gamma if self.blocks.context is None else self.blocks.context - len(seq.tokens)
        return max(0, min(gamma, self.blocks.max_draft_tokens, room))

    def _sample(self, draw: Draw, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        ids, V, chained = self.blocks.ids, self.target.vocab_size, self.blocks.is_conditional
        if ids is not None:
            ids = self.blocks.ids = send(ids, logits.device)  # stored, so it is sent once
        if draw.coupled and not chained:
            return self.sampler.sample(draw, widen(logits, ids, V), i)
        return draw_token(draw, logits, i, ids, V, None if chained else GREEDY_PARAMS)

    def _read_carried(self) -> int:
        """Append the carried hidden states to the model's contexts. Return the number of forward
        passes."""
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
