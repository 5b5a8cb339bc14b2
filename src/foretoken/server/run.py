"""Run the HTTP server and its engines until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.errors import InputError
from foretoken.server.app import create_app
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import EngineClient
from foretoken.server.process.fleet import ServedModels
from foretoken.server.process.messages import EngineSetup

WRITE_STALL_SECONDS = 60.0  # a connection whose client reads nothing for this long is aborted
log = logging.getLogger(__name__)


class HttpConnection(H11Protocol):
    """HTTP connection that is aborted if the client stops reading: uvicorn would wait for the
    client forever, even to close the connection, while output accumulates in memory."""

    _abort_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_timer = self.loop.call_later(WRITE_STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_abort()

    def _cancel_abort(self) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
            self._abort_timer = None


class HttpServer(uvicorn.Server):
    """uvicorn server that, on shutdown, gives requests `options.drain` seconds to finish, aborts
    unfinished requests and stops the engines."""

    def __init__(self, models: ServedModels, options: ServerOptions) -> None:
        config = uvicorn.Config(
            create_app(models, options),
            http=HttpConnection,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(options.drain) + 2,  # for clients that do not read
        )
        super().__init__(config)
        self.models, self.drain_seconds = models, options.drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(self.models.stop(self.drain_seconds))
        await super().shutdown(sockets)
        await stopping


def run(setups: Mapping[str, EngineSetup], options: ServerOptions) -> None:
    """Serve until SIGTERM or Ctrl-C; then refuse new requests, and wait at most `options.drain`
    seconds for running requests.

    `setups`: engine setups by the name of the served model, the base model first. Raises InputError
    if the address cannot be used or a model cannot be loaded.
    """
    listener = listen(options.host, options.port)
    models = ServedModels({name: EngineClient(setup) for name, setup in setups.items()})
    setups[models.base].log_options.configure()
    server = HttpServer(models, options)
    models.on_failure = lambda: setattr(server, "should_exit", True)
    # Otherwise parsing a body with many lists would trigger many collections over all objects
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    name, port = listener.getsockname()[:2]
    log.info("http://%s:%s is loading %s", name, port, ", ".join(setups))
    with suppress(KeyboardInterrupt):  # uvicorn raises this again after its shutdown
        server.run(sockets=[listener])
    if models.problem:
        raise InputError(models.problem)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host:port`. Raises InputError if the address cannot be used.
    Call this function before models load, so that a port in use is reported at once."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=kind)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise InputError(
            f"cannot listen on {host}:{port} ({reason}); give another --port or --host"
        ) from None
