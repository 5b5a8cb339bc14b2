"""States of a frozen target that a draft in training reads, for each token of its texts: computed
once, kept on disk within a stated size, and mapped from there.

A shard is a few texts, written whole or not at all, so that a run which was killed goes on behind
the last one.
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

SEQUENCES_PER_SHARD = 16  # texts
POSITIONS_PER_LOGITS = 256  # whose logits are made at a time: of all, they would fill the memory
MAX_OPEN_SHARDS = 256  # shards that are kept open


class SequenceHiddenStates(NamedTuple):
    """A text, and what is read of the target at its tokens."""

    ids: Tensor  # [T]
    prompt: int  # tokens of its prompt, behind which it is the target's own
    taps: Tensor  # [T, W], bfloat16: the states at the taps
    hidden: Tensor  # [T, H], bfloat16: what the output layer reads
    log_sum_exp: Tensor  # [T]: the logarithm of the sum of the exponentials of all logits


class HiddenStateDataset:
    """Texts in `folder`, at most `max_bytes` bytes of them; bfloat16: multiply in it."""

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
        """Compute what is missing of the texts that there is room for. Returns those to learn from
        and those held out, by their numbers. Raises InputError where there is room for none."""
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
                f"there are {len(split[False])} texts to learn from and {len(split[True])} held "
                "out; give more text, or more room for states"
            )
        return split[False], split[True]

    def _count_fitting(self, ids: list[list[int]]) -> int:
        """Count the texts whose states fit."""
        config = self.target.config.get_text_config(decoder=True)
        bytes_per_token = 2 * config.hidden_size * (len(self.taps) + 1) + 4  # bytes of a token
        total, count = 0, 0
        while (
            count < len(ids)
            and (total := total + bytes_per_token * len(ids[count])) <= self.max_bytes
        ):
            count += 1
        return count

    def _require_same_data(self, data: str) -> None:
        """InputError where the folder holds states of another target or of other texts."""
        facts = {"target": compute_fingerprint(self.target), "data": data}
        facts |= {"taps": list(self.taps), "bytes": self.max_bytes}
        file = self.folder / "states.json"
        if not file.exists():
            files.write_atomically(file, json.dumps(facts).encode())
        if files.read_own_json(file) != facts:
            raise InputError(
                f"{self.folder} holds states of another target, of other texts or for another size "
                "of --states; give these, or another --out"
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
        """RefusedError where logits are no products of the output layer's rows: a draft learns
        these."""
        if not torch.allclose(logits, products, rtol=1e-2, atol=1e-2):
            raise RefusedError(
                f"{type(self.target).__name__} changes the products of its output layer, by a cap, "
                "a scale or a bias, which training does not follow; give another target"
            )

    def load(self, n: int) -> SequenceHiddenStates:
        """Return text number n."""
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
    """All texts, those held out among the others in their proportion, so that any beginning has
    some of both; and which they are."""
    ordered = [(i / max(1, len(train)), x, False) for i, x in enumerate(train)]
    ordered += [(i / max(1, len(held_out)), x, True) for i, x in enumerate(held_out)]
    return [(x, held) for _, x, held in sorted(ordered, key=lambda item: (item[0], item[2]))]
