"""From settings to a server that listens."""

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

WRITE_STALL_SECONDS = 60.0  # seconds for which a client may read less than is written to it
log = logging.getLogger(__name__)


class HttpConnection(H11Protocol):
    """uvicorn's connection, ended where a client does not read: uvicorn would wait for ever, the
    text would pile up and its row would be kept. Closing would wait too, for all to be read."""

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
    """A uvicorn server around its engines: at the end, texts that clients wait for are cut off."""

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
    """Serve until SIGTERM or Ctrl-C: no new requests then, and those that run may end. `setups`: of
    an engine for each name, the base's first. InputError where nobody can listen there, and where a
    model cannot be loaded."""
    listener = listen(options.host, options.port)
    models = ServedModels({name: EngineClient(setup) for name, setup in setups.items()})
    setups[models.base].log_options.configure()
    server = HttpServer(models, options)
    models.on_failure = lambda: setattr(server, "should_exit", True)
    # Or a body of many lists is looked through for garbage again and again while it is parsed
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    name, port = listener.getsockname()[:2]
    log.info("http://%s:%s is loading %s", name, port, ", ".join(setups))
    with suppress(KeyboardInterrupt):  # what uvicorn raises again, once all is over
        server.run(sockets=[listener])
    if models.problem:
        raise InputError(models.problem)


def listen(host: str, port: int) -> socket.socket:
    """A socket there; before the model is loaded, which takes long."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=kind)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise InputError(
            f"{host}:{port} cannot be listened on ({reason}); give another --port, or --host"
        ) from None
