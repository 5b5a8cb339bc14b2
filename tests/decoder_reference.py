"""Decoders in NumPy, operation by operation, of what was read of a network: what passes of the
native decoder equal to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

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
    Norm,
    RecurrentMixer,
)
from foretoken.models.native.reading import NetworkReader
from foretoken.models.native.turns import Turns
from foretoken.models.stock.small_copy import randomize_weights


def multiply(part: Any, x: Any) -> Any:
    y = reference.float_product(part.weight, x)
    return y if part.bias is None else y + part.bias


def whole(n: int) -> int:
    return n + -n % reference.LANES


class DecoderReference:
    """A decoder in float32, of root-mean-square norms and gated MLPs."""

    def __init__(self, decoder: Decoder, embeddings: Any) -> None:
        self.decoder, self.embeddings = decoder, embeddings
        self.cached: list[Any] = []  # keys and values of layers

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
        pairs, rest = np.split(x, [2 * half], -1)
        shape = *x.shape[:-1], *((half, 2) if rope.interleaved else (2, half))
        at = -1 if rope.interleaved else -2
        a, b = np.moveaxis(pairs.reshape(shape), at, 0)
        both = reference.fma(a, c, -(b * s)), reference.fma(b, c, a * s)
        return np.concatenate([np.stack(both, at).reshape(pairs.shape), rest], -1)

    def attended(self, part: Attention, a: Any) -> Any:
        heads = [multiply(x, a).reshape(len(a), -1, part.width) for x in part.reads]
        pairs = zip(part.norms, heads, strict=False)
        q, *both = [x if norm is None else self.norm(norm, x) for norm, x in pairs]
        q = self.turned(part.query_rope, q) * np.float32(part.scale)
        if part.lender is None:
            k, v = self.turned(part.rope, both[0]), both[1]
        else:
            k, v = self.cached[part.lender]
        self.cached.append((k, v))
        result, group = np.zeros_like(q), part.heads // part.key_heads
        for t in range(len(a)):
            for h in range(part.key_heads):
                some = slice(h * group, (h + 1) * group)
                result[t, some] = reference.attention(q[t, some], k[:, h], v[:, h], t, part.window)
        made = result.reshape(len(a), -1)
        if part.gate is not None:
            made = made * reference.sigmoid(multiply(part.gate, a))
        return multiply(part.out, made)

    def attended_latents(self, part: Attention, a: Any) -> Any:
        c, n, rank = part.latent, len(a), whole(part.latent.rank)
        queries, both = (multiply(x, a) for x in part.reads)
        latents = np.zeros((n, rank), np.float32)
        latents[:, : c.rank] = self.norm(part.norms[1], both[:, : c.rank])
        key = self.turned(part.rope, both[:, None, rank:])[:, 0]
        k = np.concatenate([latents, key], 1)
        if c.queries is not None:
            queries = multiply(c.queries, self.norm(part.norms[0], queries[:, : c.query_rank]))
        heads = queries.reshape(n, part.heads, -1)
        inner = c.keys[0].weight.shape[1]
        absorbed = np.stack(
            [multiply(one, heads[:, h, :inner]) for h, one in enumerate(c.keys)], axis=1
        )
        turned = self.turned(part.query_rope, heads[:, :, inner:])
        q = np.concatenate([absorbed, turned], 2) * np.float32(part.scale)
        made = np.stack([reference.attention(q[t], k, k, t) for t in range(n)])
        results = [multiply(one, made[:, h, : c.rank]) for h, one in enumerate(c.values)]
        return multiply(part.out, np.concatenate(results, 1))

    def mixed(self, part: Any, a: Any) -> Any:
        if isinstance(part, RecurrentMixer):
            return self.recurred(part, a)
        return self.attended(part, a) if part.latent is None else self.attended_latents(part, a)

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
        if part.norm is None:
            return multiply(part.out, y * opened)
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

    def added(self, layer: DecoderLayer, norm: Norm | None, y: Any, x: Any) -> Any:
        y = y if norm is None else self.norm(norm, y)
        return x + y if layer.residual == 1 else reference.fma(y, np.float32(layer.residual), x)

    def layer(self, layer: DecoderLayer, x: Any, inputs: Any) -> Any:
        first, after, second, last = layer.norms
        part, gated = layer.attention, layer.gated
        assert part is not None
        assert gated is not None
        a = self.norm(first, x)
        x = self.added(layer, after, self.mixed(part, a), x)
        if layer.beside is not None:
            x = x + self.recurred(layer.beside, a)
        a = self.norm(second, x)
        inner = reference.activated(gated.activation, multiply(gated.gate, a), (0, 0, 0))
        x = self.added(layer, last, multiply(gated.down, inner * multiply(gated.up, a)), x)
        if layer.input is not None:
            opened = reference.activated(gated.activation, multiply(layer.input.gate, x), (0, 0, 0))
            own = np.split(inputs, len(self.decoder.layers), 1)
            part = own[layer.input.at // own[0].shape[1]]
            x = self.added(layer, layer.input.norm, multiply(layer.input.out, opened * part), x)
        return x * np.float32(layer.factor)

    def inputs(self, tokens: list[int], x: Any) -> Any:
        c = self.decoder.inputs
        if c is None:
            return None
        made = (multiply(c.product, x) * np.float32(c.product_factor)).reshape(-1, c.width)
        made = self.norm(c.norm, made).reshape(len(x), -1)
        factor = np.full_like(made, c.table_factor)
        return reference.fma(c.table.weight[tokens], factor, made) * np.float32(c.sum_factor)

    def forward(self, tokens: list[int]) -> Any:
        x = self.embeddings[tokens]
        inputs = self.inputs(tokens, x)
        for layer in self.decoder.layers:
            x = self.layer(layer, x, inputs)
        logits = multiply(self.decoder.head, self.norm(self.decoder.norm, x))
        return logits * np.float32(self.decoder.scale)


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


def require_as_defined(
    network: PreTrainedModel, sequence: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes equal the reference to the bit, on every instruction set, by one to three threads."""
    reader = NetworkReader(network)
    decoder = reader.decoder()
    expected = DecoderReference(decoder, reader.embeddings().numpy()).forward(sequence)[1:]
    assert np.isfinite(expected).all()
    for instructions in library.instruction_sets():
        monkeypatch.setenv(library.CHOICE, instructions)
        for threads, sizes in ((1, (1,)), (2, (1, 3)), (3, (9, 70, 2))):
            monkeypatch.setattr("foretoken.models.native.passes.thread_count", lambda n=threads: n)
            model = NativeConversion(None, "float32", lambda: network).model()
            logits = piecewise(model, sequence, sizes)
            same = logits.view(np.int32) == expected.view(np.int32)
            assert same.all(), (instructions, threads, np.argwhere(~same)[:3])
