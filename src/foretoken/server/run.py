"""From settings to a server that listens."""

from __future__ import annotations

from contextlib import suppress

import uvicorn

from foretoken.server.app import Settings, make
from foretoken.server.engine.link import Link
from foretoken.server.engine.worker import Setup


def run(setup: Setup, settings: Settings, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C: no new requests then, and those that run may end."""
    setup.logs.begin()
    config = uvicorn.Config(
        make(Link(setup), settings),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(settings.patience) + 5,
    )
    with suppress(KeyboardInterrupt):  # what uvicorn raises again, once all is over
        uvicorn.Server(config).run()
