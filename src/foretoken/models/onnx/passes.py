"""Passes of a graph over slots: its inputs and outputs are arrays of ours, bound once for every
size of a pass. Knows no rows beyond their places.

Attention of one token of a row alone is summed in another order than that of several, and so is
that of one token behind whole tiles. So a lone token attends twice, the second time behind itself,
where the row's next token will be written: the numbers of a token then do not depend on how many
are read with it, as far as products allow (`batch_invariant`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.blocks import Floats
from foretoken.models.onnx.slots import KeySlots

DECODER, JOIN = "decoder", "join"  # graphs
EMBEDDINGS = "embeddings.npy"  # file
SIZES = 32  # of passes whose bindings are kept, each with room for its logits
TILE = 32  # tokens of a row whose attention is computed at once, or a multiple


class Part(NamedTuple):
    """New tokens of a row, behind the `past` ones in its place."""

    place: int
    past: int
    tokens: list[int]
    need: int  # of the last ones, whose logits are asked for


class Size(NamedTuple):
    """The sizes of the arrays of a pass."""

    first: int  # place of the cache
    rows: int
    width: int  # of the padded block
    tokens: int
    needed: int


@dataclass(slots=True)
class Bound:
    """The arrays of a pass of one size, and their binding."""

    binding: ort.IOBinding
    arrays: dict[str, NDArray[Any]]
    logits: Tensor  # [1, P, V], and the hidden states there, in these arrays
    hidden: Tensor
    values: list[ort.OrtValue] = field(default_factory=list)  # which do not keep themselves alive


class Passes:
    """One graph, read from a folder; `layers` are those of the slots that it reads and writes."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.session = session(folder, DECODER)
        self.join = session(folder, JOIN) if facts["joins"] else None
        table = folder / EMBEDDINGS
        self.table: NDArray[Any] | None = None
        if table.exists():  # as a plain array: the class of mapped ones takes longer to index
            self.table = np.asarray(np.load(table, mmap_mode="r"))
        self.constant_bytes = (folder / f"{DECODER}.weights").stat().st_size
        self.layers = list(range(len(facts["keys"])))
        self.vocab_size, self.width, self.reads = (
            facts["vocab_size"],
            facts["width"],
            facts["reads"],
        )
        self.shown = len(facts.get("taps", ())) * facts["width"]
        self.ropes = [(np.array(frequencies), scale) for frequencies, scale in facts["ropes"]]
        self.turned: dict[str, Floats] = {}  # cosines and sines of all positions
        self.bound: dict[Size, Bound] = {}
        self.over: list[Floats] = []  # the slots' arrays that are bound

    def run(self, slots: KeySlots, parts: list[Part], given: Floats | None = None) -> Bound:
        """A pass over these parts, whose places ascend; what it read and made, valid until the next
        of its size. given: what it reads in place of embeddings of the tokens."""
        if self.over is not slots.arrays:
            self.bound, self.over = {}, slots.arrays
            self._turn(slots.capacity)
        bound = self._bound(self._size(parts), slots)
        arrays = bound.arrays
        self._read(arrays["states"], parts, given)
        self._lay_out(arrays, parts)
        self.session.run_with_iobinding(bound.binding)
        return bound

    def _size(self, parts: list[Part]) -> Size:
        first = parts[0].place
        return Size(
            first,
            parts[-1].place + 1 - first,
            max(attending(len(part.tokens)) for part in parts),
            max(1, sum(len(part.tokens) for part in parts)),
            max(1, sum(part.need for part in parts)),
        )

    def _read(self, states: Floats, parts: list[Part], given: Floats | None) -> None:
        count = sum(len(part.tokens) for part in parts)
        if given is not None:
            states[:count] = given
        else:
            assert self.table is not None
            wide = self.table.dtype != np.uint16
            tokens = chain.from_iterable(part.tokens for part in parts)
            # one by one: behind a pass, an index of several rows takes three times as long
            for state, token in zip(states, tokens, strict=False):
                row = self.table[token]
                state[:] = row if wide else widened(row)
        if count < len(states):
            states[count:] = states[count - 1]

    def _lay_out(self, arrays: dict[str, NDArray[Any]], parts: list[Part]) -> None:
        places, flat = arrays["places"], arrays["flat"]
        counts, last, needed = arrays["counts"], arrays["last"], arrays["needed"]
        width, first, i = places.shape[1], parts[0].place, 0
        counts[:], last[:], places[:] = 0, 0, 0
        ends = list(accumulate(len(part.tokens) for part in parts))
        for part, end in zip(parts, ends, strict=True):
            row, count = part.place - first, len(part.tokens)
            attends = attending(count)
            counts[row], last[row] = attends, part.past + attends - 1
            places[row, :count] = range(end - count, end)
            places[row, count:attends] = end - 1
            flat[end - count : end] = range(row * width, row * width + count)
            needed[i : i + part.need] = range(end - part.need, end)
            i += part.need
        flat[ends[-1] :] = flat[ends[-1] - 1]
        needed[i:] = ends[-1] - 1

    def _bound(self, size: Size, slots: KeySlots) -> Bound:
        if size not in self.bound:
            if len(self.bound) >= SIZES:
                self.bound = {}
            self.bound[size] = self._bind(size, slots)
        return self.bound[size]

    def _bind(self, size: Size, slots: KeySlots) -> Bound:
        T, P, B, S = size.tokens, size.needed, size.rows, size.width
        inputs: dict[str, NDArray[Any]] = {
            "states": np.zeros((T, self.reads), np.float32),
            "needed": np.zeros(P, np.int64),
            "places": np.zeros((B, S), np.int64),
            "flat": np.zeros(T, np.int64),
            "counts": np.zeros(B, np.int32),
            "last": np.zeros(B, np.int32),
            "most": np.array([slots.capacity], np.int32),
            **self.turned,
        }
        outputs: dict[str, Floats] = {
            "logits": np.zeros((P, self.vocab_size), np.float32),
            "hidden": np.zeros((P, self.width), np.float32),
        }
        if self.shown:
            outputs["shown"] = np.zeros((T, self.shown), np.float32)
        with torch.inference_mode(False):  # they outlive the step that makes them
            logits, hidden = (torch.from_numpy(outputs[x])[None] for x in ("logits", "hidden"))
        bound = Bound(self.session.io_binding(), inputs | outputs, logits, hidden)
        for name, array in bound.arrays.items():
            value = ort.OrtValue.ortvalue_from_numpy(array)
            bound.values.append(value)
            if name in outputs:
                bound.binding.bind_ortvalue_output(name, value)
            else:
                bound.binding.bind_ortvalue_input(name, value)
        count = len(slots.arrays) // 2
        for kind, start in (("keys", 0), ("values", count)):
            for i, layer in enumerate(self.layers):
                part = slots.arrays[start + layer][size.first : size.first + B]
                value = ort.OrtValue.ortvalue_from_numpy(part)
                bound.values.append(value)
                bound.binding.bind_ortvalue_input(f"{kind}.{i}", value)
                bound.binding.bind_ortvalue_output(f"new.{kind}.{i}", value)
        return bound

    def _turn(self, positions: int) -> None:
        """Cosines and sines of so many positions, as transformers computes them."""
        for k, (frequencies, scale) in enumerate(self.ropes):
            angles = torch.outer(
                torch.arange(positions, dtype=torch.float32),
                torch.tensor(frequencies, dtype=torch.float32),
            )
            self.turned[f"cosine.{k}"] = (angles.cos() * scale).numpy()
            self.turned[f"sine.{k}"] = (angles.sin() * scale).numpy()


def session(folder: Path, name: str) -> ort.InferenceSession:
    """A graph that was written there, ready to run on this machine's CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # errors are raised, too
    # Threads that wait for the next pass by spinning would take the cores from the other model's
    options.add_session_config_entry("session.force_spinning_stop", "1")
    providers = ["CPUExecutionProvider"]
    return ort.InferenceSession(str(folder / f"{name}.onnx"), options, providers=providers)


def attending(count: int) -> int:
    """Return how many places of attention so many tokens of a row take."""
    return count + (count % TILE == 1)


def widened(bits: NDArray[np.uint16]) -> Floats:
    """Numbers in bfloat16, given as their bits, in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
