"""Options of a server, except options of its engine, and the configuration of logging. An option's
check, flag and entry in docs/serving.md are derived from one declaration.

This module imports neither torch nor FastAPI.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from time import time
from typing import Any

from foretoken.errors import InputError, format_value
from foretoken.sampling.checks import FROM_ONE, Choice, Count, Number, as_strings
from foretoken.sampling.options import check_options, get_options, option
from foretoken.text.replies.formats import REPLY_FORMAT_NAMES as FORMAT_NAMES

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


def as_string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} is {format_value(value)}; give a string")
    return value


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server. Creating an instance raises InputError for an invalid value."""

    served_model_name: str | None = option(
        None, as_string, "Model name in requests and answers. Default: the target's.", "Serving"
    )
    host: str = option("127.0.0.1", as_string, "Address to listen on; 0.0.0.0: all.", "Serving")
    port: int = option(
        8000,
        Count(ge=0, le=65535, remedy="a port from 0 to 65535"),
        "Port to listen on; 0: any free one.",
        "Serving",
    )
    api_key: tuple[str, ...] = option(
        (), as_strings, "Accept only clients that send this key; may be repeated.", "Serving"
    )
    allowed_origin: tuple[str, ...] = option(
        (), as_strings, "Allow pages of this origin (CORS); may be repeated.", "Serving"
    )
    chat_template: str | None = option(
        None, as_string, "File with a Jinja template. Default: the tokenizer's own.", "Serving"
    )
    tool_parser: str = option(
        "auto",
        Choice(("auto", *FORMAT_NAMES)),
        "Format of tool calls and reasoning: auto (the chat template's), "
        f"{', '.join(FORMAT_NAMES)}.",
        "Serving",
    )
    max_tokens: int | None = option(None, FROM_ONE, "Maximum new tokens per output.", "Serving")
    max_texts: int = option(16, FROM_ONE, "Maximum outputs per request.", "Serving")
    max_body: int = option(4_000_000, FROM_ONE, "Maximum bytes per request.", "Serving")
    max_media: int = option(
        25_000_000, FROM_ONE, "Maximum bytes of an image or audio file.", "Serving"
    )
    max_pixels: int = option(25_000_000, FROM_ONE, "Maximum pixels of an image.", "Serving")
    max_seconds: int = option(3600, FROM_ONE, "Maximum seconds of an audio file.", "Serving")
    allowed_media_host: tuple[str, ...] = option(
        (),
        as_strings,
        "Fetch images and audio from this host on the public internet; may be repeated. "
        "Default: requests must contain them.",
        "Serving",
    )
    metrics_compat: str | None = option(
        None,
        Choice(("vllm",), "vllm, or leave out the option"),
        "Also report metrics under another server's names: vllm.",
        "Serving",
    )
    log_format: str = option(
        "text", Choice(LOG_FORMATS), "Format of the log: text or json.", "Serving"
    )
    log_level: str = option(
        "info",
        Choice(LOG_LEVELS),
        "Lowest level to log: debug, info, warning or error.",
        "Serving",
    )
    drain: float = option(
        30.0,
        Number(ge=0, le=3600, remedy="seconds from 0 to 3600"),
        "Seconds that running requests get to finish when the server stops.",
        "Serving",
    )
    gamma: int | None = option(
        None,
        Count(ge=0, remedy="0 (plain decoding) or more"),
        "Draft tokens per target call, for requests that set none. Default: automatic.",
        None,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def name(self) -> str:
        """Return the model name in requests and answers."""
        return self.served_model_name or "foretoken"


OPTIONS = get_options(ServerOptions)


LOG_LINE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Logging options. The HTTP process and the engine's process both log to standard error, as
    text or as lines of JSON."""

    kind: str = "text"  # or "json"
    level: str = "info"

    def configure(self) -> None:
        """Configure Python's logging in this process by these options."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            JsonFormatter() if self.kind == "json" else logging.Formatter(LOG_LINE_FORMAT)
        )
        logging.basicConfig(level=self.level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON. If the record has a dict `fields`, the line
    contains these fields instead of the record's message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": time(), "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
