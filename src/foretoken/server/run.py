"""From settings to a server that listens."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

import uvicorn

from foretoken.server.app import Settings, make
from foretoken.server.engine.link import Link
from foretoken.server.engine.worker import Setup
from foretoken.server.journal import Json


def run(
    setup: Setup, settings: Settings, host: str, port: int, log_format: str, log_level: str
) -> None:
    """Serve until SIGTERM or Ctrl-C: no new requests then, and those that run may end."""
    _log(log_format, log_level)
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


def _log(kind: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(Json() if kind == "json" else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
