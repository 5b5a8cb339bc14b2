"""Transformers' own bars and reports, off: on the command line an error is one line, and ours."""

from __future__ import annotations


def quiet() -> None:
    from transformers.utils import logging  # late: it takes seconds to import

    logging.set_verbosity_error()
    logging.disable_progress_bar()
