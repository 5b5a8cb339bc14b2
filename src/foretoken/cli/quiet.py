"""What a command logs to standard error: foretoken's warnings, what it does for longer than a
second, and which draft was chosen. transformers' bars and reports are off, so that an error is one
line."""

from __future__ import annotations

import logging
import sys

TELLING = "loading.chosen loading.load loading.vocabularies models.openvino.conversion speculator"
TELLING = TELLING.split()


class Lines(logging.Handler):
    """Prints to the sys.stderr of the moment: a bar being drawn replaces it, and keeps messages on
    lines of their own."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)


def quiet() -> None:
    """Set all this up."""
    from transformers.utils import logging as transformers  # late: it takes seconds to import

    transformers.set_verbosity_error()
    transformers.disable_progress_bar()
    log = logging.getLogger("foretoken")
    if not log.handlers:
        log.addHandler(Lines())
    for module in TELLING:
        logging.getLogger(f"foretoken.{module}").setLevel(logging.INFO)
