"""The head of Domino (arXiv 2605.29707), which corrects a block drafter's logits by the draft
tokens before them. The definition is that of SGLang (domino_utils.py, pull request 28998)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DominoHead(nn.Module):
    """A recurrent network over the embeddings of the last token and the draft tokens after it,
    whose state and the hidden state at the next draft token give a bias `[B, Vd]` on its logits.

    base_first: True if the first draft token of a block keeps the logits of the block.
    """

    def __init__(
        self, hidden: int, state_size: int, rank: int, outputs: int, base_first: bool
    ) -> None:
        super().__init__()
        self.prefix_gru = nn.GRU(hidden, state_size, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + state_size, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, outputs, bias=False),
        )
        self.base_first = base_first

    def forward(
        self, states: Tensor, logits: Tensor, embedded: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits `[B, Vd]` of a draft token, and the network's state `[1, B, S]` to pass
        on for the next draft token.

        states, logits: Hidden states `[B, H]` and logits `[B, Vd]` of the block at the draft token.
        embedded: The embeddings `[B, H]` of the tokens before it.
        memory: The state of the network; None for the first draft token.
        """
        _, after = self.prefix_gru(embedded[:, None].to(states), memory)
        if memory is None and self.base_first:
            return logits, after
        return logits + self.embed_proj(torch.cat([states, after[0]], -1)), after
