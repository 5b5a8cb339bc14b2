"""The log of both processes, on standard error: lines for people, or of JSON."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from time import time

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class Logs:
    """Options of the logs."""

    kind: str = "text"  # or "json"
    level: str = "info"

    def begin(self) -> None:
        """From now on, in this process."""
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(Json() if self.kind == "json" else logging.Formatter(PLAIN))
        logging.basicConfig(level=self.level.upper(), handlers=[handler], force=True)


class Json(logging.Formatter):
    """Every record as a line of JSON; `told`, where a record has it, in place of its message."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": time(), "level": record.levelname, "logger": record.name}
        fields = getattr(record, "told", None)
        line |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
