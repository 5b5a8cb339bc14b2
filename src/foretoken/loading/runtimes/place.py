"""Each model gets the first backend that runs it exactly: the native decoder on a CPU, graphs of
fixed shapes on CUDA, then transformers on torch.

Does not depend on prompts, drafts or tokenizers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretoken.errors import RefusedError, base_name
from foretoken.loading.options import ROUNDED_DTYPES
from foretoken.loading.runtimes import native
from foretoken.models.base import Model

if TYPE_CHECKING:
    from foretoken.loading.facts import ModelFacts, Placement

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A running model, and the reason for its backend."""

    model: Model
    reason: str


def place(model: ModelFacts, placement: Placement) -> PlacedModel:
    """Return the model on the first backend that runs its family exactly.

    A network in memory is used as it is, where it is, unless a runtime is asked for by name, which
    takes a copy. Raises RefusedError for a placement that cannot be honoured.
    """
    if model.source is None:
        placement = replace(placement, device=model.structure.device)
    placement = replace(placement, dtype=model.resolve_dtype(placement.dtype))
    runtimes, notes = _list_candidates(model, placement)
    for runtime in runtimes:
        backend, attempt = _get_backend(runtime), replace(placement, runtime=runtime)
        reason = backend.refusal(model, attempt)
        if reason is None:
            try:
                running, remarks = backend.build(model, attempt)
                return PlacedModel(running, "; ".join([*notes, *remarks]))
            except RefusedError as error:
                reason = str(error)
        notes.append(reason)
        log.info("%s does not run on %s: %s", base_name(model.name), runtime, reason)
    remedy = (
        "" if runtimes[-1] == "transformers" else _describe_remedy(placement)
    )  # torch's reasons say it
    raise RefusedError(f"{notes[-1]}{remedy}")


def _list_candidates(model: ModelFacts, placement: Placement) -> tuple[list[str], list[str]]:
    """Return the runtimes to try, in order, and why torch is the first where it is. RefusedError
    for a precision that the runtime asked for lacks."""
    requested, is_rounded = placement.runtime, placement.dtype in ROUNDED_DTYPES
    if model.source is not None and model.source.has_own_adapter:
        if requested not in ("auto", "transformers") or is_rounded:
            problem = f"{model.name} has an adapter of its own, which is merged on torch alone"
            raise RefusedError(f"{problem}; leave runtime, int8 and int4 out")
        return ["transformers"], ["its own adapter is merged there"]
    on_cuda = placement.device.type == "cuda"
    if requested == "auto" and model.source is None and not on_cuda:
        return ["transformers"], ["it was in memory"]
    if is_rounded and requested not in ("auto", "native"):
        raise RefusedError(
            f"dtype={placement.dtype!r} runs on the native decoder only, not on {requested}; leave "
            "runtime at 'auto'"
        )
    if requested != "auto":
        return [requested], ["it was asked for"] if requested == "transformers" else []
    if is_rounded:
        return ["native"], []
    return ["graphs" if on_cuda else "native", "transformers"], []


def _get_backend(runtime: str):  # not annotated: the modules are of one form
    if runtime == "native":
        return native
    # late: these import transformers' networks, which takes seconds; a cached conversion needs none
    from foretoken.loading.runtimes import graphs, stock

    return stock if runtime == "transformers" else graphs


def _describe_remedy(placement: Placement) -> str:
    """Return what to give instead of a placement that cannot be honoured."""
    changes = ["give dtype='float32'"] if placement.dtype in ROUNDED_DTYPES else []
    if placement.runtime != "auto":
        changes.insert(0, f"leave runtime at 'auto' (not {placement.runtime!r})")
    return "; " + ", ".join(changes)
