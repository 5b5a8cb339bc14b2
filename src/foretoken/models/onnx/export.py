"""A decoder, as it was read, as an ONNX graph.

Tokens of all rows lie flat, one behind another; attention alone sees rows: `places` [B, S] says
which flat token stands at a place of the padded block, `flat` [T] where a token stands there. So a
pass over rows of any lengths computes no more than their tokens, and the numbers of a token do not
depend on the others. Keys and values are read and written in place, `[B, heads, slots, width]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.onnx.experts import routed
from foretoken.models.onnx.graph import Graph
from foretoken.models.onnx.passes import DECODER, EMBEDDINGS, JOIN
from foretoken.models.onnx.products import PRECISIONS, Linear, Precision, multiplied
from foretoken.models.onnx.reading import (
    Attention,
    Decoder,
    Experts,
    Gated,
    NetworkReader,
    Norm,
    PairReads,
)
from foretoken.models.shown import FINAL
from foretoken.models.stock.pairs import Join
from foretoken.models.stock.sizes import context_limit, switch_of

COUNTS = 16  # place of query_seqlens among the inputs of attention
HEAD = Precision(8)  # where products are rounded


def export(
    network: PreTrainedModel,
    folder: Path,
    dtype: str = "float32",
    taps: tuple[int, ...] = (),
    some: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Write a network's graph and embeddings into a folder; returns the facts.

    Args:
        network: In float32.
        folder: Which exists.
        dtype: The precision of weights, in `PRECISIONS`.
        taps: Where it is to show its states (`models.stock.taps`).
        some: The layers that it is to have, where not all.

    Raises:
        RefusedError: For a network of another kind.
    """
    if network.config.is_encoder_decoder:
        raise RefusedError("ONNX Runtime runs decoders alone here")
    if switch_of(network) is not None:
        raise RefusedError("ONNX Runtime reads all texts with the same rotary positions here")
    reader = NetworkReader(network)
    with torch.no_grad():
        decoder = reader.decoder()
        if decoder.pairs is None:
            _keep_embeddings(reader.embeddings(), folder / EMBEDDINGS)
    decoder.layers = [decoder.layers[i] for i in some] if some else decoder.layers
    writer = Writer(Graph(folder, DECODER), decoder, PRECISIONS[dtype])
    writer.write(taps)
    join = getattr(network, "join", None)
    if join is not None:
        _write_join(join, reader, Graph(folder, JOIN), _fine(PRECISIONS[dtype]))
    attentions = [layer.attention for layer in decoder.layers]
    return {
        "form": "onnx",
        # a file's blocks of four bits stay so in int8, which then is the same model
        "computed": "int4" if dtype == "int8" and writer.bits == 4 else dtype,
        "vocab_size": len(decoder.head.weight),
        "context": context_limit(network.config.get_text_config(decoder=True)),
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "windows": [attention.window for attention in attentions],
        "keys": [[attention.key_heads, attention.width] for attention in attentions],
        "ropes": [[rope.frequencies, rope.scale] for rope in decoder.ropes],
        "width": decoder.width,
        "reads": decoder.width + (decoder.pairs.width if decoder.pairs else 0),
        "joins": join is not None,
    } | ({"taps": list(taps)} if taps else {})


def _keep_embeddings(table: torch.Tensor, file: Path) -> None:
    """Keep them in half the bytes where that changes none; bfloat16 as its bits."""
    for kind in (torch.bfloat16, torch.float16):
        narrow = table.to(kind)
        if torch.equal(narrow.float(), table):
            np.save(file, (narrow.view(torch.uint16) if kind is torch.bfloat16 else narrow).numpy())
            return
    np.save(file, table.numpy())


def _write_join(join: Join, reader: NetworkReader, graph: Graph, precision: Precision) -> None:
    """Write the graph that makes one state of those at several taps."""
    norms = [reader.norm(part) for part in join.norms]
    linear = reader.linear(join.fc)
    states = graph.input("states", "float32", "T", linear.weight.shape[1])
    if norms:
        parts = [f"part.{i}" for i in range(len(norms))]
        graph.add("Split", [states], *parts, axis=-1, num_outputs=len(parts))
        made = [normed(graph, f"{x}.normed", x, n) for x, n in zip(parts, norms, strict=True)]
        states = graph.add("Concat", made, "normed", axis=-1)
    multiplied(graph, "state", states, [linear], precision)
    graph.output("state", "float32", "T", len(linear.weight))
    graph.written()


def _fine(precision: Precision) -> Precision:
    """The precision of the output layer and of a join, whose rounding shows most."""
    return HEAD if precision.bits else precision


def normed(graph: Graph, name: str, states: str, norm: Norm | None) -> str:
    """States behind a norm, or as they are."""
    if norm is None:
        return states
    weight = graph.constant(f"{name}.norm", norm.weight)
    how: Any = {"axis": -1, "epsilon": norm.epsilon, "stash_type": 1}
    inputs = [states, weight]
    if norm.bias is not None:
        inputs.append(graph.constant(f"{name}.norm.bias", norm.bias))
    kind = "LayerNormalization" if norm.centred else "SimplifiedLayerNormalization"
    return graph.add(kind, inputs, name, **how)


class Writer:
    """Writes one decoder."""

    def __init__(self, graph: Graph, decoder: Decoder, precision: Precision) -> None:
        self.graph, self.decoder, self.precision = graph, decoder, precision

    def write(self, taps: tuple[int, ...]) -> None:
        decoder = self.decoder
        self._inputs()
        shown = dict[int, str]()
        if decoder.pairs is not None:
            states, read = self._pairs(decoder.pairs)
        else:
            states = "states"
            read = self._normed("read", states, decoder.layers[0].before_attention)
        for i, layer in enumerate(decoder.layers):
            shown[i] = states
            made = self._attention(i, read, layer.attention)
            made = self._normed(f"{i}.made", made, layer.behind_attention)
            if layer.parallel:
                if layer.before_gated is not None:
                    read = self._normed(f"{i}.own", states, layer.before_gated)
                inner = self._inner(f"{i}", read, layer.gated)
                made = self.graph.add("Add", [made, inner], f"{i}.both")
            else:
                norm = layer.before_gated
                states, read = self._added(f"{i}.mid", states, made, layer.residual, norm)
                made = self._inner(f"{i}", read, layer.gated)
            made = self._normed(f"{i}.gave", made, layer.behind_gated)
            last = i + 1 == len(decoder.layers)
            norm = decoder.norm if last else decoder.layers[i + 1].before_attention
            states, read = self._added(f"{i}.out", states, made, layer.residual, norm)
        shown |= {len(decoder.layers): states, FINAL: read}
        self.bits = self.graph.widest  # without the output layer, which has eight
        self._outputs(read, [shown[tap] for tap in taps])

    def _pairs(self, pairs: PairReads) -> tuple[str, str]:
        """The states of pairs, to which the first layer adds, and what it reads."""
        graph = self.graph
        sizes = graph.constant("pairs", np.array([pairs.width, self.decoder.width]))
        graph.add("Split", ["states", sizes], "embedded", "state", axis=-1)
        parts = (
            self._normed("embedded.normed", "embedded", pairs.embedded),
            self._normed("state.normed", "state", pairs.state),
        )
        return parts[1] if pairs.normed else "state", graph.add("Concat", [*parts], "both", axis=-1)

    def _inputs(self) -> None:
        graph, pairs = self.graph, self.decoder.pairs
        reads = self.decoder.width + (pairs.width if pairs else 0)
        graph.input("states", "float32", "T", reads)
        graph.input("needed", "int64", "P")
        graph.input("places", "int64", "B", "S")
        graph.input("flat", "int64", "T")
        graph.input("counts", "int32", "B")
        graph.input("last", "int32", "B")
        graph.input("most", "int32", 1)
        for k, rope in enumerate(self.decoder.ropes):
            for name in ("cosine", "sine"):
                graph.input(f"{name}.{k}", "float32", "positions", len(rope.frequencies))
        for i, layer in enumerate(self.decoder.layers):
            for name in ("keys", "values"):
                heads, width = layer.attention.key_heads, layer.attention.width
                graph.input(f"{name}.{i}", "float32", "B", heads, "slots", width)
                graph.output(f"new.{name}.{i}", "float32", "B", heads, "slots", width)

    def _outputs(self, normed: str, shown: list[str]) -> None:
        graph, decoder = self.graph, self.decoder
        graph.add("Gather", [normed, "needed"], "hidden", axis=0)
        plain = decoder.scale == 1 and not decoder.cap
        logits = "logits" if plain else "logits.plain"
        read = self._normed("hidden.normed", "hidden", decoder.head_norm)
        multiplied(graph, logits, read, [decoder.head], _fine(self.precision))
        if decoder.scale != 1:
            factor = self._number("logits.scale", decoder.scale)
            logits = graph.add(
                "Mul", [logits, factor], "logits.scaled" if decoder.cap else "logits"
            )
        if decoder.cap:
            cap = self._number("logits.cap", decoder.cap)
            share = graph.add("Div", [logits, cap], "logits.share")
            graph.add("Mul", [graph.add("Tanh", [share], "logits.tanh"), cap], "logits")
        graph.output("logits", "float32", "P", len(decoder.head.weight))
        graph.output("hidden", "float32", "P", decoder.width)
        if shown:
            graph.add("Concat", shown, "shown", axis=-1)
            graph.output("shown", "float32", "T", len(shown) * decoder.width)
        graph.written()

    def _attention(self, i: int, states: str, attention: Attention) -> str:
        graph, name = self.graph, f"{i}.attention"
        inputs = [
            *self._queries(name, states, attention),
            f"keys.{i}",
            f"values.{i}",
            "last",
            "most",
        ]
        rope = attention.rope
        inputs += ["", ""] if rope is None else [f"cosine.{rope}", f"sine.{rope}"]
        if attention.sinks is not None:
            inputs += ["", "", graph.constant(f"{name}.sinks", attention.sinks)]
        inputs += [""] * (COUNTS - len(inputs))
        made = [f"{name}.padded", f"new.keys.{i}", f"new.values.{i}"]
        graph.add(
            "GroupQueryAttention",
            [*inputs, "counts"],
            *made,
            ours=True,
            num_heads=attention.heads,
            kv_num_heads=attention.key_heads,
            scale=attention.scale,
            softcap=attention.softcap,
            local_window_size=attention.window or -1,
            do_rotary=int(rope is not None),
            rotary_interleaved=int(rope is not None and self.decoder.ropes[rope].interleaved),
        )
        width = attention.heads * attention.width
        shape = graph.constant(f"flat.{width}", np.array([-1, width]))
        rows = graph.add("Reshape", [f"{name}.padded", shape], f"{name}.rows")
        seen = graph.add("Gather", [rows, "flat"], name, axis=0)
        return self._product(f"{i}.o", seen, [attention.out])

    def _queries(self, name: str, states: str, attention: Attention) -> list[str]:
        """Queries, keys and values of the padded block: in one array where nothing parts them."""
        graph = self.graph
        made = self._product(f"{name}.reads", states, attention.reads)
        if attention.norms is None:
            return [graph.add("Gather", [made, "places"], f"{name}.block", axis=0), "", ""]
        parts = [f"{name}.{side}" for side in ("queries", "keys", "values")]
        sizes = np.array([len(linear.weight) for linear in attention.reads])
        graph.add("Split", [made, graph.constant(f"{name}.sizes", sizes)], *parts, axis=-1)
        for i, norm in enumerate(attention.norms):
            parts[i] = self._headed(parts[i], norm, int(sizes[i]))
        return [graph.add("Gather", [x, "places"], f"{x}.block", axis=0) for x in parts]

    def _headed(self, name: str, norm: Norm, size: int) -> str:
        """Queries or keys `[T, size]` normed, all of a token or head by head."""
        graph, width = self.graph, len(norm.weight)
        if width == size:
            return self._normed(f"{name}.normed", name, norm)
        shapes = [graph.constant(f"flat.{n}", np.array([-1, n])) for n in (width, size)]
        heads = graph.add("Reshape", [name, shapes[0]], f"{name}.heads")
        heads = self._normed(f"{heads}.normed", heads, norm)
        return graph.add("Reshape", [heads, shapes[1]], f"{name}.normed")

    def _inner(self, name: str, states: str, part: Gated | Experts) -> str:
        if isinstance(part, Gated):
            return self._gated(name, states, part)
        graph = self.graph
        made = routed(graph, f"{name}.experts", states, part, self.precision)
        if part.shared is None:
            return made
        shared = self._gated(f"{name}.shared", states, part.shared)
        if part.opening is not None:
            opening = multiplied(
                graph, f"{name}.opening", states, [part.opening], PRECISIONS["float32"]
            )
            opening = graph.add("Sigmoid", [opening], f"{name}.open")
            shared = graph.add("Mul", [shared, opening], f"{name}.opened")
        return graph.add("Add", [made, shared], f"{name}.inner")

    def _gated(self, prefix: str, states: str, part: Gated) -> str:
        graph, name = self.graph, f"{prefix}.gated"
        if part.up is None:
            gate = [self._product(f"{name}.gate", states, [part.gate])]
        else:
            both = self._product(f"{name}.reads", states, [part.gate, part.up])
            graph.add("Split", [both], f"{name}.gate", f"{name}.up", axis=-1, num_outputs=2)
            gate = [f"{name}.gate"]
        if part.activation == "silu":  # x * sigmoid(alpha * x)
            graph.add("QuickGelu", gate, f"{name}.act", ours=True, alpha=1.0)
        elif part.activation == "relu":
            graph.add("Relu", gate, f"{name}.act")
        else:
            graph.add("Gelu", gate, f"{name}.act", approximate=part.activation)
        made = f"{name}.act"
        if part.up is not None:
            made = graph.add("Mul", [made, f"{name}.up"], name)
        return self._product(f"{prefix}.down", made, [part.down])

    def _normed(self, name: str, states: str, norm: Norm | None) -> str:
        return normed(self.graph, name, states, norm)

    def _added(
        self, name: str, states: str, made: str, factor: float, norm: Norm | None
    ) -> tuple[str, str]:
        """The sum of states and what a part gave, and the same normed, or as it is."""
        if factor != 1:
            number = self._number(f"{name}.factor", factor)
            made = self.graph.add("Mul", [made, number], f"{name}.scaled")
        if norm is None:
            total = self.graph.add("Add", [states, made], name)
            return total, total
        weight = self.graph.constant(f"{name}.norm", norm.weight)
        outputs = (f"{name}.normed", "", "", name)
        inputs, how = [states, made, weight], {"epsilon": norm.epsilon}
        if norm.bias is not None:
            inputs.append(self.graph.constant(f"{name}.norm.bias", norm.bias))
        kind = "SkipLayerNormalization" if norm.centred else "SkipSimplifiedLayerNormalization"
        self.graph.add(kind, inputs, *outputs, ours=True, **how)
        return name, f"{name}.normed"

    def _product(self, name: str, states: str, linears: list[Linear]) -> str:
        return multiplied(self.graph, name, states, linears, self.precision)

    def _number(self, name: str, value: float) -> str:
        return self.graph.constant(name, np.array(value, np.float32))
