"""A log line for every request: what it took, and how well guesses did. No prompt and no text."""

from __future__ import annotations

import logging
from typing import Any

from foretoken.server.api import answers
from foretoken.server.process.generation import Generation

log = logging.getLogger("foretoken.requests")


def line(
    id: str, endpoint: str, status: int, seconds: float, generation: Generation | None
) -> dict[str, Any]:
    """Return the fields of a request's line."""
    entry: dict[str, Any] = {"id": id, "endpoint": endpoint, "status": status, "seconds": seconds}
    if generation is None:
        return entry
    rates, usage = answers.rates(generation.texts), answers.usage(generation)
    entry |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    entry |= {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}
    entry |= {name: rates[name] for name in ("drafted", "accepted", "tokens_per_call")}
    return entry | {"first_token_seconds": generation.first}


def write(entry: dict[str, Any]) -> None:
    """Write the line."""
    log.info("%s", " ".join(f"{k}={_short(v)}" for k, v in entry.items()), extra={"told": entry})


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
