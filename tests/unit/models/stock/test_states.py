"""States of hybrid models are those of the texts, after any passes, rollbacks, joins and moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import census
import foretoken
from foretoken.errors import RefusedError
from foretoken.models import rewindable_states
from foretoken.models.rewindable_states import (
    MAX_PASS_WIDTH,
    MAX_REWIND_TOKENS,
    RecurrentStateLayer,
)
from foretoken.models.stock.cache import RaggedCache
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import build_torch_model
from pairs import DEVICE

CPU = torch.device("cpu")
H, DK, DV, K, C = 2, 4, 3, 4, 5  # heads, widths, taps of a window and its channels
A = -(1 + torch.arange(DV * DK).reshape(DV, DK).double() % 5)  # decays of a scan


def build(name: str) -> Any:
    return census.build(name).to(DEVICE)


class Token:
    """The inputs of one token, float64. `kind`: with a delta rule or without, decays by channel or
    by head, or a scan for each head. Most keep what is behind them, some nearly nothing."""

    def __init__(self, kind: str, dice: random.Random) -> None:
        make = torch.Generator().manual_seed(dice.randrange(2**31))
        normal: Callable[..., Tensor] = lambda *n: torch.randn(  # noqa: E731
            *n, generator=make, dtype=torch.float64
        )
        self.q, self.k, self.v, self.x = normal(H, DK), normal(H, DK), normal(H, DV), normal(C)
        self.k /= self.k.norm(dim=1, keepdim=True)
        steep = 30 if dice.random() < 0.03 else 0.02  # else a base would soon be seen no more
        self.g = -steep * normal(H, DK if "channel" in kind else 1).abs()
        self.beta = normal(H, 1).sigmoid() if "delta" in kind else None
        self.t = steep * normal(H, DV).abs() if "scan" in kind else None

    def after(self, S: Tensor) -> Tensor:
        """The state behind this token: the rule itself."""
        decays = self.g[:, :, None] if self.t is None else (self.t[:, :, None] * A).transpose(1, 2)
        S = S * decays.exp()
        u = self.v
        if self.beta is not None:
            u = self.beta * (self.v - torch.einsum("hkv,hk->hv", S, self.k))
        return S + self.k[:, :, None] * u[:, None]


Read = tuple[Token, Tensor]  # with the state behind it


class Texts:
    """Rows of tokens, and a cache with a state and a window of each."""

    def __init__(self, kind: str, seed: int, dtype: torch.dtype) -> None:
        self.kind, self.dice, self.dtype = kind, random.Random(seed), dtype
        self.rows: list[list[Read]] = []
        self.cache = self.empty(0)
        self.worst = 0.0

    def empty(self, rows: int) -> RaggedCache:
        return RaggedCache([], rows, CPU, {0: RecurrentStateLayer()})

    def draw(self, n: int) -> list[Token]:
        return [Token(self.kind, self.dice) for _ in range(n)]

    def score(self, cache: RaggedCache, rows: list[list[Read]], blocks: list[list[Token]]) -> None:
        """Read blocks behind rows; compare what every token sees."""
        width = max(map(len, blocks))
        if not width:
            return
        cache.prepare(width)
        padded = [blocks[b] + self.draw(width - len(blocks[b])) for b in cache.order]
        q, k, v, g = (self.stacked(padded, name) for name in "qkvg")
        x = torch.stack([torch.stack([t.x for t in row], 1) for row in padded]).to(self.dtype)
        cache.get_recurrent_state(0)
        if "scan" in self.kind:
            t = self.stacked(padded, "t")
            each = zip(*(x.unbind(1) for x in (q, k, v, t)), strict=True)
            out = torch.stack([cache.advance_scan(*inputs, A.to(self.dtype)) for inputs in each], 1)
        else:
            beta = self.stacked(padded, "beta") if "delta" in self.kind else None
            out = cache.advance_recurrence(q, k, v, g, beta)
        seen = cache.update_conv_state(x, 0, conv_kernel_size=K)
        for place, b in enumerate(cache.order):
            for at, token in enumerate(blocks[b]):
                before = rows[b][-1][1] if rows[b] else torch.zeros(H, DK, DV).double()
                rows[b].append((token, token.after(before)))
                expected = torch.einsum("hkv,hk->hv", rows[b][-1][1], token.q)
                self.compare(out[place, :, at], expected)
                inputs = [torch.zeros(C)] * (K - 1) + [token.x for token, _ in rows[b][-K:-1]]
                window = torch.stack(inputs[1 - K :], 1)
                self.compare(seen[place, :, at : at + K - 1], window)
        cache.advance([len(block) for block in blocks])

    def stacked(self, rows: list[list[Token]], name: str) -> Tensor:
        made = [torch.stack([getattr(token, name) for token in row], 1) for row in rows]
        return torch.stack(made).to(self.dtype)

    def compare(self, ours: Tensor, expected: Tensor) -> None:
        self.worst = max(self.worst, float((ours - expected).abs().max().nan_to_num(torch.inf)))

    def join(self, lengths: list[int]) -> None:
        fresh, rows = self.empty(len(lengths)), [list[Read]() for _ in lengths]
        for at in range(0, max(lengths), MAX_PASS_WIDTH):
            part = [self.draw(min(MAX_PASS_WIDTH, max(0, n - at))) for n in lengths]
            self.score(fresh, rows, part)
        if self.rows:
            self.cache.join(fresh)
        else:
            self.cache = fresh
        self.rows += rows

    def step(self) -> None:
        """A pass or several, and back over some of them; or rows come, go, move or repeat."""
        act = self.dice.choice(["pass", "pass", "pass", "drafts", "join", "leave", "move", "again"])
        if not self.rows or (act == "join" and len(self.rows) < 5):
            return self.join(
                [self.dice.choice([0, 1, 2, K - 1, 9, MAX_PASS_WIDTH, 150]) for _ in range(2)]
            )
        if act in ("leave", "move"):
            some = self.dice.sample(
                range(len(self.rows)), max(1, len(self.rows) - (act == "leave"))
            )
            some = [self.dice.choice(some) for _ in some] if self.dice.random() < 0.3 else some
            self.cache.select(some)
            self.rows = [[*self.rows[b]] for b in some]
        elif act == "again":
            b = self.dice.randrange(len(self.rows))
            self.back([len(row) * (i != b) for i, row in enumerate(self.rows)])
        else:
            before = [len(row) for row in self.rows]
            for _ in range(self.dice.randint(1, 16) if act == "drafts" else 1):
                most = 1 if act == "drafts" else self.dice.choice([1, 5, 16, MAX_REWIND_TOKENS])
                self.score(
                    self.cache, self.rows, [self.draw(self.dice.randint(0, most)) for _ in before]
                )
            self.back(
                [self.dice.randint(n, len(row)) for n, row in zip(before, self.rows, strict=True)]
            )
        return None

    def back(self, lengths: list[int]) -> None:
        self.cache.lengths = lengths
        self.rows = [row[:n] for row, n in zip(self.rows, lengths, strict=True)]


def walked(kind: str, steps: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> float:
    texts = Texts(kind, seed, dtype)
    for _ in range(steps):
        texts.step()
    return texts.worst


KINDS = ["delta by head", "delta by channel", "by head", "by channel", "scans"]


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_the_texts(kind: str) -> None:
    assert walked(kind, 60) < 1e-12
    assert walked(kind, 30, dtype=torch.float32) < 1e-4


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_steps(kind: str) -> None:
    assert max(walked(kind, 500, seed) for seed in range(5)) < 1e-11


def test_equal_keys_that_are_never_forgotten() -> None:
    """Sixteen in a block, for which powers of the system would blow up."""
    texts = Texts("delta by head", 0, torch.float32)
    texts.join([3])
    block = texts.draw(16)
    for token in block:
        token.k, token.g, token.beta = block[0].k, token.g * 0, torch.ones(H, 1).double()
    texts.score(texts.cache, texts.rows, [block])
    assert texts.worst < 1e-5


@pytest.mark.daily("delta by channel", "scans")
@pytest.mark.parametrize("kind", KINDS)
def test_decays_below_what_a_quotient_could_hold(kind: str) -> None:
    """All of -30: over a block exp(c_i) exp(-c_j) would be 0 times infinity."""
    texts = Texts(kind, 0, torch.float32)
    texts.join([3, 40])
    for width in (16, MAX_PASS_WIDTH, 1):
        blocks = [texts.draw(width), texts.draw(width)]
        for token in (token for block in blocks for token in block):
            token.g = torch.full_like(token.g, -30.0)
            token.t = None if token.t is None else torch.full_like(token.t, 30.0)
        texts.score(texts.cache, texts.rows, blocks)
    assert texts.worst < 1e-5


def drafted(kind: str = "delta by head") -> float:
    """Draft tokens one by one, past where a base moves, all rejected."""
    texts = Texts(kind, 0, torch.float64)
    texts.join([MAX_PASS_WIDTH - 4])
    for _ in range(16):
        texts.score(texts.cache, texts.rows, [texts.draw(1)])
    texts.back([MAX_PASS_WIDTH - 4])
    texts.score(texts.cache, texts.rows, [texts.draw(3)])
    return texts.worst


@pytest.mark.daily("delta by channel", "scans")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_goes_back_over_several_passes(kind: str) -> None:
    assert drafted(kind) < 1e-12


@pytest.mark.daily("delta by channel", "scans")
@pytest.mark.parametrize("kind", KINDS)
def test_a_base_moves_while_another_row_begins_again(kind: str) -> None:
    texts = Texts(kind, 0, torch.float64)
    texts.join([MAX_PASS_WIDTH + 20, MAX_PASS_WIDTH - 4])
    texts.score(texts.cache, texts.rows, [[], texts.draw(20)])
    texts.back([0, len(texts.rows[1])])
    texts.score(texts.cache, texts.rows, [texts.draw(20), texts.draw(20)])
    texts.back([0, 70])  # before the last pass
    texts.score(texts.cache, texts.rows, [texts.draw(1), texts.draw(1)])
    assert texts.cache.base_lengths[0] == 0 < texts.cache.base_lengths[1]
    assert texts.worst < 1e-12


OWN_AT: Any = rewindable_states._gather_token
PLANTED: dict[str, tuple[str, Any]] = {
    "what is kept does not move with the base": ("_shift", lambda x, tokens, axis: None),
    "bases move too far": ("MAX_REWIND_TOKENS", 0),
    "the decay before a token is missing": ("_gather_token", lambda c, index: c.new_zeros(1)),
    "a base is not made smaller": ("_gather_token", lambda c, index: OWN_AT(c, index) * 0.9),
    "a scan forgets its pending tokens": ("_compute_scan_states", lambda own, to: own["S"]),
    "a scan goes on where the last pass began": ("_compute_scan_states", lambda own, to: own["L"]),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, planted = PLANTED[bug]
    monkeypatch.setattr(rewindable_states, name, planted)
    try:
        kind = "scans" if "scan" in bug else "delta by head"
        worst = max(walked(kind, 40), drafted(kind))
    except (IndexError, RuntimeError):
        return
    assert worst > 1e-3


def test_memory_is_stated() -> None:
    model: Any = build_torch_model(build("BambaForCausalLM"))
    model.start([[5] * 90, [6] * 3])
    arrays = [x for part in model.cache.list_filled_parts() for x in _arrays(part)]
    taken = sum(x.nbytes for x in arrays)
    assert taken <= model.compute_cache_bytes([90, 3], [1, 1])
    assert model.compute_cache_bytes([1] * 20, [1] * 20) > 9 * model.compute_cache_bytes(
        [1, 1], [1, 1]
    )


def _arrays(part: Any) -> list[Tensor]:
    return list(part.arrays.values() if isinstance(part, RecurrentStateLayer) else part.arrays)


def test_what_keeps_no_states_is_refused_by_name() -> None:
    model = build("Lfm2ForCausalLM")
    with pytest.raises(RefusedError, match="lfm2 .* use runtime='transformers'"):
        foretoken.load(model, "none", runtime="graphs")
    assert foretoken.load(model, "none", runtime="transformers").generate([3], max_new_tokens=2)


def test_a_mixer_whose_forward_was_replaced_is_refused() -> None:
    model = build("Qwen3_5ForCausalLM")
    for part in model.modules():
        if type(part).__name__.endswith("GatedDeltaNet"):
            part.forward = part.forward
    with pytest.raises(RefusedError, match="GatedDeltaNet was replaced, .* on one device"):
        CausalModel(model)
