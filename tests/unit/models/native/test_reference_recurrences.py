"""Passes of models with recurrences equal the reference to the bit, computed operation by operation
in NumPy of what was read of the network: on every instruction set, however a sequence is cut into
passes, wherever rows go back, and whatever other rows there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hybrids
from foretoken.kernels import library, reference
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel
from foretoken.models.native.network import (
    CONVOLUTION,
    DELTA,
    SCAN,
    Attention,
    Decoder,
    DecoderLayer,
    RecurrentMixer,
)
from foretoken.models.native.reading import NetworkReader
from foretoken.models.native.turns import Turns

# the reference takes seconds
pytestmark = [pytest.mark.cpu_only, pytest.mark.prove, pytest.mark.usefixtures("compiled")]
FAMILIES = ["Qwen3_5ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM"]
TEXT = [(7 * i * i + 3 * i) % 60 + 3 for i in range(120)]


def multiply(part: Any, x: Any) -> Any:
    y = reference.float_product(part.weight, x)
    return y if part.bias is None else y + part.bias


def whole(n: int) -> int:
    return n + -n % reference.LANES


class Reference:
    """A decoder in float32, of root-mean-square norms and gated MLPs."""

    def __init__(self, decoder: Decoder, embeddings: Any) -> None:
        self.decoder, self.embeddings = decoder, embeddings

    def norm(self, part: Any, x: Any) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        made = reference.normalize(flat, part.weight, part.bias, part.epsilon, part.centred)
        return made.reshape(x.shape)

    def turned(self, number: int | None, x: Any) -> Any:
        if number is None:
            return x
        rope = self.decoder.ropes[number]
        facts = {name: getattr(rope, name) for name in ("frequencies", "scale", "growth")}
        table = Turns(facts)
        table.reserve(len(x))
        half = len(rope.frequencies)
        c, s = np.split(table.table[0, : len(x), None], 2, -1)
        a, b, rest = np.split(x, [half, 2 * half], -1)
        first, second = reference.fma(a, c, -(b * s)), reference.fma(b, c, a * s)
        return np.concatenate([first, second, rest], -1)

    def attended(self, part: Attention, a: Any) -> Any:
        q, k, v = (multiply(x, a).reshape(len(a), -1, part.width) for x in part.reads)
        if part.norms[0] is not None:
            q, k = self.norm(part.norms[0], q), self.norm(part.norms[1], k)
        q, k = self.turned(part.query_rope, q) * np.float32(part.scale), self.turned(part.rope, k)
        result, group = np.zeros_like(q), part.heads // part.key_heads
        for t in range(len(a)):
            for h in range(part.key_heads):
                some = slice(h * group, (h + 1) * group)
                result[t, some] = reference.attention(q[t, some], k[:, h], v[:, h], t)
        made = result.reshape(len(a), -1)
        if part.gate is not None:
            made = made * reference.sigmoid(multiply(part.gate, a))
        return multiply(part.out, made)

    def recurred(self, part: RecurrentMixer, a: Any) -> Any:
        n, values = len(a), part.heads * part.width
        x = np.concatenate([multiply(one, a) for one in part.reads], 1)
        if part.rule == CONVOLUTION:
            first, second, gates = np.split(x, 3, 1)
            mixed = reference.convolution(first * second, part.filters, part.filter_bias)
            return multiply(part.out, gates * mixed)
        inputs, gates = np.split(x, [part.filters.shape[1]], 1)
        mixed = reference.convolution(inputs, part.filters, part.filter_bias)
        mixed = mixed * reference.sigmoid(mixed)
        keys = whole(part.key_width) * part.key_heads
        q, k, v = np.split(mixed, [keys, 2 * keys], 1)
        q, k = (x.reshape(n, part.key_heads, -1) for x in (q, k))
        if part.rule == DELTA:
            q, k = reference.unit(q, part.key_width**-0.5), reference.unit(k, 1.0)
        q, k = (np.repeat(x, part.heads // part.key_heads, 1) for x in (q, k))
        v = v.reshape(n, part.heads, -1)
        steps = multiply(part.steps, a)
        dt = reference.softplus(steps[:, : whole(part.heads)] + part.step_bias)
        if part.rule == SCAN:
            beta = dt = np.clip(dt, np.float32(part.least_step), np.float32(part.most_step))
        else:
            beta = reference.sigmoid(steps[:, whole(part.heads) :]) * np.float32(part.beta_scale)
        decay = reference.exponential(part.decay * dt)
        decay, beta = decay[:, : part.heads], beta[:, : part.heads]
        y = reference.recurrence(q, k, v, decay, beta, delta=part.rule == DELTA)
        if part.skip is not None:
            y = reference.fma(part.skip[: part.heads, None], v, y)
        opened = gates * reference.sigmoid(gates)
        y = y.reshape(n, values)
        y = y * opened if part.gate_first else y
        size, made = values // part.groups, []
        for one, weight in zip(
            np.split(y, part.groups, 1), np.split(part.norm, part.groups), strict=True
        ):
            squares = np.zeros((n, reference.LANES), np.float32)
            for vector in np.moveaxis(reference.vectors(one), 1, 0):
                squares = reference.fma(vector, vector, squares)
            mean = reference.lane_sum(squares) / np.float32(part.count) + np.float32(part.epsilon)
            made.append(one * (np.float32(1) / np.sqrt(mean).astype(np.float32))[:, None] * weight)
            assert one.shape[1] == size
        y = np.concatenate(made, 1)
        return multiply(part.out, y if part.gate_first else y * opened)

    def layer(self, layer: DecoderLayer, x: Any) -> Any:
        first, _, second, _ = layer.norms
        part, gated = layer.attention, layer.gated
        assert part is not None
        assert gated is not None
        a, factor = self.norm(first, x), np.float32(layer.residual)
        y = self.recurred(part, a) if isinstance(part, RecurrentMixer) else self.attended(part, a)
        x = x + y if layer.residual == 1 else reference.fma(y, factor, x)
        a = self.norm(second, x)
        inner = reference.activated(gated.activation, multiply(gated.gate, a), (0, 0, 0))
        y = multiply(gated.down, inner * multiply(gated.up, a))
        return x + y if layer.residual == 1 else reference.fma(y, factor, x)

    def forward(self, tokens: list[int]) -> Any:
        x = self.embeddings[tokens]
        for layer in self.decoder.layers:
            x = self.layer(layer, x)
        logits = multiply(self.decoder.head, self.norm(self.decoder.norm, x))
        return logits * np.float32(self.decoder.scale)


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
def test_passes_are_as_defined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = hybrids.random(name, 0).float()
    with torch.inference_mode():
        reader = NetworkReader(network)
        decoder = reader.decoder()
        expected = Reference(decoder, reader.embeddings().numpy()).forward(TEXT)[1:]
    assert np.isfinite(expected).all()
    for instructions in library.instruction_sets():
        monkeypatch.setenv(library.CHOICE, instructions)
        for threads in (1, 2, 3):
            monkeypatch.setattr("foretoken.models.native.passes.thread_count", lambda n=threads: n)
            made = scores(NativeConversion(None, "float32", lambda: network).model(), TEXT)
            same = made.view(np.int32) == expected.view(np.int32)
            assert same.all(), (instructions, threads, np.argwhere(~same)[:3])
