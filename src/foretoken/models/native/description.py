"""A network described for the kernels: packed weights in one file, and what each layer does with
them, as JSON.

Read from transformers' modules by `reading`; turned into the records of `library` by `records`,
over the mapped file.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from foretoken.models.blocks import Blocks, Floats, found
from foretoken.models.native import library
from foretoken.models.native.packing import KINDS, LANES, Panels, pack_floats, pack_integers
from foretoken.models.native.reading import (
    ACTIVATIONS,
    XIELU,
    Attention,
    Decoder,
    DecoderLayer,
    Linear,
    NetworkReader,
    Norm,
)
from foretoken.models.rounding import rounded

FILE = "weights.bin"
ALIGNED, SLACK = 64, 8192  # bytes; prefetches read past the last panel
BITS = {"int8": 8, "int4": 4}
NORMS = "before_attention", "after_attention", "before_mlp", "after_mlp"
NORMS += "of_queries", "of_keys", "of_values"
EACH, TOGETHER, LAST = 1, 2, 4  # norms of heads, as in network.h


class WeightFile:
    """Appends arrays to a file, each at a multiple of 64 bytes."""

    def __init__(self, file: BinaryIO, dtype: str) -> None:
        self.file, self.dtype = file, dtype

    def put(self, array: NDArray[Any]) -> int:
        """Append an array; return where it begins."""
        at = self.file.tell()
        self.file.write(np.ascontiguousarray(array).tobytes())
        self.file.write(bytes(-self.file.tell() % ALIGNED))
        return at

    def floats(self, array: Floats | None) -> int | None:
        """Append numbers, padded with zeros to a full vector."""
        if array is None:
            return None
        return self.put(np.concatenate([array, np.zeros(-len(array) % LANES + LANES, np.float32)]))

    def norm(self, norm: Norm | None) -> dict[str, Any] | None:
        if norm is None:
            return None
        rows = norm.weight.reshape(-1, norm.weight.shape[-1])  # each in full vectors
        rows = np.concatenate([rows, np.zeros((len(rows), -rows.shape[1] % LANES), np.float32)], 1)
        weight, bias = self.floats(rows.ravel()), self.floats(norm.bias)
        return {
            "weight": weight,
            "bias": bias,
            "epsilon": norm.epsilon,
            "centred": int(norm.centred),
        }

    def weight(self, linears: list[Linear], bits: int | None) -> dict[str, Any]:
        """Append a weight, or several as one, their outputs concatenated."""
        weight = np.concatenate([linear.weight for linear in linears])
        packed, bias = pack(weight, bits), None
        if any(linear.bias is not None for linear in linears):
            parts = [
                np.zeros(len(x.weight), np.float32) if x.bias is None else x.bias for x in linears
            ]
            bias = self.floats(np.concatenate(parts))
        at = self.put(packed.data)
        return {
            "kind": packed.kind,
            "form": packed.form,
            "outputs": packed.outputs,
            "inputs": packed.inputs,
            "panels": at,
            "bytes": packed.data.nbytes,
            "bias": bias,
        }


def pack(weight: Floats, bits: int | None) -> Panels:
    """Pack a weight: its own blocks if it has some of at most `bits` bits, else rounded to that
    many; as numbers if bits is None, of 16 bits if that loses nothing."""
    blocks = found(weight)
    if bits and (blocks is None or blocks.bits > bits) and weight.shape[1] % 32 == 0:
        blocks = rounded(weight, bits)
    if blocks is not None and (bits or blocks.bits == 4):
        return _in_blocks(blocks, weight.shape)
    upper = weight.view(np.uint32) >> 16
    if (upper << 16 == weight.view(np.uint32)).all():
        return pack_floats(upper.astype(np.uint16), "bfloat16")
    return pack_floats(weight, "float32")


def _in_blocks(blocks: Blocks, shape: tuple[int, ...]) -> Panels:
    integers, scales = blocks.integers.reshape(shape).astype(np.int16), blocks.scales[..., 0]
    if blocks.offsets is None:
        return pack_integers(integers, scales, None, blocks.bits)
    offsets = blocks.offsets[..., 0]
    low = min(0, int(integers.min()))  # integers from 0 on, and the offset that a file has
    return pack_integers(
        integers - low, scales, (offsets + scales * low).astype(np.float32), blocks.bits
    )


def describe(network: PreTrainedModel, folder: Path, dtype: str) -> dict[str, Any]:
    """Write a network's weights into a folder; return its description. Raises RefusedError for one
    that is built in another way than the kernels know."""
    reader = NetworkReader(network)
    decoder = reader.decoder()
    with (folder / FILE).open("wb") as file:
        writer = WeightFile(file, dtype)
        bits = BITS.get(dtype)
        head = writer.weight([decoder.head], bits and 8)
        embeddings, factor = _embeddings(reader, decoder, writer, head)
        facts = {
            "halved": int(bits is not None),
            "width": decoder.width,
            "vocabulary": len(decoder.head.weight),
            "embedding_factor": factor,
            "logit_factor": decoder.scale,
            "logit_cap": decoder.cap,
            "embeddings": embeddings,
            "positions": decoder.positions and writer.weight([decoder.positions], None),
            "embedding_norm": writer.norm(decoder.embedded),
            "head": head,
            "last": writer.norm(decoder.norm),
            "ropes": [asdict(rope) for rope in decoder.ropes],
            "layers": [_layer(layer, decoder, writer, bits) for layer in decoder.layers],
        }
        writer.put(np.zeros(SLACK, np.uint8))
    return facts


def _embeddings(
    reader: NetworkReader, decoder: Decoder, writer: WeightFile, head: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """The table of embeddings and a factor of it: the head's own weight where that is the same."""
    table = reader.embeddings().detach().numpy()
    weight: Any = reader.network.get_input_embeddings().weight
    own = weight.detach().float().numpy()
    known = own != 0
    factors = np.unique((table[known] / own[known]).astype(np.float32)) if known.any() else []
    factor = float(np.median(factors)) if len(factors) else 1.0
    if not np.allclose(own * np.float32(factor), table, rtol=1e-6, atol=0):
        own, factor = table, 1.0
    if own.shape == decoder.head.weight.shape and np.array_equal(own, decoder.head.weight):
        return head, factor
    return writer.weight([Linear(own)], None), factor


def _layer(
    layer: DecoderLayer, decoder: Decoder, writer: WeightFile, bits: int | None
) -> dict[str, Any]:
    part, gated = layer.attention, layer.gated
    rope = None if part.rope is None else decoder.ropes[part.rope]
    norms = dict(zip(NORMS, (*layer.norms, *part.norms), strict=True))
    return {
        **{name: writer.norm(norm) for name, norm in norms.items()},
        "qkv": writer.weight(part.reads, bits),
        "out": writer.weight([part.out], bits),
        "gate": None if gated.gate is None else writer.weight([gated.gate], bits),
        "up": writer.weight([gated.up], bits),
        "down": writer.weight([gated.down], bits),
        "heads": part.heads,
        "kv_heads": part.key_heads,
        "width": part.width,
        "rotary": -1 if part.rope is None else part.rope,
        "query_rotary": -1 if part.query_rope is None else part.query_rope,
        "rotated": 0 if rope is None else 2 * len(rope.frequencies),
        "interleaved": int(rope is not None and rope.interleaved),
        "window": part.window,
        "activation": [*ACTIVATIONS, XIELU].index(gated.activation),
        "curve": gated.curve,
        "parallel": int(layer.parallel),
        "scale": part.scale,
        "softcap": part.softcap,
        "residual": layer.residual,
        "clip": part.clip,
        "factor": layer.factor,
        "norms": _norms(part),
        "sinks": writer.floats(part.sinks),
        "slopes": writer.floats(part.slopes),
    }


def _norms(part: Attention) -> int:
    """Return flags for how queries and keys are normed."""
    if part.norms[0] is None:
        return 0
    weight = part.norms[0].weight
    kind = EACH if weight.ndim > 1 else TOGETHER if len(weight) != part.width else 0
    return kind | part.norms_last * LAST


def page_numbers(facts: dict[str, Any]) -> list[int]:
    """Return the offset of each layer's keys in a page, then the size of a page, in numbers."""
    at = [0]
    for layer in facts["layers"]:
        full = -(-layer["width"] // LANES) * LANES
        at.append(at[-1] + layer["kv_heads"] * 16 * (layer["width"] + full))
    return at


def records(
    facts: dict[str, Any], starts: list[int], memory: NDArray[np.uint8], threads: int, tokens: int
) -> Any:
    """Return the record of a network for the kernels, over its weights in memory and with each
    layer's keys where `starts` says, and what must be
    kept for as long as it is used."""
    base = memory.ctypes.data

    def pointer(at: int | None) -> int | None:
        return None if at is None else base + at

    def norm(part: dict[str, Any] | None) -> library.NormRecord:
        if part is None:
            return library.NormRecord()
        return library.NormRecord(
            pointer(part["weight"]), pointer(part["bias"]), part["epsilon"], part["centred"]
        )

    def weight(part: dict[str, Any] | None) -> library.WeightRecord:
        if part is None:
            return library.WeightRecord()
        return library.WeightRecord(
            KINDS[part["kind"]],
            part["outputs"],
            part["inputs"],
            part["form"],
            pointer(part["panels"]),
            pointer(part["bias"]),
        )

    layers = (library.LayerRecord * len(facts["layers"]))()
    for record, part, keys in zip(layers, facts["layers"], starts, strict=False):
        fields: Any = library.LayerRecord._fields_
        for name, kind in fields:
            made = {library.NormRecord: norm, library.WeightRecord: weight}.get(kind)
            if made is not None:
                setattr(record, name, made(part[name]))
            elif name in ("sinks", "slopes"):
                setattr(record, name, pointer(part[name]))
            elif name in part:
                setattr(record, name, tuple(x) if isinstance(x := part[name], list) else x)
        record.keys, record.halved = keys, facts["halved"]
    network = library.NetworkRecord(
        width=facts["width"],
        layers=len(layers),
        vocabulary=facts["head"]["outputs"],
        threads=threads,
        inner=max(part["up"]["outputs"] for part in facts["layers"]),
        attention=max(part["heads"] * part["width"] for part in facts["layers"]),
        most_tokens=tokens,
        embedding_factor=facts["embedding_factor"],
        logit_factor=facts["logit_factor"],
        logit_cap=facts["logit_cap"],
        embeddings=weight(facts["embeddings"]),
        positions=weight(facts["positions"]),
        head=weight(facts["head"]),
        embedding_norm=norm(facts["embedding_norm"]),
        last=norm(facts["last"]),
        layer=layers,
    )
    return network, (layers, memory)
