"""The HTTP process's end of the pipe: states, and what becomes of requests at an end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from foretoken.server.process.client import EngineClient, UnavailableError
from foretoken.server.process.generation import Generation
from foretoken.server.process.messages import StepOutput
from foretoken.server.process.worker import Setup
from served import LOADING, pair

LONG = {"gamma": 0, "ignore_eos": True, "temperature": 1.0}


async def ready(link: EngineClient) -> None:
    link.start()
    while link.state == "loading":
        await asyncio.sleep(0.01)
    assert link.state == "ready", link.problem


def test_a_link_from_start_to_stop(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)

    async def life() -> None:
        link = EngineClient(Setup(target, draft, LOADING, {"max_rows": 2}))
        with pytest.raises(UnavailableError, match="loading"):
            await link.ask("tokenize", prompt="a", template={})
        await ready(link)
        assert link.info.chat and link.info.context == 1024

        async with Generation(link, ["It", "She"], 2, LONG | {"max_new_tokens": 9}, 5) as writing:
            texts = await writing.all()
        assert all(len(text.tokens) == 9 and text.done for text in texts)
        assert writing.first is not None and writing.gaps

        async with aclosing(link.submit("It", LONG)) as said:  # left early
            assert isinstance(await anext(said), int)
            assert isinstance(await anext(said), StepOutput)
        while link.running:
            await asyncio.sleep(0.01)

        cut = asyncio.create_task(_last(link))
        while not link.running:
            await asyncio.sleep(0.01)
        await link.stop(0.2)
        assert link.state == "stopped"
        with pytest.raises(UnavailableError, match="shutting down"):
            await link.ask("speculation")
        cut.cancel()

    asyncio.run(life())


async def _last(link: EngineClient) -> None:
    async for _ in link.submit("It", LONG):
        pass
