"""A smaller model as the drafter (paper, section 3.6), on any backend."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.drafters.base import (
    Draft,
    Drafter,
    draw_token,
    make_token_choice,
    pack,
    pack_certain,
    pack_chained,
)
from foretoken.errors import InputError
from foretoken.models.base import Blocks, Model, require_model
from foretoken.models.draft_sequences import DraftSequences
from foretoken.sampling.distributions import SamplingParams, find_peaks, mask_invalid
from foretoken.sampling.draw import Draw
from foretoken.transfer import to_list


class LMDrafter(Drafter):
    """A smaller model as the drafter (paper, section 3.6), with one forward pass per draft token.

    A decoder-only model may draft for an encoder-decoder target. The drafter proposes no tokens for
    sequences that exceed the model's context or contain ids that the model does not have. A model
    with another vocabulary may draft by generating text, which the target's tokenizer encodes. Such
    draft tokens are certain, and `params` must be None.

    Args:
        model: The draft model.
        vocab_size: V of the target; None if the model has the same V.
        params: Sampling params that turn the model's logits into q; None uses the request's params.
            Temperature 0 takes the most probable token.

    Raises:
        InputError: `model` is not a Model, or `params` is not a SamplingParams.

    Examples:
        >>> import foretoken
        >>> small = foretoken.load("novels", draft="none").target
        >>> spec = foretoken.load("novels", draft=foretoken.LMDrafter(small))
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> round(out.stats.alpha, 3)  # this draft model is the target itself
        1.0
    """

    def __init__(
        self, model: Model, vocab_size: int | None = None, params: SamplingParams | None = None
    ) -> None:
        require_model(model)
        if not isinstance(params, SamplingParams | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"params is {params!r:.60}; give a foretoken.SamplingParams, or None")
        self.model: Model = model
        self.params, self.holds = params, (model,)
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.runtime = model.runtime
        self.has_own_speed = params is not None  # params change the time that sampling takes
        self.shares = model.capabilities.target_rows
        self._proposes_text = model.capabilities.text and params is None
        self._can_chain = model.capabilities.chain
        self._sequences = DraftSequences(model)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.model.start(*self._sequences.join(prompts, sources))

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        token_ids, cached = self._sequences.token_ids, self._sequences.num_cached
        budget = self._sequences.compute_budgets(gamma)
        seqs = zip(token_ids, cached, budget, strict=True)
        uncached = [
            ids[n:] if g else self._sequences.get_catch_up_tokens(b)
            for b, (ids, n, g) in enumerate(seqs)
        ]
        if self._proposes_text and self.model.drafts_from_text(greedy=draw.greedy):
            return self._propose_text(uncached, budget)
        if not any(budget):
            if any(uncached):
                self.model.score(uncached, [0] * len(uncached))
            draft = pack([[] for _ in budget])
        elif (made := self._propose_chained(uncached, budget, draw)) is not None:
            draft = made
        elif self._is_greedy_on_host(draw):
            draft = self._propose_greedy(uncached, budget)
        else:
            draft = self._propose_sampled(uncached, budget, draw)
        for b, g in enumerate(budget):
            # the last draft token is not fed to the model
            cached[b] = len(token_ids[b]) + g - 1 if g else cached[b] + len(uncached[b])
        return draft

    def _propose_chained(
        self, uncached: list[list[int]], budget: list[int], draw: Draw
    ) -> Draft | None:
        """Return a draft that the model makes in one call; None if this is not possible."""
        V = self.vocab_size or self.model.vocab_size
        if not self._can_chain or self.model.vocab_size > V:
            return None
        mixed = self.model.capabilities.mixed_chain
        chosen = make_token_choice(draw, max(budget), V, params=self.params, mixed=mixed)
        if chosen is None:
            return None
        return pack_chained(self.model.chain(uncached, budget, chosen), budget, max(budget), draw)

    def _is_greedy_on_host(self, draw: Draw) -> bool:
        """Return whether all draft tokens are most probable ones and the logits are on the CPU."""
        greedy = draw.greedy if self.params is None else self.params.greedy
        host = not self.model.capabilities.tensors and self.model.device.type == "cpu"
        return host and greedy and not draw.controlled

    def _propose_greedy(self, uncached: list[list[int]], budget: list[int]) -> Draft:
        """Return a draft of the most probable tokens. The tokens are in lists, because a single
        torch operation takes as long as all operations on the lists."""
        ids, tops = generate_token_by_token(self.model, uncached, budget, self.vocab_size)
        return pack_certain(ids, tops, max(budget))

    def _propose_sampled(self, uncached: list[list[int]], budget: list[int], draw: Draw) -> Draft:
        V = self.vocab_size or self.model.vocab_size
        feed: Blocks = uncached
        ids: list[Tensor] = []
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        for i in range(max(budget)):
            need = [int(g > i) for g in budget]
            logits = self.model.score(feed, need)[:, 0]
            logits = logits if logits.shape[1] <= V else logits[:, :V]  # the target's ids
            logits, top = mask_invalid(logits)
            tops.append(top)
            draft_token, q = draw_token(draw, logits, i, None, V, self.params)
            ids.append(draft_token)
            distributions += [] if q is None else [q]
            feed = self._build_next_blocks(ids[-1], [g > i + 1 for g in budget])
        return Draft(
            tokens=torch.stack(ids, 1),
            lengths=torch.tensor(budget),
            q=torch.stack(distributions, 1) if distributions else None,
            calls=len(ids),
            tops=torch.stack(tops, 1),
        )

    def _propose_text(self, uncached: list[list[int]], budget: list[int]) -> Draft:
        """Return a draft from the text that the model generates. The draft tokens are certain,
        because the text is a deterministic function of the sequence."""
        draft_tokens, calls = self.model.draft_from_text(uncached, budget)
        for b, new in enumerate(uncached):
            self._sequences.num_cached[b] += len(new)
        return pack(draft_tokens, calls=calls)

    def _build_next_blocks(self, ids: Tensor, active: list[bool]) -> Blocks:
        """Return the next blocks to score: the newest draft token of every active sequence. If the
        model accepts tensors, the blocks stay on its device."""
        if self.model.capabilities.tensors:
            return ids[:, None]
        tokens: list[int] = to_list(ids)
        return [[token] if on else [] for token, on in zip(tokens, active, strict=True)]

    def commit(self, tokens: list[list[int]]) -> None:
        self._move([0] * len(tokens), tokens)

    def rewind(self, counts: list[int]) -> None:
        self._move(counts, [[] for _ in counts])

    def _move(self, back: list[int], tokens: list[list[int]]) -> None:
        self._sequences.update(back, tokens)
        self.model.set_lengths(self._sequences.num_cached)

    def leave(self, rows: list[int]) -> None:
        self._sequences.leave(rows)
        self.model.leave(rows)


def generate_token_by_token(
    model: Model, blocks: list[list[int]], counts: list[int], V: int | None
) -> tuple[list[list[int]], list[list[float]]]:
    """Append block b to sequence b, then generate counts[b] tokens in sequence b, for all
    sequences. Each token is the most probable of the first V ids (None: of all ids). All new tokens
    but the last are appended to the sequence.

    Returns the new tokens of each sequence and the logits of these tokens; a logit is NaN or
    infinite if the sequence's logits are invalid.
    """
    tokens, logits = [list[int]() for _ in counts], [list[float]() for _ in counts]
    for i in range(max(counts)):
        need = [int(count > i) for count in counts]
        best = zip(*find_peaks(model.score(blocks, need), V), need, strict=True)
        for b, (x, top, on) in enumerate(best):
            tokens[b].extend(x if on else [])
            logits[b].extend(top if on else [])
        pairs = zip(tokens, counts, strict=True)
        blocks = [ids[-1:] if count > i + 1 else [] for ids, count in pairs]
    return tokens, logits
