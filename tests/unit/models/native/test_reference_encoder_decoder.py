"""Passes of an encoder-decoder equal the reference to the bit: a T5 of two layers each, computed
operation by operation in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tiny
from foretoken.kernels import library, reference
from foretoken.models.native.conversion import NativeConversion

# the reference takes seconds
pytestmark = [pytest.mark.cpu_only, pytest.mark.prove, pytest.mark.usefixtures("compiled")]
SOURCE = [(5 * i * i + 3 * i) % 60 + 3 for i in range(150)]
TEXT = [(7 * i * i + 3 * i) % 60 + 3 for i in range(40)]


def numbers(weight: Any) -> Any:
    return weight.detach().float().numpy()


class Reference:
    """A T5 in float32."""

    def __init__(self, network: Any) -> None:
        self.network, self.config = network, network.config

    def multiply(self, part: Any, x: Any) -> Any:
        return reference.multiply_floats(numbers(part.weight), x)

    def norm(self, part: Any, x: Any) -> Any:
        return reference.normalize(x, numbers(part.weight), None, part.variance_epsilon, False)

    def heads(self, part: Any, x: Any) -> Any:
        return self.multiply(part, x).reshape(len(x), self.config.num_heads, -1)

    def biases(self, stack: Any, n: int) -> Any:
        """`[heads, queries, keys]`."""
        part = stack.block[0].layer[0].SelfAttention
        return numbers(part.compute_bias(n, n)[0])

    def attend(self, part: Any, x: Any, read: Any, biases: Any, *, whole: bool) -> Any:
        q, (k, v) = self.heads(part.q, x), (self.heads(one, read) for one in (part.k, part.v))
        result = np.zeros_like(q)
        for t in range(len(x)):
            for h in range(self.config.num_heads):
                own = None if biases is None else biases[h, t, None]
                result[t, h] = reference.attention(
                    q[t, h, None], k[:, h], v[:, h], t, biases=own, attend_to_all=whole
                )[0]
        return self.multiply(part.o, result.reshape(len(x), -1))

    def stack(self, stack: Any, tokens: list[int], source: Any) -> Any:
        x = numbers(self.network.shared.weight)[tokens]
        biases = self.biases(stack, len(x))
        for block in stack.block:
            own, *cross, last = block.layer
            a = self.norm(own.layer_norm, x)
            x = x + self.attend(own.SelfAttention, a, a, biases, whole=source is None)
            if cross:
                a = self.norm(cross[0].layer_norm, x)
                x = x + self.attend(cross[0].EncDecAttention, a, source, None, whole=True)
            a = self.norm(last.layer_norm, x)
            inner = reference.activate("relu", self.multiply(last.DenseReluDense.wi, a), (0, 0, 0))
            x = x + self.multiply(last.DenseReluDense.wo, inner)
        return self.norm(stack.final_layer_norm, x)

    def forward(self, source: list[int], tokens: list[int]) -> Any:
        states = self.stack(self.network.encoder, source, None)
        x = self.stack(self.network.decoder, tokens, states)
        return self.multiply(self.network.lm_head, x) * np.float32(self.config.d_model**-0.5)


def test_passes_are_as_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny.t5(64)
    with torch.inference_mode():
        expected = Reference(network).forward(SOURCE, TEXT)
    for instructions in library.list_instruction_sets():
        monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, instructions)
        model = NativeConversion(None, "float32", lambda: network).load_model()
        model.start([[]], [SOURCE])
        made = [model.score([TEXT[a:b]], [b - a])[0].numpy().copy() for a, b in ((0, 9), (9, 40))]
        same = np.concatenate(made).view(np.int32) == expected.view(np.int32)
        assert same.all(), (instructions, np.argwhere(~same)[:3])
