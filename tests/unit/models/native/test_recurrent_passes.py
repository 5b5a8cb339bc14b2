"""Passes of models with recurrences are the same to the bit on every instruction set, however a
sequence is cut into passes, wherever rows go back, and whatever other rows there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hybrids
from foretoken.models.native.model import NativeModel
from native_passes import require_same_bits

pytestmark = [pytest.mark.cpu_only, pytest.mark.prove, pytest.mark.usefixtures("compiled")]
FAMILIES = ["Qwen3_5ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM"]
FAMILIES += ["FalconH1ForCausalLM"]
TEXT = [(7 * i * i + 3 * i) % 60 + 3 for i in range(120)]


def scores(model: NativeModel, sequence: list[int]) -> Any:
    """The logits of a sequence that is scored in pieces, with draft tokens that are taken back, as
    are some of its own, beside a row of other tokens."""
    model.permute([])
    model.start([sequence[:1], sequence[::-1][:90]])
    made, n, step = np.zeros((len(sequence), model.vocab_size), np.float32), 1, 0
    while n < len(sequence):
        right, wrong, back = ((1, 3, 0), (4, 0, 0), (9, 25, 8), (0, 1, 20), (70, 2, 1))[step % 5]
        step += 1
        n = max(1, n - back)
        model.set_lengths([n, model.lengths[1]])
        block = sequence[n : n + right]
        draft = [1 + i % 60 for i in range(wrong)]
        logits = model.score([[*block, *draft], [5] * (step % 3)], [len(block) + wrong, 0])[0]
        made[n : n + len(block)] = logits[: len(block)]
        n += len(block)
        model.set_lengths([n, model.lengths[1]])
    return made[1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_passes_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = hybrids.random(name, 0).float()
    require_same_bits(network, TEXT, monkeypatch, lambda model, text, _: scores(model, text))
