"""Passes of a network over pages of keys and values: arrays for kernels, tensors for callers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.models.native import description
from foretoken.models.native.library import OpenNetwork, PassRecord
from foretoken.models.native.pages import PagedRow
from foretoken.models.native.turns import Turns

MOST = 256  # tokens of a pass: bounds the memory of its states


class RowPart(NamedTuple):
    """New tokens of a row, after its first `past` ones."""

    row: PagedRow
    past: int
    tokens: list[int]
    need: int  # of the last ones, whose logits are asked for
    place: int  # where these are returned: the first of `need` rows


class PassResult(NamedTuple):
    """Results of passes: logits `[rows, V]`, what the head reads `[rows, H]`, and states at the
    taps of all tokens `[tokens, taps * H]`."""

    logits: Tensor
    hidden: Tensor
    shown: Tensor | None


class NativePasses:
    """One network, in a folder that `description.describe` has written."""

    def __init__(self, folder: Path, facts: dict[str, Any], taps: tuple[int, ...] = ()) -> None:
        self.facts, self.taps = facts, taps
        self.layers = list(range(len(facts["layers"])))  # whose keys and values they are
        self.memory = np.memmap(folder / description.FILE, np.uint8, "r")
        self.width, self.vocab_size = int(facts["width"]), int(facts["vocabulary"])
        self.columns = int(facts["head"]["outputs"])  # of the logits, in full panels
        self.starts = description.page_numbers(facts)
        self.turns = [Turns(rope) for rope in facts["ropes"]]
        self.threads = _threads()
        self._open: OpenNetwork | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the bytes of all weights, and of those that a pass over one token reads."""
        table, head = self.facts["embeddings"], self.facts["head"]
        apart = 0 if table["panels"] == head["panels"] else int(table["bytes"])
        return len(self.memory), len(self.memory) - apart

    def over(self, target: NativePasses, layers: list[int]) -> None:
        """Run these layers alone, on the pages of `target`, whose keys and values they read."""
        self.facts = {
            **self.facts,
            "layers": [self.facts["layers"][i] for i in layers],
            "halved": target.facts["halved"],
        }
        self.layers, self.starts = layers, [target.starts[i] for i in layers]
        self._open = None

    def run(self, parts: list[RowPart], rows: int, *, zeroed: bool) -> PassResult:
        """Run all parts, in passes of at most MOST tokens; `rows`: of the logits, zero where no
        part has a place."""
        make = torch.zeros if zeroed else torch.empty
        logits, hidden = make(rows, self.columns), make(rows, self.width)
        shown = [self._pass(some, logits, hidden) for some in _divided(parts)]
        states = torch.cat([each for each in shown if each is not None]) if self.taps else None
        return PassResult(logits[:, : self.vocab_size], hidden, states)

    def _pass(self, parts: list[RowPart], logits: Tensor, hidden: Tensor) -> Tensor | None:
        counts = [len(part.tokens) for part in parts]
        n, ends = sum(counts), np.cumsum([0, *counts], dtype=np.int32)
        ids = np.fromiter((id for part in parts for id in part.tokens), np.int32, n)
        at = np.concatenate(
            [np.arange(p.past, p.past + c) for p, c in zip(parts, counts, strict=True)]
        )
        at = at.astype(np.int32)
        for part, count in zip(parts, counts, strict=True):
            part.row.reserve(part.past, part.past + count)
        need = np.concatenate(
            [np.arange(end - p.need, end) for p, end in zip(parts, ends[1:], strict=True)]
        ).astype(np.int32)
        place = np.concatenate([np.arange(p.place, p.place + p.need) for p in parts]).astype(
            np.int32
        )
        pages = np.array([part.row.table for part in parts], np.uint64)
        turned = [turns.at(at, int(at.max())) for turns in self.turns]
        tables = np.array([each.ctypes.data for each in turned], np.uint64)
        shown, taps = None, None
        if self.taps:
            states = torch.empty(len(self.taps), n, self.width)
            taps = np.zeros(len(self.facts["layers"]) + 1, np.uint64)
            for tap, part in zip(self.taps, states, strict=True):
                taps[tap] = part.data_ptr()
            shown = states
        self._network().run(
            PassRecord(
                n,
                len(need),
                len(parts),
                len(turned),
                ids.ctypes.data,
                at.ctypes.data,
                ends.ctypes.data,
                pages.ctypes.data,
                tables.ctypes.data,
                need.ctypes.data,
                place.ctypes.data,
                logits.data_ptr(),
                hidden.data_ptr(),
                None if taps is None else taps.ctypes.data,
            )
        )
        return None if shown is None else shown.transpose(0, 1).reshape(n, -1)

    def _network(self) -> OpenNetwork:
        if self._open is None:
            record, kept = description.records(
                self.facts, self.starts, self.memory, self.threads, MOST
            )
            self._open = OpenNetwork(record, kept)
        return self._open


def _threads() -> int:
    """Return as many threads as torch has, of the processors that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(torch.get_num_threads(), allowed or 1, 256))  # MOST_THREADS of team.h


def _divided(parts: list[RowPart]) -> list[list[RowPart]]:
    """Return the parts of each pass: at most MOST tokens together; a longer part is cut."""
    passes: list[list[RowPart]] = [[]]
    room = MOST
    for part in parts:
        row, past, tokens, need, place = part
        while tokens:
            if not room:
                passes.append([])
                room = MOST
            first, tokens = tokens[:room], tokens[room:]
            here = max(0, need - len(tokens))  # of these tokens, whose logits are asked for
            passes[-1].append(RowPart(row, past, first, here, place))
            past, place, need, room = (
                past + len(first),
                place + here,
                need - here,
                room - len(first),
            )
    return passes
