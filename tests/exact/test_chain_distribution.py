"""All draft tokens of a step from given random numbers: the output is in the target's distribution.

A chain has its numbers before it knows a distribution. So probabilities are multiples of 1/4 here,
and each number is the middle of a quarter of [0, 1): every outcome of every token is reached with
its own probability.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exact.worlds import Case, WorldDraw, bias
from foretoken.drafters.lm import LMDrafter
from foretoken.models.base import Capabilities, ChainedTokens, TokenChoice
from foretoken.models.graph_chain import (
    ChainShape,
    chain_passes,
    is_ranked,
    pack_numbers,
    round_up_gamma,
    select_chained,
)
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, block
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import Purpose, SequenceKey
from oracle import Text, random_model
from table import TableModel

pytestmark = [pytest.mark.cpu_only, pytest.mark.daily]
V, QUARTERS, GAMMA = 2, 4, 2
VISIBLE = 1e-3
P = random_model(1, V)


def quarters(text: Text) -> list[float]:
    """A draft model whose probabilities are 1/4 and 3/4, or a half each."""
    first = 1 + (sum(text) + len(text)) % 3
    return [first / QUARTERS, 1 - first / QUARTERS]


class QuartersDraw(WorldDraw):
    """Its numbers for draft tokens are middles of quarters, whatever the distributions."""

    def draw_draft_numbers(self, count: int) -> Tensor:
        even = torch.full((len(self.keys), QUARTERS), 1 / QUARTERS, dtype=torch.float64)
        return torch.stack([self.middles(even, i, Purpose.DRAFT) for i in range(count)])


class ChainTable(TableModel):
    """A table whose draft tokens are made by the passes of a chain."""

    capabilities = Capabilities(chain=True)

    def change_numbers(self, numbers: Tensor) -> Tensor:
        return numbers

    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        sampled, G = choice.filters is not None, round_up_gamma(max(budget))
        shape = ChainShape(len(blocks), 9, G, 0, sampled, is_ranked(choice))
        packed = self.change_numbers(pack_numbers([*map(len, blocks)], budget, choice))
        numbers = shape.make_buffer(torch.device("cpu"))
        numbers[:, : packed.shape[1]] = packed
        ids = torch.tensor([[*block, *[0] * (9 - len(block))] for block in blocks])
        q, lengths = torch.zeros(len(blocks), G, V, dtype=torch.float64), torch.tensor(self.lengths)
        made = chain_passes(self.run_pass, ids, lengths, numbers, shape, q, None)
        made = select_chained(made, slice(len(blocks)), max(budget), choice)
        for text, new, x, g in zip(self._texts, blocks, made.tokens.tolist(), budget, strict=True):
            text += [*new, *x[: max(0, g - 1)]]
        return made

    def run_pass(self, ids: Tensor, lengths: Tensor, states: Any) -> tuple[Tensor, Tensor]:
        if ids.shape[1] > 1:
            self.cache = [list(text) for text in self._texts]
        rows = []
        for entries, new, n in zip(self.cache, ids.tolist(), lengths.tolist(), strict=True):
            entries[n:] = new
            rows.append([self._logits(tuple(entries[: n + i + 1])) for i in range(len(new))])
        return torch.stack([torch.stack(row) for row in rows]), ids[..., None].double()

    @property
    def lengths(self) -> list[int]:
        return [*map(len, self._texts)]


class OneNumber(ChainTable):
    """Samples all draft tokens of a row with the same number."""

    def change_numbers(self, numbers: Tensor) -> Tensor:
        return torch.cat([numbers[:, :6], numbers[:, 6:7].expand(-1, numbers.shape[1] - 6)], 1)


def case(rule: Any = block, table: type[ChainTable] = ChainTable, **changes: Any) -> Case:
    drafter = lambda: LMDrafter(table(quarters, V))  # noqa: E731
    return replace(
        Case(lambda: TableModel(P, V), drafter, rule, GAMMA, draw=QuartersDraw), **changes
    )


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_chain_is_exact(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bias(case(EXACT_RULES[rule]), P, monkeypatch) < 1e-12


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, min_p=0.5),
    ],
    ids=["greedy", "top-k", "min-p"],
)
def test_with_filters(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave a draft token's probability in quarters."""
    assert bias(case(params=params), P, monkeypatch) < 1e-12


def test_where_the_output_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Request([0], 3, SequenceKey(0, 0)),)
    assert bias(case(rows=rows), P, monkeypatch) < 1e-12


def test_a_number_that_is_used_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bias(case(table=OneNumber), P, monkeypatch) > VISIBLE
