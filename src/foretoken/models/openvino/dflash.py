"""Drafts by blocks on OpenVINO, over contexts that we own and graphs read in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import torch
from torch import Tensor, nn

from foretoken.models.openvino.explicit import STORAGE, Feed, Slots, shapes
from foretoken.models.rows import by_place
from foretoken.models.stock.dflash import BlockRows, BlocksDraft


class CompiledProduct(nn.Module):
    """A layer that OpenVINO runs."""

    def __init__(self, graph: ov.CompiledModel) -> None:
        super().__init__()
        self.request = graph.create_infer_request()

    def forward(self, x: Tensor) -> Tensor:
        self.request.infer([x.contiguous().numpy()])
        return torch.from_numpy(self.request.get_output_tensor(0).data.copy())


class CompiledBlocks(BlockRows):
    """Runs what `export_dflash` made: its graphs, compiled for the CPU, and `facts`.

    draft: what they were made of; its layers and its output layer are not read.
    """

    runtime = "openvino"

    def __init__(
        self, draft: BlocksDraft, graphs: dict[str, ov.CompiledModel], facts: dict[str, Any]
    ) -> None:
        layers = draft.network.config.num_hidden_layers
        self.shapes = shapes(graphs["decoder"], layers)
        self.reader = Feed(graphs["context"], [])
        self.decoder = Feed(graphs["decoder"], list(range(layers)))
        kind = STORAGE[self.shapes.kind]
        super().__init__(draft, torch.device("cpu"), np.dtype(kind).itemsize)
        self.identity, self.computed = facts.get("identity"), facts["computed"]
        if self.chain is not None:
            self.chain.markov_w2 = CompiledProduct(graphs["bias"])
            for part in self.chain.children():
                if isinstance(part, nn.Linear):
                    part.float()
        if self.confidence is not None:
            self.confidence.float()

    def _empty(self, rows: int) -> Slots:
        return Slots.empty(rows, self.shapes)

    def _append(self, states: Tensor, positions: Tensor, counts: list[int]) -> None:
        self.reader.put("states", states.float().numpy())
        self.reader.put("positions", positions.numpy())
        self.reader.run()
        cache, at = self.cache, 0
        ends = [n + count for n, count in zip(cache.lengths, counts, strict=True)]
        cache.close()
        cache.reserve(len(ends), max(ends))
        new = [self.reader.read(name).swapaxes(1, 2) for name in ("new_keys", "new_values")]
        for place, start, end in zip(cache.places, cache.lengths, ends, strict=True):
            for x, fresh in zip(cache.arrays, new, strict=True):
                x[:, place, :, start:end] = fresh[:, :, at : at + end - start]
            at += end - start
        cache.lengths = ends

    def _pass(self, embedded: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        cache, feed = self.cache, self.decoder
        cache.close()
        cache.trim(len(embedded), max(cache.lengths))
        order = by_place(cache.places)
        feed.put("embedded", embedded[order].float().numpy())
        feed.put("sizes", sizes[order].numpy())
        feed.put("lengths", np.array([cache.lengths[b] for b in order]))
        feed.bind("", cache, len(order), self.shapes)
        feed.run()
        states, logits = (feed.read(name)[cache.places] for name in ("states", "logits"))
        return torch.from_numpy(states), torch.from_numpy(logits)
