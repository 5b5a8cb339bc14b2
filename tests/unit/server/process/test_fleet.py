"""Several engines as one: nothing is lost with an engine, and conversations stay with theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from typing import Any
from unittest import mock

import pytest

from engines import Threaded, speculator, threaded
from foretoken.server.process import fleet as fleets
from foretoken.server.process.client import Child, RefusedRequest, UnavailableError
from foretoken.server.process.fleet import (
    DIGEST_CHARACTERS,
    DIGEST_IDS,
    EngineFleet,
    compute_prefix_digests,
)
from foretoken.server.process.messages import (
    Accepted,
    EngineSetup,
    GenerateRequest,
    LoadFailed,
    StepOutput,
)

SAMPLING = {"gamma": 2, "temperature": 1.0, "max_new_tokens": 24}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.process.client.RESTART_DELAYS_S", (0.2,))
    monkeypatch.setattr(fleets, "POLL_INTERVAL_S", 0.005)


async def ready(fleet: EngineFleet, count: int) -> None:
    while fleet.states.get("ready", 0) < count:
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running(count: int, made: list[Threaded]) -> AsyncIterator[EngineFleet]:
    fleet = EngineFleet(EngineSetup(None, None, engine={"max_rows": 4}), threaded(made), count)
    fleet.start()
    await ready(fleet, count)
    yield fleet
    await fleet.stop(5)


def require_generated(prompts: list[str], results: list[tuple[list[int], str, int]]) -> None:
    """Each text is that of `generate` with the seed of its place, and was accepted once."""
    spec = speculator()
    for i, (prompt, (tokens, shown, answers)) in enumerate(zip(prompts, results, strict=True)):
        (whole,) = spec.generate(prompt, seed=[(i, 0)], **SAMPLING)
        assert (tokens, shown, answers) == (whole.tokens, whole.text, 1)


async def text(
    fleet: EngineFleet, prompt: Any, seed: int, **more: Any
) -> tuple[list[int], str, int]:
    """Tokens and text as they were streamed, and how often the prompt's length was told."""
    tokens, shown, told, done = list[int](), "", 0, False
    heard: asyncio.Queue[Any] = asyncio.Queue()
    controls: Any = {name: value for name, value in (SAMPLING | more).items() if name != "gamma"}
    fleet.submit(GenerateRequest(prompt, controls, gamma=2, seed=(seed, 0)), heard.put_nowait)
    while not done:
        match await heard.get():
            case StepOutput() as part:
                assert len(part.tokens) == sum(len(step.new_tokens) for step in part.steps)
                tokens, shown = tokens + part.tokens, shown + part.text
                done = part.done is not None
            case Accepted():
                told += 1
            case error:
                raise error
    assert heard.empty(), "something follows the end"
    return tokens, shown, told


def test_streams_go_on_when_an_engine_is_killed() -> None:
    made: list[Threaded] = []
    prompts = [f"text {i}" for i in range(6)]

    async def life() -> None:
        async with running(2, made) as fleet:
            texts = [asyncio.create_task(text(fleet, each, i)) for i, each in enumerate(prompts)]
            while made[0].engine.stats().steps < 4:
                await asyncio.sleep(0.001)
            assert made[0].engine.running
            made[0].kill()
            require_generated(prompts, await asyncio.gather(*texts))
            await ready(fleet, 2)  # another one takes its place
            assert fleet.restarts == 1 and len(made) == 3

    asyncio.run(life())


def test_a_text_that_ends_engines_is_given_up() -> None:
    made: list[Threaded] = []

    async def killer() -> None:
        while True:
            for each in made:
                if each.engine.stats().tokens:
                    each.kill()
            await asyncio.sleep(0.001)

    async def life() -> None:
        async with running(2, made) as fleet:
            killing = asyncio.create_task(killer())
            with pytest.raises(RefusedRequest, match="the engine stopped"):
                await text(fleet, "a", 1, max_new_tokens=300)
            killing.cancel()
            assert fleet.restarts == fleets.MAX_MOVES + 1

    asyncio.run(life())


def test_a_conversation_stays_with_what_has_read_it() -> None:
    made: list[Threaded] = []

    async def life() -> None:
        talks = [[{"role": "user", "content": f"{i} is what we speak of" * 2}] for i in range(4)]
        homes: list[set[int]] = [set() for _ in talks]
        async with running(2, made) as fleet:
            for turn in range(3):
                for talk, home in zip(talks, homes, strict=True):
                    before = [each.engine.stats().tokens for each in made]
                    ids = [ord(c) for c in "".join(t["content"] for t in talk)]
                    await text(fleet, ids, turn, max_new_tokens=1)
                    after = [each.engine.stats().tokens for each in made]
                    home |= {k for k in range(2) if after[k] > before[k]}
                    talk += [{"role": "assistant", "content": "x" * 9}]
        assert all(len(home) == 1 for home in homes), homes

    asyncio.run(life())


def test_new_texts_go_where_there_is_least_to_do() -> None:
    made: list[Threaded] = []

    async def life() -> None:
        same = "the same beginning of all of them " * 4
        async with running(2, made) as fleet:
            more = (text(fleet, f"{same}{i}", i, max_new_tokens=2) for i in range(12))
            await asyncio.gather(*more)
            shares = [each.engine.stats().finished for each in made]
            assert sum(shares) == 12 and min(shares) >= 3, shares
            engines = (fleet, *fleet._clients)  # any of them answers what takes no step
            answers = [await each.ask("detokenize", tokens=[66]) for each in engines]
            assert len(set(answers)) == 1

    asyncio.run(life())


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_scaling_loses_nothing(patience: float) -> None:
    """With patience the one that leaves ends its texts; without, others go on with them."""
    made: list[Threaded] = []

    prompts = [*map(str, range(8))]

    async def life() -> None:
        async with running(1, made) as fleet:
            texts = [asyncio.create_task(text(fleet, prompts[i], i)) for i in range(4)]
            fleet.scale(2, patience)
            await ready(fleet, 2)
            texts += [asyncio.create_task(text(fleet, prompts[i], i)) for i in range(4, 8)]
            while not all(each.engine.running for each in made):
                await asyncio.sleep(0.001)
            fleet.scale(1, patience)
            assert len(fleet._clients) == 1 and sum(fleet.states.values()) == 2
            require_generated(prompts, await asyncio.gather(*texts))
            while sum(fleet.states.values()) > 1:
                await asyncio.sleep(0.005)

    asyncio.run(life())


def test_engines_that_have_left_leave_their_sums_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(patience: float) -> None:
        raise OSError("its machine is gone")

    async def life() -> None:
        async with running(3, []) as fleet:
            failing, leaving = fleet._clients[1:]
            failing.restarts, leaving.preempted = 2, 5
            monkeypatch.setattr(failing, "stop", fail)
            fleet.scale(1, 0)
            while fleet._leaving:
                await asyncio.sleep(0.005)
            assert (fleet.restarts, fleet.preempted) == (2, 5)
        assert fleet.state == "stopped"

    asyncio.run(life())


def test_one_that_cannot_be_started_is_the_end_before_all_are() -> None:
    made: list[Threaded] = []

    def begin(setup: EngineSetup) -> Child:
        if not made:
            return threaded(made)(setup)
        own, theirs = Pipe()
        theirs.send(LoadFailed("there is no such model"))
        return Child(mock.Mock(), own)

    async def life() -> None:
        fleet, told = EngineFleet(EngineSetup(None, None), begin, 2), asyncio.Event()
        fleet.on_failure = told.set
        with pytest.raises(UnavailableError, match=r"no engine is ready \(loading\)"):
            await text(fleet, "a", 1)
        fleet.start()
        await told.wait()
        assert fleet.state == "failed" and fleet.problem == "there is no such model"
        with pytest.raises(UnavailableError, match="there is no such model"):
            await text(fleet, "a", 1)
        await fleet.stop(1)
        assert fleet.state == "stopped"

    asyncio.run(life())


@pytest.mark.parametrize(
    ("long", "unit"),
    [("".join(map(str, range(400))), DIGEST_CHARACTERS), ([*range(400)], DIGEST_IDS)],
)
def test_a_longer_prompt_begins_with_the_digests_of_a_shorter(long: Any, unit: int) -> None:
    whole = compute_prefix_digests(GenerateRequest(long))
    assert len(whole) == len(long) // unit and len(set(whole)) == len(whole)
    for cut in (0, 1, unit - 1, unit, 3 * unit + 1):
        assert compute_prefix_digests(GenerateRequest(long[:cut])) == whole[: cut // unit]
    other = compute_prefix_digests(GenerateRequest(long[unit:]))
    assert not set(other) & set(whole), "a digest stands for all before it too"


def test_turns_extend_each_other_and_salts_part_them() -> None:
    talk = [{"role": role, "content": "word " * 40} for role in ("user", "assistant")]
    first, both = (
        compute_prefix_digests(GenerateRequest(talk[:1])),
        compute_prefix_digests(GenerateRequest(talk)),
    )
    assert both[: len(first)] == first and len(both) > len(first) > 1
    assert not set(first) & set(compute_prefix_digests(GenerateRequest(talk[:1], cache_salt="b")))
    assert compute_prefix_digests(GenerateRequest([{"role": "user", "content": None}])) == []
