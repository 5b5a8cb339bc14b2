"""The HTTP process's end of the pipe: states, and what becomes of requests at an end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.server.process.client import EngineClient, UnavailableError
from foretoken.server.process.generation import Generation, expand
from foretoken.server.process.messages import EngineSetup, GenerateRequest
from served import LOADING, pair

LONG = GenerateRequest("It", {"ignore_eos": True, "temperature": 1.0}, gamma=0, seed=(5, 0))


@pytest.mark.prove
def test_a_link_from_start_to_stop(tmp_path: Path) -> None:
    target, draft = pair(tmp_path)

    async def life() -> None:
        said: asyncio.Queue[Any] = asyncio.Queue()
        link = EngineClient(EngineSetup(target, draft, LOADING, {"max_rows": 2}))
        with pytest.raises(UnavailableError, match="loading"):
            link.submit(LONG, said.put_nowait)
        link.start()
        while link.state == "loading":
            await asyncio.sleep(0.01)
        assert link.state == "ready", link.problem
        assert link.info.chat and link.info.context == 1024

        short = replace(LONG, controls={**LONG.controls, "max_new_tokens": 9})
        async with Generation(link, expand(short, ["It", "She"], 2), 2) as writing:
            texts = await writing.collect()
        assert all(len(text.tokens) == 9 and text.done for text in texts)
        assert writing.first_token_seconds is not None and writing.inter_token_seconds

        link.submit(LONG, said.put_nowait)
        while not link.running:
            await asyncio.sleep(0.01)
        await link.stop(0.2)
        assert link.state == "stopped"
        with pytest.raises(UnavailableError, match="shutting down"):
            link.submit(LONG, said.put_nowait)

    asyncio.run(life())
