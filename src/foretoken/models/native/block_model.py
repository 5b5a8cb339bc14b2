"""A block draft (DFlash, DSpark and others) on the native kernels. Its context is in pages, into
which the target's hidden states are projected; a block is one forward pass over embeddings.

The small heads, which condition a draft token on the token before it, run on torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.native.linear import NativeLinear
from foretoken.models.native.pages import PAGE_POSITIONS, PagedSequence, PagePool
from foretoken.models.native.passes import NativePasses, SequencePart
from foretoken.models.stock.dflash import BlockDraftModel, BlocksDraft


class NativeBlockModel(BlockDraftModel):
    """A block drafter whose layers and output layer run on the kernels.

    Args:
        draft: The drafter from its files; only its embedding and small heads are used.
        passes: The layers and the output layer.
        facts: The description of the conversion.
    """

    runtime = "native"

    def __init__(self, draft: BlocksDraft, passes: NativePasses, facts: dict[str, Any]) -> None:
        super().__init__(draft)
        self.passes, self.context_kv = passes, passes.open_context_kv()
        self.join = NativeLinear(passes.facts["join"], passes.memory, passes.width)
        if draft.network.bias_layer is not None:
            packed = NativeLinear(passes.facts["bias_layer"], passes.memory, passes.vocab_size)
            setattr(*draft.network.bias_layer, packed)
        for head in draft.network.heads:
            for module in head.modules():
                if isinstance(module, nn.Linear | nn.GRU):
                    module.float()  # the precision of the kernels' results; tables stay as they are
        self.pool = PagePool(passes.layout, "float16" if passes.facts["halved"] else "float32")
        self.seqs: list[PagedSequence] = []
        self.context: int | None = facts["context"]
        self.compute_dtype: str = facts["computed"]
        self.identity: str | None = facts.get("identity")

    @property
    def lengths(self) -> list[int]:
        return [seq.length for seq in self.seqs]

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        return self.pool.page_bytes * sum(-(-n // PAGE_POSITIONS) for n in lengths)

    def start(self, rows: int) -> None:
        """Add `rows` sequences with an empty context."""
        self.seqs = [*self.seqs, *(PagedSequence(self.pool) for _ in range(rows))]

    def permute(self, rows: list[int]) -> None:
        old, self.seqs = self.seqs, [self.seqs[b].fork(self.seqs[b].length) for b in rows]
        for seq in old:
            seq.release()
        if not rows:
            self.pool.recount()

    @torch.inference_mode()
    def predict_block(self, anchors: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        """Return hidden states `[B, G, H]` and logits `[B, G, Vd]` for counts[b] draft tokens that
        follow anchors[b], the last token of sequence b; valid until the next forward pass. The
        contexts do not change: a block's keys and values are overwritten later."""
        B, G, skip, mask = len(counts), max(counts), self.num_anchors, self.layout.mask_token_id
        rows = list(zip(self.seqs, anchors, counts, strict=True))
        blocks = [[anchor, *[mask] * (n - 1 + skip)] if n else [] for _, anchor, n in rows]
        parts = [
            SequencePart(seq, seq.length, block, n, b * G)
            for b, ((seq, _, n), block) in enumerate(zip(rows, blocks, strict=True))
            if n
        ]
        ids = torch.tensor([token for block in blocks for token in block])
        embedded = self.embedding(ids).float() * self.embedding_scale
        self.passes.reserve_tokens(len(ids))  # a block is never split over two passes
        self.passes.input_states = embedded.contiguous()
        made = self.passes.run(parts, B, G, return_tapped=False)
        for b, n in enumerate(counts):
            made.logits[b, n:] = made.hidden[b, n:] = 0
        return made.hidden, made.logits

    def _append(self, states: Tensor, counts: list[int]) -> int:
        rows = list(zip(self.seqs, counts, strict=True))
        parts = [SequencePart(seq, seq.length, [0] * n, 0, 0) for seq, n in rows if n]
        self.context_kv.input_states = self.join(states).contiguous()
        self.context_kv.run(parts, 0, 0, return_tapped=False)
        for seq, n in rows:  # only after the pass: if memory does not suffice, nothing has changed
            seq.length += n
        return 1
