"""The engine for asyncio: a thread takes the steps and passes the events to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from itertools import count
from threading import Condition, Thread
from typing import Any

from foretoken.engine.engine import Engine, EngineStats, Event
from foretoken.errors import InputError
from foretoken.inputs import Prompts
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator

Inbox = asyncio.Queue[Event | Exception]


class AsyncEngine:
    """An `Engine` for asyncio. Within `async with`, a separate thread takes the engine's steps.

    Args:
        spec: The Speculator, which can have one engine at a time.
        **options: Options of `Engine`, checked when the `async with` begins.

    Examples:
        >>> import asyncio, foretoken
        >>> async def main():
        ...     async with foretoken.AsyncEngine(foretoken.load("novels")) as engine:
        ...         events = engine.stream("The captain looked", max_new_tokens=8, gamma=3)
        ...         return "".join([event.text async for event in events])
        >>> asyncio.run(main())
        ' at the doctor, and the doctor said'
    """

    def __init__(self, spec: Speculator, **options: Any) -> None:
        self._make_engine = partial(Engine, spec, **options)
        self._ids = count()
        self._inboxes: dict[int, Inbox] = {}
        self._wakeup = Condition()  # its lock guards look-ups in, and removals from, `_inboxes`
        self._closing = False
        self._thread = Thread(target=self._run_steps, name="foretoken engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> AsyncEngine:
        if self._loop is not None:
            raise InputError("the engine has been entered before; make another engine")
        self._engine = self._make_engine()
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    async def stream(
        self, prompt: Prompts, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Event]:
        """Run one request and yield its events. Arguments are those of `Engine.add`.

        If the `async for` is left or its task is cancelled, the request is aborted after the
        current step.

        Yields:
            The request's events; the last one has the completion.

        Raises:
            InputError: The engine does not run, or was entered in another event loop. The errors
                of `Engine.add` are raised too.

        Examples:
            >>> import asyncio, foretoken
            >>> async def main():
            ...     async with foretoken.AsyncEngine(foretoken.load("novels")) as engine:
            ...         events = engine.stream("The captain looked", max_new_tokens=8, gamma=3)
            ...         return [event.finish_reason async for event in events][-1]
            >>> asyncio.run(main())
            'length'
        """
        self._require_running()
        assert self._loop is not None
        if asyncio.get_running_loop() is not self._loop:
            raise InputError(
                "the engine was entered in another event loop; call stream in that event loop"
            )
        id, inbox = next(self._ids), Inbox()
        # without the lock, which would block the loop: `_abort` may hold the lock until a step ends
        self._inboxes[id] = inbox
        adding = self._loop.run_in_executor(None, self._add, id, prompt, params, options)
        try:
            await asyncio.shield(adding)
            while True:
                event = await inbox.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            adding.add_done_callback(lambda _: self._forget(id))

    def stats(self) -> EngineStats:
        """Return a copy of the engine's counters.

        Returns:
            The counters.

        Raises:
            InputError: The engine does not run.
        """
        self._require_running()
        return self._engine.stats()

    def _require_running(self) -> None:
        if self._loop is None or self._closing:
            raise InputError("the engine does not run; use it within `async with`")

    def _add(
        self, id: int, prompt: Prompts, params: SamplingParams | None, options: dict[str, Any]
    ) -> None:
        self._engine.add(prompt, params, **options, id=id)
        with self._wakeup:
            self._wakeup.notify()

    def _forget(self, id: int) -> None:
        """Abort a request whose stream has ended, unless it is finished."""
        assert self._loop is not None
        self._loop.run_in_executor(None, self._abort, id)

    def _abort(self, id: int) -> None:
        with self._wakeup:
            if self._inboxes.pop(id, None) is not None:
                with suppress(InputError):  # the engine refused the request
                    self._engine.abort(id)

    def _run_steps(self) -> None:
        while self._wait_for_work():
            try:
                events: list[Event] | Exception = self._engine.step()
            except Exception as error:  # names no request, so all requests fail
                events = error
            with self._wakeup:
                self._deliver(events)

    def _wait_for_work(self) -> bool:
        """Wait until there are requests, then return True. Return False if the engine closes."""
        with self._wakeup:
            engine = self._engine
            self._wakeup.wait_for(lambda: engine.running or engine.waiting or self._closing)
            return not self._closing

    def _deliver(self, events: list[Event] | Exception) -> None:
        if isinstance(events, Exception):
            for id in list(self._inboxes):
                try:
                    self._engine.abort(id)
                except InputError:  # `_add` has not added the request yet
                    continue
                self._put(id, events)
            return
        for event in events:
            if event.id in self._inboxes:
                self._put(event.id, event)

    def _put(self, id: int, event: Event | Exception) -> None:
        assert self._loop is not None
        inbox = self._inboxes[id]
        if isinstance(event, Exception) or event.finish_reason is not None:
            del self._inboxes[id]
        with suppress(RuntimeError):  # the loop is closed, so its streams have ended
            self._loop.call_soon_threadsafe(inbox.put_nowait, event)

    def _stop(self) -> None:
        with self._wakeup:
            self._closing = True
            self._wakeup.notify()
        self._thread.join()
        try:
            with self._wakeup:
                self._deliver(InputError("the engine is closed; make another engine"))
        finally:
            self._engine.close()
