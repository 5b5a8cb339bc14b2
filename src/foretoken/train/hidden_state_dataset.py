"""Hidden states of a frozen target at each token of the training data, to train drafts that use
hidden states. They are computed once, stored on disk up to a size limit, and memory-mapped.

A shard holds a few sequences and is written atomically, so that a run that was killed resumes after
the last shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.errors import InputError, RefusedError
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.row_slots import pad_blocks
from foretoken.models.stock.attention import RaggedTwin, SelectedPositions
from foretoken.storage import files
from foretoken.train.corpus import Example, Examples
from foretoken.train.pair import compute_fingerprint

SEQUENCES_PER_SHARD = 16
POSITIONS_PER_LOGITS = 256  # at which logits are computed at a time, to limit memory
MAX_OPEN_SHARDS = 256


class SequenceHiddenStates(NamedTuple):
    """A sequence of T tokens and the target's hidden states at each of them."""

    ids: Tensor  # [T]
    prompt: int  # number of prompt tokens; the output follows them
    taps: Tensor  # [T, W], bfloat16: the states at the taps, concatenated
    hidden: Tensor  # [T, H], bfloat16: the inputs of the output layer
    log_sum_exp: Tensor  # [T]: over all logits


class HiddenStateDataset:
    """Training sequences with the target's hidden states, stored in a folder of limited size.

    Args:
        folder: The folder for the shards.
        target: The target.
        taps: Layers whose inputs are stored.
        max_bytes: Maximum size of all shards together.
        bfloat16: Compute with bfloat16 autocast.
    """

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel,
        taps: tuple[int, ...],
        max_bytes: int,
        *,
        bfloat16: bool = False,
    ) -> None:
        self.folder, self.target, self.taps, self.max_bytes = folder, target, taps, max_bytes
        self.bfloat16 = bfloat16
        self.texts: list[Example] = []

    def compute_missing(
        self, examples: Examples, report: Callable[[int], None]
    ) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Compute the hidden states that are not stored yet, for as many sequences as fit into
        `max_bytes`. `report` is called with the number of sequences that are done. Returns two
        dicts from sequence number to token ids: the training and the held-out sequences. Raises
        InputError if a dict is empty, or if the folder holds hidden states of other data."""
        examples_and_flags = [*_interleave(examples.train, examples.held_out)]
        ids = [[*map(int, (*x.prompt, *x.reference))] for x, _ in examples_and_flags]
        count = self._count_fitting(ids)
        self.prompts = [len(x.prompt) for x, _ in examples_and_flags]
        self.ids = ids
        self.folder.mkdir(parents=True, exist_ok=True)
        self._require_same_data(examples.digest)
        forward = RaggedTwin(self.target, taps=(*self.taps, FINAL_TAP))
        for first in range(0, count, SEQUENCES_PER_SHARD):
            if not self._get_shard_file(first).exists():
                content = self._compute_shard(
                    forward, ids[first : min(first + SEQUENCES_PER_SHARD, count)]
                )
                files.write_atomically(self._get_shard_file(first), save(content))
            report(min(first + SEQUENCES_PER_SHARD, count))
        split = {True: dict[int, list[int]](), False: dict[int, list[int]]()}
        for n in range(count):
            split[examples_and_flags[n][1]][n] = ids[n]
        if not split[False] or not split[True]:
            raise InputError(
                f"there are {len(split[False])} sequences for training and {len(split[True])} held "
                "out; give more data, or more room for states (--states)"
            )
        return split[False], split[True]

    def _count_fitting(self, ids: list[list[int]]) -> int:
        """Return the number of sequences whose hidden states fit into `max_bytes`."""
        config = self.target.config.get_text_config(decoder=True)
        bytes_per_token = 2 * config.hidden_size * (len(self.taps) + 1) + 4
        total, count = 0, 0
        while (
            count < len(ids)
            and (total := total + bytes_per_token * len(ids[count])) <= self.max_bytes
        ):
            count += 1
        return count

    def _require_same_data(self, data: str) -> None:
        """Raise InputError if the folder holds states of another target or of other data."""
        facts = {"target": compute_fingerprint(self.target), "data": data}
        facts |= {"taps": list(self.taps), "bytes": self.max_bytes}
        file = self.folder / "states.json"
        if not file.exists():
            files.write_atomically(file, json.dumps(facts).encode())
        if files.read_own_json(file) != facts:
            raise InputError(
                f"{self.folder} holds states of another target, of other data or for another size "
                "of --states; give the same options, or another --out"
            )

    def _get_shard_file(self, n: int) -> Path:
        return self.folder / f"{n // SEQUENCES_PER_SHARD:06d}.safetensors"

    @torch.no_grad()
    def _compute_shard(self, forward: RaggedTwin, sequences: list[list[int]]) -> dict[str, Tensor]:
        states: dict[int, Tensor] = {}
        ids = pad_blocks(sequences, self.target.device)
        head: Any = self.target.get_output_embeddings()
        last = torch.tensor([i * ids.shape[1] + len(x) - 1 for i, x in enumerate(sequences)])
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16)
        with autocast, forward(None, SelectedPositions(last), states) as model:
            logits = model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
            hidden = states[FINAL_TAP].flatten(0, 1)
            self._require_plain_logits(logits, hidden[last] @ head.weight.T)
            chunks = [
                head(some).float().logsumexp(-1) for some in hidden.split(POSITIONS_PER_LOGITS)
            ]
        log_sum_exp = torch.cat(chunks).view(ids.shape)
        within = torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in sequences])[:, None]
        taps = torch.cat([states[j] for j in self.taps], -1)
        return {
            "taps": taps[within].bfloat16(),
            "hidden": states[FINAL_TAP][within].bfloat16(),
            "mass": log_sum_exp[within],
        }

    def _require_plain_logits(self, logits: Tensor, products: Tensor) -> None:
        """Raise RefusedError if the target's logits differ from the products of its hidden states
        and the weights of its output layer, because training computes logits as these products."""
        if not torch.allclose(logits, products, rtol=1e-2, atol=1e-2):
            raise RefusedError(
                f"{type(self.target).__name__} changes the products of its output layer, by a cap, "
                "a scale or a bias, which training does not support; give another target"
            )

    def load(self, n: int) -> SequenceHiddenStates:
        """Return sequence number `n` with its hidden states."""
        first = n // SEQUENCES_PER_SHARD * SEQUENCES_PER_SHARD
        start = sum(len(x) for x in self.ids[first:n])
        span = slice(start, start + len(self.ids[n]))
        taps, hidden, mass = (
            _open_shard(self._get_shard_file(n))[k] for k in ("taps", "hidden", "mass")
        )
        ids = torch.tensor(self.ids[n])
        return SequenceHiddenStates(ids, self.prompts[n], taps[span], hidden[span], mass[span])


@lru_cache(MAX_OPEN_SHARDS)
def _open_shard(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}


def _interleave(train: list[Example], held_out: list[Example]) -> list[tuple[Example, bool]]:
    """Return all examples, each with a flag that is True for held-out examples. Held-out examples
    are spread evenly, so that both kinds are among the first examples, whose states fit on disk."""
    ordered = [(i / max(1, len(train)), x, False) for i, x in enumerate(train)]
    ordered += [(i / max(1, len(held_out)), x, True) for i, x in enumerate(held_out)]
    return [(x, held) for _, x, held in sorted(ordered, key=lambda item: (item[0], item[2]))]
