"""The backend transformers: transformers' own code on torch, in batches over a ragged cache, or one
sequence at a time for a family that is not exact in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.errors import RefusedError, log_error_kind
from foretoken.models.base import Model
from foretoken.models.stock.check_results import run_self_check
from foretoken.models.stock.media import get_language_model
from foretoken.models.stock.packed import pack
from foretoken.models.stock.rowwise import ROWWISE_BACKEND
from foretoken.models.stock.selfcheck import TORCH_BACKEND, CheckedBackend, SmallCopyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.loading.facts import ModelFacts, Placement


def find_refusal(model: ModelFacts, placement: Placement) -> str | None:
    """Return why torch cannot run a model exactly; None if its family passed the self-check, or if
    no small copy of the model can be made, in which case `build` checks the model itself."""
    try:
        model.form_on_torch = _find_exact_form(model.structure)
    except SmallCopyError as error:
        if model.source is None:
            return str(error)
        if placement.dtype != "float32":
            return f"{error}; in dtype='float32' the model itself is checked"
    except RefusedError as error:
        return str(error)
    return None


def build(model: ModelFacts, placement: Placement) -> tuple[Model, list[str]]:
    """Return the model, and remarks on how it runs. Raises RefusedError if the model cannot expose
    hidden states at the taps, or does not run in its precision."""
    network = model.load_network(placement.dtype, placement.device)
    form, notes = model.form_on_torch or _find_exact_form(network)
    remarks = [*notes]
    require_precision(network, form)
    if model.source is not None:  # before the first run, which stores references to layers
        packing = pack(network)
        packed = f"{packing.layers} layers packed"
        remarks.append(packed if packing.layers else f"unpacked: {packing.reason}")
    running = form.build(network)
    if placement.taps:
        if not running.capabilities.taps:
            raise RefusedError(
                f"{type(network).__name__} runs with {form.name}, so it does not expose the hidden "
                "states that the draft uses; give another draft"
            )
        running.tap(placement.taps)
    return running, remarks


def _find_exact_form(network: PreTrainedModel) -> tuple[CheckedBackend, list[str]]:
    """Return the first way of running on torch that passes the self-check (in batches, then one
    sequence at a time), and remarks. If batches failed, the remarks give the reason and the cost of
    single sequences. Raises RefusedError if neither way passes."""
    network, form, remarks = get_language_model(network), TORCH_BACKEND, list[str]()
    try:
        checked_itself = run_self_check(network, form).on_full_model
    except SmallCopyError:
        raise
    except RefusedError as error:
        objection, form = str(error).removesuffix(f"; {form.remedy}"), ROWWISE_BACKEND
        checked_itself, remarks = (
            run_self_check(network, form).on_full_model,
            [objection, form.cost_note],
        )
    return form, [
        *remarks,
        *(["checked on the model: no small copy of it"] if checked_itself else []),
    ]


def require_precision(network: PreTrainedModel, form: CheckedBackend) -> None:
    """Raise RefusedError if torch cannot score one token with the network in its dtype. float32 is
    not tried, because the self-check already ran in it."""
    if network.dtype == torch.float32:
        return
    model = form.build(network)
    try:
        model.start([[]], [[0]] if model.encoder_decoder else None)
        model.score([[0]], [1])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        dtype = str(network.dtype).removeprefix("torch.")
        raise RefusedError(
            f"{type(network).__name__} does not run in {dtype} on {network.device}: its code "
            f"raised {log_error_kind(error)}; give dtype='float32' (in memory: model.float())"
        ) from error
