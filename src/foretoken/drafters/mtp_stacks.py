"""A drafter with a stack of layers for multi-token prediction (MTP, arXiv 2412.19437): layer k
makes draft token k, so a step has at most as many draft tokens as the stack has layers.

Pair i of layer k has token i + k + 1. A pair is final if these tokens are committed for all layers.
Only final pairs stay in the cache, with keys and values of every layer. For each draft token, its
layer runs over all pairs that are not in the cache. The last of them have draft tokens, so they are
rolled back at the end of the draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.drafters.pairs import (
    MAX_UNREAD_PAIRS,
    PairsDrafter,
    PairSequence,
    make_pair_ids,
)
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS
from foretoken.transfer import send


class MtpStackDrafter(PairsDrafter):
    """A drafter whose `decoder` is a stack of MTP layers. For the arguments see `PairsDrafter`."""

    # of this step, by sequence: the draft tokens, and the states `[n, H]` for the next layer
    _drafted: list[list[int]]
    _states: list[Tensor]

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    def _count_free_positions(self, seq: PairSequence) -> int:
        return min(self.num_layers, super()._count_free_positions(seq))

    def _count_final(self, seq: PairSequence) -> int:
        """Return how many carried pairs are final."""
        committed = len(seq.tokens) - self.num_layers - seq.num_fed
        return max(0, min(len(seq.carried), committed))

    def _catch_up(self) -> None:
        self._feed_long_sequences()

    def _feed_long_sequences(self) -> int:
        """While a sequence has many final pairs, compute final pairs in all layers. Return the
        number of forward passes."""
        passes, self._drafted = 0, [[] for _ in self.seqs]
        while max(final := list(map(self._count_final, self.seqs)), default=0) >= MAX_UNREAD_PAIRS:
            share = max(1, PREFILL_CHUNK_TOKENS // sum(n > 0 for n in final))
            counts = [min(n, share) for n in final]
            states = [seq.carried[:n] for seq, n in zip(self.seqs, counts, strict=True) if n]
            projected = self.decoder.project_states(torch.cat(states))
            self._run_layers(range(self.num_layers), counts, projected, [0] * len(counts))
            self._advance(counts)
            passes += 1
        return passes

    def _feed(self, counts: list[int], need: list[int]) -> Tensor:
        """Run the first layer over the carried pairs of each sequence b with need[b] > 0, and
        return the logits of the first draft tokens. The pairs stay carried."""
        self._drafted = [[] for _ in self.seqs]
        self._states = [self.decoder.project_states(seq.carried) for seq in self.seqs]
        return self._run_next_layer(need)

    def _feed_draft_tokens(self, ids: list[int], need: list[int]) -> Tensor:
        """Run the next layer, after draft token ids[b] of each sequence b with need[b] > 0."""
        self._drafted = [[*made, x] for made, x in zip(self._drafted, ids, strict=True)]
        return self._run_next_layer(need)

    def _run_next_layer(self, need: list[int]) -> Tensor:
        """Run the layer of the next draft token over the carried pairs of each sequence b with
        need[b] > 0. Return the logits of the draft tokens, `[B, 1, Vd]`."""
        k = len(self._drafted[0])
        counts = [len(seq.carried) * x for seq, x in zip(self.seqs, need, strict=True)]
        states = torch.cat([states for states, x in zip(self._states, need, strict=True) if x])
        self.decoder.set_lengths([seq.num_fed for seq in self.seqs])
        logits = self._run_layers(range(k, k + 1), counts, states, counts)
        self._states = [self.decoder.hidden[b, :n] for b, n in enumerate(counts)]
        if k + 1 == self.num_layers:  # final pairs now have keys and values of every layer
            final = map(self._count_final, self.seqs)
            self._advance([min(pair) for pair in zip(counts, final, strict=True)])
        last = [max(0, n - 1) for n in counts]
        return logits[range(len(last)), last][:, None]

    def _run_layers(
        self, layers: range, counts: list[int], states: Tensor, need: list[int]
    ) -> Tensor:
        """Run these layers over the first counts[b] carried pairs of each sequence b. states:
        `[sum(counts), H]`, for the first of these layers. Returns logits as `score` does."""
        tokens, blocks = list[int](), list[list[int]]()
        for seq, made, n in zip(self.seqs, self._drafted, counts, strict=True):
            every, first = [*seq.tokens, *made], seq.num_fed
            tokens += [every[i + 1 + k] for i in range(first, first + n) for k in layers]
            blocks.append(make_pair_ids(every, first, first + n, self.num_layers))
        embedded = self.embedding(send(torch.tensor(tokens), states.device)).to(states.dtype)
        self.decoder.set_next_layers(layers)
        pairs = torch.cat([embedded.reshape(len(states), -1), states], -1)
        self.decoder.set_next_pairs(pairs, counts)
        return self.decoder.score(blocks, need)
