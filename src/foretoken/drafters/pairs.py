"""A small decoder over pairs as the drafter: EAGLE-3 (arXiv 2503.01840) and single layers for
multi-token prediction (MTP, arXiv 2412.19437).

Pair i is the target's state at position i and token i + 1; behind it the decoder says what token
i + 2 may be. Draft tokens are read with states of the decoder's own in place of the target's. Their
keys are rolled back at once: after verification the same positions are read again with the
target's states, in the pass that makes the next draft token, so that every key that stays is true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.drafters.base import Draft, Drafter, certain, chained, choice, drawn, pack
from foretoken.errors import InputError, format_value
from foretoken.models.base import ChainedTokens, Model, HiddenStateDraftModel, TokenChoice
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS, list_remaining_rows
from foretoken.models.hidden_states import append_new_states
from foretoken.sampling.distributions import mask_invalid, find_peaks
from foretoken.sampling.draw import Draw
from foretoken.transfer import to_list, send

AHEAD = 32  # pairs of a row that drafts nothing, from which on they are read all the same: a page


@dataclass(slots=True)
class _Row:
    """A text, of whose pairs the first `fed` are in the model; `carried`: the target's states at
    the positions behind them."""

    text: list[int]
    fed: int = 0
    carried: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @property
    def complete(self) -> bool:
        """True where the states reach up to the last token but one, which the next pass needs."""
        return len(self.carried) > 0 and self.fed + len(self.carried) == len(self.text) - 1

    def tokens(self, V: int) -> list[int]:
        """The tokens of the carried pairs; the first pair's names the text's first token too, as
        pages are found again by tokens."""
        some = self.text[self.fed + 1 : self.fed + 1 + len(self.carried)]
        return _marked(self.text[0], some, V) if not self.fed else some


def _table(embedding: Any) -> Tensor | None:
    """Return the weights that embeddings are rows of, where they are just that and the kernels can
    look them up."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return None
    weight: Tensor = embedding.weight.detach()
    kinds = torch.float32, torch.bfloat16, torch.float16
    served = weight.is_cpu and weight.dtype in kinds and weight.is_contiguous()
    return weight if served and weight.shape[1] % 16 == 0 else None


def _marked(first: int, tokens: list[int], V: int) -> list[int]:
    return [(first + 1) * V + tokens[0], *tokens[1:]] if tokens else []


class PairsDrafter(Drafter):
    """Drafts with `decoder` from the states that `target` shows.

    A row proposes nothing before its first step, from which its last state comes.

    Args:
        target: The target, whose `taps` are those that the decoder reads.
        decoder: The decoder of pairs.
        embedding: Embeddings `[N, E]` of the target's ids `[N]`.
        ids: The target's ids that the model's outputs stand for, `[Vd]`; None: their numbers.
        columns: The part of the target's states that the decoder reads; None: all.
    """

    reads_target = True  # its states come from the target's passes, so these cannot run ahead

    def __init__(
        self,
        target: Model,
        decoder: HiddenStateDraftModel,
        embedding: Callable[[Tensor], Tensor],
        ids: Tensor | None,
        columns: slice | None = None,
    ) -> None:
        self.target: Model = target
        self.decoder, self.embedding = decoder, embedding
        self.ids = None if ids is None else ids.to(decoder.device)
        self.columns = columns
        self.runtime, self.holds, self.vocab_size = decoder.runtime, (decoder,), target.vocab_size
        self.identity = decoder.identity
        self.has_own_speed = self.identity is None  # no cost is known to be its
        self.rows: list[_Row] = []
        self._table = _table(embedding)
        self._chains = decoder.capabilities.chain
        if ids is not None and int(ids.max()) >= target.vocab_size:
            raise InputError(
                f"the draft guesses id {format_value(int(ids.max()))}, the target has "
                f"{target.vocab_size} tokens; give a draft for this target"
            )

    def reading(self, target: Model) -> PairsDrafter:
        """The same model on the states of another target that shows the same ones."""
        if target.taps != self.target.taps:
            raise InputError("give a target that exposes the states that the draft reads")
        return PairsDrafter(target, self.decoder, self.embedding, self.ids, self.columns)

    def known(self, text: list[int]) -> int:
        if len(text) < 2:
            return 0
        return self.decoder.count_cached_tokens(_marked(text[0], text[1:], self.target.vocab_size))

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        V, known = self.target.vocab_size, list(map(self.known, prompts))
        fresh = [_Row(list(text), n) for text, n in zip(prompts, known, strict=True)]
        self.decoder.start([_marked(r.text[0], r.text[1 : 1 + r.fed], V) for r in fresh])
        self.rows += fresh
        self._take()

    def _take(self) -> None:
        """Carry the states that the target has shown. Some may be of pairs that were fed before."""
        for row, new in zip(self.rows, self.target.take_hidden_states(), strict=True):
            reached = row.fed + len(row.carried)  # where states behind it are missing, it is silent
            row.carried = append_new_states(row.carried, new, reached, self.columns)
            if self.decoder.context is not None and len(row.text) > self.decoder.context:
                row.carried = row.carried[:0]  # it has outgrown the decoder, and is silent too

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        pairs = zip(self.rows, gamma, strict=True)
        budget = [min(g, self._room(row)) if row.complete else 0 for row, g in pairs]
        if not any(budget):
            self._catch_up()
            return pack([[] for _ in gamma])
        calls = self._shorten()
        if self._table is not None and self._chains:
            chosen = choice(draw, max(budget), self.target.vocab_size, self.ids)
            if chosen is not None:
                made = self._chain(self._table, budget, chosen)
                return chained(made, budget, calls + max(budget), draw)
        need = [int(g > 0) for g in budget]
        logits = self._feed([len(row.carried) for row in self.rows], need)
        host = logits.is_cpu and not self.decoder.capabilities.tensors
        if host and draw.greedy and not draw.controlled:
            draft = self._likeliest(logits, budget, calls)
        else:
            draft = self._drawn(logits, budget, draw, calls)
        self.decoder.set_lengths([row.fed for row in self.rows])
        return draft

    def _chain(self, table: Tensor, budget: list[int], chosen: TokenChoice) -> ChainedTokens:
        """Make all tokens in one call."""
        counts = [len(row.carried) for row in self.rows]
        blocks, tokens, states = self._carried(counts)
        self.decoder.set_draft_pairs(tokens, states, table)
        made = self.decoder.chain(blocks, budget, chosen, table)
        self._advance(counts)
        self.decoder.set_lengths([row.fed for row in self.rows])
        return made

    def _likeliest(self, logits: Tensor, budget: list[int], calls: int) -> Draft:
        """The likeliest tokens behind these logits, by lists, as `LMDrafter` has them."""
        made: list[list[int]] = [[] for _ in budget]
        highest: list[list[float]] = [[] for _ in budget]
        for i in range(max(budget)):
            if i:
                last = [ids[-1] if ids else 0 for ids in made]
                logits = self._follow(last, [int(g > i) for g in budget])
            best, tops = find_peaks(logits[:, :1])
            for b, g in enumerate(budget):
                if g > i:
                    ((x,), (top,)) = best[b], tops[b]
                    made[b].append(x if self.ids is None else int(self.ids[x]))
                    highest[b].append(top)
        return certain(made, highest, calls + max(budget))

    def _drawn(self, logits: Tensor, budget: list[int], draw: Draw, calls: int) -> Draft:
        ids: list[Tensor] = []
        distributions: list[Tensor] = []
        tops: list[Tensor] = []
        for i in range(max(budget)):
            if i:
                logits = self._follow(to_list(ids[-1]), [int(g > i) for g in budget])
            logits, top = mask_invalid(logits[:, 0])
            token, q = drawn(draw, logits, i, self.ids, self.target.vocab_size)
            ids.append(token)
            tops.append(top)
            distributions += [] if q is None else [q]
        return Draft(
            tokens=torch.stack(ids, 1),
            lengths=torch.tensor(budget),
            q=torch.stack(distributions, 1) if distributions else None,
            calls=calls + len(ids),
            tops=torch.stack(tops, 1),
        )

    def _room(self, row: _Row) -> int:
        """Draft tokens that fit behind a text."""
        context = self.decoder.context
        return 10**9 if context is None else max(0, context - len(row.text) + 1)

    def _catch_up(self) -> None:
        """Read pairs of rows that have drafted nothing for long, so that no text is read at one go
        when they do."""
        if any(len(row.carried) >= AHEAD for row in self.rows):
            self._shorten()
            self._feed([len(row.carried) for row in self.rows], [0] * len(self.rows))

    def _shorten(self) -> int:
        """Read carried pairs, of all rows alike, until the rest fits a pass, or is one of each row;
        the passes that it took."""
        passes = 0
        while sum(len(row.carried) for row in self.rows) > PREFILL_CHUNK_TOKENS:
            spare = [max(0, len(row.carried) - 1) for row in self.rows]
            share = max(1, PREFILL_CHUNK_TOKENS // max(1, sum(n > 0 for n in spare)))
            if not any(spare):
                break
            self._feed([min(n, share) for n in spare], [0] * len(self.rows))
            passes += 1
        return passes

    def _feed(self, counts: list[int], need: list[int]) -> Tensor:
        """A pass over so many of the carried pairs of each row, which are true."""
        if not any(counts):
            return torch.empty(len(counts), 0, 0)
        blocks, tokens, states = self._carried(counts)
        logits = self._pass(blocks, torch.tensor(tokens), self.decoder.project_states(states), need)
        self._advance(counts)
        return logits

    def _carried(self, counts: list[int]) -> tuple[list[list[int]], list[int], Tensor]:
        """Return so many carried pairs of each row: as blocks, their tokens, and their states."""
        V, some = self.target.vocab_size, list(zip(self.rows, counts, strict=True))
        blocks = [row.tokens(V)[:count] for row, count in some]
        states = [row.carried[:n] for row, n in some if n]
        texts = [row.text[row.fed + 1 : row.fed + 1 + n] for row, n in some]
        tokens = [x for text in texts for x in text]
        return blocks, tokens, states[0] if len(states) == 1 else torch.cat(states)

    def _advance(self, counts: list[int]) -> None:
        for row, n in zip(self.rows, counts, strict=True):
            row.fed, row.carried = row.fed + n, row.carried[n:]

    def _follow(self, ids: list[int], on: list[int]) -> Tensor:
        """A pass over one more draft token of the rows that are on, with the states of the last
        pass; its keys do not stay."""
        rows = [b for b, x in enumerate(on) if x]
        blocks = [[token] if x else [] for token, x in zip(ids, on, strict=True)]
        states = self.decoder.hidden[:, 0]
        states = states if len(rows) == len(on) else states[rows]
        return self._pass(blocks, torch.tensor([ids[b] for b in rows]), states, on)

    def _pass(
        self, blocks: list[list[int]], tokens: Tensor, states: Tensor, need: list[int]
    ) -> Tensor:
        self._give(blocks, tokens, states)
        return self.decoder.score(blocks, need)

    def _give(self, blocks: list[list[int]], tokens: Tensor, states: Tensor) -> None:
        embedded = self.embedding(send(tokens, states.device)).to(states.dtype)
        pairs = torch.cat([embedded, states], -1)
        self.decoder.set_next_pairs(pairs, [len(block) for block in blocks])

    def commit(self, tokens: list[list[int]]) -> None:
        for row, new in zip(self.rows, tokens, strict=True):
            row.text += new
        self._take()

    def leave(self, rows: list[int]) -> None:
        self.rows = [self.rows[b] for b in list_remaining_rows(len(self.rows), rows)]
        self.decoder.leave(rows)
