"""A decoder on the native kernels, as a Model.

The KV cache is paged. Rolling a sequence back only lowers its length; forks and sequences with a
common prefix share pages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import pointer
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import RefusedError
from foretoken.kernels.library import (
    PairsRecord,
    choose_instruction_set,
    load_library,
)
from foretoken.models.base import (
    Blocks,
    Capabilities,
    ChainedTokens,
    HiddenStateDraftModel,
    Model,
    TokenChoice,
)
from foretoken.models.hidden_states import HiddenStates, HiddenStateStore
from foretoken.models.native.linear import NativeLinear
from foretoken.models.native.pages import PAGE_POSITIONS, PagedSequence, PagePool
from foretoken.models.native.passes import (
    EMBEDDING_KINDS,
    DraftChain,
    NativePasses,
    PassResult,
    SequencePart,
)
from foretoken.models.native.recurrent_states import RecurrentStates
from foretoken.models.prefix_cache import PrefixCache, count_shared_tokens
from foretoken.models.rewindable_states import MAX_REWIND_TOKENS
from foretoken.models.row_slots import check_lengths, check_room, list_remaining_rows

MAX_STATE_CACHE_BYTES = 2**28  # for recurrent states cached at the ends of prefixes
MIN_SHARED_TOKENS = PAGE_POSITIONS  # shorter common prefixes are not shared


class UnsharedSalt:
    """The salt of a sequence with media, whose pages no other sequence may share, because they
    depend on more than the tokens. Each instance is equal only to itself."""


class NativeModel(Model):
    """A Model that runs `passes` over a paged KV cache. It is batch-invariant: its arithmetic gives
    the same bits in any batch."""

    capabilities = Capabilities(
        batch_invariant=True, prefix_cache=True, memory=True, hidden=True, taps=True, chain=True
    )
    runtime = "native"

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        self.passes = passes
        self.vocab_size = passes.vocab_size
        self.context = facts["context"]
        self._max_context = facts.get("longest")
        self.identity = facts.get("identity")
        self.compute_dtype: str = facts.get("computed", "float32")
        self.pool = PagePool(passes.layout, "float16" if passes.facts["halved"] else "float32")
        self.seqs: list[PagedSequence] = []
        # recurrent states at the ends of prefixes, for later sequences with the same prefix
        self.state_cache: PrefixCache | None = None
        self.token_ids: list[list[int]] = []  # the cached tokens of each sequence
        self.salts: list[Hashable] = []
        self.salt = ""  # of the sequences that join next
        # number of tokens found in the prefix cache, for each sequence of the last `start`
        self.num_cached_tokens: list[int] = []
        self.max_rewind = None if passes.states is None else MAX_REWIND_TOKENS
        self.taps = passes.taps
        self._hidden_states = HiddenStateStore()  # at the taps, until a drafter takes them
        # returns how many of a prompt's first tokens need no hidden states, because the drafter has
        # them already; None if the drafter uses no hidden states
        self._count_shareable: Callable[[list[int]], int] | None = None

    def __reduce__(self) -> Any:
        raise RefusedError(
            "a model on the native decoder cannot be copied or pickled; load it again, in this or "
            "another process: all copies share the memory-mapped weights"
        )

    @property
    def lengths(self) -> list[int]:
        return [seq.length for seq in self.seqs]

    @property
    def long(self) -> list[bool]:
        return [seq.long for seq in self.seqs]

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        states = 4 * self.passes.facts["row_numbers"] * len(lengths)
        return self.pool.page_bytes * sum(-(-n // PAGE_POSITIONS) for n in lengths) + states

    def reserve(self, num_bytes: int) -> None:
        self.pool.capacity = num_bytes // self.pool.page_bytes

    def expose_hidden_states(self, known: Callable[[list[int]], int] | None) -> None:
        self._count_shareable = known if self.taps else None

    def take_hidden_states(self) -> list[HiddenStates | None]:
        return self._hidden_states.take()

    def set_prefix_caching(self, enabled: bool) -> None:
        if (cached := self.pool.prefix_cache) is not None:
            cached.clear()
        pages = PrefixCache(None, divisible=True, release=lambda seq: seq.release())
        self.pool.prefix_cache = pages if enabled else None
        stores = enabled and self.passes.states is not None
        self.state_cache = PrefixCache(MAX_STATE_CACHE_BYTES, divisible=False) if stores else None

    def set_salt(self, salt: str) -> None:
        self.salt = salt

    def count_cached_tokens(self, prompt: list[int]) -> int:
        length, _ = self._find_shared(prompt)
        return self._find_resumable(prompt, length)[0]

    @property
    def _prefix_key(self) -> Hashable:
        """Return the key under which the sequences that join next share pages: their salt, with a
        mark if they are long sequences."""
        return (self.salt, "long") if self._long_context else self.salt

    def _find_resumable(self, prompt: list[int], length: int) -> tuple[int, Any]:
        """Return how many of a prompt's first `length` tokens a new sequence can skip, and copies
        of the recurrent states after these tokens (None if the model has none). The number may be
        below `length`, up to which pages could be shared, because recurrent states are cached only
        at a few positions."""
        if self.passes.states is None:
            return length, None
        if self.state_cache is None:
            return 0, None
        return self.state_cache.find(self._prefix_key, prompt[:length])

    def _store(self, b: int) -> None:
        """Add sequence b's recurrent states to the prefix cache, for later sequences that begin
        with all of its tokens."""
        layout, seq = self.passes.states, self.seqs[b]
        if (
            layout is None
            or self.state_cache is None
            or seq.states is None
            or seq.length < MIN_SHARED_TOKENS
        ):
            return
        self.passes.settle(seq.states, seq.length)
        copies = layout.copy_states(seq.states, seq.length)
        self.state_cache.add(self.salts[b], self.token_ids[b][: seq.length], copies)

    def _find_shared(self, prompt: list[int]) -> tuple[int, PagedSequence | None]:
        """Return how many of a prompt's first tokens can share another sequence's pages, and that
        sequence. Tokens whose hidden states a drafter still needs must be computed, so they are not
        shared."""
        length, seq = self._find_common(prompt)
        if length < MIN_SHARED_TOKENS:
            return 0, None
        return length if self._count_shareable is None else min(
            length, self._count_shareable(prompt)
        ), seq

    def _find_common(self, prompt: list[int]) -> tuple[int, PagedSequence | None]:
        """Return the length of the longest prefix that a prompt has in common with a cached or
        running sequence, and that sequence; (0, None) if the prefix cache is off."""
        if self.pool.prefix_cache is None:
            return 0, None
        salt = self._prefix_key
        length, seq = self.pool.prefix_cache.find(salt, prompt)
        for own, other_ids, other in zip(self.salts, self.token_ids, self.seqs, strict=True):
            if own == salt and other_ids[:MIN_SHARED_TOKENS] == prompt[:MIN_SHARED_TOKENS]:
                same = min(count_shared_tokens(other_ids, prompt), other.length)
                length, seq = (same, other) if same > length else (length, seq)
        return length, seq

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        limits = self.compute_max_lengths([self._long_context] * len(prompts))
        check_room([0] * len(prompts), [len(p) for p in prompts], limits)
        first = len(self.seqs)
        # in one assignment: a Ctrl-C in between would leave lists of different lengths
        self.seqs, self.token_ids, self.salts, self._hidden_states = (
            [*self.seqs, *self._make_seqs(len(prompts))],
            [*self.token_ids, *([] for _ in prompts)],
            [*self.salts, *(self._prefix_key for _ in prompts)],
            self._hidden_states.copy_with_rows(len(prompts)),
        )
        self.num_cached_tokens = []
        unread: dict[int, list[int]] = {}
        for b, prompt in enumerate(prompts, first):
            head = prompt[:MIN_SHARED_TOKENS]
            if self.pool.prefix_cache is not None and any(
                head == prompts[other - first][:MIN_SHARED_TOKENS] for other in unread
            ):  # prefill those prompts first: this one may share their pages
                self._prefill(unread)
                unread = {}
            length, seq = self._find_shared(prompt)
            length, states = self._find_resumable(prompt, length)
            if length and seq is not None:
                own, forked = self.seqs[b].states, seq.fork(length)
                if own is not None and self.passes.states is not None:
                    self.passes.states.restore(own, length, states)
                forked.states, forked.may_share = own, own is not None
                self.seqs[b], self.token_ids[b] = forked, prompt[:length]
            self.num_cached_tokens.append(length)
            unread[b] = prompt[length:]
        self._prefill(unread)

    def _make_seqs(self, count: int) -> list[PagedSequence]:
        seqs = [PagedSequence(self.pool, long=self._long_context) for _ in range(count)]
        if self.passes.states is not None:
            for seq in seqs:
                seq.states = RecurrentStates.create(self.passes.states)
                seq.may_share = True
        return seqs

    def _prefill(self, unread: dict[int, list[int]]) -> None:
        every = range(len(self.seqs))
        self.score([unread.get(b, []) for b in every], [0 for _ in every])

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past = self.lengths
        for b, seq in enumerate(self.seqs):
            if seq.states is not None:  # a `NativeTargetCopy` may have advanced the states
                seq.states.check_rewind(b, past[b], past[b])
        check_room(past, [len(block) for block in blocks], self.compute_max_lengths(self.long))
        if self.state_cache is not None:
            blocks = self._prefill_to_forks(blocks, need)
        return self._append_blocks(blocks, need)

    def _prefill_to_forks(self, blocks: list[list[int]], need: list[int]) -> list[list[int]]:
        """Prefill each prompt up to the token at which it diverges from all other sequences, and
        cache the recurrent states there. Return the remaining tokens of all blocks."""
        heads: list[list[int]] = [[] for _ in blocks]
        for b, (seq, block) in enumerate(zip(self.seqs, blocks, strict=True)):
            if not seq.may_share or not block:
                continue
            new, _ = self._find_common([*self.token_ids[b], *block])
            new -= seq.length
            seq.may_share = new >= len(block) and not need[b]
            if 0 < new <= len(block) - max(1, need[b]) and new + seq.length >= MIN_SHARED_TOKENS:
                heads[b] = block[:new]
        if not any(heads):
            return blocks
        self._append_blocks(heads, [0 for _ in blocks])
        for b, block in enumerate(heads):
            if block:
                self._store(b)
        return [block[len(one) :] for block, one in zip(blocks, heads, strict=True)]

    def _append_blocks(self, blocks: list[list[int]], need: list[int]) -> Tensor:
        """Append blocks, for which there must be room, and return logits as `score` does."""
        past = self.lengths
        logits = self.score_with(self.passes, past, blocks, need)
        # only after the pass: if memory does not suffice, the sequences stay unchanged
        for seq, token_ids, start, block in zip(
            self.seqs, self.token_ids, past, blocks, strict=True
        ):
            token_ids[start:] = block
            seq.length = start + len(block)
        return logits

    def score_with(
        self, passes: NativePasses, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """Return logits as `score` does, but computed by the network of `passes` over this model's
        pages. The first past[b] tokens of sequence b are cached. Does not change the sequences'
        lengths."""
        B, own = len(blocks), passes is self.passes
        tapped = own and self._count_shareable is not None
        made = self._run_passes(passes, past, blocks, need, return_tapped=tapped)
        if own:
            self._hidden = made.hidden
            if made.tapped_states is not None:
                counts = [len(block) for block in blocks]
                self._hidden_states.add(
                    past, [made.tapped_states] if B == 1 else list(made.tapped_states.split(counts))
                )
        return made.logits

    def _run_passes(
        self,
        passes: NativePasses,
        past: list[int],
        blocks: list[list[int]],
        need: list[int],
        *,
        return_tapped: bool,
    ) -> PassResult:
        """Return the results of `passes` over this model's pages, with zeros in the logits and
        hidden states that no sequence needs. Arguments as in `score_with` and `NativePasses.run`.
        """
        most = max(need, default=0)
        parts = [
            SequencePart(self.seqs[b], past[b], block, need[b], b * most)
            for b, block in enumerate(blocks)
            if block
        ]
        made = passes.run(parts, len(blocks), most, return_tapped=return_tapped)
        if min(need, default=0) < most:
            for b, count in enumerate(need):
                made.logits[b, count:] = made.hidden[b, count:] = 0
        return made

    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        past, limits = self.lengths, self.compute_max_lengths(self.long)
        made, lengths = self.chain_with(
            self.passes, past, limits, blocks, budget, choice, embeddings
        )
        tokens: list[list[int]] = made.tokens.tolist()
        for b, (seq, tokens_of_row) in enumerate(zip(self.seqs, self.token_ids, strict=True)):
            tokens_of_row[past[b] :] = [*blocks[b], *tokens[b]][: lengths[b] - past[b]]
            seq.length = lengths[b]
        return made

    def chain_with(
        self,
        passes: NativePasses,
        past: list[int],
        limits: int | None | list[int | None],
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> tuple[ChainedTokens, list[int]]:
        """Make draft tokens as `chain` does, but with the network of `passes` over this model's
        pages. The first past[b] tokens of sequence b are cached. Does not change the sequences'
        lengths.

        limits: the maximum lengths for `check_room`.

        Returns the draft tokens, and for each sequence the number of tokens that are then cached:
        all except the last draft token.
        """
        counts = [len(block) + max(0, g - 1) for block, g in zip(blocks, budget, strict=True)]
        check_room(past, counts, limits)
        lengths = [n + count for n, count in zip(past, counts, strict=True)]
        passes.reserve_positions(max(lengths))
        for seq, start, block, length in zip(self.seqs, past, blocks, lengths, strict=True):
            if block:
                seq.reserve(start, length)
        ends = [start + len(block) for start, block in zip(past, blocks, strict=True)]
        shifts = [passes.get_position_shift(seq) for seq in self.seqs]
        chain = DraftChain(budget, ends, shifts, self.seqs, self.vocab_size, choice, embeddings)
        every = enumerate(zip(self.seqs, past, blocks, budget, strict=True))
        parts = [SequencePart(seq, start, x, int(g > 0), b) for b, (seq, start, x, g) in every if x]
        passes.run(parts, len(blocks), 1, return_tapped=False, chain=chain)
        return chain.result, lengths

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        layout = self.passes.states
        for b, (seq, length) in enumerate(zip(self.seqs, lengths, strict=True)):
            if seq.states is not None:
                seq.states.check_rewind(b, seq.length, length)
        for seq, length in zip(self.seqs, lengths, strict=True):
            if not length:  # the sequence starts again
                seq.position_shift = 0
                seq.states = layout and RecurrentStates.create(layout)
        for seq, token_ids, length in zip(self.seqs, self.token_ids, lengths, strict=True):
            seq.length = length
            del token_ids[length:]
        self._hidden_states.truncate(lengths)

    def permute(self, rows: list[int]) -> None:
        used: set[int] = set()
        new: list[PagedSequence] = []
        for b in rows:
            seq = self.seqs[b]
            if b in used:
                states = seq.states and seq.states.copy()
                seq = seq.fork(seq.length)
                seq.states = states
            new.append(seq)
            used.add(b)
        token_ids, salts = [list(self.token_ids[b]) for b in rows], [self.salts[b] for b in rows]
        left = [seq for b, seq in enumerate(self.seqs) if b not in used]
        # in one assignment, as in `start`
        self.seqs, self.token_ids, self.salts, self._hidden_states = (
            new,
            token_ids,
            salts,
            self._hidden_states.copy_rows(rows),
        )
        for seq in left:
            seq.release()
        if not rows:
            self.pool.recount()

    def leave(self, rows: list[int]) -> None:
        for b in rows:
            if self.pool.prefix_cache is not None and b < len(self.seqs):
                seq, token_ids = self.seqs[b], self.token_ids[b]
                length = min(len(token_ids), seq.length)  # a Ctrl-C may have left them unequal
                if length >= MIN_SHARED_TOKENS and not isinstance(self.salts[b], UnsharedSalt):
                    if length == seq.length:
                        self._store(b)
                    self.pool.prefix_cache.add(self.salts[b], token_ids[:length], seq.fork(length))
        self.permute(list_remaining_rows(len(self.seqs), rows))


class NativeTargetCopy(Model):
    """A smaller copy of `target` that drafts over the target's KV cache. Sequences must join the
    target, which prefills them, before they join the copy.

    The copy reads the target's keys and values, and writes the keys and values of draft tokens
    after them. It needs no prefill and no cache of its own. The target's next pass overwrites the
    draft tokens' entries before it reads these positions, so the target's results do not depend on
    the copy. In a long sequence, the copy attends only to the first and the last positions
    (`NativePasses.share_pages`).
    """

    capabilities = Capabilities(target_rows=True, memory=True, chain=True)
    reads_target = True

    def __init__(self, target: NativeModel, passes: NativePasses, facts: dict[str, Any]) -> None:
        self.target, self.passes, self.runtime = target, passes, target.runtime
        self.encoder_decoder, self.vocab_size = target.encoder_decoder, target.vocab_size
        self.context, self.source_context = target.max_context, target.source_context
        self.source_vocab_size = target.source_vocab_size
        self.compute_dtype: str = facts["computed"]
        identity = facts.get("identity")
        self.identity = identity and (
            f"{identity} over the target's rows, at most {passes.max_attended_tokens} tokens"
        )
        self.max_rewind = target.max_rewind
        self._own_lengths: list[int] = []

    @property
    def max_attended_tokens(self) -> int | None:
        return self.passes.max_attended_tokens

    @property
    def lengths(self) -> list[int]:
        """The number of cached tokens of each sequence: the target's tokens, and draft tokens after
        them."""
        return [
            max(own, other)
            for own, other in zip(self._own_lengths, self.target.lengths, strict=True)
        ]

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self._own_lengths += [0] * len(prompts)

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past = self.lengths
        check_room(past, [len(block) for block in blocks], self.context)
        self._own_lengths = [n + len(block) for n, block in zip(past, blocks, strict=True)]
        return self.target.score_with(self.passes, past, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self._own_lengths = list(lengths)

    def permute(self, rows: list[int]) -> None:
        self._own_lengths = [self._own_lengths[b] for b in rows]

    def leave(self, rows: list[int]) -> None:
        # the base class uses `lengths`, which fails if the target's rows have left already
        self.permute(list_remaining_rows(len(self._own_lengths), rows))

    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        made, self._own_lengths = self.target.chain_with(
            self.passes, self.lengths, self.context, blocks, budget, choice, embeddings
        )
        return made


class NativeHiddenStateDraft(NativeModel, HiddenStateDraftModel):
    """A draft model whose inputs are pairs of a token embedding and a hidden state (EAGLE-3, MTP).
    Call `set_next_pairs` before each `score`, and `set_draft_pairs` before each `chain`."""

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        super().__init__(passes, facts)
        join = passes.facts["join"]
        self._join = join and NativeLinear(join, passes.memory, passes.width)
        self._instructions = choose_instruction_set().encode()

    def project_states(self, states: Tensor) -> Tensor:
        """Return the target's hidden states at the taps, `[N, W]`, projected to the draft model's
        width, `[N, H]`. Raises MemoryError."""
        return states.float() if self._join is None else self._join(states)

    def set_draft_pairs(self, tokens: list[int], states: Tensor, embeddings: Tensor) -> None:
        n, E, H = len(tokens), embeddings.shape[1], self.passes.width
        own, given = states.float().contiguous(), torch.empty(n, E + H)
        record = PairsRecord(n, E, H, EMBEDDING_KINDS[embeddings.dtype])
        if self._join is not None:
            joined = torch.empty(n, self._join.record.outputs)
            record.join, record.joined = pointer(self._join.record), joined.data_ptr()
        ids = np.array(tokens, np.int64)
        record.ids, record.embeddings = ids.ctypes.data, embeddings.data_ptr()
        record.states, record.given = own.data_ptr(), given.data_ptr()
        if not load_library().foretoken_join(self._instructions, record):
            raise MemoryError("not enough memory to project the target's hidden states")
        self.passes.input_states = given

    def set_next_pairs(self, pairs: Tensor, counts: list[int]) -> None:
        self.passes.input_states = pairs.float().contiguous()


class NativeMtpStack(NativeHiddenStateDraft):
    """A stack of MTP layers. Each layer has passes of its own over the common pages, in which all
    layers have the same positions."""

    capabilities = replace(NativeModel.capabilities, taps=False, chain=False)

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        super().__init__(passes, facts)
        self._stack = passes.split_stack()
        self.num_layers = len(self._stack)
        self._layers = range(self.num_layers)
        self._pairs: Tensor | None = None

    def set_next_layers(self, layers: range) -> None:
        self._layers = layers

    def set_next_pairs(self, pairs: Tensor, counts: list[int]) -> None:
        self._pairs = pairs.float()

    def score_with(
        self, passes: NativePasses, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        H, layers = self.passes.width, self._layers
        pairs, self._pairs = self._pairs, None
        if pairs is None:  # only the time is measured, or a cached prefix was dropped
            layers = range(self.num_layers)
            pairs = torch.zeros(sum(map(len, blocks)), (1 + self.num_layers) * H)
        *embeddings, states = pairs.split(H, -1)
        made: PassResult | None = None
        for k, embedded in zip(layers, embeddings, strict=True):
            self._stack[k].input_states = torch.cat([embedded, states], -1)
            final = k == layers[-1]
            made = self._run_passes(
                self._stack[k],
                past,
                blocks,
                need if final else [0 for _ in need],
                return_tapped=not final,
            )
            states = states if made.tapped_states is None else made.tapped_states
        assert made is not None
        self._hidden = made.hidden
        return made.logits
