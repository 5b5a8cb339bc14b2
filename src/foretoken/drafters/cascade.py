"""A drafter that is itself accelerated by a faster drafter (paper, section 5: hierarchical).

The same step, with the middle model as its target, makes the guesses, so that they follow the
middle model's law, whatever guesses for it; that law is the q they come with. Knows protocols only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretoken.drafters.base import Draft, Drafter, pack, require_vocabulary, rewinding
from foretoken.errors import InputError, NumericsError, RefusedError, whole
from foretoken.models.base import Blocks, Model, hears, require_model
from foretoken.request import Request, Row
from foretoken.sampling.distributions import SamplingParams, law
from foretoken.sampling.draw import Draw, SharedDraw
from foretoken.sampling.judge import Coupled, Judge, Verdict, choose
from foretoken.sampling.verify import Outcome, block
from foretoken.step import step


class CascadeDrafter:
    """Guesses with `middle`, for which `drafter` makes up to `gamma` guesses a run.

    A cascade is a drafter that can go back, so it may stand in another. As with a single model,
    rows that have outgrown the middle model's context, or whose source it cannot read, fall silent.
    Raises InputError where the vocabularies differ, RefusedError for a drafter that cannot go back.
    """

    singular = True  # its speed does not follow from its type

    def __init__(self, middle: Model, drafter: Drafter, gamma: int = 4) -> None:
        require_model(middle)
        if not whole(gamma) or gamma < 0:
            raise InputError(
                f"gamma is {gamma!r:.60}; give the guesses for a run of the middle model, 0 or more"
            )
        require_vocabulary(drafter, middle.vocab_size, "the model that it guesses for")
        self.middle, self.drafter, self.gamma = middle, rewinding(drafter, "a cascade"), gamma
        self.holds = (middle, drafter)
        self.vocab_size, self.runtime = middle.vocab_size, middle.runtime
        self._texts: list[list[int]] = []  # committed tokens, then the guesses made since
        self._guesses: list[list[int]] = []  # which those are
        self._cached: list[int] = []  # how many tokens are in the middle model's cache
        self._deaf: list[bool] = []  # rows whose source it cannot read

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        heard = self.middle.encoder_decoder
        if heard and sources is None:
            raise RefusedError("an encoder-decoder cannot draft for a causal target")
        if sources is not None and not heard:  # the source is the head of the prompt
            prompts = [[*s, *p] for s, p in zip(sources, prompts, strict=True)]
            sources = None
        V = self.middle.vocab_size
        deaf = [
            not hears(self.middle, source) if heard else max(prompt, default=0) >= V
            for source, prompt in zip(sources or prompts, prompts, strict=True)
        ]
        heads = [
            [] if no or self._room(p) <= 0 else p[:-1] for p, no in zip(prompts, deaf, strict=True)
        ]
        read = sources and [[0] if no else s for s, no in zip(sources, deaf, strict=True)]
        self.middle.start(heads, read)
        self.drafter.start(rows, [list(p) for p in prompts], sources)
        self._texts += [list(p) for p in prompts]
        self._guesses += [[] for _ in prompts]
        self._cached += map(len, heads)
        self._deaf += deaf

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        rooms = [
            0 if no else self._room(text) for text, no in zip(self._texts, self._deaf, strict=True)
        ]
        budget = [max(0, min(g, room)) for g, room in zip(gamma, rooms, strict=True)]
        keys = draw.within()
        rows = [
            Row.of(Request(text, g, key))
            for text, g, key in zip(self._texts, budget, keys, strict=True)
        ]
        laws = _Laws(rows)
        judge: Judge = choose(laws, draw.params)
        if draw.coupled:  # the middle model meets the target's noise
            judge = _Shared(laws)
        target = cast(Model, _Target(self.middle, rows, self._cached))
        calls = 0
        while any(row.room for row in rows):
            asked = [max(0, min(self.gamma, row.room - 1)) for row in rows]
            try:
                step(rows, target, self.drafter, judge, draw.params, asked)
            except NumericsError as error:
                raise NumericsError(f"in a cascade's middle model as the target: {error}") from None
            laws.keep()
            calls += 1
        self._texts = [row.tokens for row in rows]
        self._guesses = [row.new_tokens for row in rows]
        return pack(self._guesses, laws.q(), calls)

    def commit(self, tokens: list[list[int]]) -> None:
        right = [_agreed(x, kept) for x, kept in zip(self._guesses, tokens, strict=True)]
        wrong = [len(x) - n for x, n in zip(self._guesses, right, strict=True)]
        self._go(wrong, [kept[n:] for kept, n in zip(tokens, right, strict=True)])

    def rewind(self, counts: list[int]) -> None:
        back = [len(x) + count for x, count in zip(self._guesses, counts, strict=True)]
        self._go(back, [[] for _ in counts])

    def _go(self, back: list[int], tokens: list[list[int]]) -> None:
        """Every row goes back by so many tokens, and on by others."""
        if any(back):
            self.drafter.rewind(back)
        if any(tokens):
            self.drafter.commit([list(kept) for kept in tokens])
        for b, text in enumerate(self._texts):
            del text[len(text) - back[b] :]
            cached = min(self._cached[b], len(text))
            text += tokens[b]
            self._cached[b] = min(cached, len(text) - 1)
        self._guesses = [[] for _ in self._texts]
        self.middle.set_lengths(self._cached)

    def leave(self, rows: list[int]) -> None:
        stay = [b for b in range(len(self._texts)) if b not in rows]
        self._texts = [self._texts[b] for b in stay]
        self._guesses = [self._guesses[b] for b in stay]
        self._cached = [self._cached[b] for b in stay]
        self._deaf = [self._deaf[b] for b in stay]
        self.middle.leave(rows)
        self.drafter.leave(rows)

    def _room(self, text: list[int]) -> int:
        """How many guesses fit in the middle model's context behind `text`."""
        context = self.middle.context
        return 10**9 if context is None else context - len(text) + 1


class _Target:
    """The middle model as the inner step's target: what its cache lacks of a row is read first,
    and rows that have all their guesses rest."""

    takes_tensors = False

    def __init__(self, model: Model, rows: list[Row], cached: list[int]) -> None:
        self.model, self.rows, self.cached = model, rows, cached
        self.vocab_size, self.device = model.vocab_size, model.device

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)  # as takes_tensors says
        feed: list[list[int]] = []
        wanted: list[int] = []
        for b, (row, new) in enumerate(zip(self.rows, blocks, strict=True)):
            feed.append([*row.tokens[self.cached[b] : -1], *new] if row.room else [])
            wanted.append(need[b] if row.room else 0)
            self.cached[b] += len(feed[b])
        return self.model.score(feed, wanted)

    def set_lengths(self, lengths: list[int]) -> None:
        self.cached[:] = map(min, self.cached, lengths)
        self.model.set_lengths(self.cached)


class _Laws:
    """The inner steps' rule, which remembers the target's law at every token that was kept."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.p: Tensor | None = None  # of the last step
        self.kept: list[list[Tensor]] = [[] for _ in rows]

    def __call__(self, p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        self.p = p
        return block(p, q, x, lengths)

    def keep(self) -> None:
        if self.p is not None:  # at temperature 0 no rule is asked
            for b, row in enumerate(self.rows):
                self.kept[b].append(self.p[b, : len(row.records[-1].kept)])

    def q(self) -> Tensor | None:
        """`[B, G, V]`; None where every guess was certain."""
        if self.p is None:
            return None
        laws = [torch.cat(kept) for kept in self.kept]
        return pad_sequence(laws, batch_first=True)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Coupled mode within coupled mode: its judge, whose laws are remembered too."""

    draws: ClassVar[type[Draw]] = SharedDraw
    laws: _Laws

    def __call__(
        self,
        logits: Tensor,
        x: Tensor,
        lengths: Tensor,
        q: Tensor | None,
        params: SamplingParams,
        draw: Draw,
    ) -> Verdict:
        self.laws.p = law(logits, params)
        return Coupled()(logits, x, lengths, q, params, draw)


def _agreed(guesses: list[int], kept: list[int]) -> int:
    """How many of the first guesses were kept."""
    return next(
        (i for i, (x, y) in enumerate(zip(guesses, kept, strict=False)) if x != y),
        min(len(guesses), len(kept)),
    )
