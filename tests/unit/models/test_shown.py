"""What a target shows of the states between its layers: where, to whom, and which parts of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tiny
from foretoken.errors import RefusedError
from foretoken.models.hidden_states import FINAL_TAP, HiddenStates, HiddenStateStore
from foretoken.models.native.conversion import NativeConversion
from pairdrafts import tapped

LAYERS = 3
LLAMA = tiny.llama(64, num_hidden_layers=LAYERS, head_dim=16).double()


def on_torch(taps: tuple[int, ...]) -> Any:
    return tapped(LLAMA, taps)


def natively(taps: tuple[int, ...]) -> Any:
    source = copy.deepcopy(LLAMA).float()
    return NativeConversion(None, "float32", lambda: source, taps=taps).load_model()


Target = Callable[[tuple[int, ...]], Any]
targets = pytest.mark.parametrize(
    "target", [on_torch, pytest.param(natively, marks=pytest.mark.native)]
)


def test_a_layer_that_is_tapped_twice_is_shown_twice() -> None:
    target = natively((1, FINAL_TAP, 1))
    target.expose_hidden_states(lambda text: 0)
    target.start([[3, 4, 5]])
    (known,) = target.take_hidden_states()
    first, last, again = known.states.chunk(3, 1)
    assert torch.equal(first, again) and not torch.equal(first, last)
    target.score([[6, 7]], [2])
    (known,) = target.take_hidden_states()
    assert torch.equal(known.states.chunk(3, 1)[1], target.hidden[0])


@targets
def test_nothing_is_kept_where_nobody_watches(target: Target) -> None:
    """Nor of what was read before anybody watched."""
    model = target((1, FINAL_TAP))
    model.start([[3, 4], [5]])
    model.score([[6], [7, 8]], [1, 1])
    assert model.take_hidden_states() == [None, None]
    model.permute([])
    model.expose_hidden_states(lambda text: 0)
    model.start([[3, 4], []])
    first, second = model.take_hidden_states()
    assert first.first == 0 and len(first.states) == 2 and second is None
    assert model.take_hidden_states() == [None, None]
    model.permute([])
    model.expose_hidden_states(None)
    model.start([[3, 4]])
    assert model.take_hidden_states() == [None]
    never = target(())
    never.expose_hidden_states(lambda text: 0)
    never.start([[3, 4]])
    assert never.take_hidden_states() == [None]


@pytest.mark.parametrize("allowed", [0, 33, 64, 500])
def test_a_row_shares_no_more_natively(allowed: int) -> None:
    target, text = natively((0, FINAL_TAP)), [(7 * i + 3) % 64 for i in range(80)]
    target.set_prefix_caching(True)
    target.expose_hidden_states(lambda prompt: allowed)
    for turn in range(2):
        target.start([text])
        (known,) = target.take_hidden_states()
        shared = min(allowed, 80) if turn else 0
        assert shared == 80 if known is None else known.first == shared
        target.leave([0])


@targets
def test_a_tap_behind_the_last_layer_is_refused(target: Target) -> None:
    with pytest.raises(RefusedError, match="layer 4, .* has (only )?3"):
        target((0, 4))


def test_parts_are_cut_joined_and_forgotten_once_taken() -> None:
    shown, states = HiddenStateStore(2), torch.arange(10.0)[:, None]
    shown.add([0, 0], [states[:3], states[:0]])
    shown.add([3, 0], [states[3:7], states[:2]])
    shown.join(HiddenStateStore(1))
    shown.truncate([4, 2, 0])
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
    assert isinstance(taken[0], HiddenStates)
