"""Whole passes equal the reference to the bit: on every instruction set, with any number of
threads, however a sequence is cut into passes and whatever other rows are in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from foretoken.kernels import library, reference
from foretoken.models.native import description, passes
from foretoken.models.native.network import Linear, Norm
from foretoken.models.native.packing import round_blocks
from foretoken.models.native.pages import PagedSequence, PagePool
from foretoken.models.native.passes import NativePasses, SequencePart
from foretoken.models.native.position_tables import RotaryTable

# the reference takes seconds
pytestmark = [pytest.mark.cpu_only, pytest.mark.prove, pytest.mark.usefixtures("compiled")]
WIDTH, INNER, V, HEADS, KV, D = 64, 96, 48, 4, 2, 32
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


@dataclass
class Layer:
    """What differs between families."""

    dtype: str
    layer_norm: bool = False
    before: bool = True  # norms before the parts
    after: bool = False  # and after them
    parallel: bool = False
    gated: bool = True
    biased: bool = False
    head_norms: bool = False
    rotated: int = D
    interleaved: bool = False
    window: int = 0
    cap: float = 0
    activation: int = 0
    sinks: bool = False
    positions: str = "rotary"  # learned, or by slopes
    clip: float = 0
    residual: float = 1
    factors: tuple[float, float] = (1, 1)  # of embeddings and of logits
    experts: int = 0  # of which a token has two, beside an MLP of all
    normalized: bool = True
    groups: int = 0  # of experts, of which two are chosen from, by sigmoids and numbers added
    kept_blocks: tuple[int, int] | None = None  # first and last ones that a token attends to
    weights: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "llama": Layer("int4"),
    "llama in int8": Layer("int8", interleaved=True),
    "llama in float32": Layer("float32"),
    "gemma": Layer(
        "int8", after=True, head_norms=True, window=40, cap=5, activation=2, factors=(8, 1)
    ),
    "neox": Layer(
        "float32",
        layer_norm=True,
        parallel=True,
        gated=False,
        biased=True,
        rotated=16,
        activation=1,
    ),
    "cohere": Layer("int4", layer_norm=True, parallel=True, interleaved=True, factors=(1, 0.25)),
    "olmo": Layer("bfloat16", before=False, after=True, biased=True, residual=0.5),
    "gpt2": Layer(
        "int8", layer_norm=True, gated=False, biased=True, positions="learned", activation=2
    ),
    "bloom": Layer("int4", layer_norm=True, gated=False, positions="slopes", clip=1.5),
    "sinks": Layer("int4", sinks=True, window=150, biased=True),
    "experts": Layer("int4", experts=5),
    "experts in float32": Layer("float32", experts=20, normalized=False, after=True),
    "experts in groups": Layer("int8", experts=18, groups=3),
    "first and last blocks": Layer("int4", kept_blocks=(1, 1), sinks=True),
    "last blocks of a window": Layer("int8", kept_blocks=(0, 1), window=150, positions="slopes"),
}


class Network(NamedTuple):
    """A folder of packed weights with its description, and the same in NumPy."""

    folder: Path
    facts: dict[str, Any]
    forward: Callable[[list[int]], Any]


def made(kind: Layer, folder: Path) -> Network:
    random = np.random.default_rng(5)
    bits = description.PRECISION_BITS.get(kind.dtype)

    def numbers(*shape: int) -> Any:
        values = random.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
        if kind.dtype == "bfloat16":
            values = (values.view(np.uint32) >> 16 << 16).view(np.float32)
        return values

    with (folder / description.WEIGHTS_FILE).open("wb") as file:
        writer = description.WeightFile(file, kind.dtype)

        def linear(out: int, inner: int, bits: int | None = bits) -> tuple[dict[str, Any], Any]:
            weight = numbers(out, inner)
            bias = numbers(1, out)[0] if kind.biased else None
            facts = writer.append_weight([Linear(weight, bias)], bits, rounding=bits is not None)
            blocks = round_blocks(weight, bits) if bits else None

            def multiply(x: Any) -> Any:
                if blocks is None:
                    y = reference.multiply_floats(weight, x)
                else:
                    whole = blocks.integers.reshape(weight.shape)
                    y = reference.multiply_integers(whole, blocks.scales[..., 0], None, x)
                return y if bias is None else y + bias

            return facts, multiply

        def norm(width: int = WIDTH) -> tuple[dict[str, Any] | None, Any]:
            weight = 1 + numbers(1, width)[0]
            bias = numbers(1, width)[0] if kind.layer_norm else None
            facts = writer.append_norm(Norm(weight, 1e-5, bias, kind.layer_norm))

            def normalize(x: Any) -> Any:
                flat = x.reshape(-1, width)
                made = reference.normalize(flat, weight, bias, 1e-5, kind.layer_norm)
                return made.reshape(x.shape)

            return facts, normalize

        def experts(linear: Any) -> tuple[dict[str, Any], Any]:
            router, choose = linear(kind.experts + 1, WIDTH, None)
            shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
            each = [{n: linear(*shape) for n, shape in shapes.items()} for _ in range(kind.experts)]
            facts = {"count": kind.experts, "chosen": 2, "normalized": int(kind.normalized)}
            facts |= {"shared_gate": 1, "scale": 1.5, "router": router}
            added = numbers(1, kind.experts)[0] if kind.groups else None
            facts |= {"sigmoids": int(kind.groups > 0), "added": writer.append_floats(added)}
            facts |= {"groups": max(1, kind.groups), "chosen_groups": 2 if kind.groups else 1}
            facts |= {name: [one[name][0] for one in each] for name in shapes}

            def add(a: Any, shared: Any) -> Any:
                logits, total = choose(a), np.zeros((len(a), WIDTH), np.float32)
                own = logits[:, : kind.experts]
                masses = reference.exponential(own - own.max(-1, keepdims=True))
                scores = own
                if kind.groups:
                    masses = reference.sigmoid(own)
                    scores = in_groups(masses + added)
                order = np.argsort(-scores, 1, kind="stable")[:, :2]
                weights = np.take_along_axis(masses, order, 1)
                some = weights if kind.normalized else masses
                sums = np.zeros(len(a), np.float32)
                for column in some.T:
                    sums = sums + column
                weights = weights / sums[:, None] * np.float32(1.5)
                made = np.stack([_gated(one, a) for one in each])
                for j in range(2):
                    which = made[order[:, j], np.arange(len(a))]
                    total = reference.fma(which, weights[:, j, None], total)
                gate = reference.sigmoid(logits[:, kind.experts :])
                return reference.fma(shared, gate, total)

            return facts, add

        def in_groups(scores: Any) -> Any:
            each = scores.reshape(len(scores), kind.groups, -1)
            best = np.sort(each, -1)[..., :-3:-1]
            best = best[..., 0] + best[..., 1]
            stays = np.argsort(-best, 1, kind="stable")[:, :2]
            mask = np.zeros(best.shape, bool)
            np.put_along_axis(mask, stays, np.bool_(1), 1)
            return np.where(mask[..., None], each, -np.inf).reshape(scores.shape)

        def _gated(one: Any, a: Any) -> Any:
            name = ACTIVATIONS[kind.activation]
            inner = reference.activate(name, one["gate"][1](a), (0, 0, 0)) * one["up"][1](a)
            return one["down"][1](inner)

        absent = None, lambda x: x
        table = numbers(V, WIDTH)
        embeddings = writer.append_weight([Linear(table)], rounding=False)
        head, read_out = linear(V, WIDTH, bits and 8)
        last, last_norm = norm()
        learned = numbers(300, WIDTH) if kind.positions == "learned" else None
        positions = (
            None if learned is None else writer.append_weight([Linear(learned)], rounding=False)
        )
        slopes = np.float32([0.5, 0.25, 0.1, 0.01]) if kind.positions == "slopes" else None
        embedded = norm() if kind.positions == "slopes" else absent
        layers, parts = [], []
        for _ in range(2):
            first, second = (norm() if kind.before else absent for _ in range(2))
            if kind.parallel:
                second = absent
            third, fourth = (norm() if kind.after else absent for _ in range(2))
            own = (norm(D) if kind.head_norms else absent for _ in range(2))
            of_queries, of_keys = own
            qkv, project = linear((HEADS + 2 * KV) * D, WIDTH)
            out, give = linear(WIDTH, HEADS * D)
            gate, open_gate = linear(INNER, WIDTH) if kind.gated else absent
            up, widen = linear(INNER, WIDTH)
            down, narrow = linear(WIDTH, INNER)
            sinks = numbers(1, HEADS)[0] if kind.sinks else None
            of_experts = experts(linear) if kind.experts else absent
            norms = first[1], second[1], third[1], fourth[1], of_queries[1], of_keys[1]
            some = project, give, open_gate, widen, narrow, sinks, of_experts[1]
            parts.append((*norms, *some))
            layers.append(
                {
                    "before_attention": first[0],
                    "after_attention": third[0],
                    "before_mlp": second[0],
                    "after_mlp": fourth[0],
                    "of_queries": of_queries[0],
                    "of_keys": of_keys[0],
                    "of_values": None,
                    "qkv": qkv,
                    "out": out,
                    "gate": gate,
                    "up": up,
                    "down": down,
                    "heads": HEADS,
                    "kv_heads": KV,
                    "width": D,
                    "rotary": 0 if kind.positions == "rotary" else -1,
                    "query_rotary": 0 if kind.positions == "rotary" else -1,
                    "rotated": kind.rotated,
                    "interleaved": int(kind.interleaved),
                    "window": kind.window,
                    "activation": kind.activation,
                    "parallel": int(kind.parallel),
                    "scale": 0.2,
                    "softcap": kind.cap,
                    "residual": kind.residual,
                    "sinks": writer.append_floats(sinks),
                    "slopes": writer.append_floats(slopes),
                    "clip": kind.clip,
                    "factor": 1,
                    "norms": 0,
                    "curve": [0, 0, 0],
                    "source": 0,
                    "experts": of_experts[0],
                    "added_first": 0,
                    "bias": 0,
                    "gate_of_heads": 0,
                    "attention_gate": None,
                    "recurrence": None,
                    "beside": None,
                    "latent": None,
                    "lender": None,
                    "borrowed": 0,
                    "input": 0,
                    "input_gate": None,
                    "input_out": None,
                    "after_input": None,
                }
            )
        writer.append(np.zeros(description.PREFETCH_SLACK_BYTES, np.uint8))
    rope = {
        "frequencies": [10000 ** (-2 * i / kind.rotated) for i in range(kind.rotated // 2)],
        "scale": 1,
        "growth": None,
        "interleaved": kind.interleaved,
    }
    facts = {
        "halved": int(bits is not None),
        "width": WIDTH,
        "vocabulary": V,
        "embedding_factor": kind.factors[0],
        "logit_factor": kind.factors[1],
        "logit_cap": 3 * kind.cap,
        "embeddings": embeddings,
        "positions": positions,
        "embedding_norm": embedded[0],
        "head": head,
        "last": last,
        "ropes": [rope],
        "layers": layers,
        "row_numbers": 0,
        "beside": 0,
        "before_last": 0,
        "beside_norm": None,
        "join": None,
        "inputs": None,
        "encoder": 0,
        "biases": [],
    }
    if kind.kept_blocks:
        facts["first_blocks"], facts["last_blocks"] = kind.kept_blocks

    def attended(x: Any, part: Any, turns: Any) -> Any:
        *_, of_queries, of_keys, project, _, _, _, _, sinks, _ = part
        heads = project(x).reshape(len(x), -1, D)
        if kind.clip:
            heads = np.clip(heads, np.float32(-kind.clip), np.float32(kind.clip))
        q, k, v = np.split(heads, [HEADS, HEADS + KV], 1)
        q, k = turned(of_queries(q), turns), turned(of_keys(k), turns)
        q = q * np.float32(0.2)
        if facts["halved"]:
            k, v = (np.clip(y, -65504, 65504).astype(np.float16).astype(np.float32) for y in (k, v))
        group = HEADS // KV
        result = np.zeros((len(x), HEADS, D), np.float32)
        for h in range(KV):
            some = slice(h * group, (h + 1) * group)
            for t in range(len(x)):
                own = None if sinks is None else sinks[some]
                own_slopes = None if slopes is None else slopes[some]
                result[t, some] = reference.attention(
                    *(q[t, some], k[:, h], v[:, h], t, kind.window, kind.cap, own_slopes, own),
                    kept_blocks=kind.kept_blocks,
                )
        return result.reshape(len(x), -1)

    def turned(x: Any, turns: Any) -> Any:
        if kind.positions != "rotary":
            return x
        y, half = x.copy(), kind.rotated // 2
        index = np.arange(kind.rotated).reshape(*((half, 2) if kind.interleaved else (2, half)))
        one, other = index.T if kind.interleaved else index
        c, s = turns[:, None, :half], turns[:, None, half:]
        a, b = x[..., one], x[..., other]
        y[..., one] = reference.fma(a, c, -(b * s))
        y[..., other] = reference.fma(b, c, a * s)
        return y

    def forward(tokens: list[int]) -> Any:
        table_of = RotaryTable(rope)
        table_of.reserve(len(tokens))
        turns = table_of.table[0, : len(tokens)]
        x = table[tokens] * np.float32(kind.factors[0])
        x = embedded[1](x if learned is None else x + learned[: len(x)])
        factor = np.float32(kind.residual)

        def added(x: Any, y: Any, norm: Any, *, normed: bool) -> Any:
            if normed:
                return reference.fma(norm(y), factor, x)
            return x + y if kind.residual == 1 else reference.fma(y, factor, x)

        for part in parts:
            first, second, third, fourth, _, _, _, give, open_gate, widen, narrow, _, add = part
            a = first(x)
            y = give(attended(a, part, turns))
            if not kind.parallel:
                x = added(x, y, third, normed=kind.after)
                a = second(x)
            name = ACTIVATIONS[kind.activation]
            if kind.gated:
                inner = reference.activate(name, open_gate(a), (0, 0, 0)) * widen(a)
            else:
                inner = reference.activate(name, widen(a), (0, 0, 0))
            if kind.parallel:
                x = added(x, y, third, normed=kind.after)
            made = narrow(inner)
            if kind.experts:
                x = reference.fma(fourth(add(a, made)), factor, x)
                continue
            x = added(x, made, fourth, normed=kind.after)
        logits = read_out(last_norm(x)) * np.float32(kind.factors[1])
        cap = np.float32(3 * kind.cap)
        return cap * reference.tangent(logits / cap) if kind.cap else logits

    return Network(folder, facts, forward)


def run(
    model: NativePasses, pool: PagePool, cuts: list[int], sequence: list[int], *, alone: bool
) -> Any:
    """The logits of a sequence that is scored in pieces, beside a row of other tokens or alone."""
    row, other, logits = PagedSequence(pool), PagedSequence(pool), []
    for start, end in zip([0, *cuts], [*cuts, len(sequence)], strict=True):
        piece, n = sequence[start:end], end - start
        more = [] if alone else [SequencePart(other, start, piece[::-1], 1, n)]
        result = model.run(
            [SequencePart(row, start, piece, n, 0), *more], n + 1, 1, return_tapped=False
        )
        logits.append(result.logits.reshape(n + 1, -1)[:n].numpy().copy())
    return np.concatenate(logits)


@pytest.mark.parametrize("name", KINDS)
def test_passes_are_as_defined(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = made(KINDS[name], tmp_path)
    length = 300 if KINDS[name].kept_blocks else 180
    sequence = np.random.default_rng(0).integers(0, V, length).tolist()
    expected = network.forward(sequence)
    assert np.isfinite(expected).all()
    for instructions in library.list_instruction_sets():
        monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, instructions)
        for threads in (1, 2, 3):
            monkeypatch.setattr(passes, "count_threads", lambda count=threads: count)
            model = NativePasses(tmp_path, network.facts)
            halved = "float16" if network.facts["halved"] else "float32"
            pool = PagePool(model.layout, halved)
            for cuts in ([], [1, 2, 5, 13, 100, 101, 140, length - 1], [128, 170, length - 5]):
                logits = run(model, pool, cuts, sequence, alone=cuts[-1:] == [length - 5])
                same = logits.view(np.int32) == expected.view(np.int32)
                assert same.all(), (instructions, threads, cuts, np.argwhere(~same)[:3])
