"""A smaller model as the drafter (paper 3.6), over any runtime. Knows Models only."""

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
    """A smaller model as the drafter (paper, section 3.6), one forward for each draft token.

    A decoder-only model may draft for an encoder-decoder target. In sequences that the model cannot
    read it makes no draft tokens. A model of another vocabulary may draft by the text that it
    writes, which is certain, where `params` is None.

    Args:
        model: The model.
        vocab_size: V of the target; None where it is the model's.
        params: How its logits become distributions; None is as the request's. Temperature 0 always
            takes the likeliest token.

    Raises:
        InputError: `model` is no model, or `params` no SamplingParams.

    Examples:
        >>> import foretoken
        >>> small = foretoken.load("novels", draft="none").target
        >>> spec = foretoken.load("novels", draft=foretoken.LMDrafter(small))
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> round(out.stats.alpha, 3)  # this draft is the target again
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
        self.has_own_speed = params is not None  # its speed does not follow from its model alone
        self.shares = model.capabilities.target_rows
        self._proposes_text = model.capabilities.text and params is None
        self._can_chain = model.capabilities.chain
        self._sequences = DraftSequences(model)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.model.start(*self._sequences.join(prompts, sources))

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        texts, cached = self._sequences.token_ids, self._sequences.num_cached
        budget = self._sequences.compute_budgets(gamma)
        rows = zip(texts, cached, budget, strict=True)
        unread = [
            text[n:] if g else self._sequences.get_catch_up_tokens(b)
            for b, (text, n, g) in enumerate(rows)
        ]
        if self._proposes_text and self.model.drafts_from_text(greedy=draw.greedy):
            return self._propose_text(unread, budget)
        if not any(budget):
            if any(unread):
                self.model.score(unread, [0] * len(unread))
            draft = pack([[] for _ in budget])
        elif (made := self._propose_chained(unread, budget, draw)) is not None:
            draft = made
        elif self._is_greedy_on_host(draw):
            draft = self._propose_greedy(unread, budget)
        else:
            draft = self._propose_sampled(unread, budget, draw)
        for b, g in enumerate(budget):
            cached[b] = len(texts[b]) + g - 1 if g else cached[b] + len(unread[b])
        return draft

    def _propose_chained(
        self, unread: list[list[int]], budget: list[int], draw: Draw
    ) -> Draft | None:
        """Make all tokens in one call, where the model can."""
        V = self.vocab_size or self.model.vocab_size
        if not self._can_chain or self.model.vocab_size > V:
            return None
        chosen = make_token_choice(draw, max(budget), V, params=self.params)
        if chosen is None:
            return None
        return pack_chained(self.model.chain(unread, budget, chosen), budget, max(budget), draw)

    def _is_greedy_on_host(self, draw: Draw) -> bool:
        """Tell whether the likeliest tokens are all that the draft needs, and are on the host."""
        greedy = draw.greedy if self.params is None else self.params.greedy
        host = not self.model.capabilities.tensors and self.model.device.type == "cpu"
        return host and greedy and not draw.controlled

    def _propose_greedy(self, unread: list[list[int]], budget: list[int]) -> Draft:
        """The likeliest tokens, by lists alone: behind a forward pass, whatever torch does with a
        few numbers takes as long as all of this."""
        ids, tops = generate_token_by_token(self.model, unread, budget, self.vocab_size)
        return pack_certain(ids, tops, max(budget))

    def _propose_sampled(self, unread: list[list[int]], budget: list[int], draw: Draw) -> Draft:
        V = self.vocab_size or self.model.vocab_size
        feed: Blocks = unread
        ids: list[Tensor] = []
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        for i in range(max(budget)):
            need = [int(g > i) for g in budget]
            logits = self.model.score(feed, need)[:, 0]
            logits = logits if logits.shape[1] <= V else logits[:, :V]  # no other id is drawn
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

    def _propose_text(self, unread: list[list[int]], budget: list[int]) -> Draft:
        """Guesses by the text that the model writes: they follow from the text so far."""
        draft_tokens, calls = self.model.draft_from_text(unread, budget)
        for b, new in enumerate(unread):
            self._sequences.num_cached[b] += len(new)
        return pack(draft_tokens, calls=calls)

    def _build_next_blocks(self, ids: Tensor, active: list[bool]) -> Blocks:
        """One more token for every row that goes on; where it can, it stays on its device."""
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
    """Append block b to row b, for all rows, and then the likeliest of the first V ids, token by
    token: counts[b] of them in row b, of which the last is not appended. Return these, and the
    logit of each: NaN or infinite where logits are invalid."""
    tokens, logits = [list[int]() for _ in counts], [list[float]() for _ in counts]
    for i in range(max(counts)):
        need = [int(count > i) for count in counts]
        best = zip(*find_peaks(model.score(blocks, need), V), need, strict=True)
        for b, (x, top, on) in enumerate(best):
            tokens[b].extend(x if on else [])
            logits[b].extend(top if on else [])
        rows = zip(tokens, counts, strict=True)
        blocks = [ids[-1:] if count > i + 1 else [] for ids, count in rows]
    return tokens, logits
