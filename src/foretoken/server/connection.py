"""A client's connection, which does not outlast its reader."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

UNREAD = 60.0  # seconds for which a client may read less than is written to it


class Connection(H11Protocol):
    """uvicorn's, which waits for ever where a client does not read: the text would pile up here,
    and its row would be kept. Closing would wait too, for what is written to be read."""

    _late: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._late = self.loop.call_later(UNREAD, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forgive()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forgive()

    def _forgive(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
