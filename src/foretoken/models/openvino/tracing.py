"""A torch module as an OpenVINO graph, through OpenVINO's own front end, what an export is, and the
one core of this process.

Not by `convert_model`: that one reports its use to its makers and writes to the user's home. A
core's CPU plugin takes the thread's alternate signal stack for its own. Where there were two and
the older ended first, the younger's end would put the freed stack of the older back, and the next
signal, such as Ctrl-C, would crash the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import openvino as ov

if TYPE_CHECKING:
    from torch import Tensor, nn


@cache
def core() -> ov.Core:
    """Made when first asked for, kept until the process ends."""
    return ov.Core()


@dataclass(frozen=True, slots=True)
class Exported:
    """Graphs of one model by name, and JSON-able facts about it (vocab_size, context, ...)."""

    graphs: dict[str, ov.Model]
    facts: dict[str, Any]


def traced(module: nn.Module, example: tuple[Tensor, ...]) -> ov.Model:
    """One forward of `module` on `example`, recorded; the graph reads the module's weights in
    place. Raises RuntimeError for an operation that has no counterpart."""
    import torch  # late, as all below: a kept export is read without them
    from openvino._offline_transformations import apply_moc_transformations
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    once = {"check_trace": False}  # the check is two more forwards
    with torch.no_grad(), warnings.catch_warnings(), _silent():
        warnings.simplefilter("ignore")  # the tracer warns of sizes that are fixed on purpose
        decoder = TorchScriptPythonDecoder(module, None, example, trace_kwargs=once)
    frontend = FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    # The common simplifications, whose results the paged attention transformation matches
    apply_moc_transformations(graph, cf=False, smart_reshape=True)
    return graph


@contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' log, which the tracer fills by reading every property of a module."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
