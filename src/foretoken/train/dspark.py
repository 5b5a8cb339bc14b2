"""Training of DSpark drafts (arXiv 2607.05147): `foretoken train dspark`.

Each block of draft tokens follows an anchor, a position of a training sequence. One forward pass
computes the blocks of many anchors. A block attends to the target's hidden states before its anchor
and to the block itself, as in drafting. Each draft token is conditioned on the previous token of
the training sequence. At each draft token, the draft learns the target's distribution, and its
confidence head learns the overlap of the target's and the draft's distributions.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, Qwen3Config

from foretoken.models.stock.dflash import apply_markov_head
from foretoken.models.stock.dflash_files import build_network, parse_block_config
from foretoken.train.distill import MIN_LOG_PROB
from foretoken.train.hidden_state_dataset import SequenceHiddenStates
from foretoken.train.student import (
    ComparedDistributions,
    Lesson,
    NumberedSequences,
    Student,
    choose_taps,
    find_frequent_tokens,
    make_config,
)


@dataclass(frozen=True, slots=True)
class DSparkLesson(Lesson):
    """Size of the draft, and settings of its training."""

    layers: int = 2
    block: int = 7  # draft tokens after an anchor
    rank: int = 64  # of the bias that depends on the previous token
    anchors: int = 32  # for each sequence of a batch

    def make_student(
        self, target: PreTrainedModel, sequences: NumberedSequences, seed: int
    ) -> BlockStudent:
        """Return a randomly initialized draft whose vocabulary is the most frequent tokens of
        `sequences`."""
        ids, mask = (
            find_frequent_tokens(sequences, self.draft_vocab),
            find_rarest_token(target, sequences),
        )
        return BlockStudent(target, ids, mask, self, seed)


def find_rarest_token(target: PreTrainedModel, sequences: NumberedSequences) -> int:
    """Return the id of the rarest token of the sequences, the highest id if several are equally
    rare. It serves as the mask token, which stands for tokens that are not drafted yet."""
    counts = Counter(token for ids in sequences.values() for token in ids)
    V = target.config.get_text_config(decoder=True).vocab_size
    return min(range(V), key=lambda token: (counts[token], -token))


class BlockStudent(Student):
    """A DSpark draft with the target's widths and Qwen3's layers, like published DSpark drafts.

    `mask` is the id that stands for tokens that are not drafted yet.
    """

    def __init__(
        self, target: PreTrainedModel, ids: Tensor, mask: int, lesson: DSparkLesson, seed: int
    ) -> None:
        layers = Qwen3Config(**lesson.get_layer_settings(target), num_hidden_layers=lesson.layers)
        config = make_config("dspark", target, layers, ids, lesson.block) | {
            "architectures": ["DSparkSpeculator"],
            "aux_hidden_state_layer_ids": list(choose_taps(target)),
            "block_size": lesson.block,
            "mask_token_id": mask,
            "sample_from_anchor": True,
            "markov_rank": lesson.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        H = layers.hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = build_network(parse_block_config(config), H, layers.vocab_size, len(ids))
            head = nn.Linear(H, len(ids), bias=False)
        chain: Any = self.blocks.markov_head
        nn.init.zeros_(chain.markov_w2.weight)
        network = nn.ModuleDict({"blocks": self.blocks, "head": head})
        super().__init__(network, head, config, ids, target, lesson.block)
        self.mask, self.anchors = mask, lesson.anchors

    def gather_positions(
        self, sequences: list[SequenceHiddenStates], rng: random.Random | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of the positions after anchors, as `Student` specifies. For training,
        anchors are random, and half of the blocks have a random length, because a draft may be used
        with fewer draft tokens than a block has."""
        n, anchors = (
            self.depths,
            torch.tensor([self._choose_anchors(text, rng) for text in sequences]),
        )
        sizes = torch.full_like(anchors, n)
        if rng is not None:
            lengths = [rng.randint(1, 2 * n) for _ in range(sizes.numel())]
            sizes = torch.tensor(lengths).view(sizes.shape).clamp(max=n)
        return self.gather_after_anchors(sequences, anchors, sizes)

    def gather_after_anchors(
        self, sequences: list[SequenceHiddenStates], anchors: Tensor, sizes: Tensor
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of `gather_positions` for the given anchors `[B, A]`, which are
        followed by blocks of `sizes [B, A]` draft tokens."""
        ids = pad_sequence([t.ids for t in sequences], batch_first=True)
        states = self._compute_states(sequences, ids, anchors, sizes)
        hidden = pad_sequence([t.hidden for t in sequences], batch_first=True)
        log_sum_exps = pad_sequence([t.log_sum_exp for t in sequences], batch_first=True)
        lengths = torch.tensor([len(t.ids) for t in sequences])[:, None]
        for k in range(self.depths):
            row, block = ((k < sizes) & (anchors + k < lengths)).nonzero(as_tuple=True)
            index = row, anchors[row, block] + k
            yield hidden[index], log_sum_exps[index], states[row, block, k], ids[index]

    def compare(self, hidden: Tensor, mass: Tensor, *own: Tensor) -> ComparedDistributions:
        """Return the target's and the draft's distributions, and the draft's confidence, at some of
        the positions that `gather_positions` yields."""
        hidden_states, previous_tokens = own
        parts = self.blocks.markov_head, self.blocks.confidence_head
        logits, confidence, _ = apply_markov_head(
            *parts, hidden_states, self.compute_logits(hidden_states), previous_tokens, None
        )
        q = logits.float().log_softmax(-1).clamp(min=MIN_LOG_PROB)
        return ComparedDistributions(self.compute_target_log_probs(hidden, mass), q, confidence)

    def _choose_anchors(
        self, sequence: SequenceHiddenStates, rng: random.Random | None
    ) -> list[int]:
        """Return the anchors of a sequence, from its prompt's last token on: random positions, or
        evenly spaced positions if `rng` is None."""
        candidates, count = range(max(1, sequence.prompt) - 1, len(sequence.ids)), self.anchors
        if rng is not None:
            return rng.choices(candidates, k=count)
        return [candidates[i * len(candidates) // count] for i in range(count)]

    def _compute_states(
        self, sequences: list[SequenceHiddenStates], ids: Tensor, anchors: Tensor, sizes: Tensor
    ) -> Tensor:
        """Return the draft's hidden states `[B, A, n, H]` in the blocks after the anchors `[B, A]`.
        Within a block, positions attend only to the first `sizes [B, A]` positions."""
        (B, T), n, cache = ids.shape, self.depths, DynamicCache()
        taps = pad_sequence([t.taps for t in sequences], batch_first=True).float()
        keys_and_values = self.blocks.make_context(taps.flatten(0, 1), torch.arange(T).repeat(B))
        for i, pair in enumerate(keys_and_values):
            k, v = (x.unflatten(0, (B, T)).transpose(1, 2) for x in pair)
            cache.update(k, v, i)
        offsets = torch.arange(n)
        input_ids = torch.full((*anchors.shape, n), self.mask)
        input_ids[..., 0] = ids.gather(1, anchors)
        is_used = (offsets < sizes[..., None]).flatten(1)
        block = torch.arange(anchors.shape[1]).repeat_interleave(n)
        before_anchor = torch.arange(T) < anchors[:, block, None]
        within_block = (block[:, None] == block) & is_used[:, None]
        visible = torch.cat([before_anchor, within_block], -1)
        embedded = self.embedding(input_ids.flatten(1)).detach().float()
        positions = (anchors[..., None] + offsets).flatten(1)
        mask = visible[:, None]
        states = self.blocks(embedded, positions, cache, (mask, mask))
        return states.unflatten(1, (-1, n))

    def get_stored_name(self, name: str) -> str:
        """Return the name of a weight of `network` in speculators' format."""
        return f"lm_{name}" if name.startswith("head.") else name.removeprefix("blocks.")
