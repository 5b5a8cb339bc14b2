"""Passes of a network over pages of keys and values: arrays for kernels, tensors for callers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import RefusedError
from foretoken.kernels.library import OpenNetwork, PassRecord
from foretoken.kernels.tokens import thread_count
from foretoken.models.native import description
from foretoken.models.native.chain import DraftChain
from foretoken.models.native.pages import PagedRow, page_layout
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
    """Results of passes, valid until the next ones: logits `[B, most, V]`, what the head reads
    `[B, most, H]`, and states at the taps of all tokens `[tokens, taps * H]`."""

    logits: Tensor
    hidden: Tensor
    shown: Tensor | None


class NativePasses:
    """One network, in a folder that `description.describe` has written."""

    def __init__(self, folder: Path, facts: dict[str, Any], taps: tuple[int, ...] = ()) -> None:
        self.facts, self.taps = facts, taps
        self.layers = list(range(len(facts["layers"])))  # whose keys and values they are
        if max(taps, default=0) > len(self.layers):
            raise RefusedError(
                f"the draft reads behind layer {max(taps)}, the target has {len(self.layers)}; "
                "give a draft for this target"
            )
        self._tapped = sorted(set(taps))
        self._order = [self._tapped.index(tap) for tap in taps]
        self.memory = np.memmap(folder / description.FILE, np.uint8, "r")
        self.width, self.vocab_size = int(facts["width"]), int(facts["vocabulary"])
        self.columns = int(facts["head"]["outputs"])  # of the logits, in full panels
        self.layout = page_layout([description.cached_heads(layer) for layer in facts["layers"]])
        self.turns = [Turns(rope) for rope in facts["ropes"]]
        self.threads = thread_count()
        self._open: OpenNetwork | None = None
        self._turned = 0  # positions up to which the tables are made
        # arrays that the record of every pass points to
        names = ("ids", "at", "turn", "row", "need", "place")
        self._inputs = {name: np.zeros(MOST + 1, np.int32) for name in names}
        self._pages, self._tables = np.zeros(MOST, np.uint64), np.zeros(len(self.turns), np.uint64)
        self._record = PassRecord(tables=len(self.turns), pages=self._pages.ctypes.data)
        self._record.rotary = self._tables.ctypes.data
        for name, array in self._inputs.items():
            setattr(self._record, name, array.ctypes.data)
        self._buffers = (
            torch.empty(0),
            torch.empty(0),
        )  # logits and states, as the kernels write them
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        # what a decoder of pairs reads of the next tokens, `[tokens, beside + width]`
        self.given: Tensor | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the bytes of all weights, and of those that a pass over one token reads."""
        table, head = self.facts["embeddings"], self.facts["head"]
        apart = 0
        if table is not None and table["panels"] != head["panels"]:
            apart = int(table["bytes"])
        return len(self.memory), len(self.memory) - apart

    def over(self, target: NativePasses, layers: list[int]) -> None:
        """Run these layers alone, on the pages of `target`, whose keys and values they read."""
        self.facts = {
            **self.facts,
            "layers": [self.facts["layers"][i] for i in layers],
            "halved": target.facts["halved"],
        }
        self.layers, self.layout = layers, target.layout
        self._open = None

    def run(
        self,
        parts: list[RowPart],
        rows: int,
        most: int,
        *,
        shows: bool,
        chain: DraftChain | None = None,
    ) -> PassResult:
        """Run all parts, in passes of at most MOST tokens. rows, most: the first two sizes of the
        logits, whose places outside all parts mean nothing; shows: return states at the taps;
        chain: a draft's tokens, made after the last pass."""
        logits, hidden = self._outputs(rows, most)
        passes = _divided(parts)
        shown = [self._pass(some, shows=shows) for some in passes[:-1]]
        shown += [self._pass(some, shows=shows, chain=chain) for some in passes[-1:]]
        states = [each for each in shown if each is not None]
        states = states if len(states) < 2 else [torch.cat(states)]
        return PassResult(logits, hidden, states[0] if states else None)

    def _outputs(self, rows: int, most: int) -> tuple[Tensor, Tensor]:
        """Return where logits are written, and what the head reads."""
        if (rows, most) in self._views:
            return self._views[rows, most]
        count = rows * most
        with torch.inference_mode(False):
            if count * self.columns > self._buffers[0].numel():
                room = count + count // 2
                self._views.clear()
                self._buffers = torch.empty(room * self.columns), torch.empty(room * self.width)
            logits = self._buffers[0][: count * self.columns].view(rows, most, self.columns)
            hidden = self._buffers[1][: count * self.width].view(rows, most, self.width)
            self._views[rows, most] = logits[..., : self.vocab_size], hidden
        return self._views[rows, most]

    def _pass(
        self, parts: list[RowPart], *, shows: bool, chain: DraftChain | None = None
    ) -> Tensor | None:
        ids, at, turn, row, need, place = self._inputs.values()
        n = needed = 0
        self.turn_up_to(max(part.past + len(part.tokens) for part in parts))
        for b, (own, past, tokens, wanted, first) in enumerate(parts):
            count = len(tokens)
            own.reserve(past, past + count)
            self._pages[b] = own.table
            after = n + count
            if count == 1:
                at[n] = past
            else:
                at[n:after] = np.arange(past, past + count)
            if self.given is None:
                ids[n:after] = tokens
            turn[n:after] = at[n:after]
            if own.long:
                turn[n:after] += self.turns[0].capacity
            for i in range(wanted):
                need[needed], place[needed] = after - wanted + i, first + i
                needed += 1
            row[b + 1] = n = after
        # pointers anew in each pass: a Ctrl-C may have come where arrays had moved
        record, states, taps = self._record, None, None
        if shows:
            stride = record.tap_stride = len(self._tapped) * self.width
            states = torch.empty(n, stride)
            taps = np.zeros(len(self.layers) + 2, np.uint64)
            begin = states.data_ptr()
            taps[self._tapped] = range(begin, begin + 4 * stride, 4 * self.width)  # FINAL is last
        record.tokens, record.needed, record.rows = n, needed, len(parts)
        record.taps = None if taps is None else taps.ctypes.data
        record.logits, record.hidden = (each.data_ptr() for each in self._buffers)
        given = self.given
        record.given = None if given is None else given.data_ptr()
        if chain is None:
            self._network().run(record)
        else:
            beside = None if given is None else torch.empty(chain.record.rows, given.shape[1])
            chain.reuse(self._inputs, self._pages, beside)
            self._network().chain(record, chain.record)
        self.given = None if given is None else given[n:]
        if states is None or self._order == list(range(len(self._tapped))):
            return states
        return states.view(n, -1, self.width)[:, self._order].reshape(n, -1)

    def turn_up_to(self, positions: int) -> None:
        """Make the rotary positions up to a number of them."""
        if positions <= self._turned:
            return
        for i, turns in enumerate(self.turns):
            turns.reserve(positions)
            self._tables[i] = turns.table.ctypes.data
        self._turned = min((turns.capacity for turns in self.turns), default=positions)

    def _network(self) -> OpenNetwork:
        if self._open is None:
            places = [self.layout.layers[i] for i in self.layers]
            record, kept = description.records(self.facts, places, self.memory, self.threads, MOST)
            self._open = OpenNetwork(record, kept)
        return self._open


def _divided(parts: list[RowPart]) -> list[list[RowPart]]:
    """Return the parts of each pass: at most MOST tokens together; a longer part is cut."""
    if sum(len(part.tokens) for part in parts) <= MOST:
        return [parts] if parts else []
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
