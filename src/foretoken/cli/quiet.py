"""What a command says beside its result: transformers' own bars and reports are off, for an error
is one line, and ours; a conversion, which takes a while, is announced on standard error."""

from __future__ import annotations

import logging
import sys


def quiet() -> None:
    from transformers.utils import logging as transformers  # late: it takes seconds to import

    transformers.set_verbosity_error()
    transformers.disable_progress_bar()
    news = logging.getLogger("foretoken.models.conversion")
    if not news.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        news.addHandler(handler)
        news.setLevel(logging.INFO)
        news.propagate = False
