"""A drafter with a small decoder whose input is a pair of a hidden state and a token: EAGLE-3
(arXiv 2503.01840) and single layers for multi-token prediction (MTP, arXiv 2412.19437).

Pair i consists of the target's hidden state at position i and token i + 1. From pair i, the decoder
predicts token i + 2. If token i + 1 is a draft token, the pair has the decoder's own hidden state
instead of the target's. The keys and values of such pairs are rolled back at the end of the draft.
After verification the same positions are computed again from the target's hidden states, in the
forward pass that makes the next draft token. So the cache never retains anything computed from the
decoder's own hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.drafters.base import (
    Draft,
    Drafter,
    draw_token,
    make_token_choice,
    pack,
    pack_certain,
    pack_chained,
)
from foretoken.errors import InputError, format_value
from foretoken.models.base import ChainedTokens, HiddenStateDraftModel, Model, TokenChoice
from foretoken.models.hidden_states import append_new_states
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS, list_remaining_rows
from foretoken.sampling.distributions import find_peaks, mask_invalid
from foretoken.sampling.draw import Draw
from foretoken.transfer import send, to_list

# while no sequence drafts, the decoder runs only when a sequence has this many pairs to compute,
# because each run takes a forward pass
MAX_UNREAD_PAIRS = 32


@dataclass(slots=True)
class PairSequence:
    """The pairs of one sequence. The first `num_fed` pairs are in the decoder's cache. `carried`,
    `[n, W]`: the target's hidden states of the next n pairs."""

    tokens: list[int]
    num_fed: int = 0
    carried: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @property
    def complete(self) -> bool:
        """True if the hidden states reach up to the last token but one, as drafting requires."""
        return len(self.carried) > 0 and self.num_fed + len(self.carried) == len(self.tokens) - 1


def _get_embedding_table(embedding: Any, decoder: HiddenStateDraftModel) -> Tensor | None:
    """Return the weights `[V, E]` of a plain embedding layer if the decoder can use them in a
    chain, else None."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return None
    weight: Tensor = embedding.weight.detach()
    if decoder.runtime != "native":
        return weight if weight.device == decoder.device else None
    kinds = torch.float32, torch.bfloat16, torch.float16
    served = weight.is_cpu and weight.dtype in kinds and weight.is_contiguous()
    return weight if served and weight.shape[1] % 16 == 0 else None


def make_pair_ids(tokens: list[int], first: int, last: int, num_layers: int) -> list[int]:
    """Return the ids of pairs `first` to `last - 1`, for the decoder's prefix cache. If the ids up
    to a pair are equal, all tokens that the decoder has used for these pairs are equal.

    In a stack of layers, pair i depends on tokens up to i + num_layers, and the id is that token.
    The first id stands for all tokens up to there. Ids of pairs with missing tokens are 0.
    """
    ids = tokens[first + num_layers : last + num_layers]
    if first == 0 and ids:
        ids[0] = hash((*tokens[: num_layers + 1],))
    return ids + [0] * (last - first - len(ids))


class PairsDrafter(Drafter):
    """A drafter whose `decoder` predicts tokens from the hidden states of `target`.

    It proposes nothing in a sequence's first step: only that step computes the last of the hidden
    states that drafting needs.

    Args:
        target: The target; its `taps` must be the layers whose hidden states the decoder needs.
        decoder: The decoder of pairs.
        embedding: Function from ids `[N]` of the target to embeddings `[N, E]`.
        ids: Target id of each of the decoder's logits, `[Vd]`; None: the first Vd ids.
        columns: The columns of the target's hidden states that the decoder takes; None: all.
    """

    reads_target = True

    def __init__(
        self,
        target: Model,
        decoder: HiddenStateDraftModel,
        embedding: Callable[[Tensor], Tensor],
        ids: Tensor | None,
        columns: slice | None = None,
    ) -> None:
        self.target: Model = target
        self.decoder, self.embedding = decoder, embedding
        self.ids = None if ids is None else ids.to(decoder.device)
        self.columns = columns
        self.runtime, self.holds, self.vocab_size = decoder.runtime, (decoder,), target.vocab_size
        self.identity = decoder.identity
        self.has_own_speed = self.identity is None  # costs are stored by identity
        self.seqs: list[PairSequence] = []
        self._table = _get_embedding_table(embedding, decoder)
        self._can_chain = decoder.capabilities.chain
        if ids is not None and int(ids.max()) >= target.vocab_size:
            raise InputError(
                f"the draft can propose token id {format_value(int(ids.max()))}, but the target "
                f"has only {target.vocab_size} tokens; give a draft for this target"
            )

    def with_target(self, target: Model) -> PairsDrafter:
        """Return a drafter without sequences, with the same decoder, for another target that
        returns the hidden states of the same layers (`taps`). Raises InputError if they differ."""
        if target.taps != self.target.taps:
            raise InputError(
                "the target does not expose the hidden states that the draft needs; give a target "
                "that does"
            )
        return type(self)(target, self.decoder, self.embedding, self.ids, self.columns)

    def count_cached_tokens(self, tokens: list[int]) -> int:
        layers = self.decoder.num_layers
        ids = make_pair_ids(tokens, 0, max(0, len(tokens) - layers), layers)
        return self.decoder.count_cached_tokens(ids) if ids else 0

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        # at least one pair is computed again: its logits make the first draft token
        num_cached = [self.count_cached_tokens(prompt[:-1]) for prompt in prompts]
        seqs = [PairSequence(list(ids), n) for ids, n in zip(prompts, num_cached, strict=True)]
        layers = self.decoder.num_layers
        self.decoder.start([make_pair_ids(seq.tokens, 0, seq.num_fed, layers) for seq in seqs])
        self.seqs += seqs
        self._take_states()

    def _take_states(self) -> None:
        """Append the target's new hidden states to `carried`. States of pairs that are already in
        `carried` or in the decoder's cache are skipped."""
        for seq, new in zip(self.seqs, self.target.take_hidden_states(), strict=True):
            # if states are missing in between, nothing is appended: `complete` stays False, so that
            # the sequence gets no draft tokens
            reached = seq.num_fed + len(seq.carried)
            seq.carried = append_new_states(seq.carried, new, reached, self.columns)
            if self.decoder.context is not None and len(seq.tokens) > self.decoder.context:
                seq.carried = seq.carried[:0]  # too long for the decoder: no more draft tokens

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        pairs = zip(self.seqs, gamma, strict=True)
        budget = [
            min(g, self._count_free_positions(seq)) if seq.complete else 0 for seq, g in pairs
        ]
        if not any(budget):
            self._catch_up()
            return pack([[] for _ in gamma])
        calls = self._feed_long_sequences()
        if self._table is not None and self._can_chain:
            mixed, V = self.decoder.capabilities.mixed_chain, self.target.vocab_size
            chosen = make_token_choice(draw, max(budget), V, self.ids, mixed=mixed)
            if chosen is not None:
                made = self._propose_chained(self._table, budget, chosen)
                return pack_chained(made, budget, calls + max(budget), draw)
        need = [int(g > 0) for g in budget]
        logits = self._feed([len(seq.carried) for seq in self.seqs], need)
        host = logits.is_cpu and not self.decoder.capabilities.tensors
        if host and draw.greedy and not draw.controlled:
            draft = self._propose_greedy(logits, budget, calls)
        else:
            draft = self._propose_sampled(logits, budget, draw, calls)
        self.decoder.set_lengths([seq.num_fed for seq in self.seqs])
        return draft

    def _propose_chained(
        self, table: Tensor, budget: list[int], chosen: TokenChoice
    ) -> ChainedTokens:
        """Return the draft tokens of all sequences, made in one call of the decoder."""
        counts = [len(seq.carried) for seq in self.seqs]
        blocks, tokens, states = self._get_carried_pairs(counts)
        self.decoder.set_draft_pairs(tokens, states, table)
        made = self.decoder.chain(blocks, budget, chosen, table)
        self._advance(counts)
        self.decoder.set_lengths([seq.num_fed for seq in self.seqs])
        return made

    def _propose_greedy(self, logits: Tensor, budget: list[int], calls: int) -> Draft:
        """Return a draft of the most probable tokens. `logits` are those of each sequence's first
        draft token. Tokens are in lists for speed, as in `LMDrafter`."""
        made: list[list[int]] = [[] for _ in budget]
        highest: list[list[float]] = [[] for _ in budget]
        for i in range(max(budget)):
            if i:
                last = [ids[-1] if ids else 0 for ids in made]
                logits = self._feed_draft_tokens(last, [int(g > i) for g in budget])
            best, tops = find_peaks(logits[:, :1])
            for b, g in enumerate(budget):
                if g > i:
                    ((x,), (top,)) = best[b], tops[b]
                    made[b].append(x if self.ids is None else int(self.ids[x]))
                    highest[b].append(top)
        return pack_certain(made, highest, calls + max(budget))

    def _propose_sampled(self, logits: Tensor, budget: list[int], draw: Draw, calls: int) -> Draft:
        ids: list[Tensor] = []
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        for i in range(max(budget)):
            if i:
                logits = self._feed_draft_tokens(to_list(ids[-1]), [int(g > i) for g in budget])
            logits, top = mask_invalid(logits[:, 0])
            token, q = draw_token(draw, logits, i, self.ids, self.target.vocab_size)
            ids.append(token)
            tops.append(top)
            distributions += [] if q is None else [q]
        return Draft(
            tokens=torch.stack(ids, 1),
            lengths=torch.tensor(budget),
            q=torch.stack(distributions, 1) if distributions else None,
            calls=calls + len(ids),
            tops=torch.stack(tops, 1),
        )

    def _count_free_positions(self, seq: PairSequence) -> int:
        """Return how many draft tokens fit into the decoder's context."""
        context = self.decoder.context
        return 10**9 if context is None else max(0, context - len(seq.tokens) + 1)

    def _catch_up(self) -> None:
        """Compute the carried pairs if a sequence has many carried pairs, although no sequence
        drafts now. Otherwise all pairs would have to be computed when a sequence drafts again."""
        if any(len(seq.carried) >= MAX_UNREAD_PAIRS for seq in self.seqs):
            self._feed_long_sequences()
            self._feed([len(seq.carried) for seq in self.seqs], [0] * len(self.seqs))

    def _feed_long_sequences(self) -> int:
        """Run the decoder over carried pairs, the same number of each sequence, until the remaining
        pairs fit into one forward pass or each sequence has one pair left. Return the number of
        forward passes."""
        passes = 0
        while sum(len(seq.carried) for seq in self.seqs) > PREFILL_CHUNK_TOKENS:
            spare = [max(0, len(seq.carried) - 1) for seq in self.seqs]
            share = max(1, PREFILL_CHUNK_TOKENS // max(1, sum(n > 0 for n in spare)))
            if not any(spare):
                break
            self._feed([min(n, share) for n in spare], [0] * len(self.seqs))
            passes += 1
        return passes

    def _feed(self, counts: list[int], need: list[int]) -> Tensor:
        """Run the decoder over the first counts[b] carried pairs of sequence b and return logits as
        `score` does. The keys and values of these pairs remain cached, because they are computed
        from the target's hidden states."""
        if not any(counts):
            return torch.empty(len(counts), 0, 0)
        blocks, tokens, states = self._get_carried_pairs(counts)
        logits = self._run_forward(
            blocks, torch.tensor(tokens), self.decoder.project_states(states), need
        )
        self._advance(counts)
        return logits

    def _get_carried_pairs(self, counts: list[int]) -> tuple[list[list[int]], list[int], Tensor]:
        """Return three things about the first counts[b] carried pairs of each sequence b: blocks of
        ids for the decoder's prefix cache, the tokens of all pairs in one list, and their hidden
        states `[sum(counts), W]`."""
        some = list(zip(self.seqs, counts, strict=True))
        blocks = [make_pair_ids(seq.tokens, seq.num_fed, seq.num_fed + n, 1) for seq, n in some]
        states = [seq.carried[:n] for seq, n in some if n]
        tokens = [x for seq, n in some for x in seq.tokens[seq.num_fed + 1 : seq.num_fed + 1 + n]]
        return blocks, tokens, states[0] if len(states) == 1 else torch.cat(states)

    def _advance(self, counts: list[int]) -> None:
        for seq, n in zip(self.seqs, counts, strict=True):
            seq.num_fed, seq.carried = seq.num_fed + n, seq.carried[n:]

    def _feed_draft_tokens(self, ids: list[int], need: list[int]) -> Tensor:
        """Run the decoder over the last draft token ids[b] of each sequence b with need[b] > 0,
        paired with the decoder's own hidden state from its last forward pass. Return logits. The
        keys and values are rolled back at the end of `propose`."""
        rows = [b for b, x in enumerate(need) if x]
        blocks = [[token] if x else [] for token, x in zip(ids, need, strict=True)]
        states = self.decoder.hidden[:, 0]
        states = states if len(rows) == len(need) else states[rows]
        return self._run_forward(blocks, torch.tensor([ids[b] for b in rows]), states, need)

    def _run_forward(
        self, blocks: list[list[int]], tokens: Tensor, states: Tensor, need: list[int]
    ) -> Tensor:
        self._set_pairs(blocks, tokens, states)
        return self.decoder.score(blocks, need)

    def _set_pairs(self, blocks: list[list[int]], tokens: Tensor, states: Tensor) -> None:
        embedded = self.embedding(send(tokens, states.device)).to(states.dtype)
        pairs = torch.cat([embedded, states], -1)
        self.decoder.set_next_pairs(pairs, [len(block) for block in blocks])

    def commit(self, tokens: list[list[int]]) -> None:
        for seq, new in zip(self.seqs, tokens, strict=True):
            seq.tokens += new
        self._take_states()

    def leave(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[b] for b in list_remaining_rows(len(self.seqs), rows)]
        self.decoder.leave(rows)
