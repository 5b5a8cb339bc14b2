"""A drafter that samples uniformly from the vocabulary: the extreme case of the paper's section
3.6."""

from __future__ import annotations

import torch

from foretoken.drafters.base import Draft, Drafter, Draw, pack
from foretoken.sampling.checks import Count
from foretoken.sampling.distributions import compute_cdf
from foretoken.transfer import to_list


class UniformDrafter(Drafter):
    """A drafter that samples uniformly from the target's vocabulary (paper, section 3.6).

    Its distribution does not depend on the temperature. Its draft tokens cost almost nothing, so
    in theory they speed up every target a little.

    Args:
        vocab_size: V of the target.

    Raises:
        InputError: `vocab_size` is not an integer of 1 or more.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels", draft="none")
        >>> spec = foretoken.load("novels", draft=foretoken.UniformDrafter(spec.target.vocab_size))
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=2, temperature=1.0)
        >>> out.stats.alpha < 0.5
        True
    """

    def __init__(self, vocab_size: int) -> None:
        vocab_size = Count(ge=1, remedy="the target's, 1 or more")("vocab_size", vocab_size)
        self.vocab_size = vocab_size
        self.distribution = torch.full((1, vocab_size), 1 / vocab_size, dtype=torch.float64)
        self.cdf = compute_cdf(self.distribution)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        """Do nothing: this drafter stores no sequences."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        B, G = len(gamma), max(gamma, default=0)
        distributions, cdf = self.distribution.expand(B, -1), self.cdf.expand(B, -1).contiguous()
        columns = [to_list(draw(distributions, i, cdf)) for i in range(G)]
        draft_tokens = [[ids[b] for ids in columns[: gamma[b]]] for b in range(B)]
        return pack(draft_tokens, distributions[:, None].expand(-1, G, -1))

    def commit(self, tokens: list[list[int]]) -> None:
        """Do nothing."""

    def rewind(self, counts: list[int]) -> None:
        """Do nothing."""

    def leave(self, rows: list[int]) -> None:
        """Do nothing."""
