"""EAGLE-3 (arXiv 2503.01840) in training: `foretoken train eagle`.

The draft is unrolled over several depths, as it will be used: at the first it reads the target's
states, at each further one its own of the depth before, and learns the target's distribution at
every one. Tokens are the text's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from foretoken.models.stock.pair_files import build_eagle_network
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

STORED = {"first.": "layers.0.", "head.norm.": "norm.", "head.linear.": "lm_head."}
STORED |= {"join.fc.": "fc."}


@dataclass(frozen=True, slots=True)
class EagleLesson(Lesson):
    """The draft's size, and how it is taught."""

    depths: int = 4

    def student(self, target: PreTrainedModel, texts: Texts, seed: int) -> EagleStudent:
        """Return a random draft of such texts."""
        return EagleStudent(target, frequent(texts, self.draft_vocab), self, seed)


class EagleStudent(Student):
    """An EAGLE-3 draft of the target's widths, of Llama's parts, which other readers know."""

    def __init__(
        self, target: PreTrainedModel, ids: Tensor, lesson: EagleLesson, seed: int
    ) -> None:
        layers = LlamaConfig(**lesson.settings(target), num_hidden_layers=1)
        taps = list(taps_of(target))
        config = described("eagle3", target, layers, ids, 3) | {
            "architectures": ["Eagle3Speculator"],
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": taps,
            "draft_taps": "inputs",
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = build_eagle_network(layers, config, len(ids), layers.hidden_size, len(taps))
        head: Any = network.head
        super().__init__(network, head.linear, config, ids, target, lesson.depths)

    def places(
        self, texts: list[TextStates], dice: random.Random | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Return what is to be compared at the new tokens of texts, depth by depth.

        At depth k (from 0) place i has read the states up to token i, and the tokens up to i + k +
        1; it learns the target's distribution behind these. Nothing is left to chance.
        """
        network: Any = self.network
        ids = pad_sequence([t.ids for t in texts], batch_first=True)
        lengths = torch.tensor([len(t.ids) for t in texts])[:, None]
        prompts = torch.tensor([t.prompt for t in texts])[:, None]
        states = network.join(pad_sequence([t.taps for t in texts], batch_first=True).float())[
            :, :-1
        ]
        embedded = self.embedding(ids).detach()
        hidden = pad_sequence([t.hidden for t in texts], batch_first=True)
        masses = pad_sequence([t.mass for t in texts], batch_first=True)
        M = ids.shape[1] - 1
        cache, places = DynamicCache(), torch.arange(M)
        causal, own = places[:, None] >= places, torch.eye(M, dtype=torch.bool)
        for k in range(self.depths):
            read = nn.functional.pad(embedded[:, k + 1 :], (0, 0, 0, min(k, M)))
            mask = torch.cat([causal, *[own] * k], 1)[None, None]
            positions = (places + k)[None]
            given: dict[str, Any] = {
                "attention_mask": mask,
                "position_ids": positions,
                "past_key_values": cache,
                "position_embeddings": network.rotary(states, position_ids=positions),
            }
            states = network.run_layers(read, states, {"full_attention": given})
            behind = places + k + 1  # the token whose next one is learnt
            taught = (behind < lengths) & (behind + 1 >= prompts)
            row, place = taught.nonzero(as_tuple=True)
            at = row, place + k + 1
            yield hidden[at], masses[at], network.head.norm(states[taught])

    def compared(self, hidden: Tensor, mass: Tensor, *own: Tensor) -> Compared:
        """Compare both at some of these places."""
        q = self.outputs(*own).float().log_softmax(-1)
        return Compared(self.teacher(hidden, mass), q.clamp(min=LEAST))

    def stored(self, name: str) -> str:
        """Return the name in speculators' layout of a weight of the network."""
        return next(
            new + name.removeprefix(old) for old, new in STORED.items() if name.startswith(old)
        )
