"""The engine on an event loop: streams at once, and rows that nobody reads any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from threading import Event

import pytest

from foretoken import AsyncEngine, Engine, InputError, SamplingParams, Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens
from oracle import random_model
from table import TableModel

V = 32
P, Q = (random_model(seed, V) for seed in (1, 2))
SAMPLING = SamplingParams(1.0, max_new_tokens=12)
LONG = SamplingParams(1.0, max_new_tokens=100_000)


def speculator() -> Speculator:
    return Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V), ends=EndTokens())


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def test_streams_at_once_are_what_they_are_alone() -> None:
    spec = speculator()
    expected = [spec.generate([i], SAMPLING, gamma=2, seed=i)[0].tokens for i in range(6)]

    async def tokens(engine: AsyncEngine, i: int) -> list[int]:
        events = [event async for event in engine.stream([i], SAMPLING, gamma=2, seed=i)]
        last = events[-1].completion
        assert last is not None and last.finish_reason == "length"
        return [token for event in events for token in event.tokens]

    async def work() -> None:
        async with AsyncEngine(spec, max_rows=3) as engine:
            texts = await asyncio.gather(*(tokens(engine, i) for i in range(6)))
            assert list(texts) == expected and engine.stats().finished == 6

    run(work)


async def idle(engine: AsyncEngine) -> None:
    while engine.stats().running or engine.stats().waiting:
        await asyncio.sleep(0.01)


def test_leaving_the_loop_and_cancelling_free_the_row() -> None:
    async def work() -> None:
        async with AsyncEngine(speculator()) as engine:
            async for event in engine.stream([1], LONG, gamma=2):
                assert event.tokens
                break
            await idle(engine)

            async def read() -> None:
                async for _ in engine.stream([2], LONG, gamma=2):
                    pass

            task = asyncio.create_task(read())
            while not engine.stats().running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(engine)
            assert engine.stats().aborted == 2

    run(work)


def test_an_end_that_waits_for_a_step_holds_up_nothing_else() -> None:
    async def work() -> None:
        async with AsyncEngine(speculator()) as engine:
            abort, aborting, go_on = engine._engine.abort, Event(), Event()

            def slow(id: int) -> None:
                aborting.set()
                go_on.wait(1)
                abort(id)

            engine._engine.abort = slow  # pyright: ignore[reportAttributeAccessIssue]
            stream = engine.stream([1], LONG, gamma=2)
            await anext(stream)
            await stream.aclose()
            await asyncio.to_thread(aborting.wait)
            start = time.monotonic()
            other = asyncio.create_task(anext(engine.stream([2], SAMPLING, gamma=2)))
            await asyncio.sleep(0.01)  # in which the other begins
            assert time.monotonic() - start < 0.5
            go_on.set()
            assert (await other).tokens

    run(work)


def test_cancelled_at_once() -> None:
    async def work() -> None:
        async with AsyncEngine(speculator()) as engine:
            for _ in range(5):
                task = asyncio.create_task(anext(engine.stream([2], LONG, gamma=2)))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.sleep(0.2)
            await idle(engine)

    run(work)


def test_the_end_ends_streams_and_nothing_begins_behind_it() -> None:
    async def work() -> None:
        async with AsyncEngine(speculator()) as engine:
            open_ = engine.stream([1], LONG, gamma=2)
            await anext(open_)
        with pytest.raises(InputError, match="^the engine is closed; make another engine"):
            async for _ in open_:
                pass
        with pytest.raises(InputError, match="^the engine does not run; use it within"):
            await anext(engine.stream([1]))
        with pytest.raises(InputError, match="^the engine does not run; use it within"):
            await anext(AsyncEngine(speculator()).stream([1]))

    run(work)


def test_a_step_that_fails_ends_its_streams_and_the_engine_goes_on() -> None:
    spec = speculator()

    async def work() -> None:
        async with AsyncEngine(spec) as engine:
            target: TableModel = spec.target  # pyright: ignore
            score = target.score

            def broken(*_: object) -> None:
                raise RuntimeError("out of luck")

            target.score = broken  # pyright: ignore
            with pytest.raises(RuntimeError, match="out of luck"):
                async for _ in engine.stream([1], SAMPLING, gamma=2):
                    pass
            target.score = score
            events = [event async for event in engine.stream([1], SAMPLING, gamma=2)]
            assert events[-1].finish_reason == "length"

    run(work)


def test_one_that_is_never_entered_has_nothing() -> None:
    spec = speculator()
    unused = AsyncEngine(spec, max_rows=2)
    with pytest.raises(InputError, match="use it within `async with`"):
        unused.stats()

    async def work() -> None:
        async with AsyncEngine(spec) as engine:
            assert engine.stats().running == 0
            with pytest.raises(InputError, match="have an engine; close that engine first"):
                async with unused:
                    pass
        with pytest.raises(InputError, match="entered before"):
            async with engine:
                pass

    run(work)


def test_a_loop_that_is_gone_leaves_the_models_free() -> None:
    spec = speculator()

    async def begun() -> AsyncEngine:
        engine = await AsyncEngine(spec).__aenter__()
        stream = engine.stream([1], temperature=1.0, max_new_tokens=400, ignore_eos=True)
        await anext(stream)
        held.append(stream)
        return engine

    held: list[object] = []
    engine = asyncio.run(begun())

    async def other() -> None:
        with pytest.raises(InputError, match="was entered in another event loop"):
            await anext(engine.stream([1]))
        await engine.__aexit__()

    asyncio.run(other())
    with Engine(spec) as again:
        assert not again.running
