"""A decoder on OpenVINO's paged attention, behind the Model protocol.

Keys and values live in blocks of 32 tokens; a row is a list of blocks and a length. One flat pass
takes the new tokens of all rows, whatever their lengths; rollback is a smaller length, and rows
that were copied share blocks until one of them writes. It does not know tokens' meaning, nor where
its graph came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import openvino as ov
from foretoken.models.base import Blocks
from foretoken.models.rows import check_context, check_lengths, staying
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

CHUNK = 512  # tokens in one pass of a prefill: bounds its memory
FIRST = 16  # blocks to begin with; the pool then grows by half
MOST = 16  # tokens added to a pass
SLACK = 1.2e7  # parameters a layer whose products for one token cost as much as a new layout


def paged(graph: ov.Model, windows: list[int]) -> ov.Model:
    """The same graph over paged attention, each layer with its sliding window (0: none)."""
    paged_attention_transformation(graph)
    found = [op for op in graph.get_ordered_ops() if "PagedAttention" in op.get_type_name()]
    for op in found:
        names = op.input_value(3).get_names()
        layer = int(next(name for name in names if "key_cache" in name).split(".")[1])
        if windows[layer]:
            window: Any = ops.constant(np.array(windows[layer], dtype=np.int32))
            op.input(10).replace_source_output(window.output(0))
    graph.validate_nodes_and_infer_types()
    return graph


@dataclass(slots=True)
class Pool:
    """Blocks of keys and values, the same numbers in every layer, and who holds them."""

    request: ov.InferRequest
    names: list[str]
    size: int = 0
    wanted: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)  # rows per block

    def take(self) -> int:
        if not self.free:
            self.grow()
        block = self.free.pop()
        self.holders[block] = 1
        return block

    def own(self, blocks: list[int], i: int) -> None:
        """Block i of a row is about to be written to: from now on no other row holds it."""
        shared = blocks[i]
        if self.holders[shared] == 1:
            return
        fresh = self.take()
        for array in self.arrays.values():
            array[fresh] = array[shared]
        blocks[i] = fresh
        self.holders[shared] -= 1  # last: broken off before, a block is idle until rows change

    def counted(self, rows: list[list[int]]) -> tuple[list[int], list[int]]:
        """`holders` and `free` where these rows hold blocks, and nobody else."""
        holders = [0] * self.size
        for block in chain.from_iterable(rows):
            holders[block] += 1
        return holders, [block for block in reversed(range(self.size)) if not holders[block]]

    def grow(self) -> None:
        self.wanted = max(FIRST, self.size + self.size // 2)
        self.fit()

    def fit(self) -> None:
        """As many blocks as are wanted, in every layer, also where growing was broken off: over
        keys and values of different sizes OpenVINO makes nothing, and does not say so."""
        if self.size == self.wanted:
            return
        for name in self.names:
            if name not in self.arrays or len(self.arrays[name]) != self.wanted:
                self._widen(name)
        more = range(self.wanted - 1, self.size - 1, -1)
        # At once: broken off in between, a block would be free twice
        self.free, self.holders, self.size = (
            [*self.free, *more],
            [*self.holders, *[0] * len(more)],
            self.wanted,
        )

    def _widen(self, name: str) -> None:
        port = self.request.get_compiled_model().input(name)
        shape = [self.wanted, *(d.get_length() for d in list(port.get_partial_shape())[1:])]
        bigger = ov.Tensor(port.get_element_type(), ov.Shape(shape))
        array = bigger.data
        if self.size:
            array[: self.size] = self.arrays[name]
        array[self.size :] = 0
        self.request.set_tensor(name, bigger)
        self.arrays[name] = array


class PagedModel:
    """`compiled` is what `paged` made; `facts` are the export's."""

    encoder_decoder = False
    source_context: int | None = None
    source_vocab_size: int | None = None
    runtime = "openvino"
    takes_tensors = False
    device = torch.device("cpu")

    def __init__(self, compiled: ov.CompiledModel, facts: dict[str, Any]) -> None:
        self.vocab_size: int = facts["vocab_size"]
        self.context: int | None = facts["context"]
        self.identity: str | None = facts.get("identity")  # what its speed follows from
        self.computed: str = facts.get("computed", "float32")  # the arithmetic's dtype
        self.request = compiled.create_infer_request()
        caches = [p.get_any_name() for p in compiled.inputs if "cache." in p.get_any_name()]
        self.block = int(compiled.input("key_cache.0").get_partial_shape()[2].get_length())
        self.pool = Pool(self.request, caches)
        others = [p for p in compiled.inputs if "cache." not in p.get_any_name()]
        self.kinds = {p.get_any_name(): p.get_element_type().to_dtype() for p in others}
        self.buffers: dict[tuple[str, int], tuple[NDArray[Any], ov.Tensor]] = {}
        self.bound: dict[str, int] = {}  # sizes of the buffers that the request reads now
        self.slack = min(MOST, int(SLACK * len(facts["windows"]) / facts["parameters"]))
        self.added = 0  # tokens, since a pass of this size was needed
        self.lengths: list[int] = []
        self.blocks: list[list[int]] = []  # of every row
        self.need: list[int] = []  # positions of every row in the last score

    @property
    def hidden(self) -> Tensor:
        return ragged(self._output("hidden", sum(self.need)), self.need)

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        check_context([0] * len(prompts), prompts, self.context)
        first = len(self.lengths)
        self.lengths += [0] * len(prompts)
        self.blocks += [[] for _ in prompts]
        for b, prompt in enumerate(prompts, first):
            for at in range(0, len(prompt), CHUNK):
                self._run([(b, prompt[at : at + CHUNK])], [0])

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_context(self.lengths, blocks, self.context)
        parts = [(b, block) for b, block in enumerate(blocks) if block]
        if not parts:
            return torch.zeros(len(blocks), 0, self.vocab_size)
        ends = accumulate(len(block) for _, block in parts)
        wanted = [need[b] for b, _ in parts]
        places = [i for end, n in zip(ends, wanted, strict=True) for i in range(end - n, end)]
        flat = self._run(parts, places or [0])
        if not places:
            return torch.zeros(len(blocks), 0, self.vocab_size)
        self.need = list(need)
        return ragged(flat, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self.lengths = list(lengths)

    def permute(self, rows: list[int]) -> None:
        blocks, lengths = [list(self.blocks[b]) for b in rows], [self.lengths[b] for b in rows]
        holders, free = self.pool.counted(blocks)
        # At once, and counted anew: what a Ctrl-C has left does not stay
        self.blocks, self.lengths, self.pool.holders, self.pool.free = (
            blocks,
            lengths,
            holders,
            free,
        )

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.lengths), rows))

    def _run(self, parts: list[tuple[int, list[int]]], places: list[int]) -> Tensor:
        """Append blocks to rows; logits `[len(places), V]` at flat `places`, valid until the next
        run."""
        self.pool.fit()
        past = [self.lengths[b] for b, _ in parts]
        for start, (b, tokens) in zip(past, parts, strict=True):
            self.lengths[b] = start + len(tokens)
        ids = [list(tokens) for _, tokens in parts]
        ids[-1] += [0] * self._padding(sum(map(len, ids)), past[-1] + len(ids[-1]))
        sizes = [len(tokens) for tokens in ids]
        ends = [start + size for start, size in zip(past, sizes, strict=True)]
        held = [
            self._room(b, start, end) for (b, _), start, end in zip(parts, past, ends, strict=True)
        ]
        same = sum(sizes) == self.bound.get("input_ids")
        again = max(0, self.bound.get("needed", 0) - len(places)) if same else 0
        self._put("input_ids", list(chain.from_iterable(ids)))
        self._put("position_ids", list(chain.from_iterable(map(range, past, ends))))
        self._put("needed", places + places[-1:] * again)
        self._put("past_lens", past)
        self._put("subsequence_begins", [0, *accumulate(sizes)])
        self._put("block_indices_begins", [0, *accumulate(map(len, held))])
        self._put("block_indices", list(chain.from_iterable(held)))
        self._put("max_context_len", [max(ends)])
        self.request.infer(share_outputs=True)
        return self._output("logits", len(places))

    def _output(self, name: str, count: int) -> Tensor:
        """The first rows of what the last run made, `[count, ..]`; more may have been asked for."""
        made = torch.from_numpy(self.request.get_tensor(name).data)
        return made.flatten(0, -2)[:count]

    def _padding(self, tokens: int, end: int) -> int:
        """Tokens to add behind the last row, where the next ones will be written: a pass of the
        same size as the one before is quicker, for OpenVINO lays out every layer anew for another.

        Until so many were added as another layout costs: then the smaller size is the new one.
        """
        missing = self.bound.get("input_ids", 0) - tokens
        fits = self.context is None or end + missing <= self.context
        self.added = self.added + missing if missing > 0 else 0
        if self.added <= self.slack and fits:
            return max(0, missing)
        self.added = 0
        return 0

    def _room(self, b: int, start: int, end: int) -> list[int]:
        """The blocks of row b's first `end` tokens; those from `start` on are its own."""
        blocks = self.blocks[b]
        for i in range(start // self.block, len(blocks)):
            self.pool.own(blocks, i)
        count = -(-end // self.block)
        while len(blocks) < count:
            blocks.append(self.pool.take())
        return blocks[:count]

    def _put(self, name: str, values: list[int]) -> None:
        """Fill an input; its buffer is bound again only where its size has changed."""
        if name not in self.kinds:
            return  # a graph without positions
        size = len(values)
        if (name, size) not in self.buffers:
            array = np.empty(() if name == "max_context_len" else size, self.kinds[name])
            self.buffers[name, size] = array, ov.Tensor(array, shared_memory=True)
        array, tensor = self.buffers[name, size]
        array[...] = values[0] if array.ndim == 0 else values
        if self.bound.get(name) != size:
            self.bound.pop(name, None)  # where this is broken off, it is neither
            self.request.set_tensor(name, tensor)
            self.bound[name] = size


def ragged(flat: Tensor, need: list[int]) -> Tensor:
    """`[sum(need), n]`, row behind row -> `[B, max(need), n]`, zeros behind a row's own."""
    if min(need) == max(need):
        return flat.view(len(need), need[0], -1)
    out = flat.new_zeros(len(need), max(need), flat.shape[1])
    for row, part in zip(out, flat.split(need), strict=True):
        row[: len(part)] = part
    return out
