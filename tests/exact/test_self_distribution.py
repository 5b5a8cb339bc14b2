"""A copy of the target guesses over the target's own cache: the text is in the target's
distribution, and a cache that keeps a guess's entry, or a q that is not the copy's, shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exact.worlds import Case, bias
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.models import base
from foretoken.models.native.model import NativeTargetCopy
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, block
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from oracle import Model, random_model

pytestmark = [pytest.mark.cpu_only, pytest.mark.daily]
V, GAMMA = 2, 2
VISIBLE = 1e-3
P, COPY = random_model(1, V), random_model(2, V)


class HostTable(base.Model):
    """A target whose distributions follow from the entries of its cache. One that a copy has
    written reads as another token: it must be gone before the target reads there."""

    runtime, compute_dtype, vocab_size = "table", "float64", V
    lengths: list[int] = []  # and no property

    def __init__(self, distribution: Model, context: int | None = None) -> None:
        self.distribution, self.context = distribution, context
        self.lengths: list[int] = []
        self.cache: list[list[int]] = []

    def start(self, prompts: list[list[int]], sources: None = None) -> None:
        self.lengths += map(len, prompts)
        self.cache += [list(prompt) for prompt in prompts]

    def score(self, blocks: list[list[int]], need: list[int]) -> Tensor:
        logits = self._run(self.distribution, self.lengths, blocks, need, lambda token: token)
        self.lengths = [n + len(block) for n, block in zip(self.lengths, blocks, strict=True)]
        return logits

    def score_with(
        self, distribution: Model, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        return self._run(distribution, past, blocks, need, lambda token: V + token)

    def _run(self, distribution: Model, past: list[int], blocks, need, entry) -> Tensor:
        logits = torch.zeros(len(blocks), max(need), V, dtype=torch.float64)
        for b, (start, new, n) in enumerate(zip(past, blocks, need, strict=True)):
            for i, token in enumerate(new, start):
                self.write(self.cache[b], i, entry(token))
            for i in range(n):
                end = start + len(new) - n + i + 1
                logits[b, i] = torch.tensor(
                    distribution(self.read(self.cache[b][:end], entry))
                ).log()
            logits[b, n:, 1:] = -1e9  # as `worlds.Table`
        return logits

    def write(self, row: list[int], place: int, entry: int) -> None:
        row[place : place + 1] = [entry]

    def read(self, row: list[int], entry) -> tuple[int, ...]:
        """The text that a row's entries stand for: an entry of the copy is the other token to the
        target, and itself to the copy."""
        target = entry(0) == 0
        return tuple(e if e < V else (V - 1 - (e - V) if target else e - V) for e in row)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)  # what stood behind stays: only its place is free

    def permute(self, rows: list[int]) -> None:
        self.lengths = [self.lengths[b] for b in rows]
        self.cache = [list(self.cache[b]) for b in rows]

    def leave(self, rows: list[int]) -> None:
        self.permute([b for b in range(len(self.lengths)) if b not in rows])


class Keeping(HostTable):
    """Writes where nothing stands: a guess's entry stays."""

    def write(self, row: list[int], place: int, entry: int) -> None:
        if place == len(row):
            row.append(entry)


class Claiming(LMDrafter):
    """Says that its draft tokens were drawn from another distribution than they were."""

    def __init__(self, model: base.Model, claimed: Model) -> None:
        super().__init__(model)
        self.claimed = claimed

    def propose(self, gamma, draw):
        draft = super().propose(gamma, draw)
        assert draft.q is not None
        q = draft.q.clone()
        for b, (text, x) in enumerate(
            zip(self._sequences.token_ids, draft.tokens.tolist(), strict=True)
        ):
            for i in range(len(x)):
                q[b, i] = torch.tensor(self.claimed((*text, *x[:i])))
        return replace(draft, q=q)


class Copy(NativeTargetCopy):
    capabilities = replace(NativeTargetCopy.capabilities, chain=False)


def narrow(text: tuple[int, ...]) -> Any:
    """The copy that attends only to the first and the last token of a sequence."""
    return COPY((text[0], text[-1]))


def copy(target: Any, passes: Any = COPY) -> Copy:
    return Copy(target, passes, {"computed": "float64"})


DRAFTERS = {
    "self": lambda target: LMDrafter(copy(target)),
    "self-of-first-and-last": lambda target: LMDrafter(copy(target, narrow)),
    "behind-lookup": lambda target: MixtureDrafter(
        [(LookupDrafter(), 1), (LMDrafter(copy(target)), None)]
    ),
    "over-lookup": lambda target: CascadeDrafter(copy(target), LookupDrafter(), 1),
    "over-lookup-past-the-end": lambda target: CascadeDrafter(copy(target), LookupDrafter(), 3),
}


def case(drafter, rule=block, host: type[HostTable] = HostTable, **changes) -> Case:
    """Every batch has a target of its own, over whose rows its drafter runs."""
    made: list[HostTable] = []

    def target() -> HostTable:
        made.append(host(P, changes.get("context")))
        return made[-1]

    rest = {name: value for name, value in changes.items() if name != "context"}
    return Case(target, lambda: drafter(made[-1]), rule, GAMMA, **rest)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_target_drafts_for_itself(kind, rule, monkeypatch):
    assert bias(case(DRAFTERS[kind], EXACT_RULES[rule]), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)], ids=str
)
def test_at_other_temperatures(kind, params, monkeypatch):
    assert bias(case(DRAFTERS[kind], params=params), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("kind", DRAFTERS)
def test_where_the_context_ends(kind, monkeypatch):
    rows = (Request([0], 3, SequenceKey(0, 0)),)
    assert bias(case(DRAFTERS[kind], context=4, rows=rows), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_draft_token_whose_entry_stays_is_seen(rule, monkeypatch):
    assert bias(case(DRAFTERS["self"], EXACT_RULES[rule], Keeping), P, monkeypatch) > VISIBLE


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_q_of_the_unrounded_model_is_seen(rule, monkeypatch):
    liar = case(lambda target: Claiming(copy(target), P), EXACT_RULES[rule])
    assert bias(liar, P, monkeypatch) > VISIBLE


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_q_of_a_copy_that_attends_to_all_tokens_is_seen(rule, monkeypatch):
    liar = case(lambda target: Claiming(copy(target, narrow), COPY), EXACT_RULES[rule])
    assert bias(liar, P, monkeypatch) > VISIBLE
