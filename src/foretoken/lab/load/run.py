"""Requests sent when they are due, at most so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from foretoken.lab.load.trace import Trace


async def run(
    ask: Callable[[int], Awaitable[Trace]],
    due: Sequence[float],
    at_once: int | None,
    report: Callable[[Trace], None],
) -> None:
    """`ask` for each request by its number, `due` seconds from now on; `report` each as it ends.
    at_once: those beyond wait, and their time begins when they are sent; None: no bound."""
    free: AbstractAsyncContextManager[object] = nullcontext()
    if at_once is not None:
        free = asyncio.Semaphore(at_once)  # first come, first served
    clock = asyncio.get_running_loop().time
    start = clock()

    async def one(number: int, due: float) -> None:
        async with free:
            late = clock() - due
            trace = await ask(number)
            trace.late = late
            report(trace)

    async with asyncio.TaskGroup() as group:
        for number, seconds in enumerate(due):
            await asyncio.sleep(max(0.0, start + seconds - clock()))
            group.create_task(one(number, start + seconds))
