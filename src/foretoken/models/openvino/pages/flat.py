"""Flat passes of a graph over pages: the new tokens of all rows one behind another, whatever their
lengths. Which rows these are, and which pages they have, its caller knows.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.models.padding import Padding

MOST = 16  # tokens added to a pass


class Flat:
    """A compiled graph and its inputs; `facts` are its export's."""

    def __init__(self, compiled: ov.CompiledModel, facts: dict[str, Any]) -> None:
        self.request = compiled.create_infer_request()
        kinds = {p.get_any_name(): p.get_element_type() for p in compiled.inputs}
        self.kinds = {name: k.to_dtype() for name, k in kinds.items() if "cache." not in name}
        self.buffers: dict[tuple[str, int], tuple[NDArray[Any], ov.Tensor]] = {}
        self.bound: dict[str, int] = {}  # sizes of the buffers that the request reads now
        self.longest: int | None = facts.get("longest") or facts["context"]
        self.sizes = Padding()
        self.padding = 0

    def padded(self, ids: list[list[int]], past: list[int]) -> list[list[int]]:
        """The tokens of every row, padded behind the last one, where the next ones will be written:
        for a pass of another size OpenVINO prepares every layer anew."""
        room = MOST
        if self.longest is not None:
            room = min(room, self.longest - past[-1] - len(ids[-1]))
        single = all(len(tokens) == 1 for tokens in ids)
        self.padding = self.sizes.missing(sum(map(len, ids)), room, single=single)
        return [*ids[:-1], [*ids[-1], *[0] * self.padding]]

    def run(
        self,
        ids: list[list[int]],
        past: list[int],
        pages: list[list[int]],
        places: list[int],
        firsts: list[int],
    ) -> Tensor:
        """A pass over these tokens of rows that have so many in their pages; logits
        `[len(places), V]` at flat `places`, valid until the next pass. firsts: the position that a
        row's first token has."""
        sizes = [len(tokens) for tokens in ids]
        ends = [start + size for start, size in zip(past, sizes, strict=True)]
        same = sum(sizes) == self.bound.get("input_ids")
        repeats = max(0, self.bound.get("needed", 0) - len(places)) if same else 0
        self._put("input_ids", list(chain.from_iterable(ids)))
        spans = (range(n + a, n + b) for n, a, b in zip(firsts, past, ends, strict=True))
        self._put("position_ids", list(chain.from_iterable(spans)))
        self._put("needed", places + places[-1:] * repeats)
        self._put("past_lens", past)
        self._put("subsequence_begins", [0, *accumulate(sizes)])
        self._put("block_indices_begins", [0, *accumulate(map(len, pages))])
        self._put("block_indices", list(chain.from_iterable(pages)))
        self._put("max_context_len", [max(ends)])
        self.request.infer(share_outputs=True)
        return self.output("logits", len(places))

    def output(self, name: str, count: int) -> Tensor:
        """The first `count` rows of an output of the last run, whose padding may have made more."""
        values = torch.from_numpy(self.request.get_tensor(name).data)
        return values.flatten(0, -2)[:count]

    def _put(self, name: str, values: list[int]) -> None:
        """Fill an input; its buffer is bound again only if its size has changed."""
        if name not in self.kinds:
            return  # a graph without positions
        size = len(values)
        if (name, size) not in self.buffers:
            array = np.empty(() if name == "max_context_len" else size, self.kinds[name])
            self.buffers[name, size] = array, ov.Tensor(array, shared_memory=True)
        array, tensor = self.buffers[name, size]
        array[...] = values[0] if array.ndim == 0 else values
        if self.bound.get(name) != size:
            self.bound.pop(name, None)  # broken off here, either buffer may be bound
            self.request.set_tensor(name, tensor)
            self.bound[name] = size
