"""A network's description for the kernels: packed weights in one file, and settings as JSON.

`describe` makes both from transformers' modules. `make_network_record` turns a description into the
ctypes structs of `library`, with pointers into the memory-mapped file. In this module, "facts" are
(parts of) the description.
"""

from __future__ import annotations

import ctypes
import json
from ctypes import POINTER, Structure, c_void_p
from dataclasses import asdict, replace
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from foretoken.kernels import library
from foretoken.models.native.network import (
    CONVOLUTION,
    DELTA,
    KERNEL_ACTIVATIONS,
    Attention,
    BlockConvolution,
    Decoder,
    DecoderLayer,
    Experts,
    Latent,
    LayerInputs,
    Linear,
    Norm,
    PairInputs,
    RecurrentMixer,
    Rope,
)
from foretoken.models.native.packing import LANES, STORAGE_KINDS, Panels, pack
from foretoken.models.native.pages import LayerOffsets, PageLayout, compute_page_layout
from foretoken.models.quantized_blocks import Floats

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel

    from foretoken.models.native.block_reader import BlockDecoder, BlockNetworks

WEIGHTS_FILE = "weights.bin"
ALIGNMENT_BYTES, PREFETCH_SLACK_BYTES = 64, 8192  # the kernels prefetch past the last panel
PRECISION_BITS = {"int8": 8, "int4": 4}
NORM_FIELDS = "before_attention", "after_attention", "before_mlp", "after_mlp"
NORM_FIELDS += "of_queries", "of_keys", "of_values"
NORM_EACH_HEAD, NORM_ALL_HEADS, NORM_AFTER_ROTARY = 1, 2, 4  # norms of heads, as in network.h
BLOCK_TO_END, BLOCK_FROM_START = 1, 2  # attention of block drafts, as in network.h
RING_TOKENS = 72  # tokens in the rings of a sequence's recurrent states, as in network.h
NO_HEADS = 1, LANES  # (heads, width) of placeholder keys, for a network without attention
LAYER_HEADER_NUMBERS = 16  # size of the header of a layer's recurrent states, as in network.h
# fields with the offset of an array in the file
OFFSET_FIELDS = {"panels", "bias", "weight", "at", "sinks", "slopes", "base"}
MAX_LOSSLESS_BITS = 4  # a checkpoint's blocks of at most 4 bits are stored as they are


class WeightFile:
    """Appends arrays to a file, each aligned to 64 bytes, and returns their offsets."""

    def __init__(self, file: BinaryIO, dtype: str) -> None:
        self.file, self.bits = file, PRECISION_BITS.get(dtype)
        # digest of an encoder's weights, for `EncoderStateHandoff`; updated while `hashing` is True
        self.digest, self.hashing = blake2b(digest_size=16), False

    def append(self, *arrays: NDArray[Any]) -> int:
        """Append arrays without gaps between them; return the offset of the first in bytes."""
        at = self.file.tell()
        for array in arrays:
            written = np.ascontiguousarray(array).data
            self.file.write(written)
            if self.hashing:
                self.digest.update(written)
        self.file.write(bytes(-self.file.tell() % ALIGNMENT_BYTES))
        return at

    def append_floats(self, array: Floats | None) -> int | None:
        """Append a vector of floats, padded with zeros to full vectors of 16, and return its offset
        in bytes. Return None if `array` is None."""
        if array is None:
            return None
        return self.append(
            np.concatenate([array, np.zeros(-len(array) % LANES + LANES, np.float32)])
        )

    def append_norm(self, norm: Norm | None) -> dict[str, Any] | None:
        if norm is None:
            return None
        rows = norm.weight.reshape(-1, norm.weight.shape[-1])  # each in full vectors
        rows = np.concatenate([rows, np.zeros((len(rows), -rows.shape[1] % LANES), np.float32)], 1)
        weight, bias = self.append_floats(rows.ravel()), self.append_floats(norm.bias)
        return {
            "weight": weight,
            "bias": bias,
            "epsilon": norm.epsilon,
            "centred": int(norm.centred),
        }

    def append_weight(
        self, linears: list[Linear], bits: int | None = None, *, rounding: bool = True
    ) -> dict[str, Any]:
        """Append one weight, made of these layers with their outputs concatenated, and return its
        description. Consecutive layers in the same storage format form one array; `rest` describes
        the layers after them.

        bits: Maximum number of bits; None: the bits of the file's dtype. rounding: If False, the
        weight is stored without loss (see `pack`).
        """
        if rounding and self.bits is None:
            bits, rounding = MAX_LOSSLESS_BITS, False
        max_bits = bits or self.bits or MAX_LOSSLESS_BITS
        biased = any(x.bias is not None for x in linears)
        if any(len(x.weight) % LANES for x in linears[:-1]):  # a panel would span two weights
            biases = [_get_bias(x) for x in linears] if biased else []
            whole = np.concatenate([x.weight for x in linears])
            bias = np.concatenate(biases) if biased else None
            linears = [replace(linears[0], weight=whole, bias=bias)]
        packed = [(pack(x.weight, max_bits, rounding=rounding), x) for x in linears]
        made: dict[str, Any] | None = None
        for _, group in reversed([(k, list(g)) for k, g in groupby(packed, _get_storage)]):
            some, own = zip(*group, strict=True)
            made = {
                "kind": some[0].kind,
                "form": some[0].form,
                "outputs": sum(x.outputs for x in some) + (made["outputs"] if made else 0),
                "inputs": some[0].inputs,
                "panels": self.append(*(x.data for x in some)),
                "bytes": sum(x.data.nbytes for x in some) + (made["bytes"] if made else 0),
                "bias": self.append_floats(
                    np.concatenate([_get_bias(x) for x in own]) if biased else None
                ),
                "rest": made,
            }
        assert made is not None
        return made


def _get_storage(packed: tuple[Panels, Linear]) -> tuple[str, int]:
    return packed[0].kind, packed[0].form


def _get_bias(linear: Linear) -> Floats:
    return np.zeros(len(linear.weight), np.float32) if linear.bias is None else linear.bias


def describe(
    network: PreTrainedModel | BlockDecoder, folder: Path, dtype: str, switch: int | None = None
) -> dict[str, Any]:
    """Write a network's weights into a folder; return its description. Raises RefusedError for a
    network that the kernels do not support.

    switch: Sequences of more than this many tokens have other rotary frequencies; None: all
    sequences have the same frequencies.
    """
    # late: the readers import transformers, which a stored conversion loads without
    from foretoken.models.native import block_reader, encoder_decoder_reader, network_reader

    with (folder / WEIGHTS_FILE).open("wb") as file:
        writer = WeightFile(file, dtype)
        if isinstance(network, block_reader.BlockDecoder):
            facts = _write_block_networks(block_reader.BlockReader(network).read_networks(), writer)
        elif network.config.is_encoder_decoder:
            encoder, cross_kv, decoder = encoder_decoder_reader.EncoderDecoderReader(
                network
            ).read_stacks()
            facts = _write_network(decoder, writer)
            facts |= {"crossing": _write_network(cross_kv, writer), "encoder_network": None}
            facts["encoder_key"] = None
            if encoder is not None:
                vectors, own = _get_vectors(encoder), _get_vectors(decoder)
                assert vectors is not None
                assert own is not None
                writer.digest.update(np.ascontiguousarray(vectors[0]).data)
                writer.hashing = True
                same = all(map(np.array_equal, vectors, own))
                shared = (facts["embeddings"], facts["embedding_factor"]) if same else None
                made = _write_network(encoder, writer, shared)
                writer.hashing = False
                facts["encoder_network"] = made | {"encoder": 1}
                writer.digest.update(json.dumps(_drop_offsets(made)).encode())
                facts["encoder_key"] = writer.digest.hexdigest()
        else:
            reader = network_reader.NetworkReader(network)
            decoder = reader.read_decoder()
            facts = _write_network(decoder, writer)
            facts["ropes"] = [_describe_rope(rope, reader.base, switch) for rope in decoder.ropes]
        writer.append(np.zeros(PREFETCH_SLACK_BYTES, np.uint8))
    return facts


def _write_block_networks(networks: BlockNetworks, writer: WeightFile) -> dict[str, Any]:
    """Write the weights of a block draft; return its description."""
    ropes = {"ropes": [asdict(rope) for rope in networks.blocks.ropes]}
    bias_layer = networks.bias_layer
    return {
        **_write_network(networks.blocks, writer),
        **ropes,
        "join": writer.append_weight([networks.join]),
        "bias_layer": bias_layer and writer.append_weight([bias_layer], 8),
        "context_kv": _write_network(networks.context_kv, writer) | ropes,
    }


def _drop_offsets(facts: Any) -> Any:
    """Return a description without the fields that are offsets of arrays in the file."""
    if isinstance(facts, dict):
        return {name: _drop_offsets(x) for name, x in facts.items() if name not in OFFSET_FIELDS}
    return [_drop_offsets(x) for x in facts] if isinstance(facts, list) else facts


def _write_network(
    decoder: Decoder, writer: WeightFile, shared: tuple[Any, float] | None = None
) -> dict[str, Any]:
    """Write the weights of a decoder or an encoder; return its description, in which "ropes" is
    still empty. shared: The result of `_write_embeddings` for another network with equal
    embeddings; None: write the embeddings."""
    head = decoder.head and writer.append_weight([decoder.head], 8)
    embeddings, factor = shared or (None, 1.0)
    if not shared and (vectors := _get_vectors(decoder)):
        embeddings, factor = _write_embeddings(*vectors, decoder.head, writer, head)
    layers, end = [_write_layer(layer, decoder, writer) for layer in decoder.layers], 0
    for layer in list_recurrent_layers(layers):
        layer["recurrence"]["at"] = end
        end += count_state_numbers(layer)
    facts = {
        "halved": int(writer.bits is not None),
        "width": decoder.width,
        "vocabulary": 0 if decoder.head is None else len(decoder.head.weight),
        "embedding_factor": factor,
        "logit_factor": decoder.scale,
        "logit_cap": decoder.logit_cap,
        "embeddings": embeddings,
        "positions": decoder.positions
        and writer.append_weight([decoder.positions], rounding=False),
        "embedding_norm": writer.append_norm(decoder.embedding_norm),
        "head": head,
        "last": writer.append_norm(decoder.norm),
        "ropes": [],
        "layers": layers,
        "row_numbers": end,
        "beside": 0,
        "encoder": 0,
        "inputs": decoder.inputs and _write_layer_inputs(decoder.inputs, writer),
        "biases": [
            {"at": writer.append(table), "shape": list(table.shape)}
            for table in decoder.distance_biases
        ],
    }
    pairs = [_write_pair_inputs(each, writer) for each in decoder.pairs]
    return facts | (pairs[0] | {"stack": pairs} if pairs else {})


def _write_pair_inputs(pairs: PairInputs, writer: WeightFile) -> dict[str, Any]:
    return {
        "beside": pairs.width,
        "before_last": int(pairs.before_last),
        "beside_norm": writer.append_norm(pairs.norm),
        "last": writer.append_norm(pairs.last),
        "join": pairs.join and writer.append_weight([pairs.join]),
        "state_norm": writer.append_norm(pairs.state_norm),
        "pair": pairs.product and writer.append_weight([pairs.product]),
    }


def _describe_rope(rope: Rope, base: Any, switch: int | None) -> dict[str, Any]:
    facts = asdict(rope)
    if switch is None:
        return facts
    rotary = base.rotary_emb

    def compute_frequencies(position: int) -> dict[str, Any]:
        cosine, _ = rotary(torch.zeros(1), torch.tensor([[0, position]]))
        frequencies = rotary.inv_freq.double().tolist()
        unrotated = [0.0] * (len(rope.frequencies) - len(frequencies))
        return {"frequencies": [*frequencies, *unrotated], "scale": float(cosine[0, 0, 0])}

    # both are computed here: `rope` may have the frequencies of short or of long sequences
    return facts | {"long": compute_frequencies(switch)} | compute_frequencies(0)


def _get_vectors(stack: Decoder) -> tuple[Floats, Floats] | None:
    """Return the embeddings of all ids, and the weight that they are computed from; None if the
    stack has no embeddings."""
    if stack.embeddings is None or stack.embedded_weight is None:
        return None
    return stack.embeddings.detach().numpy(), stack.embedded_weight.detach().float().numpy()


def _write_embeddings(
    table: Floats,
    weight: Floats,
    output: Linear | None,
    writer: WeightFile,
    head: dict[str, Any] | None,
) -> tuple[dict[str, Any] | None, float]:
    """Write the table of embeddings; return its description, and the factor that its entries must
    be multiplied by. A table tied to the head is not written again: the head's description is
    returned."""
    known = weight != 0
    factors = np.unique((table[known] / weight[known]).astype(np.float32)) if known.any() else []
    factor = float(np.median(factors)) if len(factors) else 1.0
    if not np.allclose(weight * np.float32(factor), table, rtol=1e-6, atol=0):
        weight, factor = table, 1.0
    if output is not None and np.array_equal(weight, output.weight):
        return head, factor
    return writer.append_weight([Linear(weight)], 8, rounding=False), factor


def _write_layer(layer: DecoderLayer, decoder: Decoder, writer: WeightFile) -> dict[str, Any]:
    part, gated, recurrence = layer.attention, layer.gated, None
    if isinstance(part, RecurrentMixer):
        recurrence = _write_recurrence(part, writer)
        # no attention: `heads` and `width` are those of the recurrence's values
        part = Attention(part.projections, part.out, part.heads, 0, part.width, 1.0)
    part = part or Attention([], None, 0, 0, 0, 1.0)
    act = layer.experts.each[0] if layer.experts else gated
    rope = None if part.rope is None else decoder.ropes[part.rope]
    norms = dict(zip(NORM_FIELDS, (*layer.norms, *part.norms), strict=True))
    return {
        **{name: writer.append_norm(norm) for name, norm in norms.items()},
        "qkv": writer.append_weight(part.projections) if part.projections else None,
        "out": part.out and writer.append_weight([part.out]),
        "gate": gated and gated.gate and writer.append_weight([gated.gate]),
        "up": gated and writer.append_weight([gated.up]),
        "down": gated and writer.append_weight([gated.down]),
        "heads": part.heads,
        "kv_heads": part.key_heads,
        "width": part.width,
        "rotary": -1 if part.rope is None else part.rope,
        "query_rotary": -1 if part.query_rope is None else part.query_rope,
        "rotated": 0 if rope is None else 2 * len(rope.frequencies),
        "interleaved": int(rope is not None and rope.interleaved),
        "window": part.window,
        "activation": 0 if act is None else KERNEL_ACTIVATIONS.index(act.activation),
        "curve": (0.0, 0.0, 0.0) if act is None else act.curve,
        "parallel": int(layer.parallel),
        "scale": part.scale,
        "softcap": part.softcap,
        "residual": layer.residual,
        "clip": part.clip,
        "factor": layer.factor,
        "norms": _get_norm_flags(part),
        "sinks": writer.append_floats(part.sinks),
        "slopes": writer.append_floats(part.slopes),
        "experts": layer.experts and _write_experts(layer.experts, writer),
        "source": int(part.attends_to_source),
        "added_first": int(layer.norm_after_add),
        "bias": part.bias,
        "block": BLOCK_TO_END * part.to_block_end + BLOCK_FROM_START * part.from_block_start,
        "gate_of_heads": int(part.gate is not None and len(part.gate.weight) == part.heads),
        "attention_gate": part.gate and writer.append_weight([part.gate]),
        "recurrence": recurrence,
        "beside": layer.parallel_mixer
        and _write_layer(_make_mixer_layer(layer.parallel_mixer), decoder, writer),
        "latent": part.latent and _write_latent(part.latent, writer),
        "lender": part.kv_source_layer,
        "borrowed": int(part.kv_source_layer is not None),
        "input": 0 if layer.input is None else layer.input.at,
        "input_gate": layer.input and writer.append_weight([layer.input.gate]),
        "input_out": layer.input and writer.append_weight([layer.input.out]),
        "after_input": layer.input and writer.append_norm(layer.input.norm),
        "attention_conv": _write_convolution(layer.convolutions[0], writer),
        "mlp_conv": _write_convolution(layer.convolutions[1], writer),
    }


def _write_convolution(part: BlockConvolution | None, writer: WeightFile) -> dict[str, Any] | None:
    return part and {
        "taps": part.base.shape[1],
        "group": part.group,
        "base": writer.append(part.base),
        "deltas": writer.append_weight([part.deltas]),
    }


def _write_layer_inputs(part: LayerInputs, writer: WeightFile) -> dict[str, Any]:
    return {
        "width": part.width,
        "table": writer.append_weight([part.table], 8),
        "product": writer.append_weight([part.product]),
        "norm": writer.append_norm(part.norm),
        "table_factor": part.table_factor,
        "product_factor": part.product_factor,
        "sum_factor": part.sum_factor,
    }


def _make_mixer_layer(mixer: RecurrentMixer) -> DecoderLayer:
    return DecoderLayer((None, None, None, None), mixer, None)


def list_recurrent_layers(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the descriptions of the recurrent layers, and of recurrences that run in parallel to a
    layer's attention."""
    every = [one for layer in layers for one in (layer, layer["beside"]) if one]
    return [layer for layer in every if layer["recurrence"]]


def _write_latent(part: Latent, writer: WeightFile) -> dict[str, Any]:
    return {
        "rank": part.rank,
        "query_rank": part.query_rank,
        "queries": part.queries and writer.append_weight([part.queries]),
        "keys": [writer.append_weight([one]) for one in part.keys],
        "values": [writer.append_weight([one]) for one in part.values],
    }


def _write_recurrence(part: RecurrentMixer, writer: WeightFile) -> dict[str, Any]:
    names = "filter_bias", "decay", "step_bias", "skip", "norm"
    values = {name: writer.append_floats(getattr(part, name)) for name in names}
    key_width = part.key_width + -part.key_width % LANES
    return values | {
        "rule": part.rule,
        "taps": len(part.filters),
        "filters": writer.append(part.filters),
        "key_heads": part.key_heads,
        "key_width": key_width,
        "groups": part.groups,
        "count": part.count,
        "gate_first": int(part.gate_first),
        "epsilon": part.epsilon,
        "query_scale": part.key_width**-0.5 if part.rule == DELTA else 1.0,
        "beta_scale": part.beta_scale,
        "least_step": part.min_step,
        "most_step": min(part.max_step, float(np.finfo(np.float32).max)),
        # not rounded: the error of a decay grows with every token
        "steps": part.steps and writer.append_weight([part.steps], rounding=False),
    }


def count_channels(layer: dict[str, Any]) -> int:
    """Return the number of channels of a layer's convolution."""
    part, values = layer["recurrence"], int(layer["heads"] * layer["width"])
    keys = 0 if part["rule"] == CONVOLUTION else part["key_heads"] * part["key_width"]
    return 2 * keys + values


def count_state_numbers(layer: dict[str, Any]) -> int:
    """Return the size, in floats, of the states of one sequence in a layer's convolution and
    recurrence."""
    part, channels = layer["recurrence"], count_channels(layer)
    if part["rule"] == CONVOLUTION:
        return LAYER_HEADER_NUMBERS + RING_TOKENS * channels
    values, keys = layer["heads"] * layer["width"], part["key_heads"] * part["key_width"]
    decays = layer["heads"] + -layer["heads"] % LANES
    rings = RING_TOKENS * (channels + keys + values + decays)
    return LAYER_HEADER_NUMBERS + rings + 2 * values * part["key_width"]


def _write_experts(experts: Experts, writer: WeightFile) -> dict[str, Any]:
    return {
        **experts.routing._asdict(),
        "count": len(experts.each),
        "added": writer.append_floats(experts.added),
        "shared_gate": int(experts.shared_gate),
        "router": writer.append_weight([experts.router], rounding=False),
        "gate": [one.gate and writer.append_weight([one.gate]) for one in experts.each],
        "up": [writer.append_weight([one.up]) for one in experts.each],
        "down": [writer.append_weight([one.down]) for one in experts.each],
    }


def _get_norm_flags(part: Attention) -> int:
    """Return the flags of a layer's norms of queries and keys (enum HeadNorms of network.h)."""
    if part.norms[0] is None:
        return 0
    weight = part.norms[0].weight
    kind = NORM_EACH_HEAD if weight.ndim > 1 else NORM_ALL_HEADS if len(weight) != part.width else 0
    return kind | part.norms_last * NORM_AFTER_ROTARY


def get_kv_shape(layer: dict[str, Any]) -> tuple[int, int]:
    """Return a layer's number of key heads, and their width padded to full vectors."""
    return int(layer["kv_heads"]), -(-int(layer["width"]) // LANES) * LANES


def compute_layout(facts: dict[str, Any]) -> tuple[PageLayout, list[LayerOffsets]]:
    """Return the page layout of a network's keys and values, and each layer's offsets in a page.
    The offsets of cross-attention and of an assistant are placeholders, which
    `NativePasses.open_cross_kv` and `NativePasses.read_pages` replace.

    A layer of an encoder needs its keys and values only until the next layer begins, so layers of
    the same shape share their offsets.
    """
    shapes, indices = list[tuple[int, int]](), list[int]()
    for layer in facts["layers"]:
        shape = get_kv_shape(layer)
        if layer["borrowed"]:
            lender = layer["lender"]  # or, in an assistant, the target's layer
            indices.append(indices[lender] if lender < len(indices) else 0)
            continue
        uncached = layer["source"] or not layer["kv_heads"]
        if not uncached and not (facts["encoder"] and shape in shapes):
            shapes.append(shape)
        indices.append(shapes.index(shape) if facts["encoder"] else max(0, len(shapes) - 1))
    layout = compute_page_layout(shapes or [NO_HEADS])
    return layout, [layout.layers[i] for i in indices]


def _count_attention_numbers(layer: dict[str, Any]) -> int:
    """Return the size of the workspace, in floats, that a layer's attention needs for one token."""
    latent, heads = layer["latent"], max(layer["heads"], 1)
    values = latent["values"][0]["outputs"] if latent else 0
    if layer["beside"]:
        heads = max(heads, -(-_count_attention_numbers(layer["beside"]) // layer["width"]))
    return max(heads * max(layer["width"], values), latent["query_rank"] if latent else 0)


def make_weight_record(
    part: dict[str, Any] | None, memory: NDArray[np.uint8], owned: list[Any]
) -> library.WeightRecord:
    """Return the ctypes struct of a weight in mapped memory. Structs that it points to are appended
    to `owned`, which must outlive the returned struct."""
    if part is None:
        return library.WeightRecord()
    if part["rest"] is not None:
        owned.append(make_weight_record(part["rest"], memory, owned))
    base, bias = memory.ctypes.data, part["bias"]
    return library.WeightRecord(
        STORAGE_KINDS[part["kind"]],
        part["outputs"],
        part["inputs"],
        part["form"],
        base + part["panels"],
        None if bias is None else base + bias,
        None if part["rest"] is None else ctypes.addressof(owned[-1]),
    )


def make_network_record(
    facts: dict[str, Any],
    layer_offsets: list[LayerOffsets],
    memory: NDArray[np.uint8],
    threads: int,
    max_tokens: int,
) -> Any:
    """Return the ctypes struct of a network, and an object that must outlive the struct, because it
    owns the memory that the struct points to.

    layer_offsets: The offsets of each layer's keys and values in a page. memory: The mapped file of
    weights.
    """
    base, owned = memory.ctypes.data, list[Any]([memory])

    def value(kind: Any, fact: Any) -> Any:
        """Return an entry of a description as the value of a struct's field."""
        if kind is library.WeightRecord:
            return make_weight_record(fact, memory, owned)
        if kind is POINTER(library.WeightRecord):
            owned.append(
                (library.WeightRecord * len(fact))(
                    *(make_weight_record(x, memory, owned) for x in fact)
                )
            )
            return owned[-1]
        if isinstance(kind, type(Structure)):
            return record(kind, fact or {})
        if kind is c_void_p:
            return None if fact is None else base + fact
        return tuple(fact) if isinstance(fact, list) else fact

    def record(kind: Any, facts: dict[str, Any]) -> Any:
        fields = [(name, value(own, facts[name])) for name, own in kind._fields_ if name in facts]
        return kind(**dict(fields))

    def layer(part: dict[str, Any], offsets: LayerOffsets) -> Any:
        made = record(library.LayerRecord, {k: x for k, x in part.items() if k != "beside"})
        made.keys, made.values, made.step = offsets
        made.halved = facts["halved"]
        if part["beside"]:
            owned.append(layer(part["beside"], offsets))
            made.beside = ctypes.addressof(owned[-1])
        return made

    parts = facts["layers"]
    layers = (library.LayerRecord * len(parts))(*map(layer, parts, layer_offsets))
    inner = [part[name]["outputs"] for part in parts for name in ("up", "input_gate") if part[name]]
    sizes = {
        "layers": len(layers),
        "vocabulary": facts["head"]["outputs"] if facts["head"] else 0,
        "threads": threads,
        "inner": max(inner, default=LANES),
        "attention": max(map(_count_attention_numbers, parts)),
        "most_tokens": max_tokens,
    }
    network = record(library.NetworkRecord, facts | sizes)
    network.layer = layers
    return network, (layers, owned)
