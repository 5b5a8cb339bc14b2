"""Training of EAGLE-3 drafts (arXiv 2503.01840): `foretoken train eagle`.

The draft is unrolled over several depths, as in drafting: at the first depth its inputs are the
target's hidden states; at each later depth they are the draft's own hidden states of the previous
depth. The draft learns the target's distribution at every depth. Its input tokens always come from
the data.
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

STORED_PREFIXES = {"first.": "layers.0.", "head.norm.": "norm.", "head.linear.": "lm_head."}
STORED_PREFIXES |= {"join.fc.": "fc."}


@dataclass(frozen=True, slots=True)
class EagleLesson(Lesson):
    """Size of the draft, and settings of its training."""

    depths: int = 4

    def make_student(
        self, target: PreTrainedModel, sequences: NumberedSequences, seed: int
    ) -> EagleStudent:
        """Return a randomly initialized draft whose vocabulary is the most frequent tokens of
        `sequences`."""
        return EagleStudent(target, find_frequent_tokens(sequences, self.draft_vocab), self, seed)


class EagleStudent(Student):
    """An EAGLE-3 draft with the target's widths and Llama's layers, as in other systems."""

    def __init__(
        self, target: PreTrainedModel, ids: Tensor, lesson: EagleLesson, seed: int
    ) -> None:
        layers = LlamaConfig(**lesson.get_layer_settings(target), num_hidden_layers=1)
        taps = list(choose_taps(target))
        config = make_config("eagle3", target, layers, ids, 3) | {
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

    def gather_positions(
        self, sequences: list[SequenceHiddenStates], rng: random.Random | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the tensors of all output positions of the sequences, as `Student` specifies.

        At depth k (from 0), the inputs of position i are the hidden states up to token i and the
        tokens up to i + k + 1; the draft learns the target's distribution of token i + k + 2. `rng`
        is not used.
        """
        network: Any = self.network
        ids = pad_sequence([t.ids for t in sequences], batch_first=True)
        lengths = torch.tensor([len(t.ids) for t in sequences])[:, None]
        prompts = torch.tensor([t.prompt for t in sequences])[:, None]
        states = network.join(pad_sequence([t.taps for t in sequences], batch_first=True).float())[
            :, :-1
        ]
        embedded = self.embedding(ids).detach()
        hidden = pad_sequence([t.hidden for t in sequences], batch_first=True)
        log_sum_exps = pad_sequence([t.log_sum_exp for t in sequences], batch_first=True)
        M = ids.shape[1] - 1
        cache, positions_from_0 = DynamicCache(), torch.arange(M)
        causal, own = positions_from_0[:, None] >= positions_from_0, torch.eye(M, dtype=torch.bool)
        for k in range(self.depths):
            inputs = nn.functional.pad(embedded[:, k + 1 :], (0, 0, 0, min(k, M)))
            mask = torch.cat([causal, *[own] * k], 1)[None, None]
            positions = (positions_from_0 + k)[None]
            arguments: dict[str, Any] = {
                "attention_mask": mask,
                "position_ids": positions,
                "past_key_values": cache,
                "position_embeddings": network.rotary(states, position_ids=positions),
            }
            states = network.run_layers(inputs, states, {"full_attention": arguments})
            token_positions = positions_from_0 + k + 1  # the token after each position is predicted
            is_taught = (token_positions < lengths) & (token_positions + 1 >= prompts)
            row, column = is_taught.nonzero(as_tuple=True)
            index = row, column + k + 1
            yield hidden[index], log_sum_exps[index], network.head.norm(states[is_taught])

    def compare(self, hidden: Tensor, mass: Tensor, *own: Tensor) -> ComparedDistributions:
        """Return the target's and the draft's distributions at some of the positions that
        `gather_positions` yields."""
        q = self.compute_logits(*own).float().log_softmax(-1)
        return ComparedDistributions(
            self.compute_target_log_probs(hidden, mass), q.clamp(min=MIN_LOG_PROB)
        )

    def get_stored_name(self, name: str) -> str:
        """Return the name of a weight of `network` in speculators' format."""
        return next(
            new + name.removeprefix(old)
            for old, new in STORED_PREFIXES.items()
            if name.startswith(old)
        )
