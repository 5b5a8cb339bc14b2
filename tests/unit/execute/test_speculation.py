"""Speculative execution: its distribution, its times, and how it ends."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from foretoken.errors import InputError
from foretoken.execute import Flag, speculate, speculate_async

LONG = 30.0  # seconds that no test waits for


def test_flag(tmp_path) -> None:
    flag = Flag(str(tmp_path / "flag"))
    assert not flag.is_set() and not flag.wait(0.001)
    flag.set()
    flag.set()
    assert flag.is_set() and flag.wait() and flag.wait(LONG)


def test_two_flags_of_one_file_are_one(tmp_path) -> None:
    ours, theirs = Flag(str(tmp_path / "flag")), Flag(str(tmp_path / "flag"))
    threading.Timer(0.05, theirs.set).start()
    assert ours.wait(LONG)


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


# --- what comes back ---


def test_a_right_guess() -> None:
    run = speculate(distribution_a, twice, RIGHT, None)
    assert (run.value, run.y, run.kept, run.guesses, run.beta) == ("aa", "a", 0, ("a",), 1.0)
    assert run.seconds.total >= max(run.seconds.f, run.seconds.g) > 0


def test_a_wrong_guess() -> None:
    run = speculate(distribution_a, twice, WRONG, None)
    assert (run.value, run.y, run.kept, run.guesses, run.beta) == ("aa", "a", None, ("b",), 0.0)


def test_one_of_several_guesses() -> None:
    q = {"c": 0.5, "a": 0.3, "b": 0.2}
    runs = [speculate(distribution_a, twice, q, None, guesses=3, seed=seed) for seed in range(20)]
    assert all(run.value == "aa" and run.guesses[run.kept] == "a" for run in runs)
    assert {run.kept for run in runs} == {0, 1, 2}
    assert all(set(run.guesses) == set(q) for run in runs)


def test_no_more_guesses_than_q_has() -> None:
    assert (
        speculate(distribution_a, twice, {"b": 0.5, "c": 0.5, "d": 0.0}, None, guesses=7).beta
        == 0.0
    )
    assert len(speculate(distribution_a, twice, {"b": 0.5, "c": 0.5}, None, guesses=7).guesses) == 2


def test_no_guesses_are_f_and_then_g() -> None:
    run = speculate(distribution_a, twice, fails, None, guesses=0)
    assert (run.value, run.kept, run.guesses, run.beta) == ("aa", None, (), 0.0)


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


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, list])
def test_distributions_as_arrays(make) -> None:
    run = speculate(lambda x: make([0.0, 1.0]), lambda y: y + 10, lambda x: make([0.5, 0.5]), None)
    assert (run.value, run.y) == (11, 1) and type(run.y) is int


def test_f_and_q_are_given_x() -> None:
    run = speculate(lambda x: {x: 1.0}, twice, lambda x: {x: 1.0}, "z")
    assert (run.value, run.kept) == ("zz", 0)


def test_the_seed_decides() -> None:
    p, q = dict.fromkeys(range(8), 0.125), dict.fromkeys(range(4, 12), 0.125)

    def draws(seed: int | None) -> tuple:
        run = speculate(lambda x: p, str, q, None, guesses=2, seed=seed)
        return run.seed, run.guesses, run.y

    assert draws(3) == draws(3)
    assert len({draws(seed)[1:] for seed in range(20)}) > 5
    fresh = draws(None)
    assert draws(fresh[0]) == fresh


def test_a_chain_of_executions() -> None:
    """g may itself be a speculative execution."""

    def g(y: str) -> str:
        return speculate(lambda y: {y + "b": 1.0}, twice, lambda y: {y + "b": 1.0}, y, seed=1).value

    assert speculate(distribution_a, g, RIGHT, None).value == "abab"


# --- what is not wanted ---


def test_a_wrong_guess_is_called_off() -> None:
    before = threads()
    assert (
        speculate(distribution_a, wrong_waits, {"b": 0.5, "c": 0.5}, None, guesses=2).value == "aa"
    )
    assert threads() == before


def test_the_other_guesses_are_called_off() -> None:
    q = {"a": 0.5, "b": 0.25, "c": 0.25}
    assert speculate(distribution_a, wrong_waits, q, None, guesses=3).kept is not None


def test_only_a_parameter_named_cancelled_is_given_the_event() -> None:
    def g(y: str, times: int = 3) -> str:
        return y * times

    assert speculate(distribution_a, g, RIGHT, None).value == "aaa"


def test_a_given_executor_is_kept_and_left_empty() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert speculate(distribution_a, wrong_waits, WRONG, None, executor=pool).value == "aa"
        assert pool.submit(twice, "c").result() == "cc"


def test_one_worker_is_enough() -> None:
    """Guesses that did not begin are dropped; it is only slow."""
    with ThreadPoolExecutor(1) as pool:
        assert (
            speculate(distribution_a, twice, {"b": 0.5, "c": 0.5}, None, guesses=2, executor=pool).y
            == "a"
        )


# --- what is raised ---


def fails(x: object) -> dict[str, float]:
    raise LookupError(f"f or g of {x}")


def test_an_error_of_f_wins_and_ends_g() -> None:
    before = threads()
    with pytest.raises(LookupError, match="of 7"):
        speculate(fails, wrong_waits, WRONG, 7)
    with pytest.raises(LookupError, match="of 7"):
        speculate(fails, fails, WRONG, 7)
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
            "'s law has a probability of -0.5 for 'a'; give numbers, 0 or more",
        ),
        ({"a": math.nan, "b": 1.0}, "'s law has a probability of nan for 'a'"),
        (np.array([0.5, math.inf]), "'s law has a probability of inf for 1"),
        ([0.5, math.nan], "'s law has a probability of nan for 1"),
        ([0.0, 0.0], "'s law sums to 0; give a law, which sums to 1"),
        ({"a": 0.4, "b": 0.3}, "'s law sums to 0.7"),
        ({}, "'s law sums to 0"),
        ([], "'s law sums to 0"),
        (None, "gives None; give a law: a dict"),
        ("left", "gives 'left'; give a law"),
        ({"a": "much"}, "gives ['much']; give a law"),
        ({"a": "0.5", "b": "0.5"}, "gives ['0.5', '0.5']; give a law"),
        ({"a": 1 + 0j}, "gives [(1+0j)]; give a law"),
        (np.array([1 + 0j]), "gives array([1.+0.j]); give a law"),
        (torch.tensor([1 + 0j]), "gives [(1+0j)]; give a law"),
        (np.eye(2), "give a law: a dict of probabilities, or an array (V,)"),
    ],
)
@pytest.mark.parametrize("whose", ["f", "q"])
def test_what_is_no_distribution_is_named(whose: str, distribution: object, says: str) -> None:
    before = threads()
    with pytest.raises(InputError) as error:
        if whose == "f":
            speculate(lambda x: distribution, wrong_waits, WRONG, None)
        else:
            speculate(distribution_a, twice, lambda x: distribution, None)
    message = str(error.value)
    assert says in message and message.startswith((f"{whose} gives", f"{whose}'s law "))
    assert "\n" not in message
    assert threads() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"guesses": -1}, "guesses is -1; give a whole number, 0 or more"),
        ({"guesses": 1.5}, "guesses is 1.5"),
        ({"guesses": True}, "guesses is True; give a whole number"),
        ({"seed": True}, "seed is True; give an integer"),
        ({"seed": -1}, "seed is -1; give an integer in [0, 2**63)"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"executor": "threads"}, "executor is 'threads'; give one of concurrent.futures, or None"),
    ],
)
def test_bad_options(options: dict, says: str) -> None:
    with pytest.raises(InputError) as error:
        speculate(distribution_a, twice, RIGHT, None, **options)
    assert says in str(error.value)


class Soon:
    async def __call__(self, y: str) -> str:
        return y


@pytest.mark.parametrize("run", [speculate, lambda *args: awaited(*args)])
def test_what_cannot_be_called_is_named(run) -> None:
    with pytest.raises(InputError, match=r"f is \{'a': 1.0\}; give a function"):
        run(RIGHT, twice, RIGHT, None)
    with pytest.raises(InputError, match="g is None; give a function"):
        run(distribution_a, None, RIGHT, None)
    with pytest.raises(InputError, match=r"f is array\(\[\[1., 0.\], \[0., 1.\]\]\); give"):
        run(np.eye(2), twice, RIGHT, None)


def test_an_object_whose_call_is_a_coroutine_function_is_refused() -> None:
    with pytest.raises(InputError, match="g is a coroutine function; await speculate_async"):
        speculate(distribution_a, Soon(), RIGHT, None)
    with pytest.raises(InputError, match="q is a coroutine function; await speculate_async"):
        speculate(distribution_a, twice, distribution_soon, None)
    assert awaited(distribution_soon, Soon(), RIGHT, None).value == "a"


@pytest.mark.parametrize("whose", ["f", "g", "q"])
def test_a_function_that_turns_out_to_give_coroutines_is_refused(whose: str) -> None:
    arguments = {"f": distribution_a, "g": twice, "q": distribution_a} | {
        whose: lambda y: distribution_soon(y)
    }
    says = "^distribution_soon is a coroutine function; await speculate_async"
    with pytest.raises(InputError, match=says):
        speculate(arguments["f"], arguments["g"], arguments["q"], None)


def test_the_event_is_given_by_name() -> None:
    def g(y: str, cancelled: object, /) -> str:
        return y

    with pytest.raises(InputError, match="^g takes `cancelled` by position; let it be given by"):
        speculate(distribution_a, g, RIGHT, None)


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


def test_async_draws_as_threads_do() -> None:
    p, q = dict.fromkeys("abcdefgh", 0.125), dict.fromkeys("efghijkl", 0.125)

    async def f(x: object) -> dict[str, float]:
        return p

    async def g(y: str) -> str:
        return y

    for seed in range(10):
        run = awaited(f, g, q, None, guesses=2, seed=seed)
        other = speculate(lambda x: p, str, q, None, guesses=2, seed=seed)
        assert (run.guesses, run.kept, run.y) == (other.guesses, other.kept, other.y)


def test_async_errors() -> None:
    async def fails_soon(x: object) -> dict[str, float]:
        await asyncio.sleep(0)
        return fails(x)

    with pytest.raises(LookupError, match="of 7"):
        awaited(fails_soon, wrong_sleeps, WRONG, 7)
    with pytest.raises(LookupError, match="of a"):
        awaited(distribution_soon, fails_soon, WRONG, 7)
    with pytest.raises(InputError, match="f gives {'a': 1.0}, nothing to await; use speculate"):
        awaited(distribution_a, wrong_sleeps, RIGHT, None)
    with pytest.raises(InputError, match="g is a coroutine function; await speculate_async"):
        speculate(distribution_a, wrong_sleeps, RIGHT, None)


def test_async_gives_no_event() -> None:
    async def g(y: str, cancelled) -> str:
        return y

    async def may_have_one(y: str, cancelled=None) -> str:
        return y

    with pytest.raises(InputError, match="g wants `cancelled`; leave it out: asyncio cancels") as e:
        awaited(distribution_soon, g, RIGHT, None)
    assert "\n" not in str(e.value)
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
    code = "import sys, foretoken.execute; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
