"""From settings to a server that listens."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

import uvicorn

from foretoken.errors import InputError
from foretoken.server.app import Settings, make
from foretoken.server.engine.link import Link
from foretoken.server.engine.worker import Setup

log = logging.getLogger(__name__)


def run(setup: Setup, settings: Settings, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C: no new requests then, and those that run may end. InputError
    where nobody can listen there, and where the model cannot be loaded."""
    listening, link = _listening(host, port), Link(setup)
    setup.logs.begin()
    config = uvicorn.Config(
        make(link, settings),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(settings.patience) + 5,
    )
    server = uvicorn.Server(config)
    link.failed = lambda: setattr(server, "should_exit", True)
    name, port = listening.getsockname()[:2]
    log.info("http://%s:%s is loading %s", name, port, settings.name)
    with suppress(KeyboardInterrupt):  # what uvicorn raises again, once all is over
        server.run(sockets=[listening])
    if link.problem:
        raise InputError(link.problem)


def _listening(host: str, port: int) -> socket.socket:
    """Before the model is loaded, which takes long."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=kind)
    except OSError as error:
        said = error.strerror or str(error)
        raise InputError(f"{host}:{port} cannot be listened on ({said}); give another") from None
    return listening
