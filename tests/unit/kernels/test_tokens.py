"""Distributions, draws and verifications by the kernels: as defined, to the bit, on every
instruction set, and lossless by enumeration."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.errors import InputError
from foretoken.kernels import library, reference, tokens
from foretoken.sampling.acceptance_rules import EXACT_RULES

pytestmark = [pytest.mark.cpu_only, pytest.mark.daily]
SIZES = (1, 5, 16, 31, 255, 257, 1000, 8193)
each_rule = pytest.mark.parametrize("rule", tokens.KERNEL_RULES)


@pytest.fixture(autouse=True, params=library.INSTRUCTION_SETS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "FORETOKEN_KERNELS" in os.environ:  # under a sanitizer
        request.getfixturevalue("compiled")
    if not library.LIBRARY_FILE.exists():
        pytest.skip("the kernels were not compiled")
    if request.param not in library.list_instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, request.param)


def logits(V: int, *shape: int) -> Any:
    """Logits of which some are impossible, some far below the rest, and some alike."""
    dice = np.random.default_rng(V)
    x = dice.standard_normal((*shape, V)).astype(np.float32) * dice.choice([1, 5, 60], (*shape, 1))
    x[dice.random(x.shape) < 0.1] = -np.inf
    x[..., V // 2] = 0.5
    return x.astype(np.float32)


def same(made: Any, expected: Any) -> bool:
    made, expected = np.asarray(made), np.asarray(expected)
    return made.dtype == expected.dtype and bool(
        ((made == expected) | (np.isnan(made) & np.isnan(expected))).all()
    )


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.02, 40.0])
def test_distributions_are_as_defined(V: int, temperature: float) -> None:
    x = logits(V, 3)
    made = tokens.softmax(torch.from_numpy(x), temperature)
    assert same(made.numpy(), reference.softmax(x, temperature))
    expected = (torch.from_numpy(x).double() / temperature).softmax(-1)
    torch.testing.assert_close(made.double(), expected, atol=2e-6, rtol=0)
    assert not (made.numpy()[np.isneginf(x)] != 0).any()


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 700},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 300, "top_p": 0.99, "min_p": 0.01},
    ],
    ids=str,
)
def test_filters_are_as_defined(V: int, filters: dict[str, Any]) -> None:
    """With distinct logits, with ties, and with little else than ties."""
    cut = 0
    for step in (1e-9, 0.5, 4.0):
        x = (logits(V, 4) / np.float32(step)).round() * np.float32(step)
        made = tokens.softmax(torch.from_numpy(x), 0.7, **filters).numpy()
        expected = reference.softmax(x, 0.7, **filters)
        assert same(made, expected)
        assert np.allclose(made.sum(-1, dtype=float), 1)
        wide = tokens.softmax(torch.from_numpy(x), 0.7).numpy()
        assert ((made > 0) <= (wide > 0)).all()
        cut += ((made > 0) < (wide > 0)).sum()
    assert V < 1000 or cut


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_invalid_logits_give_an_invalid_distribution(value: float) -> None:
    x = logits(300, 2)
    x[1, 77] = value
    made = tokens.softmax(torch.from_numpy(x), 0.7)
    assert same(made.numpy(), reference.softmax(x, 0.7))
    assert made[1].isnan().all() and not made[0].isnan().any()
    assert tokens.softmax(torch.full((1, 300), -torch.inf), 1.0).isnan().all()


@pytest.mark.parametrize("V", [257, 100_000])
def test_rows_are_read_where_they_lie(V: int) -> None:
    """In a view of wider rows, of every other row, and in four dimensions; by threads or not."""
    x = torch.from_numpy(logits(V + 7, 2, 6))
    expected = tokens.softmax(x[..., :V].contiguous(), 0.7)
    for view in (x[..., :V], x[..., :V].view(2, 3, 2, V), x[:, :, :V].transpose(0, 1)):
        made = tokens.softmax(view, 0.7)
        assert made.shape == view.shape
    assert torch.equal(tokens.softmax(x[..., :V], 0.7), expected)
    assert torch.equal(tokens.softmax(x[:, ::2, :V], 0.7), expected[:, ::2])
    assert torch.equal(made.transpose(0, 1), expected)
    assert torch.equal(tokens.softmax(x[0, 0, :V], 0.7), expected[0, 0])


@pytest.mark.parametrize("V", SIZES)
def test_draws_are_as_defined(V: int) -> None:
    p = reference.softmax(logits(V, 2), 1.0)
    numbers = [0.0, 0.1, 0.5, 0.9, 1 - 2**-53, *np.random.default_rng(0).random(50)]
    many = torch.from_numpy(p).repeat(len(numbers), 1)
    u = torch.tensor(numbers, dtype=torch.float64).repeat_interleave(2)
    ids, masses = tokens.draw(many, u)
    expected = [reference.locate(p[i % 2], float(one)) for i, one in enumerate(u)]
    assert list(zip(ids.tolist(), masses.tolist(), strict=True)) == expected
    assert (many.gather(1, ids[:, None]) > 0).all()


def block(V: int, B: int, G: int) -> tuple[Any, Any, Any, Any, Any]:
    """Distributions of a target and of a draft that is much like it, draft tokens, and numbers."""
    dice = np.random.default_rng(V + G)
    p = reference.softmax(logits(V, B * (G + 1)), 1.0).reshape(B, G + 1, V)
    q = 0.7 * p[:, :G] + 0.3 * p[:, :G, ::-1]
    x = [dice.choice(V, p=row / row.sum()) for row in q.reshape(B * G, V).astype(float)]
    ids = np.array(x, np.int64).reshape(B, G)
    return p, q.astype(np.float32), ids, dice.random(B), dice.random(B)


@each_rule
@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("G", [0, 1, 3])
def test_verifications_are_as_defined(rule: str, certain: bool, G: int) -> None:
    """For every length of a row's block; what lies past it is without influence. They agree with
    the rule in torch, too."""
    B, numbers = 24, 0
    for V in (5, 257, 1000):
        p, q, x, accept, following = block(V, B, G)
        q = None if certain else q
        lengths = np.arange(B) % (G + 1)
        for b in range(B):
            x[b, lengths[b] :] = 10**6
        given = [None if a is None else torch.from_numpy(a) for a in (p, q, x, lengths)]
        made = tokens.verify(rule, *given, torch.from_numpy(accept), torch.from_numpy(following))
        for b, length in enumerate(lengths.tolist()):
            own = None if q is None else q[b, :length]
            n, t, beta, mass = reference.verify(
                rule, p[b, : length + 1], own, x[b, :length].tolist(), accept[b], following[b]
            )
            assert (made.n[b], made.t[b], made.masses[b]) == (n, t, mass)
            assert made.beta[b].tolist() == [*beta.tolist(), *[0.0] * (G - length)]
            numbers += n
        if not certain:
            wide = [each.double() if each.is_floating_point() else each for each in given]
            wide[2] = wide[2].clamp(max=V - 1)
            outcome = EXACT_RULES[rule](*wide)
            near = (outcome.survival - torch.from_numpy(accept)[:, None]).abs() < 1e-5
            assert torch.equal(outcome.n(torch.from_numpy(accept)), made.n) or near.any()
    assert G == 0 or numbers > 5


def drawn(rule: str, p: Any, q: Any, told: Any) -> Any:
    """How likely each first token of the output is, `[V]`: summed over draft tokens drawn from q,
    and over numbers on a grid. The rule is told `told` of q."""
    (G, V), grid = q.shape, (np.arange(64) + 0.5) / 64
    accept, following = (torch.from_numpy(g.ravel()) for g in np.meshgrid(grid, grid))
    total, B = np.zeros(V), len(accept)
    many = [torch.from_numpy(a).expand(B, *a.shape) for a in (p, told)]
    for x in product(range(V), repeat=G):
        chance = np.prod([q[i, one] for i, one in enumerate(x)])
        if chance == 0:
            continue
        ids, lengths = torch.tensor([x] * B), torch.full((B,), G)
        made = tokens.verify(rule, *many, ids, lengths, accept, following)
        first = torch.where(made.n > 0, x[0], made.t)
        total += chance * np.bincount(first.numpy(), minlength=V) / B
    return total


@each_rule
def test_they_are_lossless(rule: str) -> None:
    """By enumeration, up to the grid's width; a rule that is told another q is caught."""
    p = np.float32([[0.5, 0.25, 0.25, 0], [0.125, 0.5, 0.125, 0.25], [0.25, 0.25, 0.25, 0.25]])
    q = np.float32([[0.25, 0.5, 0, 0.25], [0.5, 0.25, 0.25, 0]])
    assert np.abs(drawn(rule, p, q, q) - p[0]).max() < 0.02
    assert np.abs(drawn(rule, p, q, q[:, [1, 0, 2, 3]]) - p[0]).max() > 0.1


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    p = torch.full((1, 2, 4), 0.25)
    numbers = torch.zeros(1, dtype=torch.float64)
    for x in (4, -1):
        with pytest.raises(InputError, match="not one of the target's 4 ids"):
            ids, lengths = torch.tensor([[x]]), torch.tensor([1])
            tokens.verify("block", p, None, ids, lengths, numbers, numbers)
