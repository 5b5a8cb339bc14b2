"""A recipe's target with each of its drafts, and the texts that the target writes.

One pair is loaded at a time, so that a large target is in memory once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import count
from typing import NamedTuple

from foretoken.drafters.base import Drafter
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.errors import ForetokenError, InputError, RefusedError
from foretoken.inputs import Prompt
from foretoken.loading.load import load
from foretoken.loading.named_models import NOVELS
from foretoken.request import Request, require_uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from foretoken.text import chat
from reproduction.ngram import NGramDrafter
from reproduction.recipe import Recipe, RecipeDraft, read_prompts
from reproduction.train_ngram import fit

LEARNED, LEAST = 2, 5_000  # tokens that tables are fitted to, for each of alpha; and at least
OTHERS = 1000  # the seed behind the recipe's of texts that tables are fitted to
INNER = 3  # draft tokens that a cascade's inner drafter makes


class WrittenTexts(NamedTuple):
    """A text of the target's."""

    request: Request
    tokens: list[int]


class Pairs:
    """Models that a recipe names, loaded on demand and kept while they can be used again."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tasks = read_prompts(recipe.prompts)
        self._loaded: tuple[str | None, Speculator] | None = None  # a draft's name, and the pair
        self._unable: dict[str | None, str] = {}  # why a draft's pair cannot be loaded
        self._written: dict[tuple[int, float, int], list[WrittenTexts]] = {}
        self._tables: dict[int, Drafter] = {}

    @cached_property
    def prompts(self) -> list[Prompt]:
        plain: list[Prompt] = [task.prompt for task in self.tasks]
        if not self.recipe.prompts.chat:
            return plain
        tokenizer = self._any().tokenizer
        return [chat.encode_chat([{"role": "user", "content": text}], tokenizer) for text in plain]

    @property
    def timed(self) -> list[Prompt]:
        """The prompts that are timed."""
        return self.prompts[: self.recipe.timed]

    def spec(self, label: str) -> Speculator:
        """The target with the draft of that label; a pair that cannot be loaded is tried once."""
        draft = self.recipe.draft(label)
        if draft.order is not None:
            return self._with_table(draft, draft.order)
        return self._load(draft.draft)

    def cascade(self, label: str, inner: str | None) -> Speculator:
        """The draft of one label, itself drafted for by another; inner None: by a look-up.
        RefusedError where it is no model."""
        spec = self.spec(label)
        if not isinstance(spec.drafter, LMDrafter):
            raise RefusedError(f"{label} is no model: a cascade drafts for one")
        below: Drafter = LookupDrafter()
        if inner is not None:
            middle = self.recipe.draft(label).draft
            below = (
                load(middle, self.recipe.draft(inner).draft, dtype=self.recipe.dtype)
                .prepared()
                .drafter
            )
        cascade = CascadeDrafter(spec.drafter.model, below, INNER)
        return replace(spec, drafter=cascade, draft_name=f"{label} < {inner or 'lookup'}")

    def texts(self, temperature: float) -> list[WrittenTexts]:
        """About as many tokens of the target's own as the recipe asks for."""
        return self._write(self.recipe.tokens, temperature)

    def _write(self, tokens: int, temperature: float, after: int = 0) -> list[WrittenTexts]:
        """Once for all that ask for the same."""
        key = tokens, temperature, after
        if key not in self._written:
            params = SamplingParams(temperature, max_new_tokens=self.recipe.max_new_tokens)
            first = self.recipe.seed + after
            self._written[key] = written(self._any(), self.prompts, tokens, params, first)
        return self._written[key]

    def _load(self, draft: str | None) -> Speculator:
        if draft in self._unable:
            raise InputError(self._unable[draft])
        if self._loaded is None or self._loaded[0] != draft:
            self._loaded = None  # one at a time
            try:
                spec = load(self.recipe.target or NOVELS, draft, dtype=self.recipe.dtype).prepared()
                if self.recipe.guidance is not None:
                    spec = spec.guided(self.recipe.guidance, self.recipe.negative)
                self._loaded = draft, spec
            except ForetokenError as error:
                self._unable[draft] = str(error)
                raise
        return self._loaded[1]

    def _any(self) -> Speculator:
        """A pair that is loaded, or else the target with what needs no model."""
        return self._load("lookup") if self._loaded is None else self._loaded[1]

    def _with_table(self, draft: RecipeDraft, order: int) -> Speculator:
        """With a table of that order, fitted to other texts of the target than alpha is measured
        on."""
        spec = self._any()
        if order not in self._tables:
            texts = self._write(max(LEAST, LEARNED * self.recipe.tokens), 1.0, after=OTHERS)
            V = spec.target.vocab_size
            self._tables[order] = NGramDrafter(fit([text for _, text in texts], V, order))
        return replace(spec, drafter=self._tables[order], draft_name=draft.label)


def written(
    spec: Speculator, prompts: list[Prompt], tokens: int, params: SamplingParams, first: int
) -> list[WrittenTexts]:
    """Texts of the target behind these prompts, `tokens` or a few more where there are so many:
    round by round, with seeds counted from `first`; a prompt has but one greedy text."""
    texts: list[WrittenTexts] = []
    for seed in count(first):
        for at in range(0, len(prompts), MAX_BATCH_SIZE):
            batch = prompts[at : at + MAX_BATCH_SIZE]
            keys = [(seed, at + i) for i in range(len(batch))]
            requests = spec.inputs.make_requests(batch, params, keys)
            completions = require_uninterrupted(spec.generate(batch, params, gamma=0, seed=keys))
            texts += [
                WrittenTexts(r, one.tokens) for r, one in zip(requests, completions, strict=True)
            ]
            if sum(len(text.tokens) for text in texts) >= tokens:
                return texts
        if params.greedy:
            return texts
    raise AssertionError
