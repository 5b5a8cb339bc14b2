"""Speculative execution: its draws by hand-computed numbers, its times, and how it ends."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from foretoken.errors import InputError
from reproduction.execute import (
    Flag,
    finite_distribution,
    pick,
    sample_distribution,
    speculate,
    speculate_async,
    without,
)
from scripts import ROOT

LONG = 30.0  # seconds that no test waits for
RIGHT = {"a": 1.0}
WRONG = {"b": 1.0}


def threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def distribution_a(x: object) -> dict[str, float]:
    return RIGHT


def twice(y: str) -> str:
    return y * 2


def wrong_waits(y: str, cancelled) -> str:
    """Waits to be called off for the wrong guess."""
    return "called off" if y != "a" and cancelled.wait(LONG) else y * 2


# --- the rule ---


def test_a_distribution_from_a_dict_or_an_array():
    distribution = finite_distribution("f", {"a": 0.25, "b": 0.75})
    assert list(distribution.outcomes) == ["a", "b"]
    assert distribution.masses.tolist() == [0.25, 0.75]
    halves = torch.tensor([0.5, 0.5], dtype=torch.bfloat16, requires_grad=True)
    distribution = finite_distribution("f", halves)
    assert list(distribution.outcomes) == [0, 1] and distribution.masses.dtype == np.float64
    rounded = finite_distribution("f", [0.3, 0.30002, 0.4]).masses
    assert rounded.sum() == pytest.approx(1, abs=1e-15)


def test_one_guess_is_the_papers_rule():
    """Section 2.3: keep x with probability min(1, p/q), else draw from norm((p - q)+)."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    distribution = sample_distribution(p, q, [1])
    assert distribution.kept == pytest.approx([0.5, 0.5])
    assert distribution.residual == pytest.approx([1, 0, 0])
    assert distribution.beta == pytest.approx(0.2 + 0.3 + 0.2)
    assert sample_distribution(p, q, [0]).kept == pytest.approx([1, 0])
    none = sample_distribution(p, q, [])
    assert none.kept == pytest.approx([1]) and none.residual is p and none.beta == 0


def test_a_second_guess_is_judged_by_what_the_first_left():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    distribution = sample_distribution(p, q, [1, 0])  # then p is [1, 0, 0] and q is [.5, 0, .5]
    assert distribution.kept == pytest.approx([0.5, 0.5, 0.0])
    assert distribution.beta == pytest.approx(0.75)
    assert without(q, 1).tolist() == [0.5, 0, 0.5]
    assert without(np.array([0.0, 1.0]), 1).tolist() == [0, 0]


def test_an_outcome_of_no_mass_is_never_picked():
    for uniform, index in ((0.0, 1), (0.24, 1), (0.26, 3), (math.nextafter(1, 0), 3)):
        assert pick(np.array([0.0, 0.25, 0.0, 0.75, 0.0]), uniform) == index


# --- what comes back ---


def test_a_right_guess() -> None:
    run = speculate(distribution_a, twice, RIGHT, None)
    assert (run.value, run.y, run.kept, run.guesses, run.beta) == ("aa", "a", 0, ("a",), 1.0)
    assert run.seconds.total >= max(run.seconds.f, run.seconds.g) > 0


def test_a_wrong_guess() -> None:
    run = speculate(distribution_a, twice, WRONG, None)
    assert (run.value, run.y, run.kept, run.guesses, run.beta) == ("aa", "a", None, ("b",), 0.0)


def test_several_guesses() -> None:
    q = {"c": 0.5, "a": 0.3, "b": 0.2}
    runs = [speculate(distribution_a, twice, q, None, guesses=3, seed=seed) for seed in range(20)]
    assert all(run.value == "aa" and run.guesses[run.kept] == "a" for run in runs)
    assert {run.kept for run in runs} == {0, 1, 2}
    assert all(set(run.guesses) == set(q) for run in runs)
    fewer = speculate(distribution_a, twice, {"b": 0.5, "c": 0.5, "d": 0.0}, None, guesses=7)
    assert fewer.beta == 0.0 and set(fewer.guesses) == {"b", "c"}


def test_f_and_g_run_side_by_side() -> None:
    """Each waits for the other: one after the other they would never end."""
    meet = threading.Barrier(3, timeout=LONG)

    def f(x: object) -> dict[str, float]:
        meet.wait()
        return RIGHT

    def g(y: str) -> str:
        meet.wait()
        return y

    assert speculate(f, g, {"a": 0.5, "b": 0.5}, None, guesses=2).value == "a"


def test_the_seed_decides() -> None:
    p, q = dict.fromkeys(range(8), 0.125), dict.fromkeys(range(4, 12), 0.125)

    def draws(seed: int | None) -> tuple:
        run = speculate(lambda x: p, str, q, None, guesses=2, seed=seed)
        return run.seed, run.guesses, run.y

    assert draws(3) == draws(3)
    assert len({draws(seed)[1:] for seed in range(20)}) > 5
    fresh = draws(None)
    assert draws(fresh[0]) == fresh


# --- what is not wanted ---


def test_wrong_guesses_are_called_off() -> None:
    before = threads()
    wrong = {"b": 0.5, "c": 0.5}
    assert speculate(distribution_a, wrong_waits, wrong, None, guesses=2).value == "aa"
    some = {"a": 0.5, "b": 0.25, "c": 0.25}
    assert speculate(distribution_a, wrong_waits, some, None, guesses=3).kept is not None
    assert threads() == before


# --- processes ---


def test_processes() -> None:
    """A Flag stands for the Event; f, g and x go to other processes, q need not."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        for seed in range(3):
            run = speculate(
                distribution_a, wrong_waits, lambda x: WRONG, None, executor=pool, seed=seed
            )
            assert (run.value, run.kept) == ("aa", None)
        with pytest.raises(LookupError, match="of 7"):
            speculate(fails, twice, RIGHT, 7, executor=pool)
        for f, g, x, name in [
            (lambda x: RIGHT, twice, None, "f"),
            (distribution_a, lambda y: y, None, "g"),
            (distribution_a, twice, threading.Lock(), "x"),
        ]:
            with pytest.raises(InputError, match=f"{name} cannot be sent to another process") as e:
                speculate(f, g, RIGHT, x, executor=pool)
            assert "define it at the top level of a module, or use threads" in str(e.value)


def test_two_flags_of_one_file_are_one(tmp_path) -> None:
    ours, theirs = Flag(str(tmp_path / "flag")), Flag(str(tmp_path / "flag"))
    assert not ours.is_set() and not ours.wait(0.001)
    threading.Timer(0.05, theirs.set).start()
    assert ours.wait(LONG) and ours.is_set()


# --- what is raised ---


def fails(x: object) -> dict[str, float]:
    raise LookupError(f"f or g of {x}")


def test_an_error_of_f_wins_and_ends_g() -> None:
    before = threads()
    for g in (wrong_waits, fails):
        with pytest.raises(LookupError, match="of 7"):
            speculate(fails, g, WRONG, 7)
    assert threads() == before


def test_an_error_of_g_counts_only_for_the_sample() -> None:
    def g(y: str) -> str:
        return fails(y) if y == "b" else y  # type: ignore[return-value]

    assert speculate(distribution_a, g, {"b": 0.5, "c": 0.5}, None, guesses=2).value == "a"
    with pytest.raises(LookupError, match="of b"):
        speculate(lambda x: WRONG, g, WRONG, None)  # as a guess that is right
    with pytest.raises(LookupError, match="of b"):
        speculate(lambda x: WRONG, g, RIGHT, None)  # as the sample after a wrong guess


def test_an_error_of_q_comes_before_anything_runs() -> None:
    def f(x: object) -> dict[str, float]:
        raise AssertionError("f was started")

    with pytest.raises(LookupError):
        speculate(f, twice, fails, 7)


@pytest.mark.parametrize(
    ("distribution", "says"),
    [
        (
            {"a": -0.5, "b": 1.5},
            " gives 'a' a probability of -0.5; give numbers, 0 or more",
        ),
        ({"a": math.nan, "b": 1.0}, " gives 'a' a probability of nan"),
        (np.array([0.5, math.inf]), " gives 1 a probability of inf"),
        ([0.0, 0.0], " gives sum to 0; they must to 1"),
        ({"a": 0.4, "b": 0.3}, " gives sum to 0.7"),
        ([], " gives sum to 0"),
        (None, "gives None; give a distribution: a dict"),
        ({"a": "0.5", "b": "0.5"}, "gives ['0.5', '0.5']; give a distribution"),
        ({"a": 1 + 0j}, "gives [(1+0j)]; give a distribution"),
        (torch.tensor([1 + 0j]), "gives [(1+0j)]; give a distribution"),
        (np.eye(2), "give a distribution: a dict of probabilities, or an array (V,)"),
    ],
)
def test_what_is_no_distribution_is_named(distribution: object, says: str) -> None:
    before = threads()
    for whose in ("f", "q"):
        with pytest.raises(InputError) as error:
            if whose == "f":
                speculate(lambda x: distribution, wrong_waits, WRONG, None)
            else:
                speculate(distribution_a, twice, lambda x: distribution, None)
        message = str(error.value)
        assert says in message and f"{whose} gives" in message
        assert "\n" not in message
    assert threads() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"guesses": -1}, "guesses is -1; give a whole number, 0 or more"),
        ({"guesses": 1.5}, "guesses is 1.5"),
        ({"guesses": True}, "guesses is True; give a whole number"),
        ({"seed": -1}, "seed is -1; give a whole number in [0, 2**63)"),
        ({"executor": "threads"}, "executor is 'threads'; give one of concurrent.futures, or None"),
    ],
)
def test_bad_options(options: dict, says: str) -> None:
    with pytest.raises(InputError) as error:
        speculate(distribution_a, twice, RIGHT, None, **options)
    assert says in str(error.value)


@pytest.mark.parametrize("run", [speculate, lambda *args: awaited(*args)])
def test_what_cannot_be_called_is_named(run) -> None:
    with pytest.raises(InputError, match=r"f is \{'a': 1.0\}"):
        run(RIGHT, twice, RIGHT, None)
    with pytest.raises(InputError, match="g is None"):
        run(distribution_a, None, RIGHT, None)


@pytest.mark.parametrize("whose", ["f", "g", "q"])
def test_functions_that_give_coroutines_are_refused(whose: str) -> None:
    functions = {"f": distribution_a, "g": twice, "q": distribution_a}
    says = "^distribution_soon is a coroutine function; await speculate_async"
    for function in (distribution_soon, lambda y: distribution_soon(y)):
        with pytest.raises(InputError, match=says):
            speculate(**(functions | {whose: function}), x=None)


@pytest.mark.parametrize("whose", ["f", "g", "q"])
def test_the_event_is_given_by_name(whose: str) -> None:
    def by_place(y: str, cancelled: object, /) -> dict[str, float]:
        return RIGHT

    functions = {"f": distribution_a, "g": twice, "q": distribution_a} | {whose: by_place}
    with pytest.raises(InputError, match=f"^{whose} takes `cancelled` by position; let it be"):
        speculate(**functions, x=None)
    with pytest.raises(InputError, match=f"^{whose} takes `cancelled` by position; let it be"):
        awaited(**functions, x=None)


def test_q_is_never_cancelled() -> None:
    def q(x: object, cancelled) -> dict[str, float]:
        return RIGHT

    with pytest.raises(InputError, match="^q wants `cancelled`"):
        speculate(distribution_a, twice, q, None)


# --- asyncio ---


async def distribution_soon(x: object) -> dict[str, float]:
    await asyncio.sleep(0.001)
    return RIGHT


async def wrong_sleeps(y: str) -> str:
    await asyncio.sleep(0 if y == "a" else LONG)
    return y * 2


def awaited(*args, **options):
    """The execution, with nothing left in the loop."""

    async def main():
        try:
            return await speculate_async(*args, **options)
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(main())


def test_async() -> None:
    began = time.monotonic()
    assert awaited(distribution_soon, wrong_sleeps, RIGHT, None).kept == 0
    run = awaited(distribution_soon, wrong_sleeps, distribution_soon, None, guesses=2)
    assert (run.value, run.kept) == ("aa", 0)
    assert awaited(distribution_soon, wrong_sleeps, fails, None, guesses=0).value == "aa"
    run = awaited(distribution_soon, wrong_sleeps, {"b": 0.5, "c": 0.5}, None, guesses=2)
    assert (run.value, run.kept) == ("aa", None)
    assert time.monotonic() - began < LONG


def test_async_errors() -> None:
    async def fails_soon(x: object) -> dict[str, float]:
        await asyncio.sleep(0)
        return fails(x)

    with pytest.raises(LookupError, match="of 7"):
        awaited(fails_soon, wrong_sleeps, WRONG, 7)
    with pytest.raises(LookupError, match="of a"):
        awaited(distribution_soon, fails_soon, WRONG, 7)
    with pytest.raises(InputError, match="f gives {'a': 1.0}, nothing to await"):
        awaited(distribution_a, wrong_sleeps, RIGHT, None)


def test_async_gives_no_event() -> None:
    async def g(y: str, cancelled) -> str:
        return y

    async def may_have_one(y: str, cancelled=None) -> str:
        return y

    with pytest.raises(InputError, match="^g wants `cancelled`"):
        awaited(distribution_soon, g, RIGHT, None)
    assert awaited(distribution_soon, may_have_one, RIGHT, None).value == "a"


def test_async_may_itself_be_cancelled() -> None:
    ended = []

    async def g(y: str) -> None:
        try:
            await asyncio.sleep(LONG)
        finally:
            ended.append(y)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(speculate_async(distribution_soon, g, RIGHT, None), 0.02)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert ended == ["a"]


# --- weight ---


def test_no_torch_is_needed() -> None:
    code = "import sys, reproduction.execute; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
