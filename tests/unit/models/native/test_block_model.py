"""Block drafts on the native decoder: their results are those of the reference to the bit, and
those of torch up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import blocks
import tiny
from blocks import native_draft
from foretoken import Engine, SamplingParams, Speculator
from foretoken.errors import RefusedError
from foretoken.kernels import library, reference
from foretoken.models.native import linear, passes
from foretoken.models.native.block_model import NativeBlockModel
from foretoken.models.native.position_tables import RotaryTable
from foretoken.models.stock.dflash import BlocksDraft
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey

pytestmark = pytest.mark.native

V, H = 40, 32
TARGET = tiny.llama(V, context=256, seed=5)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
WINDOWS |= {**blocks.LAYERS, "sliding_window": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "dflash": blocks.ZLAB,
    "window": {**blocks.ZLAB, **WINDOWS},
    "causal": {**blocks.ZLAB, "dflash_config": {**blocks.ZLAB["dflash_config"], "causal": True}},
    "causal window": blocks.speculators(transformer_layer_config=WINDOWS),
    "window of the block": blocks.speculators(
        transformer_layer_config=WINDOWS, sliding_window_non_causal=True
    ),
    "vanilla": blocks.DSPARK,
    "gated": {**blocks.DSPARK, "markov_head_type": "gated"},
    "rnn": {**blocks.DSPARK, "markov_head_type": "rnn"},
    "confidence": blocks.CONFIDENT,
    "dflash2": blocks.DFLASH2,
    "domino": blocks.DOMINO,
}
WIDE = {"max_position_embeddings": 256}
PROMPTS = [[3, 7, 1, 9], [5, 2], [2, 8, 8, 30, 31, 4, 6, 9, 9, 1]]
CLOSE = 1e-4  # float32


def states(config: dict[str, Any], *counts: int) -> list[Tensor]:
    """Of the target's, for each row."""
    taps = len(blocks.parse_block_config(config).layout.taps)
    random = torch.Generator().manual_seed(3)
    return [torch.randn(n, taps * H, generator=random) for n in counts]


def array(x: Any) -> Any:
    return x.detach().numpy()


class Reference:
    """One row's block, by the definition of the arithmetic."""

    def __init__(self, draft: BlocksDraft, rope: dict[str, Any]) -> None:
        self.network, self.head, self.table = draft.network, draft.head, RotaryTable(rope)
        self.layout, self.config = draft.network.layout, draft.network.config
        self.embedding = draft.embedding
        self.table.reserve(256)

    def multiply(self, part: Any, x: Any) -> Any:
        return reference.multiply_floats(array(part.weight), x)

    def norm(self, part: Any, x: Any) -> Any:
        flat, weight = x.reshape(-1, x.shape[-1]), array(part.weight)
        made = reference.normalize(flat, weight, None, part.variance_epsilon, False)
        return made.reshape(x.shape)

    def heads(self, part: Any, name: str, x: Any, first: int) -> Any:
        """Queries, keys or values `[n, heads, D]` of tokens from position `first` on."""
        made = self.multiply(getattr(part, f"{name}_proj"), x).reshape(len(x), -1, part.head_dim)
        if name == "v":
            return made
        made, half = self.norm(getattr(part, f"{name}_norm"), made), part.head_dim // 2
        turns = self.table.table[0, first : first + len(x), None]
        c, s, a, b = turns[..., :half], turns[..., half:], made[..., :half], made[..., half:]
        return np.concatenate([reference.fma(a, c, -(b * s)), reference.fma(b, c, a * s)], -1)

    def attend(self, layer: Any, kind: str, x: Any, context: Any) -> Any:
        part, first, layout = layer.self_attn, len(context), self.layout
        q = self.heads(part, "q", x, first) * np.float32(part.scaling)
        k, v = (
            np.concatenate([self.heads(part, n, context, 0), self.heads(part, n, x, first)])
            for n in "kv"
        )
        window = (self.config.sliding_window or 0) if kind == "sliding_attention" else 0
        causal = layout.causal or (window > 0 and layout.causal_window)
        group, result = part.num_key_value_groups, np.zeros_like(q)
        for t in range(len(x)):
            start = first + t if layout.window_per_position else first
            for h in range(k.shape[1]):
                some = slice(h * group, (h + 1) * group)
                result[t, some] = reference.attention(
                    q[t, some], k[:, h], v[:, h], first + t, window and window + 1,
                    attend_to_all=not causal, window_at=start,
                )  # fmt: skip
        return self.multiply(part.o_proj, result.reshape(len(x), -1))

    def mlp(self, part: Any, x: Any) -> Any:
        inner = reference.activate("silu", self.multiply(part.gate_proj, x), (0, 0, 0))
        return self.multiply(part.down_proj, inner * self.multiply(part.up_proj, x))

    def convolved(self, conv: Any, x: Any, sublayer: Any) -> Any:
        if conv is None:
            return sublayer(x)
        base = array(conv.base_kernel)
        deltas = self.multiply(conv.kernel_projection, x).reshape(len(x), 2, base.shape[1], -1)
        x = sublayer(reference.apply_block_convolution(x, base[0], deltas[:, 0]))
        return reference.apply_block_convolution(x, base[1], deltas[:, 1])

    def predict(self, given: Tensor, tokens: list[int]) -> Any:
        """The logits of the draft tokens of a block."""
        network = self.network
        context = self.norm(network.hidden_norm, self.multiply(network.fc, array(given)))
        x = array(self.embedding(torch.tensor(tokens))) * np.float32(network.embedding_scale)
        for layer, kind in zip(network.layers, self.config.layer_types or [], strict=True):
            convs = [getattr(layer, f"{name}_conv", None) for name in ("attention", "mlp")]
            inside = self.norm(layer.input_layernorm, x)
            x = x + self.convolved(
                convs[0], inside, lambda y, own=layer, kind=kind: self.attend(own, kind, y, context)
            )
            inside = self.norm(layer.post_attention_layernorm, x)
            x = x + self.convolved(convs[1], inside, lambda y, own=layer: self.mlp(own.mlp, y))
        skip = int(not self.layout.sample_from_anchor)
        return self.multiply(self.head, self.norm(network.norm, x)[skip:])


@pytest.mark.daily("dflash", "dflash2", "causal window", "window of the block")
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_blocks_are_as_defined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every instruction set, with any number of threads and beside other rows."""
    config = {**CONFIGS[name], **WIDE}
    if "transformer_layer_config" in config:
        config["transformer_layer_config"] = {**config["transformer_layer_config"], **WIDE}
    given, expected = states(config, 135, 3, 1), list[Any]()
    counts, anchors, mask = [4, 3, 1], [5, 6, 7], 1
    for instructions in library.list_instruction_sets():
        monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, instructions)
        for threads in (1, 2, 3):
            for module in (passes, linear):
                monkeypatch.setattr(module, "count_threads", lambda count=threads: count)
            model = native_draft(config, TARGET)
            if not expected:
                draft = blocks.filed(config, TARGET, blocks.tensors(config, TARGET))
                numbers = Reference(draft, model.passes.facts["ropes"][0])
                for x, anchor, n in zip(given, anchors, counts, strict=True):
                    tokens = [anchor, *[mask] * (n - 1 + model.num_anchors)]
                    expected.append(numbers.predict(x, tokens))
            model.start(3)
            model.append_context([x[:2] for x in given])
            model.append_context([x[2:] for x in given])
            found = model.predict_block(anchors, counts)[1].clone()
            alone = model.predict_block([0, 6, 0], [0, 3, 0])[1]
            assert torch.equal(alone[1], found[1, :3])
            for own, made, n in zip(expected, found.numpy(), counts, strict=True):
                assert np.isfinite(own).all()
                assert (own.view(np.int32) == made[:n].view(np.int32)).all(), (
                    instructions,
                    threads,
                )


@pytest.mark.daily("confidence", "rnn", "domino", "dflash2")
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_results_are_those_of_torch(name: str) -> None:
    """Of ragged blocks, of the heads after them, and of rows that move, leave and start again."""
    config = CONFIGS[name]
    stock, own = blocks.draft(config, TARGET), native_draft(config, TARGET)
    models: list[Any] = [stock, own]
    for model in models:
        model.start(3)
        model.append_context(states(config, 20, 3, 0))
    for counts in ([4, 2, 3], [1, 0, 4]):
        (hidden, logits), found = (x.predict_block([5, 6, 7], counts) for x in models)
        for b, n in enumerate(counts):
            for x, y in zip((hidden, logits), found, strict=True):
                assert torch.allclose(x[b, :n], y[b, :n], rtol=CLOSE, atol=CLOSE)
        memories: list[Any] = [None, None]
        for i in range(max(counts)):
            tokens, results = torch.tensor([3, 1, 2]), list[Any]()
            for k, (model, made) in enumerate(zip(models, ((hidden, logits), found), strict=True)):
                x, chance, memories[k] = model.condition_on_previous(
                    made[0][:, i], made[1][:, i], tokens, memories[k]
                )
                results.append(x if chance is None else torch.cat([x, chance[:, None]], 1))
            some = [b for b, n in enumerate(counts) if n > i]
            expected, other = (x[some] for x in results)
            assert torch.equal(expected.isfinite(), other.isfinite())
            assert torch.allclose(expected, other, rtol=CLOSE, atol=CLOSE)
        for model in models:
            model.append_context(states(config, 1, 4, 0))
    for model in models:
        model.permute([1, 0, 1])
        model.leave([1])
        model.start(1)
        model.append_context(states(config, 2, 0, 5))
    assert stock.lengths == own.lengths == [13, 11, 5]
    logits, found = (x.predict_block([5, 6, 7], [4, 4, 4])[1] for x in models)
    assert torch.allclose(logits, found, rtol=CLOSE, atol=CLOSE)
    own.clear()
    assert own.lengths == [] and own.pool.num_used == 0


@pytest.mark.daily("confidence", "dflash2")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=1)])
@torch.inference_mode()
def test_drafts_are_those_of_torch(name: str, params: SamplingParams) -> None:
    """Tokens, and the distributions that they were drawn from."""
    drafts = []
    for make in (blocks.pair, blocks.native_pair):
        target, drafter = make(CONFIGS[name], TARGET)
        target.expose_hidden_states(drafter.count_cached_tokens)
        target.start([prompt[:-1] for prompt in PROMPTS])
        drafter.start([0, 1, 2], PROMPTS, None)
        draw = Draw([SequenceKey(1, b) for b in range(3)], [5] * 3, [params] * 3)
        drafts.append(drafter.propose([4, 3, 0], draw))
    one, other = drafts
    assert one.lengths.tolist() == other.lengths.tolist() and one.calls == other.calls
    assert (one.q is None) == (other.q is None)
    for b, n in enumerate(one.lengths.tolist()):
        assert torch.equal(one.tokens[b, :n], other.tokens[b, :n])
        if one.q is not None:
            assert torch.allclose(one.q[b, :n], other.q[b, :n], atol=CLOSE)


@pytest.mark.parametrize(("dtype", "within"), [("bfloat16", 0.05), ("int8", 0.2), ("int4", 2)])
@torch.inference_mode()
def test_weights_may_be_rounded(dtype: str, within: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instruction set gives the same bits, in a pass of any size: 100 blocks are more than
    a pass takes at first."""
    for config in (blocks.DSPARK, blocks.DFLASH2):
        stock, given = blocks.draft(config, TARGET), states(config, 20)
        stock.start(1)
        stock.append_context(given)
        logits, results = stock.predict_block([5], [4])[1], list[Tensor]()
        for instructions in library.list_instruction_sets():
            monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, instructions)
            own = native_draft(config, TARGET, dtype)
            assert own.compute_dtype == dtype
            own.start(1)
            own.append_context(given)
            results.append(own.predict_block([5], [4])[1].clone())
            own.start(99)
            own.append_context([given[0][:0], *given * 99])
            many = own.predict_block([5] * 100, [4] * 100)[1]
            assert torch.equal(many, results[0].expand_as(many))
        found = results[0]
        assert float((logits - found).square().mean() / logits.square().mean()) < within**2


def test_an_engine_caches_prefixes_and_aborts_requests() -> None:
    target, drafter = blocks.native_pair(blocks.CONFIDENT, TARGET)
    spec, model = Speculator(target=target, drafter=drafter), drafter.blocks
    assert isinstance(model, NativeBlockModel)
    prompts = [[3 + i % 30 for i in range(40)], [5, 6], [3 + i % 30 for i in range(35)]]
    plain = spec.generate(prompts, max_new_tokens=12, gamma=0, temperature=0.0)
    with Engine(spec) as engine:
        for _ in range(2):
            ids = [engine.add(x, max_new_tokens=12, gamma=3, temperature=0.0) for x in prompts]
            aborted = engine.add(prompts[0], max_new_tokens=50, gamma=3)
            tokens: dict[int, list[int]] = {id: [] for id in ids}
            for step in range(40):
                for event in engine.step():
                    if event.id in tokens:
                        tokens[event.id] += event.tokens
                if step == 3:
                    engine.abort(aborted)
            assert [tokens[id] for id in ids] == [each.tokens for each in plain]
            assert model.lengths == [] and model.pool.num_used == 0


def test_a_window_shorter_than_the_block_is_refused() -> None:
    config = {**blocks.ZLAB, **WINDOWS, "sliding_window": 3}
    with pytest.raises(RefusedError, match=r"a window of 3 tokens, shorter than the block"):
        native_draft(config, TARGET)
