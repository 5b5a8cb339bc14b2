"""What a command says beside its result, on standard error: our own warnings, and a conversion, as
it takes a while. transformers' bars and reports are off, for an error is one line, and ours."""

from __future__ import annotations

import logging
import sys


class Lines(logging.Handler):
    """Messages on what is standard error at that moment: a bar that is being drawn stands in for
    it, and keeps them apart from itself."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr)


def quiet() -> None:
    from transformers.utils import logging as transformers  # late: it takes seconds to import

    transformers.set_verbosity_error()
    transformers.disable_progress_bar()
    news = logging.getLogger("foretoken")
    if not news.handlers:
        news.addHandler(Lines())
    logging.getLogger("foretoken.models.openvino.conversion").setLevel(logging.INFO)
