"""Passes of the native decoder over a sequence in pieces, which must change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from foretoken.kernels import library
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel
from foretoken.models.stock.small_copy import randomize_weights


def stirred(kind: Any, config: Any) -> PreTrainedModel:
    """A random network none of whose parts is what it is in a new one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = kind(config).eval()
        randomize_weights(network)
    return network.requires_grad_(False)


def piecewise(model: NativeModel, sequence: list[int], sizes: tuple[int, ...]) -> Any:
    """The logits of a sequence that is scored in pieces of these sizes beside another row, with
    draft tokens that are taken back."""
    model.permute([])
    model.start([sequence[:1], sequence[::-1][:90]])
    logits, n, step = np.zeros((len(sequence), model.vocab_size), np.float32), 1, 0
    while n < len(sequence):
        block = sequence[n : n + sizes[step % len(sizes)]]
        draft = [1 + i for i in range(step % 3)]
        step += 1
        one = model.score([[*block, *draft], [5] * (step % 3)], [len(block) + len(draft), 0])[0]
        logits[n : n + len(block)] = one[: len(block)]
        n += len(block)
        model.set_lengths([n, model.lengths[1]])
    return logits[1:]


def require_same_bits(
    network: PreTrainedModel,
    sequence: list[int],
    monkeypatch: pytest.MonkeyPatch,
    pieces: Callable[[NativeModel, list[int], tuple[int, ...]], Any] = piecewise,
) -> None:
    """Logits are those of one pass by one thread of portable code, on every instruction set, by one
    to three threads and in whatever pieces."""

    def logits(instructions: str, threads: int, sizes: tuple[int, ...]) -> Any:
        monkeypatch.setenv(library.CHOICE, instructions)
        monkeypatch.setattr("foretoken.models.native.passes.thread_count", lambda: threads)
        made = NativeConversion(None, "float32", lambda: network).model()
        cut = piecewise if sizes == whole else pieces
        return cut(made, sequence, sizes).view(np.int32)

    whole = (len(sequence),)
    expected = logits("portable", 1, whole)
    for instructions in library.instruction_sets():
        for threads, sizes in ((1, (1,)), (2, (1, 3)), (3, (9, 70, 2))):
            same = logits(instructions, threads, sizes) == expected
            assert same.all(), (instructions, threads, np.argwhere(~same)[:3])
