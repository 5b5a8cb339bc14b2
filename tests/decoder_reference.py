"""Decoders in NumPy, operation by operation, of what was read of a network: what passes of the
native decoder equal to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from foretoken.kernels import reference
from foretoken.models.native.network import (
    CONVOLUTION,
    DELTA,
    SCAN,
    Attention,
    Decoder,
    DecoderLayer,
    Experts,
    GatedMLP,
    Linear,
    Norm,
    RecurrentMixer,
)
from foretoken.models.native.position_tables import RotaryTable


def whole(n: int) -> int:
    return n + -n % reference.VECTOR_LANES


class DecoderReference:
    """A decoder in float32."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.cached: list[Any] = []  # keys and values of layers

    def multiply(self, part: Linear, x: Any) -> Any:
        y = reference.multiply_floats(part.weight, x)
        return y if part.bias is None else y + part.bias

    def norm(self, part: Norm | None, x: Any) -> Any:
        if part is None:
            return x
        if part.weight.ndim == 2:  # a row for each head
            heads = [
                reference.normalize(x[:, h], weight, None, part.epsilon, part.centred)
                for h, weight in enumerate(part.weight)
            ]
            return np.stack(heads, 1)
        flat = x.reshape(-1, x.shape[-1])
        made = reference.normalize(flat, part.weight, part.bias, part.epsilon, part.centred)
        return made.reshape(x.shape)

    def turned(self, number: int | None, x: Any) -> Any:
        if number is None:
            return x
        rope = self.decoder.ropes[number]
        facts = {name: getattr(rope, name) for name in ("frequencies", "scale", "growth")}
        table = RotaryTable(facts)
        table.reserve(len(x))
        half = len(rope.frequencies)
        c, s = np.split(table.table[0, : len(x), None], 2, -1)
        pairs, rest = np.split(x, [2 * half], -1)
        shape = *x.shape[:-1], *((half, 2) if rope.interleaved else (2, half))
        at = -1 if rope.interleaved else -2
        a, b = np.moveaxis(pairs.reshape(shape), at, 0)
        both = reference.fma(a, c, -(b * s)), reference.fma(b, c, a * s)
        return np.concatenate([np.stack(both, at).reshape(pairs.shape), rest], -1)

    def norm_heads(self, part: Norm | None, x: Any) -> Any:
        """Those of each head, or of all together."""
        whole = part is not None and part.weight.ndim == 1 and part.weight.size > x.shape[-1]
        return self.norm(part, x.reshape(len(x), -1) if whole else x).reshape(x.shape)

    def attended(self, part: Attention, a: Any) -> Any:
        heads = [self.multiply(x, a) for x in part.projections]
        if part.clip:
            heads = [np.clip(x, np.float32(-part.clip), np.float32(part.clip)) for x in heads]
        norms, last = part.norms, part.norms_last
        shaped = [x.reshape(len(a), -1, part.width) for x in heads]
        q, *both = (
            shaped if last else [self.norm_heads(*x) for x in zip(norms, shaped, strict=False)]
        )
        q = self.turned(part.query_rope, q)
        q = (self.norm_heads(norms[0], q) if last else q) * np.float32(part.scale)
        if part.kv_source_layer is None:
            k, v = self.turned(part.rope, both[0]), both[1]
            k = self.norm_heads(norms[1], k) if last else k
        else:
            k, v = self.cached[part.kv_source_layer]
        self.cached.append((k, v))
        result, group = np.zeros_like(q), part.heads // part.key_heads
        for t in range(len(a)):
            for h in range(part.key_heads):
                some = slice(h * group, (h + 1) * group)
                own = (None if x is None else x[some] for x in (part.slopes, part.sinks))
                result[t, some] = reference.attention(
                    q[t, some], k[:, h], v[:, h], t, part.window, part.softcap, *own
                )
        made = result.reshape(len(a), -1)
        if part.gate is not None:
            made = made * reference.sigmoid(self.multiply(part.gate, a))
        return self.multiply(part.out, made)

    def attended_latents(self, part: Attention, a: Any) -> Any:
        c, n, rank = part.latent, len(a), whole(part.latent.rank)
        queries, both = (self.multiply(x, a) for x in part.projections)
        latents = np.zeros((n, rank), np.float32)
        latents[:, : c.rank] = self.norm(part.norms[1], both[:, : c.rank])
        key = self.turned(part.rope, both[:, None, rank:])[:, 0]
        k = np.concatenate([latents, key], 1)
        if c.queries is not None:
            queries = self.multiply(c.queries, self.norm(part.norms[0], queries[:, : c.query_rank]))
        heads = queries.reshape(n, part.heads, -1)
        inner = c.keys[0].weight.shape[1]
        absorbed = np.stack(
            [self.multiply(one, heads[:, h, :inner]) for h, one in enumerate(c.keys)], axis=1
        )
        turned = self.turned(part.query_rope, heads[:, :, inner:])
        q = np.concatenate([absorbed, turned], 2) * np.float32(part.scale)
        made = np.stack([reference.attention(q[t], k, k, t) for t in range(n)])
        results = [self.multiply(one, made[:, h, : c.rank]) for h, one in enumerate(c.values)]
        return self.multiply(part.out, np.concatenate(results, 1))

    def mixed(self, part: Any, a: Any) -> Any:
        if isinstance(part, RecurrentMixer):
            return self.recurred(part, a)
        return self.attended(part, a) if part.latent is None else self.attended_latents(part, a)

    def recurred(self, part: RecurrentMixer, a: Any) -> Any:
        n, values = len(a), part.heads * part.width
        x = np.concatenate([self.multiply(one, a) for one in part.projections], 1)
        if part.rule == CONVOLUTION:
            first, second, gates = np.split(x, 3, 1)
            mixed = reference.convolution(first * second, part.filters, part.filter_bias)
            return self.multiply(part.out, gates * mixed)
        inputs, gates = np.split(x, [part.filters.shape[1]], 1)
        mixed = reference.convolution(inputs, part.filters, part.filter_bias)
        mixed = mixed * reference.sigmoid(mixed)
        keys = whole(part.key_width) * part.key_heads
        q, k, v = np.split(mixed, [keys, 2 * keys], 1)
        q, k = (x.reshape(n, part.key_heads, -1) for x in (q, k))
        if part.rule == DELTA:
            q, k = (
                reference.normalize_length(q, part.key_width**-0.5),
                reference.normalize_length(k, 1.0),
            )
        q, k = (np.repeat(x, part.heads // part.key_heads, 1) for x in (q, k))
        v = v.reshape(n, part.heads, -1)
        steps = self.multiply(part.steps, a)
        dt = reference.softplus(steps[:, : whole(part.heads)] + part.step_bias)
        if part.rule == SCAN:
            beta = dt = np.clip(dt, np.float32(part.min_step), np.float32(part.max_step))
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
            return self.multiply(part.out, y * opened)
        size, made = values // part.groups, []
        for one, weight in zip(
            np.split(y, part.groups, 1), np.split(part.norm, part.groups), strict=True
        ):
            squares = np.zeros((n, reference.VECTOR_LANES), np.float32)
            for vector in np.moveaxis(reference.split_into_vectors(one), 1, 0):
                squares = reference.fma(vector, vector, squares)
            mean = reference.sum_lanes(squares) / np.float32(part.count) + np.float32(part.epsilon)
            made.append(one * (np.float32(1) / np.sqrt(mean).astype(np.float32))[:, None] * weight)
            assert one.shape[1] == size
        y = np.concatenate(made, 1)
        return self.multiply(part.out, y if part.gate_first else y * opened)

    def added(self, layer: DecoderLayer, norm: Norm | None, y: Any, x: Any) -> Any:
        y = y if norm is None else self.norm(norm, y)
        return x + y if layer.residual == 1 else reference.fma(y, np.float32(layer.residual), x)

    def widened(self, part: GatedMLP, a: Any) -> Any:
        inner = self.multiply(part.up, a)
        if part.gate is None:
            return self.multiply(part.down, reference.activate(part.activation, inner, part.curve))
        gate = reference.activate(part.activation, self.multiply(part.gate, a), part.curve)
        return self.multiply(part.down, gate * inner)

    def routed(self, part: Experts, a: Any, shared: Any) -> Any:
        rule, count = part.routing, len(part.each)
        logits = reference.multiply_floats(part.router.weight, a)
        own = logits[:, :count]
        masses = reference.exponential(own - own.max(-1, keepdims=True))
        scores = own
        if rule.sigmoids:
            masses = reference.sigmoid(own)
            scores = masses if part.added is None else masses + part.added[:count]
        if rule.groups > 1:
            each = scores.reshape(len(a), rule.groups, -1)
            best = np.sort(each, -1)
            order = np.argsort(-(best[..., -1] + best[..., -2]), 1, kind="stable")
            out = order[:, rule.chosen_groups :]
            each[np.arange(len(a))[:, None], out] = -np.inf
            scores = each.reshape(len(a), count)
        order = np.argsort(-scores, 1, kind="stable")[:, : rule.chosen]
        weights = np.take_along_axis(masses, order, 1)
        sums = np.zeros(len(a), np.float32)
        for column in (weights if rule.normalized else masses).T:
            sums = sums + column
        weights = weights / sums[:, None] * np.float32(rule.scale)
        made = np.stack([self.widened(one, a) for one in part.each])
        total = np.zeros_like(a)
        for j in range(rule.chosen):
            total = reference.fma(made[order[:, j], np.arange(len(a))], weights[:, j, None], total)
        if shared is None:
            return total
        gate = reference.sigmoid(logits[:, count:]) if part.shared_gate else np.float32(1)
        return reference.fma(shared, gate, total)

    def layer(self, layer: DecoderLayer, x: Any, inputs: Any) -> Any:
        first, after, second, last = layer.norms
        part, gated = layer.attention, layer.gated
        assert part is not None
        read = a = self.norm(first, x)
        if layer.parallel and second is not None:
            read = self.norm(second, x)
        x = self.added(layer, after, self.mixed(part, a), x)
        if layer.parallel_mixer is not None:
            x = x + self.recurred(layer.parallel_mixer, a)
        read = read if layer.parallel else self.norm(second, x)
        made = None if gated is None else self.widened(gated, read)
        if layer.experts is not None:
            made = self.routed(layer.experts, read, made)
        x = self.added(layer, last, made, x)
        if layer.input is not None:
            assert gated is not None
            gate = self.multiply(layer.input.gate, x)
            opened = reference.activate(gated.activation, gate, gated.curve)
            own = np.split(inputs, len(self.decoder.layers), 1)
            part = own[layer.input.at // own[0].shape[1]]
            x = self.added(
                layer, layer.input.norm, self.multiply(layer.input.out, opened * part), x
            )
        return x * np.float32(layer.factor)

    def inputs(self, tokens: list[int], x: Any) -> Any:
        c = self.decoder.inputs
        if c is None:
            return None
        made = (self.multiply(c.product, x) * np.float32(c.product_factor)).reshape(-1, c.width)
        made = self.norm(c.norm, made).reshape(len(x), -1)
        factor = np.full_like(made, c.table_factor)
        return reference.fma(c.table.weight[tokens], factor, made) * np.float32(c.sum_factor)

    def forward(self, tokens: list[int]) -> Any:
        x, positions = self.decoder.embeddings[tokens].detach().numpy(), self.decoder.positions
        x = self.norm(
            self.decoder.embedding_norm, x if positions is None else x + positions.weight[: len(x)]
        )
        inputs = self.inputs(tokens, x)
        for layer in self.decoder.layers:
            x = self.layer(layer, x, inputs)
        assert self.decoder.head is not None
        logits = self.multiply(self.decoder.head, self.norm(self.decoder.norm, x))
        logits, cap = logits * np.float32(self.decoder.scale), np.float32(self.decoder.logit_cap)
        return cap * reference.tangent(logits / cap) if cap else logits
