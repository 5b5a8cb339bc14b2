"""Passes of a network over pages of keys and values: arrays for kernels, tensors for callers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.errors import RefusedError
from foretoken.kernels.library import ChainRecord, OpenNetwork, PassRecord, SoftmaxRecord
from foretoken.kernels.tokens import thread_count
from foretoken.models.base import ChainedTokens, TokenChoice
from foretoken.models.native import description
from foretoken.models.native.pages import PAGE, PagedRow
from foretoken.models.native.positions import DistanceBiases, Turns
from foretoken.models.native.recurrent_states import RecurrentStates, StateLayout
from foretoken.models.shown import FINAL

if TYPE_CHECKING:
    from foretoken.models.native.media import EmbeddedPrompt

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of embeddings, in network.h
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


class DraftChain:
    """A draft's tokens in one call, by a pass and one over each token after it: room for what these
    give, and its record for the kernels.

    Args:
        budget: The tokens of each row, `[B]`.
        first: The position of each row's first token, `[B]`.
        apart: How far each row's rotary positions are from these, `[B]`.
        rows: The rows, `[B]`.
        Vd: The draft's ids.
        choice: How tokens are chosen.
        embeddings: The embeddings that a decoder of pairs reads, `[V, E]`; None for others.
    """

    def __init__(
        self,
        budget: list[int],
        first: list[int],
        apart: list[int],
        rows: list[PagedRow],
        Vd: int,
        choice: TokenChoice,
        embeddings: Tensor | None,
    ) -> None:
        B, G, V = len(budget), max(budget), choice.V
        # where all rows make as many tokens, all of it is written
        make = torch.empty if min(budget) == G else torch.zeros
        self.made = ChainedTokens(
            make(B, G, dtype=torch.int64),
            make(B, G),
            None if choice.filters is None else (make if V == Vd else torch.zeros)(B, G, V),
            torch.ones(B, G, dtype=torch.float64),
        )
        record = ChainRecord(B, G, V, 0 if embeddings is None else KINDS[embeddings.dtype])
        sources = [row.source for row in rows if row.source is not None]
        lengths = [source.length for source in sources] or [0] * B
        numbers = np.array([budget, first, apart, lengths], np.int32)
        tables = np.array([row.table for row in [*rows, *sources]], np.uint64)
        at, record.pages_of = numbers.ctypes.data, tables.ctypes.data
        record.budget, record.next, record.apart = at, at + 4 * B, at + 8 * B
        own = [row.states.address for row in rows if row.states is not None]
        states = np.array(own, np.uint64)
        if own:
            record.states_of = states.ctypes.data
        if sources:
            record.sources_of, record.length_of = tables[B:].ctypes.data, at + 12 * B
        temperature, top_k, top_p, min_p = choice.filters or (1.0, 0, 1.0, 0.0)
        record.choice = SoftmaxRecord(
            1, Vd, 1, 0 if top_k >= Vd else top_k, temperature, min_p, top_p
        )
        narrow = torch.empty(Vd) if self.made.q is not None and choice.ids is not None else None
        tensors = {"u": choice.numbers, "ids": choice.ids, "embeddings": embeddings}
        tensors |= {"narrow": narrow, **self.made._asdict()}
        for name, tensor in tensors.items():
            setattr(record, name, None if tensor is None else tensor.data_ptr())
        self.record = record
        self._memory = numbers, tables, states, tensors  # what the record points to

    def reuse(
        self, inputs: dict[str, Any], pages: Any, sources: Any, states: Any, given: Tensor | None
    ) -> None:
        """Let passes write their arrays where the first pass had its own."""
        record = self.record
        record.pages, record.sources = pages.ctypes.data, sources.ctypes.data
        record.states = states.ctypes.data
        record.given = None if given is None else given.data_ptr()
        record.id = inputs["ids"].ctypes.data
        for name in ("at", "turn", "row", "need", "place", "source_length"):
            setattr(record, name, inputs[name].ctypes.data)


class NativePasses:
    """One network, in a folder that `description.describe` has written."""

    def __init__(self, folder: Path, facts: dict[str, Any], taps: tuple[int, ...] = ()) -> None:
        self.folder, self.facts, self.taps = folder, facts, taps
        self.layers = list(range(len(facts["layers"])))  # whose keys and values they are
        self.layout, self.places = description.layout_of(facts)
        # of each row's recurrences, where there are some
        self.states = StateLayout(facts) if facts["row_numbers"] else None
        if max(taps, default=0) > len(self.layers):
            raise RefusedError(
                f"the draft reads behind layer {max(taps)}, the target has {len(self.layers)}; "
                "give a draft for this target"
            )
        self._tapped = sorted(set(taps))
        self._order = [self._tapped.index(tap) for tap in taps]
        self.memory = np.memmap(folder / description.FILE, np.uint8, "r")
        self.width, self.vocab_size = int(facts["width"]), int(facts["vocabulary"])
        # of the logits, in full panels
        self.columns = int(facts["head"]["outputs"]) if facts["head"] else 0
        self.turns = [Turns(rope) for rope in facts["ropes"]]
        self.threads = thread_count()
        self._turned = 0  # positions up to which the tables are made
        self.biases = DistanceBiases([self._numbers(**table) for table in facts["biases"]])
        self._biases = np.zeros(len(facts["biases"]), np.uint64)
        self._tables = np.zeros(len(self.turns), np.uint64)
        self._record = PassRecord(tables=len(self.turns), rotary=self._tables.ctypes.data)
        self._record.biases = self._biases.ctypes.data
        self.most = 0  # tokens of a pass
        self.fit(MOST)
        self._buffers = (
            torch.empty(0),
            torch.empty(0),
        )  # logits and states, as the kernels write them
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        # what a decoder of pairs reads of the next tokens, `[tokens, beside + width]`
        self.given: Tensor | None = None
        self.embedded: EmbeddedPrompt | None = None  # what else it reads of them

    def fit(self, tokens: int) -> None:
        """Make room for passes of so many tokens."""
        if tokens <= self.most:
            return
        self._open, self.most = None, max(tokens, 2 * self.most)
        # arrays that the record of every pass points to
        names = ("ids", "at", "turn", "row", "need", "place", "source_length")
        self._inputs = {name: np.zeros(self.most + 1, np.int32) for name in names}
        self._pages, self._sources, self._states = np.zeros((3, self.most), np.uint64)
        for name, array in self._inputs.items():
            setattr(self._record, name, array.ctypes.data)
        self._record.pages = self._pages.ctypes.data
        self._record.sources = self._sources.ctypes.data
        self._record.states = self._states.ctypes.data if self.states is not None else None

    def _numbers(self, at: int, shape: list[int]) -> NDArray[np.float32]:
        count = math.prod(shape)
        return self.memory[at : at + 4 * count].view(np.float32).reshape(shape)

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the bytes of all weights, and of those that a pass over one token reads."""
        table, head = self.facts["embeddings"], self.facts["head"]
        others = [self.facts.get(name) for name in ("encoder_network", "crossing")]
        layers = [layer for other in others if other for layer in other["layers"]]
        parts = [part for layer in layers for part in layer.values()]
        apart = sum(part["bytes"] for part in parts if isinstance(part, dict) and "panels" in part)
        if table is not None and table["panels"] != head["panels"]:
            apart += int(table["bytes"])
        if self.facts["inputs"]:
            apart += int(self.facts["inputs"]["table"]["bytes"])
        for part in (layer["experts"] for layer in self.facts["layers"]):
            if part is not None:  # a token has some of them
                own = sum(x["bytes"] for name in ("gate", "up", "down") for x in part[name])
                apart += own - own * part["chosen"] // part["count"]
        return len(self.memory), len(self.memory) - apart

    def records_of(self, layers: tuple[int, ...]) -> list[int]:
        """Return what runs in these layers of the model: attention to a source is by itself."""
        each = 1 + any(layer["source"] for layer in self.facts["layers"])
        return [each * i + j for i in layers for j in range(each)]

    def encoder(self) -> NativePasses | None:
        """Return the encoder, whose states are shown; None where there is none."""
        facts = self.facts["encoder_network"]
        return facts and NativePasses(self.folder, facts, (FINAL,))

    def crossing(self) -> NativePasses:
        """Return the network that makes the keys and values that this decoder reads, of states."""
        made = NativePasses(self.folder, self.facts["crossing"])
        own = [i for i, layer in enumerate(self.facts["layers"]) if layer["source"]]
        for i, place in zip(own, made.places, strict=True):
            self.places[i] = place
        return made

    def over(self, target: NativePasses, layers: list[int]) -> None:
        """Run these layers alone, on the pages of `target`, whose keys and values they read. Raises
        RefusedError for a layer that reads those of one which is left out."""
        lenders = {self.facts["layers"][i]["lender"] for i in layers} - {None, *layers}
        if lenders:
            raise RefusedError(
                f"layer {min(lenders)} is left out, whose keys and values a layer of the copy reads"
            )
        self.facts = {
            **self.facts,
            "layers": [self.facts["layers"][i] for i in layers],
            "halved": target.facts["halved"],
        }
        self.layers, self.layout = layers, target.layout
        self.places = [target.places[i] for i in layers]
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
        passes, tokens = _divided(parts, self.most), sum(len(part.tokens) for part in parts)
        if self.facts["beside"] and (self.given is None or len(self.given) != tokens):
            # rows that are measured, or found no more
            self.given = torch.zeros(tokens, self.facts["beside"] + self.width)
        try:
            shown = [self._pass(some, shows=shows) for some in passes[:-1]]
            shown += [self._pass(some, shows=shows, chain=chain) for some in passes[-1:]]
        finally:
            self.given = self.embedded = None
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
        ids, at, turn, row, need, place, source_length = self._inputs.values()
        n = needed = 0
        self.turn_up_to(max(part.past + len(part.tokens) for part in parts))
        for b, (own, past, tokens, wanted, first) in enumerate(parts):
            count = len(tokens)
            own.reserve(past, past + count)
            self._pages[b] = own.table
            if own.states is not None:
                self._states[b] = own.states.address
            if own.source is not None:
                self._sources[b], source_length[b] = own.source.table, own.source.length
            after = n + count
            if count == 1:
                at[n] = past
            else:
                at[n:after] = np.arange(past, past + count)
            if self.given is None or self.embedded is not None:
                ids[n:after] = tokens
            turn[n:after] = at[n:after]
            if apart := self.apart(own):
                turn[n:after] += apart
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
        given, embedded = self.given, self.embedded
        record.ends = record.added = None
        if embedded is not None:  # of one row, which begins
            self._place(embedded, n, long=parts[0].row.long)
        record.given = None if given is None else given.data_ptr()
        if chain is None:
            self._network().run(record)
        else:
            beside = None if given is None else torch.empty(chain.record.rows, given.shape[1])
            arrays = self._pages, self._sources, self._states
            chain.reuse(self._inputs, *arrays, beside)
            self._network().chain(record, chain.record)
        self.given = None if given is None else given[n:]
        if embedded is not None:
            self.embedded = embedded.behind(n)
            self._point_to_tables()
        if states is None or self._order == list(range(len(self._tapped))):
            return states
        return states.view(n, -1, self.width)[:, self._order].reshape(n, -1)

    def apart(self, row: PagedRow) -> int:
        """Return how far a row's places in the rotary tables are from its positions."""
        return row.shift + (self.turns[0].capacity if row.long else 0)

    def _place(self, embedded: EmbeddedPrompt, n: int, *, long: bool) -> None:
        """Let the next pass read n tokens of a prompt with media."""
        record, turn = self._record, self._inputs["turn"]
        self.turn_up_to(int(embedded.positions.max()) + 1)
        if len(embedded.positions) == 1:
            turn[:n] = embedded.positions[0, :n] + (self.turns[0].capacity if long else 0)
        else:
            places = embedded.positions[:, :n]
            self._extended = [
                np.concatenate([turns.table[0], turns.rows_of(places, embedded.axes)])
                for turns in self.turns
            ]
            for i, table in enumerate(self._extended):
                self._tables[i] = table.ctypes.data
            turn[:n] = np.arange(n) + self.turns[0].capacity
        if embedded.ends is not None:
            self._ends = embedded.ends[:n].astype(np.int32)
            record.ends = self._ends.ctypes.data
        if embedded.added:
            self._added = np.zeros(len(self.layers), np.uint64)
            for layer, rows in embedded.added.items():
                self._added[layer] = rows.data_ptr()
            record.added = self._added.ctypes.data

    def settle(self, states: RecurrentStates, length: int) -> None:
        """Let a row's states stand at its last token, of `length`."""
        self._network().settle(states.address, length)

    def turn_up_to(self, positions: int) -> None:
        """Make the rotary positions, and the biases by distance, up to a number of positions."""
        if positions <= self._turned:
            return
        for turns in self.turns:
            turns.reserve(positions)
        self._point_to_tables()
        self.biases.reserve(positions)
        for i, table in enumerate(self.biases.tables):
            self._biases[i] = table.ctypes.data
        self._record.bias_reach, self._record.bias_stride = self.biases.reach, 2 * self.biases.reach
        rooms = [turns.capacity for turns in self.turns]
        rooms += [self.biases.reach - PAGE] if self.biases.tables else []
        self._turned = min(rooms, default=positions)

    def _point_to_tables(self) -> None:
        for i, turns in enumerate(self.turns):
            self._tables[i] = turns.table.ctypes.data

    def _network(self) -> OpenNetwork:
        if self._open is None:
            record, kept = description.records(
                self.facts, self.places, self.memory, self.threads, self.most
            )
            self._open = OpenNetwork(record, kept)
        return self._open


def _divided(parts: list[RowPart], most: int) -> list[list[RowPart]]:
    """Return the parts of each pass: at most so many tokens together; a longer part is cut."""
    if sum(len(part.tokens) for part in parts) <= most:
        return [parts] if parts else []
    passes: list[list[RowPart]] = [[]]
    room = most
    for part in parts:
        row, past, tokens, need, place = part
        while tokens:
            if not room:
                passes.append([])
                room = most
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
