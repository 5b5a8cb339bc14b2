"""The backend graphs: CUDA graphs of fixed shapes. In the variant "compiled", torch compiles the
layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.errors import RefusedError
from foretoken.loading.runtimes.stock import require_precision
from foretoken.models.base import Model
from foretoken.models.graphs import GRAPHS_FORM, GraphModel, rehearse
from foretoken.models.stock.check_results import run_self_check
from foretoken.models.stock.media import get_language_model

if TYPE_CHECKING:
    from foretoken.loading.facts import ModelFacts, Placement


def find_refusal(model: ModelFacts, placement: Placement) -> str | None:
    """Return why CUDA graphs cannot run a model; None if its family passed the self-check."""
    try:
        network = get_language_model(model.structure)
        encodes = network.config.is_encoder_decoder
        run_self_check(network if encodes else model.structure, GRAPHS_FORM)
    except RefusedError as error:
        return str(error)
    return None


def build(model: ModelFacts, placement: Placement) -> tuple[Model, list[str]]:
    """Return the model with its first graphs recorded. Raises RefusedError if recording fails, or
    if the model cannot expose hidden states at the taps."""
    network = model.load_network(placement.dtype, placement.device)
    require_precision(network, GRAPHS_FORM)
    graphs = GraphModel(network, compiled=placement.runtime == "compiled")
    graphs.may_compile = not placement.named
    if placement.taps:
        graphs.tap(placement.taps)
    return rehearse(graphs), ["it passed the self-check"]
