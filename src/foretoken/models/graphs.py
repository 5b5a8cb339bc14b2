"""A transformers model that runs forward passes of fixed shapes over a ragged KV cache. On CUDA the
passes are recorded as CUDA graphs and replayed.

Batch sizes, widths and cache lengths are rounded up to a few values, so that few graphs suffice for
all blocks. Pieces of prompts run in passes over their own slots (`graph_prompts`). If a sequence of
an encoder-decoder joins, its source and prompt run without graphs. Shapes do not depend on data:
every query attends to all cache positions, and a mask, computed on the device from the lengths,
hides the positions after each sequence's end. The keys and values of an encoder-decoder's sources
are masked in the same way. A draft model makes all draft tokens of a step in one recording
(`graph_chain`). A guard refuses operations that cannot be recorded. On a CPU the same forward
passes run without recording, for tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.media.inputs import Media
from foretoken.models.base import (
    Blocks,
    Capabilities,
    ChainedTokens,
    Model,
    TokenChoice,
    count_block_tokens,
)
from foretoken.models.graph_chain import (
    BLOCK_TOKENS,
    ChainShape,
    chain_passes,
    is_ranked,
    pack_numbers,
    round_up_gamma,
    select_chained,
)
from foretoken.models.graph_pass import (
    GraphPass,
    RecordingGuard,
    make_memory_pool,
    refuse_failed_recording,
)
from foretoken.models.graph_prompts import (
    PromptPiece,
    RowOutputs,
    count_prompt_positions,
    cut_piece,
    group_pieces,
    list_picks,
)
from foretoken.models.hidden_states import HiddenStates
from foretoken.models.row_slots import (
    LONG_ROW_OFFSET,
    PREFILL_CHUNK_TOKENS,
    check_lengths,
    check_room,
    cut_blocks,
    list_remaining_rows,
    pad_blocks,
    round_up_to_power_of_two,
)
from foretoken.models.stock.attention import (
    HiddenStatesRecorder,
    NeededPositions,
    RaggedTwin,
    SelectedPositions,
)
from foretoken.models.stock.block_attention import KV_BLOCK_SLOTS
from foretoken.models.stock.cache import make_cache_argument, make_ragged_cache
from foretoken.models.stock.compiled import CompiledLayers
from foretoken.models.stock.fixed_cache import (
    FixedCache,
    FixedDecoderCache,
    round_up_slots,
)
from foretoken.models.stock.media import MediaObjections, get_forward_parameters
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.selfcheck import CheckedBackend
from foretoken.models.stock.sizes import make_empty_logits
from foretoken.sampling.distributions import get_working_dtype
from foretoken.slow_log import log_if_slow
from foretoken.transfer import send

log = logging.getLogger(__name__)


def round_up_width(tokens: int) -> int:
    """Return the smallest recorded width with room for this many tokens: 1 + gamma for a gamma that
    is 0 or a power of two (1, 2, 3, 5, 9, 17, ...)."""
    return tokens if tokens < 2 else 1 + round_up_to_power_of_two(tokens - 1)


class PassOutputs(NamedTuple):
    """The results of a forward pass over a padded block."""

    logits: Tensor  # [rows, width, V]; [1, N, V] at the picks of a pass over prompts
    hidden: Tensor  # the output layer's inputs, [.., H]
    tapped: Tensor | None  # [rows, width, W], the hidden states at the taps; None: there are none


REHEARSAL_BLOCKS = [[0]], [[0, 0]]
REHEARSAL_FILTERS = [(1.0, 1, 0.5, 0.1)]
# the second prompt, for attention by blocks, has more blocks than the first
REHEARSAL_PROMPTS = [[0], [0] * (KV_BLOCK_SLOTS + 1)]
MAX_LOGIT_DEVIATION = 0.1  # relative to the logits' spread; 46 layers in bfloat16 deviated by 0.03
MAX_SHARED_WIDTH = 33  # tokens of a block in a pass over all slots; longer blocks are of prompts


class GraphModel(Model):
    """A twin of `model` with the same weights, whose forward passes are recorded.

    All passes use the slots and first positions of the same buffers. So sequences may leave or
    differ in length without a new recording; only growth of the buffers discards the recordings.
    `compiled`: torch compiles the decoder layers first, once or twice, for seconds each time.
    `by_blocks`: compiled attention reads only the cache blocks that each sequence has, and layers
    are compiled for each batch size. Off by default, since its gain on a GPU is not measured yet.
    Raises RefusedError if the model cannot be run in fixed shapes.
    """

    capabilities = Capabilities(tensors=True, hidden=True, taps=True, chain=True, mixed_chain=True)
    max_shared_width = MAX_SHARED_WIDTH
    eager_class: type[CausalModel] = CausalModel  # for decoder-only models, runs no passes
    may_compile = False  # whether `prepare` compiles the layers

    def __init__(
        self, model: PreTrainedModel, compiled: bool = False, by_blocks: bool = False
    ) -> None:
        encodes = model.config.is_encoder_decoder
        if encodes and compiled:
            raise RefusedError("layers of encoder-decoders are not compiled; give runtime='graphs'")
        self.eager = (Seq2SeqModel if encodes else self.eager_class)(model)
        model = self.eager.model if encodes else model  # it may be within the user's model
        self.model, self.device = model, self.eager.device
        self.compute_dtype = self.eager.compute_dtype
        self.context, self._max_context = self.eager.context, self.eager.max_context
        self.vocab_size = self.eager.vocab_size
        self.twin = RaggedTwin(model)
        self.cache: Any = FixedCache(make_ragged_cache(model, 0).layers, self.device)
        if isinstance(self.eager, Seq2SeqModel):
            self._add_encoder(self.eager)
        self.layers = CompiledLayers(self.twin.model, self.cache, by_blocks) if compiled else None
        self.runtime = "compiled" if compiled else "graphs"
        # by number of slots, width, end and source end
        self.passes: dict[tuple[int, int, int, int], GraphPass] = {}
        # by number of slots, width, end, source end and picks
        self.prompt_passes: dict[tuple[int, ...], GraphPass] = {}
        # by shape, source end, and the addresses of the tables that a chain uses
        self.chains: dict[tuple[ChainShape, int, tuple[int, ...]], GraphPass] = {}
        self._q = torch.empty(0)  # of the chains; a new one if a chain needs more
        self.shape = self.cache.shape  # the shape for which passes and chains were recorded
        self.pool: Any = None
        self.offset: Tensor | None = None  # lengths by slot, on the device; None: not sent yet

    def prepare(self) -> None:
        if self.may_compile and self.layers is None and not self.encoder_decoder:
            self.layers, self.runtime = CompiledLayers(self.twin.model, self.cache), "compiled"
            self._discard_passes()
            start = perf_counter()
            with log_if_slow(log, "compiling the layers of %s", type(self.model).__name__):
                rehearse(self)
            log.info("compiling took %.0f s", perf_counter() - start)

    def _add_encoder(self, eager: Seq2SeqModel) -> None:
        """Set the attributes of an encoder-decoder. `eager` runs the encoder."""
        self.capabilities = replace(self.capabilities, media=True)
        self.encoder_decoder, self.joining_media = True, []
        self.needs_media, self._objections = eager.needs_media, MediaObjections(eager.full_model)
        self.source_context = eager.source_context
        self.source_vocab_size = eager.source_vocab_size
        self.shared_encoder_states = eager.shared_encoder_states
        decoder: Any = self.model.get_decoder()
        has_source_mask = "encoder_attention_mask" in get_forward_parameters(type(decoder))
        own, cross = (make_ragged_cache(self.model, 0).layers for _ in range(2))
        self.cache = FixedDecoderCache(own, cross, self.device, has_source_mask)

    def find_media_problem(self, media: Media) -> str | None:
        if not self.capabilities.media:
            return super().find_media_problem(media)
        return self._objections.to(media, lambda: GraphModel(self.eager.full_model))

    @cached_property
    def encoder_key(self) -> str | None:
        return self.eager.encoder_key

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @property
    def long(self) -> list[bool]:
        return self.cache.long

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not self.encoder_decoder:
            self._prefill(prompts)
            return
        self.eager.joining_media, self.joining_media = self.joining_media, []
        joining = self.eager.prefill_joining(prompts, sources)
        self.encoder_seconds = self.eager.encoder_seconds
        if joining is not None:
            self.cache.join(joining)
            self.offset = None

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Add a sequence for each prompt, and run the prompts."""
        joining, first = make_ragged_cache(self.model, len(prompts)), len(self.lengths)
        joining.long = [self._long_context] * len(prompts)
        check_room(joining.lengths, list(map(len, prompts)), self.compute_max_lengths(joining.long))
        self.cache.join(joining)
        self.offset = None
        blocks = [[]] * first + prompts
        if any(blocks):
            rows, counts = [b for b, block in enumerate(blocks) if block], list(map(len, blocks))
            self._run_prompts(blocks, rows, counts, RowOutputs([0] * len(blocks)))
            self._advance(counts)

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        counts = count_block_tokens(blocks, need)
        check_room(self.lengths, counts, self.compute_max_lengths(self.long))
        if not any(counts):
            return make_empty_logits(self.model, len(counts))
        self.cache.close_gaps()
        self.padding = -sum(counts)
        long = [b for b, n in enumerate(counts) if n > MAX_SHARED_WIDTH]
        if long:
            logits, self._hidden = self._run_split(blocks, long, counts, need)
        else:
            logits, self._hidden = self._run_shared(blocks, counts, need)
        self._advance(counts)
        return logits

    def _run_split(
        self, blocks: Blocks, long: list[int], counts: list[int], need: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the blocks of the sequences `long` in passes of their own, and the other blocks in a
        shared pass; return the results of all as `_run_shared` does. The shared pass comes first,
        since it also writes padding after the tokens of the sequences `long`."""
        outputs, others = RowOutputs(need), list_remaining_rows(len(counts), long)
        short = [n if b in others else 0 for b, n in enumerate(counts)]
        if any(short):
            short_need = [n if b in others else 0 for b, n in enumerate(need)]
            outputs.put(slice(None), 0, *self._run_shared(blocks, short, short_need))
        self._run_prompts(blocks, long, counts, outputs)
        if outputs.logits is None:
            return make_empty_logits(self.model, len(counts)), None
        return outputs.logits, outputs.hidden

    def _run_shared(
        self, blocks: Blocks, counts: list[int], need: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Run a pass over all slots, for counts[b] tokens of each block b. Return the logits and
        hidden states at the needed positions, `[B, max(need), ..]`."""
        B, width = len(counts), round_up_width(max(counts))
        shape = round_up_to_power_of_two(B), width
        self.padding += shape[0] * width
        end = round_up_slots(max(self.cache.lengths) + width)
        self.cache.reserve(B, end)
        order = self.cache.order
        self._fill_buffer(order, 0, shape)
        outputs = self._get_pass(*shape, end)(
            cut_blocks(blocks, order, 0, max(counts), self.device),
            self._send_lengths(),
            self._send_first_positions(order),
        )
        self._store_tapped(outputs.tapped, order, 0, [counts[b] for b in order])
        needed = NeededPositions(counts, need, self.cache.slots, self.device)
        return needed.select(outputs.logits[:B]), needed.select(outputs.hidden[:B])

    def _run_prompts(
        self, blocks: Blocks, rows: list[int], counts: list[int], outputs: RowOutputs
    ) -> None:
        """Run the blocks of these sequences, of counts[b] tokens, in passes over their own slots.
        Copy logits and hidden states at the needed positions to `outputs`."""
        most = max(counts[b] for b in rows)
        end = round_up_slots(max(self.cache.lengths[b] for b in rows) + most)
        for start in range(0, most, PREFILL_CHUNK_TOKENS):
            pieces = [
                cut_piece(b, start, counts[b], outputs.need[b]) for b in rows if counts[b] > start
            ]
            for width, group in group_pieces(pieces, end):
                made = self._run_pieces(blocks, start, width, group)
                sizes = [piece.size for piece in group]
                self._store_tapped(made.tapped, [piece.row for piece in group], start, sizes)
                outputs.put_pieces(group, made.logits, made.hidden)

    def _run_pieces(
        self, blocks: Blocks, start: int, width: int, pieces: list[PromptPiece]
    ) -> PassOutputs:
        """Run a pass over pieces that begin at token `start` of their blocks."""
        rows = [piece.row for piece in pieces]
        self.padding += len(rows) * width
        lengths = [self.cache.lengths[b] + start for b in rows]
        end = round_up_slots(max(lengths) + width)
        self.cache.reserve(len(self.cache.slots), end)
        self._fill_buffer(rows, start, (len(rows), width))
        num_picks = round_up_to_power_of_two(max(1, *(len(piece.needed) for piece in pieces)))
        return self._get_prompt_pass(len(rows), width, end, num_picks)(
            cut_blocks(blocks, rows, start, width, self.device),
            self._send(lengths),
            self._send_first_positions(rows),
            self._send([self.cache.slots[b] for b in rows]),
            send(list_picks(pieces, width, num_picks), self.device),
        )

    def _store_tapped(
        self, tapped: Tensor | None, rows: list[int], start: int, counts: list[int]
    ) -> None:
        """Store the hidden states of a pass over counts[i] tokens of sequence rows[i], from token
        `start` of its block on, if a drafter takes them."""
        if tapped is None or not self.eager.exposes_states:
            return
        states = [tapped[0, :0]] * len(self.cache.lengths)
        for i, (b, n) in enumerate(zip(rows, counts, strict=True)):
            states[b] = tapped[i, :n].clone()
        self.cache.shown.add([n + start for n in self.cache.lengths], states)

    @torch.inference_mode()
    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        added = [len(block) + max(0, g - 1) for block, g in zip(blocks, budget, strict=True)]
        check_room(self.lengths, added, self.compute_max_lengths(self.long))
        heads = [block[:-BLOCK_TOKENS] for block in blocks]
        if any(heads):
            self.score(heads, [0 for _ in heads])
        blocks = [block[-BLOCK_TOKENS:] for block in blocks]
        return self._run_chain(blocks, BLOCK_TOKENS, budget, choice, None)

    def _run_chain(
        self,
        blocks: list[list[int]],
        width: int,
        budget: list[int],
        choice: TokenChoice,
        table: Tensor | None,
    ) -> ChainedTokens:
        """Do as `chain` for blocks that have at most `width` tokens, for which there is room."""
        counts, B, G = list(map(len, blocks)), len(blocks), round_up_gamma(max(budget))
        self.cache.close_gaps()
        end = round_up_slots(max(self.cache.lengths) + width + G - 1)
        self.cache.reserve(B, end)
        sampled, rows = choice.filters is not None, round_up_to_power_of_two(B)
        shape = ChainShape(rows, width, G, end, sampled, is_ranked(choice))
        numbers = send(pack_numbers(counts, budget, choice), self.device)
        chained = self._get_chain(shape, choice.ids, table)(
            self.cache.to_slot_order(pad_blocks(blocks, self.device)),
            self._send_lengths(),
            self._send_first_positions(self.cache.order),
            self.cache.to_slot_order(numbers),
        )
        self._advance([n + max(0, g - 1) for n, g in zip(counts, budget, strict=True)])
        slots = self.cache.slots
        aligned = slots == list(range(B))
        places = slice(B) if aligned else send(torch.tensor(slots), self.device)
        return select_chained(chained, places, max(budget), choice)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.cache.lengths, lengths)
        self.cache.shown.truncate(lengths)
        if lengths != self.cache.lengths:
            self.cache.lengths, self.offset = list(lengths), None

    def rehearse(self) -> None:
        """Run and record a few short forward passes over the only sequence."""
        for blocks in REHEARSAL_BLOCKS:
            self.score(blocks, [1])
        self.chain([[0]], [2], make_rehearsal_choice(self.vocab_size))

    def tap(self, taps: tuple[int, ...]) -> None:
        self.eager.tap(taps)
        self.twin, self.taps = RaggedTwin(self.model, taps), taps
        if self.layers is not None:
            by_blocks = self.layers.by_blocks
            self.layers = CompiledLayers(self.twin.model, self.cache, by_blocks)
        self._discard_passes()

    def expose_hidden_states(self, known: Callable[[list[int]], int] | None) -> None:
        self.eager.expose_hidden_states(known)

    def take_hidden_states(self) -> list[HiddenStates | None]:
        return self.cache.shown.take()

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        self.cache.select(rows)
        self.offset = None

    def count_padded_positions(self, batch_size: int, width: int) -> int:
        if width > MAX_SHARED_WIDTH:
            return batch_size * count_prompt_positions(width)
        return round_up_to_power_of_two(batch_size) * round_up_width(width)

    def _send(self, numbers: list[int]) -> Tensor:
        return send(torch.tensor(numbers), self.device)

    def _send_lengths(self) -> Tensor:
        if self.offset is None:
            self.offset = self._send([self.cache.lengths[b] for b in self.cache.order])
        return self.offset

    def _send_first_positions(self, rows: list[int]) -> Tensor | None:
        """Return the position id of the first token of each of these sequences, on the device: 0,
        or `LONG_ROW_OFFSET` for long sequences; None if all are 0."""
        if not any(self.long):
            return None
        return self._send([LONG_ROW_OFFSET * self.long[b] for b in rows])

    def _fill_buffer(self, rows: list[int], start: int, shape: tuple[int, int]) -> None:
        """Prepare other inputs than ids for the next pass, of this shape, from token `start` of the
        blocks of these sequences on. A model of tokens has none."""

    def _advance(self, counts: list[int]) -> None:
        """Add counts[b] to the length of each sequence b. If all counts are equal, also add them on
        the device, which saves sending the lengths again."""
        self.cache.advance(counts)
        even = min(counts) == max(counts)
        self.offset = self.offset + counts[0] if even and self.offset is not None else None

    def _discard_outdated(self) -> None:
        """Discard all recordings if the cache has grown: they refer to the old tensors."""
        if self.shape != self.cache.shape:
            self._discard_passes()
            self.chains.clear()
            self.shape = self.cache.shape
            self.pool = make_memory_pool(self.device)

    def _discard_passes(self) -> None:
        self.passes.clear()
        self.prompt_passes.clear()

    def _get_chain(
        self, shape: ChainShape, target_ids: Tensor | None, table: Tensor | None
    ) -> GraphPass:
        self._discard_outdated()
        tables = target_ids, table
        key = shape, self.cache.source_end, tuple(0 if x is None else x.data_ptr() for x in tables)
        if key not in self.chains:
            q = self._get_q(shape)

            # refers to the tables, so that they stay at the addresses in the key
            def forward(
                ids: Tensor, lengths: Tensor, firsts: Tensor, numbers: Tensor
            ) -> ChainedTokens:
                def run_pass(ids: Tensor, lengths: Tensor, states: Tensor | None) -> Any:
                    pairs = self._make_pairs(ids, states, table)
                    return self._forward(ids, lengths, firsts, shape.end, pairs)[:2]

                return chain_passes(run_pass, ids, lengths, numbers, shape, q, target_ids)

            numbers = shape.make_buffer(self.device)
            self.chains[key] = self._make_pass(shape[:2], forward, self.pool, numbers)
        return self.chains[key]

    def _get_q(self, shape: ChainShape) -> Tensor:
        """Return a buffer for a chain's distributions. Chains share it, because it can take more
        memory than all else that a recording needs."""
        size = shape.rows * shape.num_tokens * self.vocab_size * shape.sampled
        if size > len(self._q):
            dtype = get_working_dtype(self.model.dtype)
            self._q = torch.empty(size, dtype=dtype, device=self.device)
        return self._q[:size].view(-1, shape.num_tokens, self.vocab_size)

    def _make_pairs(
        self, ids: Tensor, states: Tensor | None, table: Tensor | None
    ) -> Tensor | None:
        """Return the inputs of a forward pass over pairs of tokens and hidden states; None for a
        model of tokens. states: within a chain, the hidden states `[slots, 1, H]`. table: the
        embeddings."""
        return None

    def _get_pass(self, rows: int, width: int, end: int) -> GraphPass:
        self._discard_outdated()
        key = rows, width, end, self.cache.source_end
        if key not in self.passes:

            def forward(ids: Tensor, lengths: Tensor, firsts: Tensor) -> PassOutputs:
                return self._forward(ids, lengths, firsts, end, self._make_pairs(ids, None, None))

            self.passes[key] = self._make_pass((rows, width), forward, self.pool)
        return self.passes[key]

    def _get_prompt_pass(self, rows: int, width: int, end: int, num_picks: int) -> GraphPass:
        self._discard_outdated()
        key = rows, width, end, self.cache.source_end, num_picks
        if key not in self.prompt_passes:

            def forward(
                ids: Tensor, lengths: Tensor, firsts: Tensor, places: Tensor, picks: Tensor
            ) -> PassOutputs:
                pairs = self._make_pairs(ids, None, None)
                return self._forward(ids, lengths, firsts, end, pairs, (places, picks))

            places = torch.zeros(rows, dtype=torch.long, device=self.device)
            picks = places.new_zeros(rows * num_picks)
            self.prompt_passes[key] = self._make_pass((rows, width), forward, None, places, picks)
        elif num_picks == 1:
            # recorded when its shape recurs: recording takes as long as four runs. More picks are
            # rare, and a recording would hold the memory of their logits
            self.prompt_passes[key].pool = self.pool
        return self.prompt_passes[key]

    def _make_pass(
        self, shape: tuple[int, int], run: Callable[..., Any], pool: Any, *more: Tensor
    ) -> GraphPass:
        """Return a pass that runs `run` over ids of this shape, lengths, first positions and `more`
        buffers, and is recorded with this memory pool; None: it is not recorded."""
        layers = self.layers if shape[1] <= MAX_SHARED_WIDTH else None

        def forward(*inputs: Tensor, watched: bool) -> Any:
            with nullcontext() if layers is None or watched else layers.activate():
                return run(*inputs)

        ids = torch.zeros(shape, dtype=torch.long, device=self.device)
        lengths, firsts = (ids.new_zeros(shape[0]) for _ in range(2))
        guard = RecordingGuard(type(self.model).__name__)
        return GraphPass(forward, guard, [ids, lengths, firsts, *more], pool)

    def _forward(
        self,
        ids: Tensor,
        lengths: Tensor,
        firsts: Tensor,
        end: int,
        pairs: Tensor | None,
        some: tuple[Tensor, Tensor] | None = None,
    ) -> PassOutputs:
        """Run a forward pass over new tokens `ids` `[slots, width]`. In slot b they follow
        lengths[b] cached tokens. No shape depends on the tensors' values. pairs: the inputs in
        place of the ids; None for a model of tokens. some: which slots, and the flat indices of the
        positions that need logits; None: the first slots, and all positions."""
        places, picks = some or (None, None)
        self.cache.lay_out(lengths, ids.shape[1], end, places)
        recorder = HiddenStatesRecorder() if picks is None else SelectedPositions(picks)
        tap_states = dict[int, Tensor]()
        with self.twin(self.cache, recorder, tap_states) as model:
            logits = model(
                **self._make_inputs(ids, firsts, pairs), use_cache=True, return_dict=True
            ).logits
        self.cache.advance([0] * len(self.cache.lengths))
        tapped = torch.cat([tap_states[j] for j in self.taps], -1) if self.taps else None
        return PassOutputs(logits, recorder.hidden, tapped)

    def _make_inputs(self, ids: Tensor, firsts: Tensor, pairs: Tensor | None) -> dict[str, Any]:
        """Return the arguments of the forward for new tokens `ids` or `pairs`, and the cache."""
        if isinstance(self.eager, Seq2SeqModel):
            cache = self.cache.cross_cache
            inputs = self.eager.make_decoder_inputs(ids, cache)
            return inputs | make_cache_argument(self.model, cache)
        positions = self.cache.positions
        if self._max_context is not None:
            positions = positions.clamp(max=self._max_context - 1)  # padding only
        if self._max_context != self.context:
            positions = positions + firsts[:, None]
        tokens = {"input_ids": ids} if pairs is None else {"inputs_embeds": pairs}
        inputs = {**tokens, "position_ids": positions}
        return inputs | make_cache_argument(self.model, self.cache)


def make_rehearsal_choice(V: int) -> TokenChoice:
    """Return a choice of two tokens that needs every operation that a chain can need."""
    return TokenChoice(V, None, REHEARSAL_FILTERS, torch.zeros(2, 1, dtype=torch.float64))


def rehearse(model: GraphModel) -> GraphModel:
    """Run and record a few short forward passes, and return the model. Raises RefusedError if they
    cannot be recorded."""
    with refuse_failed_recording(type(model.model).__name__):
        model.start([[0]], [[0]] if model.encoder_decoder else None)
        model.rehearse()
        model.chains.clear()  # a target needs none
        model.leave([0])
        if model.layers is not None:
            _compare(model, model.layers)
    return model


def _score_rehearsal(model: Model, num_prompts: int) -> list[Tensor]:
    """Return the logits of each rehearsal block after each of the first rehearsal prompts."""
    model.start(REHEARSAL_PROMPTS[:num_prompts])
    logits = [
        model.score([block] * num_prompts, [len(block)] * num_prompts).clone()
        for (block,) in REHEARSAL_BLOCKS
    ]
    model.leave(list(range(num_prompts)))
    return logits


def _compare(model: GraphModel, layers: CompiledLayers) -> None:
    """Turn compiled layers off if they change logits, compared with the stock model over a ragged
    cache, by more than rounding."""
    num_prompts, runners = 1 + layers.by_blocks, (model, CausalModel(model.model))
    _score_rehearsal(model, num_prompts)  # on a CPU, a shape's first pass runs uncompiled layers
    for logits, expected in zip(*(_score_rehearsal(x, num_prompts) for x in runners), strict=True):
        deviation, spread = (logits - expected).abs().max(), expected.max() - expected.min()
        exact = float(deviation) <= MAX_LOGIT_DEVIATION * float(spread)  # False for NaN
        if not layers.refusal and not exact:
            layers.refuse(f"logits differ by {float(deviation / spread):.1e} of their spread")
            model.passes.clear()  # prompts run uncompiled layers
    if layers.refusal:
        model.runtime = "graphs"


GRAPHS_FORM = CheckedBackend("fixed shapes", GraphModel, switches_rope=True)
