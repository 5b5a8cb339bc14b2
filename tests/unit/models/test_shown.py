"""States that a target shows: taken together they are those of one full forward, however its rows
were read, rolled back, moved and joined by others."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hybrids
import tiny
from foretoken.errors import RefusedError
from foretoken.models.shown import FINAL, Known, Shown
from pairdrafts import states_of, tapped

LAYERS = 3
LLAMA = tiny.llama(64, num_hidden_layers=LAYERS, head_dim=16).double()
HYBRID = "Qwen3_5ForCausalLM"  # whose code has its recurrences in float32


def network(name: str) -> Any:
    return LLAMA if name == "Llama" else _hybrid()


@cache
def _hybrid() -> Any:
    return hybrids.random(HYBRID, 0)


def taps_of(name: str) -> tuple[int, ...]:
    count = network(name).config.num_hidden_layers
    return 0, count // 2, count, FINAL


def natively(name: str, taps: tuple[int, ...]) -> Any:
    from foretoken.models.native.conversion import NativeConversion

    source = copy.deepcopy(network(name)).float()
    return NativeConversion(None, "float32", lambda: source, taps=taps).model()


@dataclass
class Watched:
    """Rows of a target, and the states that were taken of them."""

    target: Any
    texts: list[list[int]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [n, W] of each

    def take(self) -> None:
        """Others may have been taken back since: each part says where it begins."""
        for b, known in enumerate(self.target.shown()):
            if known is not None:
                assert known.first <= len(self.states[b]), "states are missing"
                self.states[b] = torch.cat([self.states[b][: known.first], known.states])

    def require(self, name: str, within: float) -> None:
        """All taken, and the same as by a full forward of the model itself."""
        self.take()
        for text, states in zip(self.texts, self.states, strict=True):
            states = states[: len(text)]
            if text:
                full = states_of(network(name), text, taps_of(name))
                assert states.shape == full.shape
                assert (states - full).abs().max() < within * full.abs().max()


def play(target: Any, name: str, within: float, seed: int, turns: int = 20) -> None:
    """Rows join with prompts, read blocks, are rolled back, move and leave, at random."""
    dice = random.Random(seed)
    target.show(lambda text: 0)
    watched = Watched(target)

    def tokens(most: int) -> list[int]:
        return [dice.randrange(64) for _ in range(dice.randrange(most))]

    def join() -> None:
        fresh = [tokens(20) for _ in range(dice.randrange(1, 3))]
        target.start(fresh)
        watched.texts += fresh
        watched.states += [torch.empty(0) for _ in fresh]

    def read() -> None:
        blocks = [tokens(6) if len(text) < 70 else [] for text in watched.texts]
        target.score(blocks, [dice.randint(0, len(block)) for block in blocks])
        watched.texts = [t + new for t, new in zip(watched.texts, blocks, strict=True)]
        if dice.random() < 0.5:
            keep = [
                len(t) - dice.randint(0, len(n)) for t, n in zip(watched.texts, blocks, strict=True)
            ]
            target.set_lengths(keep)
            watched.texts = [text[:n] for text, n in zip(watched.texts, keep, strict=True)]

    def choose(rows: list[int]) -> None:
        watched.take()  # a row that is there twice shows its states twice
        watched.texts = [list(watched.texts[b]) for b in rows]
        watched.states = [watched.states[b] for b in rows]

    def leave() -> None:
        gone = sorted(dice.sample(range(len(watched.texts)), 1))
        target.leave(gone)
        for b in gone:
            del watched.texts[b], watched.states[b]

    join()
    for _ in range(turns):
        move = dice.random()
        if not watched.texts or (move < 0.15 and len(watched.texts) < 5):
            join()
        elif move < 0.3:
            leave()
        elif move < 0.4:
            rows = [dice.randrange(len(watched.texts)) for _ in watched.texts]
            choose(rows)
            target.permute(rows)
        else:
            read()
        if dice.random() < 0.3:
            watched.take()
    watched.require(name, within)
    target.permute([])
    target.show(None)


@pytest.mark.parametrize("name", ["Llama", HYBRID])
def test_states_are_those_of_one_forward(name: str) -> None:
    target = tapped(network(name), taps_of(name))
    for seed in range(4):
        play(target, name, 1e-3 if name == HYBRID else 1e-12, seed)


def test_a_layer_that_is_tapped_twice_is_shown_twice() -> None:
    target = natively("Llama", (1, FINAL, 1))
    target.show(lambda text: 0)
    target.start([[3, 4, 5]])
    (known,) = target.shown()
    first, last, again = known.states.chunk(3, 1)
    assert torch.equal(first, again) and not torch.equal(first, last)
    target.score([[6, 7]], [2])
    (known,) = target.shown()
    assert torch.equal(known.states.chunk(3, 1)[1], target.hidden[0])


@pytest.mark.native
@pytest.mark.parametrize("name", ["Llama", HYBRID])
def test_states_are_those_of_one_forward_natively(name: str) -> None:
    target = natively(name, taps_of(name))
    for seed in range(1 if name == HYBRID else 3):
        play(target, name, 1e-3 if name == HYBRID else 1e-4, seed)


def shows_nothing_unwatched(target: Any) -> None:
    """Nor of what was read before anybody watched."""
    target.start([[3, 4], [5]])
    target.score([[6], [7, 8]], [1, 1])
    assert target.shown() == [None, None]
    target.permute([])
    target.show(lambda text: 0)
    target.start([[3, 4], []])
    first, second = target.shown()
    assert first.first == 0 and len(first.states) == 2 and second is None
    assert target.shown() == [None, None]
    target.permute([])
    target.show(None)
    target.start([[3, 4]])
    assert target.shown() == [None]
    target.permute([])


def test_nothing_is_kept_where_nobody_watches() -> None:
    shows_nothing_unwatched(tapped(LLAMA, (1, FINAL)))
    never = tapped(LLAMA, ())
    never.show(lambda text: 0)
    never.start([[3, 4]])
    assert never.shown() == [None]


@pytest.mark.parametrize("allowed", [0, 33, 64, 500])
def test_a_row_shares_no_more_natively(allowed: int) -> None:
    target, text = natively("Llama", (0, FINAL)), [(7 * i + 3) % 64 for i in range(80)]
    target.remember(True)
    target.show(lambda prompt: allowed)
    for turn in range(2):
        target.start([text])
        (known,) = target.shown()
        shared = min(allowed, 80) if turn else 0
        assert shared == 80 if known is None else known.first == shared
        target.leave([0])


def test_a_tap_behind_the_last_layer_is_refused_natively() -> None:
    with pytest.raises(RefusedError, match="the draft reads behind layer 4, the target has 3"):
        natively("Llama", (0, 4))


def test_nothing_is_kept_where_nobody_watches_natively() -> None:
    shows_nothing_unwatched(natively("Llama", (1, FINAL)))


def test_a_tap_behind_the_last_layer_is_refused() -> None:
    with pytest.raises(RefusedError, match="the draft reads behind layer 4, the target has 3"):
        tapped(LLAMA, (0, 4))


def test_parts_are_cut_joined_and_forgotten_once_taken() -> None:
    shown, states = Shown(2), torch.arange(10.0)[:, None]
    shown.add([0, 0], [states[:3], states[:0]])
    shown.add([3, 0], [states[3:7], states[:2]])
    shown.join(Shown(1))
    shown.cut([4, 2, 0])
    shown.select([1, 0, 0, 2])
    taken = shown.take()
    assert [None if x is None else (x.first, x.states[:, 0].tolist()) for x in taken] == [
        (0, [0, 1]),
        (0, [0, 1, 2, 3]),
        (0, [0, 1, 2, 3]),
        None,
    ]
    shown.add([2, 4, 4, 0], [states[2:3], states[4:5], states[:0], states[:0]])
    assert [x and x.first for x in shown.take()] == [2, 4, None, None]
    assert shown.take() == [None] * 4
    assert isinstance(taken[0], Known)
