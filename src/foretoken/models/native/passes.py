"""Runs forward passes of a network over paged keys and values: fills the kernels' structs and
arrays, calls the kernels and returns tensors."""

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
from foretoken.kernels.reference import ATTENTION_BLOCK_POSITIONS
from foretoken.kernels.tokens import count_threads
from foretoken.models.base import ChainedTokens, TokenChoice
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.native import description
from foretoken.models.native.packing import LANES
from foretoken.models.native.pages import PAGE_POSITIONS, PagedSequence
from foretoken.models.native.position_tables import DistanceBiases, RotaryTable
from foretoken.models.native.recurrent_states import RecurrentStates, StateLayout

if TYPE_CHECKING:
    from foretoken.models.native.media import EmbeddedPrompt

EMBEDDING_KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
}  # storage of a table of embeddings: enum Kind of network.h
MAX_PASS_TOKENS = 256  # longer inputs take several passes: bounds the memory of activations
# A copy of the target attends to the first blocks of positions (attention sinks) and the last ones.
# Keys and values of the last blocks may take this share of the bytes of the copy's weights
NUM_SINK_BLOCKS, MIN_LAST_BLOCKS, MAX_LAST_BLOCKS_SHARE = 1, 16, 0.25


class SequencePart(NamedTuple):
    """New tokens of a sequence that one forward pass computes. The `past` tokens before them are
    cached."""

    seq: PagedSequence
    past: int
    tokens: list[int]
    need: int  # logits are wanted for the last `need` tokens
    output_row: int  # row of the first such token in the buffers of logits and hidden states


class PassResult(NamedTuple):
    """Results of `NativePasses.run`, valid until the next run: logits `[B, max_need, V]`, inputs of
    the output layer `[B, max_need, H]`, and hidden states at the taps `[tokens, taps * H]` (None if
    hidden states were not requested)."""

    logits: Tensor
    hidden: Tensor
    tapped_states: Tensor | None


class DraftChain:
    """Computes all draft tokens of a step in one call of the kernels: one forward pass makes the
    first draft token of each sequence, and each later draft token takes another pass. Contains the
    kernels' struct and the result.

    Args:
        budget: Number of draft tokens of each sequence, `[B]`.
        first: Position of each sequence's first draft token, `[B]`.
        position_shifts: Added to each sequence's positions to index the rotary tables, `[B]`.
        seqs: The sequences, `[B]`.
        Vd: The draft model's vocabulary size.
        choice: The rule by which tokens are chosen.
        embeddings: Token embeddings `[V, E]` for a model whose inputs are pairs of an embedding and
            a hidden state; None for other models.
    """

    def __init__(
        self,
        budget: list[int],
        first: list[int],
        position_shifts: list[int],
        seqs: list[PagedSequence],
        Vd: int,
        choice: TokenChoice,
        embeddings: Tensor | None,
    ) -> None:
        B, G, V = len(budget), max(budget), choice.V
        # if all sequences draft G tokens, the kernels write every entry
        make = torch.empty if min(budget) == G else torch.zeros
        self.result = ChainedTokens(
            make(B, G, dtype=torch.int64),
            make(B, G),
            None if choice.filters is None else (make if V == Vd else torch.zeros)(B, G, V),
            torch.ones(B, G, dtype=torch.float64),
        )
        record = ChainRecord(
            B, G, V, 0 if embeddings is None else EMBEDDING_KINDS[embeddings.dtype]
        )
        sources = [seq.source for seq in seqs if seq.source is not None]
        lengths = [source.length for source in sources] or [0] * B
        numbers = np.array([budget, first, position_shifts, lengths], np.int32)
        tables = np.array([seq.table for seq in [*seqs, *sources]], np.uint64)
        address, record.pages_of = numbers.ctypes.data, tables.ctypes.data
        record.budget, record.next, record.apart = address, address + 4 * B, address + 8 * B
        state_addresses = [seq.states.address for seq in seqs if seq.states is not None]
        states = np.array(state_addresses, np.uint64)
        if state_addresses:
            record.states_of = states.ctypes.data
        if sources:
            record.sources_of, record.length_of = tables[B:].ctypes.data, address + 12 * B
        temperature, top_k, top_p, min_p = (choice.filters or [(1.0, 0, 1.0, 0.0)])[0]
        record.choice = SoftmaxRecord(
            1, Vd, 1, 0 if top_k >= Vd else top_k, temperature, min_p, top_p
        )
        narrow = torch.empty(Vd) if self.result.q is not None and choice.ids is not None else None
        tensors = {"u": choice.numbers, "ids": choice.ids, "embeddings": embeddings}
        tensors |= {"narrow": narrow, **self.result._asdict()}
        for name, tensor in tensors.items():
            setattr(record, name, None if tensor is None else tensor.data_ptr())
        self.record = record
        self._memory = numbers, tables, states, tensors  # the struct points to these

    def reuse(
        self, inputs: dict[str, Any], pages: Any, sources: Any, states: Any, given: Tensor | None
    ) -> None:
        """Let the chain's later forward passes reuse the input arrays of the first pass: write the
        arrays' addresses into the struct."""
        record = self.record
        record.pages, record.sources = pages.ctypes.data, sources.ctypes.data
        record.states = states.ctypes.data
        record.given = None if given is None else given.data_ptr()
        record.id = inputs["ids"].ctypes.data
        for name in ("at", "turn", "row", "need", "place", "source_length"):
            setattr(record, name, inputs[name].ctypes.data)


class NativePasses:
    """The forward passes of one network, whose weights are in a folder written by
    `description.describe`.

    taps: The layers whose hidden states are returned: tap i is the input of layer i, and FINAL_TAP
    is the input of the output layer.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], taps: tuple[int, ...] = ()) -> None:
        self.folder, self.facts, self.taps = folder, facts, taps
        # the layers to run, as indices of layers in the page layout
        self.layers = list(range(len(facts["layers"])))
        self.layout, self.layer_offsets = description.compute_layout(facts)
        self.writes_pages = True
        # None: no layer is recurrent
        self.states = StateLayout(facts) if facts["row_numbers"] else None
        # entries in the description's "layers" for each layer of the model: two in an
        # encoder-decoder, self-attention and cross-attention
        self.entries_per_layer = 1 + any(layer["source"] for layer in facts["layers"])
        num_layers = len(self.layers) // self.entries_per_layer
        if max(taps, default=0) > num_layers:
            raise RefusedError(
                f"the draft uses hidden states after layer {max(taps)}, but the target has only "
                f"{num_layers} layers; give a draft for this target"
            )
        entries = [tap if tap == FINAL_TAP else tap * self.entries_per_layer for tap in taps]
        self._tapped = sorted(set(entries))
        self._tap_order = [self._tapped.index(entry) for entry in entries]
        self.memory = np.memmap(folder / description.WEIGHTS_FILE, np.uint8, "r")
        self.width, self.vocab_size = int(facts["width"]), int(facts["vocabulary"])
        # columns of the kernels' logits: the vocabulary, padded to full panels
        self.columns = int(facts["head"]["outputs"]) if facts["head"] else 0
        self.rope_tables = [RotaryTable(rope) for rope in facts["ropes"]]
        self.threads = count_threads()
        self._num_positions = 0  # number of positions that the tables have entries for
        self.biases = DistanceBiases([self._map_floats(**table) for table in facts["biases"]])
        self._bias_addresses = np.zeros(len(facts["biases"]), np.uint64)
        self._rope_addresses = np.zeros(len(self.rope_tables), np.uint64)
        self._record = PassRecord(
            tables=len(self.rope_tables), rotary=self._rope_addresses.ctypes.data
        )
        self._record.biases = self._bias_addresses.ctypes.data
        self.max_tokens = 0  # maximum number of tokens in a pass
        self.reserve_tokens(MAX_PASS_TOKENS)
        # written by the kernels: logits, and inputs of the output layer
        self._buffers = torch.empty(0), torch.empty(0)
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        # inputs of the next tokens in place of their ids: `[tokens, width]`, or, for a draft model
        # with pairs as inputs, embeddings and hidden states `[tokens, E + width]`
        self.input_states: Tensor | None = None
        # positions, masks and added states of the next tokens, for a prompt with media
        self.embedded_prompt: EmbeddedPrompt | None = None

    def reserve_tokens(self, tokens: int) -> None:
        """Allocate input arrays for passes over up to `tokens` tokens."""
        if tokens <= self.max_tokens:
            return
        self._opened, self.max_tokens = None, max(tokens, 2 * self.max_tokens)
        # arrays that the struct of every pass points to
        names = ("ids", "at", "turn", "row", "need", "place", "source_length")
        self._inputs = {name: np.zeros(self.max_tokens + 1, np.int32) for name in names}
        self._pages, self._sources, self._states = np.zeros((3, self.max_tokens), np.uint64)
        for name, array in self._inputs.items():
            setattr(self._record, name, array.ctypes.data)
        self._record.pages = self._pages.ctypes.data
        self._record.sources = self._sources.ctypes.data
        self._record.states = self._states.ctypes.data if self.states is not None else None

    def _map_floats(self, at: int, shape: list[int]) -> NDArray[np.float32]:
        count = math.prod(shape)
        return self.memory[at : at + 4 * count].view(np.float32).reshape(shape)

    @property
    def bytes(self) -> tuple[int, int]:
        """The bytes of all weights, and the bytes of the weights that a pass over one token
        loads."""
        table, head = self.facts["embeddings"], self.facts["head"]
        others = [self.facts.get(name) for name in ("encoder_network", "crossing")]
        layers = [layer for other in others if other for layer in other["layers"]]
        parts = [part for layer in layers for part in layer.values()]
        unread = sum(part["bytes"] for part in parts if isinstance(part, dict) and "panels" in part)
        if table is not None and table["panels"] != head["panels"]:
            unread += int(table["bytes"])
        if self.facts["inputs"]:
            unread += int(self.facts["inputs"]["table"]["bytes"])
        for part in (layer["experts"] for layer in self.facts["layers"]):
            if part is not None:  # a token uses only the chosen experts
                weights = [x for name in ("gate", "up", "down") for x in part[name]]
                own = sum(x["bytes"] for x in weights if x is not None)  # not all have a gate
                unread += own - own * part["chosen"] // part["count"]
        return len(self.memory), len(self.memory) - unread

    def list_layer_records(self, layers: tuple[int, ...]) -> list[int]:
        """Return, for these layers of the model, the indices of their entries in the description's
        "layers"."""
        each = self.entries_per_layer
        return [each * i + j for i in layers for j in range(each)]

    def open_encoder(self) -> NativePasses | None:
        """Return the passes of the model's encoder, which return the encoder's last hidden states;
        None if the model has no native encoder."""
        facts = self.facts["encoder_network"]
        return facts and NativePasses(self.folder, facts, (FINAL_TAP,))

    def open_cross_kv(self) -> NativePasses:
        """Return passes that compute the keys and values of cross-attention from the encoder's
        hidden states. From now on, this decoder's cross-attention reads the pages that the returned
        passes write."""
        made = NativePasses(self.folder, self.facts["crossing"])
        own = [i for i, layer in enumerate(self.facts["layers"]) if layer["source"]]
        for i, offsets in zip(own, made.layer_offsets, strict=True):
            self.layer_offsets[i] = offsets
        return made

    def open_context_kv(self) -> NativePasses:
        """Return the passes that compute a block draft's context: keys and values of the target's
        hidden states, in the same pages as this network's."""
        return NativePasses(self.folder, self.facts["context_kv"])

    def share_pages(self, target: NativePasses, layers: list[int]) -> None:
        """From now on, run only the layers `layers`, over the pages of `target`. Raises
        RefusedError if one of these layers uses the keys and values of a layer that is left out."""
        lenders = {self.facts["layers"][i]["lender"] for i in layers} - {None, *layers}
        if lenders:
            raise RefusedError(
                f"the copy leaves out layer {min(lenders)}, but has a layer that uses the keys and "
                f"values of layer {min(lenders)}; include layer {min(lenders)}"
            )
        self.facts = {
            **self.facts,
            "layers": [self.facts["layers"][i] for i in layers],
            "halved": target.facts["halved"],
        }
        self.layers, self.layout = layers, target.layout
        self.layer_offsets = [target.layer_offsets[i] for i in layers]
        self._opened = None

    def limit_attention(self, target: NativePasses, layers: list[int]) -> None:
        """From now on, attend only to the first and the last blocks of positions (StreamingLLM,
        arXiv 2309.17453), so that a forward pass of the layers `layers` over the pages of `target`
        takes no more time at a longer context."""
        used = [self.facts["layers"][i] for i in layers]
        # the keys and values of a position that are loaded at any later position
        shapes = [description.get_kv_shape(x) for x in used if not x["source"] and not x["window"]]
        numbers = sum(2 * heads * width for heads, width in shapes)
        if not numbers:
            return
        block_bytes = numbers * (2 if target.facts["halved"] else 4) * ATTENTION_BLOCK_POSITIONS
        weight_bytes = self.bytes[1] * len(layers) / len(self.facts["layers"])
        last_blocks = max(MIN_LAST_BLOCKS, int(MAX_LAST_BLOCKS_SHARE * weight_bytes / block_bytes))
        limits = {"first_blocks": NUM_SINK_BLOCKS, "last_blocks": last_blocks}
        self.facts, self._opened = {**self.facts, **limits}, None

    @property
    def max_attended_tokens(self) -> int | None:
        """The maximum number of positions that a token attends to; None: no limit."""
        if "last_blocks" not in self.facts:
            return None
        return (self.facts["first_blocks"] + self.facts["last_blocks"]) * ATTENTION_BLOCK_POSITIONS

    def share_head(self, target: NativePasses, outputs: int) -> None:
        """From now on, use the first `outputs` outputs of the target's head as the head."""
        start = target.memory.ctypes.data - self.memory.ctypes.data
        head = dict(target.facts["head"])
        head |= {"panels": head["panels"] + start, "bias": None}
        head["outputs"] = self.columns = outputs + -outputs % LANES
        self.facts = {**self.facts, "head": head}
        self.vocab_size, self._head_memory = outputs, target.memory
        self._opened = None

    def read_pages(self, target: NativePasses) -> None:
        """From now on, run over the pages of `target`, whose layers have the keys and values that
        this network's layers use. A token attends only to earlier positions."""
        self.facts = {**self.facts, "halved": target.facts["halved"]}
        self.layout, self.writes_pages = target.layout, False
        lenders = [layer["lender"] for layer in self.facts["layers"]]
        self.layer_offsets = [target.layer_offsets[i] for i in lenders]
        self._opened = None

    def split_stack(self) -> list[NativePasses]:
        """Return the passes of each layer of a stack of MTP layers, over the pages of all
        layers."""
        made: list[NativePasses] = []
        for k, pair_inputs in enumerate(self.facts["stack"]):
            made.append(NativePasses(self.folder, self.facts | pair_inputs, (FINAL_TAP,)))
            # a shared head is relative to this memory
            made[k].memory, made[k].vocab_size = self.memory, self.vocab_size
            made[k].share_pages(self, [k])
        return made

    def run(
        self,
        parts: list[SequencePart],
        num_rows: int,
        max_need: int,
        *,
        return_tapped: bool,
        chain: DraftChain | None = None,
    ) -> PassResult:
        """Compute all parts, in passes of at most `max_tokens` tokens, and return the results. In
        the logits and hidden states `[num_rows, max_need, ..]`, entries that no part needs are
        undefined.

        return_tapped: True to return hidden states at the taps. chain: Makes draft tokens after the
        last pass; None: no draft tokens.
        """
        logits, hidden = self._get_output_views(num_rows, max_need)
        passes, tokens = (
            _split_into_passes(parts, self.max_tokens),
            sum(len(part.tokens) for part in parts),
        )
        if self.facts["beside"] and (self.input_states is None or len(self.input_states) != tokens):
            # no input pairs were set, because only the time is measured: use zeros
            self.input_states = torch.zeros(tokens, self.facts["beside"] + self.width)
        try:
            tapped = [self._run_pass(some, return_tapped=return_tapped) for some in passes[:-1]]
            tapped += [
                self._run_pass(some, return_tapped=return_tapped, chain=chain)
                for some in passes[-1:]
            ]
        finally:
            self.input_states = self.embedded_prompt = None
        states = [each for each in tapped if each is not None]
        states = states if len(states) < 2 else [torch.cat(states)]
        return PassResult(logits, hidden, states[0] if states else None)

    def _get_output_views(self, num_rows: int, max_need: int) -> tuple[Tensor, Tensor]:
        """Return views of the buffers that the kernels write: logits `[num_rows, max_need, V]`, and
        inputs of the output layer `[num_rows, max_need, H]`."""
        if (num_rows, max_need) in self._views:
            return self._views[num_rows, max_need]
        count = num_rows * max_need
        with torch.inference_mode(False):
            if count * self.width > self._buffers[1].numel():
                room = count + count // 2
                self._views.clear()
                self._buffers = torch.empty(room * self.columns), torch.empty(room * self.width)
            logits = self._buffers[0][: count * self.columns].view(num_rows, max_need, self.columns)
            hidden = self._buffers[1][: count * self.width].view(num_rows, max_need, self.width)
            self._views[num_rows, max_need] = logits[..., : self.vocab_size], hidden
        return self._views[num_rows, max_need]

    def _run_pass(
        self, parts: list[SequencePart], *, return_tapped: bool, chain: DraftChain | None = None
    ) -> Tensor | None:
        ids, at, turn, row, need, place, source_length = self._inputs.values()
        n = needed = 0
        self.reserve_positions(max(part.past + len(part.tokens) for part in parts))
        for b, (seq, past, tokens, wanted, first) in enumerate(parts):
            count = len(tokens)
            if self.writes_pages:
                seq.reserve(past, past + count)
            self._pages[b] = seq.table
            if seq.states is not None:
                self._states[b] = seq.states.address
            if seq.source is not None:
                self._sources[b], source_length[b] = seq.source.table, seq.source.length
            after = n + count
            if count == 1:
                at[n] = past
            else:
                at[n:after] = np.arange(past, past + count)
            if self.input_states is None or self.embedded_prompt is not None:
                ids[n:after] = tokens
            turn[n:after] = at[n:after]
            if shift := self.get_position_shift(seq):
                turn[n:after] += shift
            for i in range(wanted):
                need[needed], place[needed] = after - wanted + i, first + i
                needed += 1
            row[b + 1] = n = after
        # set in each pass: after a Ctrl-C, the old pointers may be invalid
        record, states, taps = self._record, None, None
        if return_tapped:
            stride = record.tap_stride = len(self._tapped) * self.width
            states = torch.empty(n, stride)
            taps = np.zeros(len(self.layers) + 2, np.uint64)
            begin = states.data_ptr()
            # FINAL_TAP is -1: the last entry
            taps[self._tapped] = range(begin, begin + 4 * stride, 4 * self.width)
        record.tokens, record.needed, record.rows = n, needed, len(parts)
        record.taps = None if taps is None else taps.ctypes.data
        record.logits, record.hidden = (each.data_ptr() for each in self._buffers)
        input_states, embedded_prompt = self.input_states, self.embedded_prompt
        record.ends, record.added = None if self.writes_pages else at.ctypes.data, None
        if embedded_prompt is not None:  # the pass computes only this prompt's tokens
            self._set_prompt_inputs(embedded_prompt, n, long=parts[0].seq.long)
        record.given = None if input_states is None else input_states.data_ptr()
        if chain is None:
            self._open_network().run(record)
        else:
            chain_inputs = (
                None
                if input_states is None
                else torch.empty(chain.record.rows, input_states.shape[1])
            )
            arrays = self._pages, self._sources, self._states
            chain.reuse(self._inputs, *arrays, chain_inputs)
            self._open_network().chain(record, chain.record)
        self.input_states = None if input_states is None else input_states[n:]
        if embedded_prompt is not None:
            self.embedded_prompt = embedded_prompt.drop_first(n)
            self._point_to_tables()
        if states is None or self._tap_order == list(range(len(self._tapped))):
            return states
        return states.view(n, -1, self.width)[:, self._tap_order].reshape(n, -1)

    def get_position_shift(self, seq: PagedSequence) -> int:
        """Return the number to add to a sequence's positions to index the rotary tables."""
        return seq.position_shift + (self.rope_tables[0].capacity if seq.long else 0)

    def _set_prompt_inputs(self, embedded: EmbeddedPrompt, n: int, *, long: bool) -> None:
        """Set the inputs of the next pass, which computes n tokens of a prompt with media: the
        positions, the masks, and the states that are added to the outputs of layers. long: True if
        the sequence has the rotary positions of long contexts."""
        record, turn = self._record, self._inputs["turn"]
        self.reserve_positions(int(embedded.positions.max()) + 1)
        if len(embedded.positions) == 1:
            turn[:n] = embedded.positions[0, :n] + (self.rope_tables[0].capacity if long else 0)
        else:
            positions = embedded.positions[:, :n]
            self._prompt_tables = [
                np.concatenate([turns.table[0], turns.gather_rows(positions, embedded.axes)])
                for turns in self.rope_tables
            ]
            for i, table in enumerate(self._prompt_tables):
                self._rope_addresses[i] = table.ctypes.data
            turn[:n] = np.arange(n) + self.rope_tables[0].capacity
        if embedded.ends is not None:
            self._ends = embedded.ends[:n].astype(np.int32)
            record.ends = self._ends.ctypes.data
        if embedded.added:
            self._added = np.zeros(len(self.layers), np.uint64)
            for layer, rows in embedded.added.items():
                self._added[layer] = rows.data_ptr()
            record.added = self._added.ctypes.data

    def settle(self, states: RecurrentStates, length: int) -> None:
        """Advance a sequence's stored recurrent states to its last token. length: the sequence's
        number of tokens."""
        self._open_network().settle(states.address, length)

    def reserve_positions(self, positions: int) -> None:
        """Extend the rotary tables, and the tables of attention biases by distance, to `positions`
        positions."""
        if positions <= self._num_positions:
            return
        for table in self.rope_tables:
            table.reserve(positions)
        self._point_to_tables()
        self.biases.reserve(positions)
        for i, table in enumerate(self.biases.tables):
            self._bias_addresses[i] = table.ctypes.data
        self._record.bias_reach, self._record.bias_stride = self.biases.reach, 2 * self.biases.reach
        capacities = [turns.capacity for turns in self.rope_tables]
        capacities += [self.biases.reach - PAGE_POSITIONS] if self.biases.tables else []
        self._num_positions = min(capacities, default=positions)

    def _point_to_tables(self) -> None:
        for i, table in enumerate(self.rope_tables):
            self._rope_addresses[i] = table.table.ctypes.data

    def _open_network(self) -> OpenNetwork:
        if self._opened is None:
            record, owned = description.make_network_record(
                self.facts, self.layer_offsets, self.memory, self.threads, self.max_tokens
            )
            self._opened = OpenNetwork(record, owned)
        return self._opened


def _split_into_passes(parts: list[SequencePart], max_tokens: int) -> list[list[SequencePart]]:
    """Distribute the parts over passes of at most `max_tokens` tokens, and return the parts of each
    pass. A part that does not fit into a pass is split."""
    if sum(len(part.tokens) for part in parts) <= max_tokens:
        return [parts] if parts else []
    passes: list[list[SequencePart]] = [[]]
    room = max_tokens
    for part in parts:
        seq, past, tokens, need, output_row = part
        while tokens:
            if not room:
                passes.append([])
                room = max_tokens
            first, tokens = tokens[:room], tokens[room:]
            need_here = max(0, need - len(tokens))  # tokens of `first` whose logits are wanted
            passes[-1].append(SequencePart(seq, past, first, need_here, output_row))
            past, output_row, need, room = (
                past + len(first),
                output_row + need_here,
                need - need_here,
                room - len(first),
            )
    return passes
