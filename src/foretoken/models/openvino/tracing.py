"""A torch module as an OpenVINO graph, through OpenVINO's own front end.

Not by its `convert_model`: that one reports its use to its makers and writes to the user's home.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.utils import logging

import openvino as ov
from openvino._offline_transformations import apply_moc_transformations
from openvino.frontend import FrontEndManager
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder


@contextmanager
def silent() -> Iterator[None]:
    """Without what transformers logs when the tracer looks at every property of a module."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def traced(module: nn.Module, example: tuple[Tensor, ...]) -> ov.Model:
    """One forward of `module` on `example`, recorded; the graph reads the module's weights in
    place. Raises RuntimeError for an operation that has no counterpart."""
    once = {"check_trace": False}  # the check is two more forwards
    with torch.no_grad(), warnings.catch_warnings(), silent():
        warnings.simplefilter("ignore")  # the tracer asks about sizes that were meant to be fixed
        decoder = TorchScriptPythonDecoder(module, None, example, trace_kwargs=once)
    frontend = FrontEndManager().load_by_framework("pytorch")
    graph = frontend.convert(frontend.load(decoder))
    # The common simplifications: what makes paged attention looks for their outcome
    apply_moc_transformations(graph, cf=False, smart_reshape=True)
    return graph
