"""DSpark (arXiv 2607.05147) in training: `foretoken train dspark`.

A block of guesses behind each of many anchors of a text, all in one pass: a block sees the target's
states before its anchor and itself, as in use. Each guess follows the text's token before it, and
learns the target's distribution there, and how much it has in common with it.
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
from foretoken.models.stock.dflash_files import parse_block_config, build_network
from foretoken.train.distill import LEAST
from foretoken.train.kept_states import TextStates
from foretoken.train.student import (
    Compared,
    Lesson,
    Student,
    Texts,
    described,
    frequent,
    taps_of,
)


@dataclass(frozen=True, slots=True)
class DSparkLesson(Lesson):
    """The draft's size, and how it is taught."""

    layers: int = 2
    block: int = 7  # guesses behind an anchor
    rank: int = 64  # of the bias by the token before
    anchors: int = 32  # of a text in a step

    def student(self, target: PreTrainedModel, texts: Texts, seed: int) -> BlockStudent:
        """Return a random draft of such texts."""
        ids, mask = frequent(texts, self.draft_vocab), rarest(target, texts)
        return BlockStudent(target, ids, mask, self, seed)


def rarest(target: PreTrainedModel, texts: Texts) -> int:
    """A token that texts hardly have, to stand for those not known: the last of the rarest."""
    counts = Counter(token for ids in texts.values() for token in ids)
    V = target.config.get_text_config(decoder=True).vocab_size
    return min(range(V), key=lambda token: (counts[token], -token))


class BlockStudent(Student):
    """A DSpark draft of the target's widths, of Qwen3's layers, as published ones have them.

    mask: the id that stands for tokens not known.
    """

    def __init__(
        self, target: PreTrainedModel, ids: Tensor, mask: int, lesson: DSparkLesson, seed: int
    ) -> None:
        layers = Qwen3Config(**lesson.settings(target), num_hidden_layers=lesson.layers)
        config = described("dspark", target, layers, ids, lesson.block) | {
            "architectures": ["DSparkSpeculator"],
            "aux_hidden_state_layer_ids": list(taps_of(target)),
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

    def places(
        self, texts: list[TextStates], dice: random.Random | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Return what is to be compared behind anchors of texts, depth by depth.

        By chance are the anchors, and how long half of the blocks are, as not all are whole in use.
        """
        n, anchors = self.depths, torch.tensor([self._anchors(text, dice) for text in texts])
        sizes = torch.full_like(anchors, n)
        if dice is not None:
            some = [dice.randint(1, 2 * n) for _ in range(sizes.numel())]
            sizes = torch.tensor(some).view(sizes.shape).clamp(max=n)
        return self.behind(texts, anchors, sizes)

    def behind(
        self, texts: list[TextStates], anchors: Tensor, sizes: Tensor
    ) -> Iterator[tuple[Tensor, ...]]:
        """Return the same for so many guesses behind each of the anchors `[B, A]`."""
        ids = pad_sequence([t.ids for t in texts], batch_first=True)
        states = self._states(texts, ids, anchors, sizes)
        hidden = pad_sequence([t.hidden for t in texts], batch_first=True)
        masses = pad_sequence([t.mass for t in texts], batch_first=True)
        lengths = torch.tensor([len(t.ids) for t in texts])[:, None]
        for k in range(self.depths):
            row, block = ((k < sizes) & (anchors + k < lengths)).nonzero(as_tuple=True)
            at = row, anchors[row, block] + k
            yield hidden[at], masses[at], states[row, block, k], ids[at]

    def compared(self, hidden: Tensor, mass: Tensor, *own: Tensor) -> Compared:
        """Compare both at some of these places."""
        made, before = own
        parts = self.blocks.markov_head, self.blocks.confidence_head
        logits, sure, _ = apply_markov_head(*parts, made, self.outputs(made), before, None)
        q = logits.float().log_softmax(-1).clamp(min=LEAST)
        return Compared(self.teacher(hidden, mass), q, sure)

    def _anchors(self, text: TextStates, dice: random.Random | None) -> list[int]:
        """Places from the prompt's last token on; as far apart as can be where there is no
        chance."""
        places, count = range(max(1, text.prompt) - 1, len(text.ids)), self.anchors
        if dice is not None:
            return dice.choices(places, k=count)
        return [places[i * len(places) // count] for i in range(count)]

    def _states(
        self, texts: list[TextStates], ids: Tensor, anchors: Tensor, sizes: Tensor
    ) -> Tensor:
        """States `[B, A, n, H]` of blocks behind the anchors `[B, A]`, by how many places of each
        are there."""
        (B, T), n, cache = ids.shape, self.depths, DynamicCache()
        taps = pad_sequence([t.taps for t in texts], batch_first=True).float()
        made = self.blocks.context(taps.flatten(0, 1), torch.arange(T).repeat(B))
        for i, pair in enumerate(made):
            k, v = (x.unflatten(0, (B, T)).transpose(1, 2) for x in pair)
            cache.update(k, v, i)
        places = torch.arange(n)
        read = torch.full((*anchors.shape, n), self.mask)
        read[..., 0] = ids.gather(1, anchors)
        there = (places < sizes[..., None]).flatten(1)
        block = torch.arange(anchors.shape[1]).repeat_interleave(n)
        before = torch.arange(T) < anchors[:, block, None]
        within = (block[:, None] == block) & there[:, None]
        seen = torch.cat([before, within], -1)
        embedded = self.embedding(read.flatten(1)).detach().float()
        positions = (anchors[..., None] + places).flatten(1)
        mask = seen[:, None]
        states = self.blocks(embedded, positions, cache, (mask, mask))
        return states.unflatten(1, (-1, n))

    def stored(self, name: str) -> str:
        """Return the name in speculators' layout of a weight of the network."""
        return f"lm_{name}" if name.startswith("head.") else name.removeprefix("blocks.")
