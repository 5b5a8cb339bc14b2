"""Options of a server beside its engine, each declared once: its checks, the command line and the
table in docs/serving.md follow; and what those of the log come to.

Imports neither torch nor FastAPI.
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
        raise InputError(f"{name} is {format_value(value)}; give a str")
    return value


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server, checked when made."""

    served_model_name: str | None = option(
        None, as_string, "Model name in requests and answers. Default: the target's.", "Serving"
    )
    host: str = option("127.0.0.1", as_string, "Address to listen on; 0.0.0.0: all.", "Serving")
    port: int = option(
        8000,
        Count(ge=0, le=65535, remedy="one from 0 to 65535"),
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
    max_tokens: int | None = option(None, FROM_ONE, "New tokens per text, at most.", "Serving")
    max_texts: int = option(16, FROM_ONE, "Texts per request, at most.", "Serving")
    max_body: int = option(4_000_000, FROM_ONE, "Bytes per request, at most.", "Serving")
    max_media: int = option(
        25_000_000, FROM_ONE, "Bytes of a picture or a sound, at most.", "Serving"
    )
    max_pixels: int = option(25_000_000, FROM_ONE, "Pixels of a picture, at most.", "Serving")
    max_seconds: int = option(3600, FROM_ONE, "Seconds of a sound, at most.", "Serving")
    allowed_media_host: tuple[str, ...] = option(
        (),
        as_strings,
        "Fetch pictures and sounds from this host of the public internet; may be repeated. "
        "Default: requests hold them themselves.",
        "Serving",
    )
    metrics_compat: str | None = option(
        None,
        Choice(("vllm",), "vllm, or leave it out"),
        "Also report metrics under another server's names: vllm.",
        "Serving",
    )
    log_format: str = option(
        "text", Choice(LOG_FORMATS), "Format of the log: text or json.", "Serving"
    )
    log_level: str = option(
        "info",
        Choice(LOG_LEVELS),
        "Least level to log: debug, info, warning or error.",
        "Serving",
    )
    drain: float = option(
        30.0,
        Number(ge=0, le=3600, remedy="seconds from 0 to 3600"),
        "Seconds to finish running texts when the server is stopped.",
        "Serving",
    )
    gamma: int | None = option(
        None,
        Count(ge=0, remedy="0 (plain decoding) or more"),
        "Draft tokens per target call of requests that name none; left out: automatic.",
        None,
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def name(self) -> str:
        """The name in answers and requests."""
        return self.served_model_name or "foretoken"


OPTIONS = get_options(ServerOptions)


LOG_LINE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of the log of both processes, on standard error: lines for people, or of JSON."""

    kind: str = "text"  # or "json"
    level: str = "info"

    def configure(self) -> None:
        """From now on, in this process."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            JsonFormatter() if self.kind == "json" else logging.Formatter(LOG_LINE_FORMAT)
        )
        logging.basicConfig(level=self.level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """Every record as a line of JSON; the fields that a record has, in place of its message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": time(), "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
