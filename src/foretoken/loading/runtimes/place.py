"""Choice of the backend: the first one that runs a model exactly. On a CPU that is the native
decoder, on CUDA the graphs of fixed shapes, then transformers on torch.

Does not depend on prompts, drafts or tokenizers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretoken.errors import RefusedError, get_base_name
from foretoken.loading.options import ROUNDED_DTYPES
from foretoken.loading.runtimes import native
from foretoken.models.base import Model

if TYPE_CHECKING:
    from foretoken.loading.facts import ModelFacts, Placement

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on its backend, and the reason why this backend was chosen."""

    model: Model
    reason: str


def place(model: ModelFacts, placement: Placement) -> PlacedModel:
    """Return the model on the first backend that runs its family exactly.

    A network in memory stays on its device and is not copied, except that the native decoder, if
    requested by name, runs a copy. Raises RefusedError if no backend supports the placement.
    """
    if model.source is None:
        placement = replace(placement, device=model.structure.device)
    placement = replace(placement, dtype=model.resolve_dtype(placement.dtype))
    runtimes, notes = _list_candidates(model, placement)
    for runtime in runtimes:
        backend = _get_backend(runtime)
        attempt = replace(placement, runtime=runtime, named=placement.runtime != "auto")
        reason = backend.find_refusal(model, attempt)
        if reason is None:
            try:
                running, remarks = backend.build(model, attempt)
                return PlacedModel(running, "; ".join([*notes, *remarks]))
            except RefusedError as error:
                reason = str(error)
        notes.append(reason)
        log.info("%s does not run on %s: %s", get_base_name(model.name), runtime, reason)
    # torch's own reasons include the remedy
    remedy = "" if runtimes[-1] == "transformers" else _describe_remedy(placement)
    raise RefusedError(f"{notes[-1]}{remedy}")


def _list_candidates(model: ModelFacts, placement: Placement) -> tuple[list[str], list[str]]:
    """Return the backends to try, in order, and a list with the reason if torch is tried first,
    else []. Raises RefusedError for a precision that the requested backend lacks."""
    requested, is_rounded = placement.runtime, placement.dtype in ROUNDED_DTYPES
    if model.source is not None and model.source.has_own_adapter:
        if requested not in ("auto", "transformers") or is_rounded:
            problem = f"{model.name} has an adapter of its own, which only torch can merge"
            raise RefusedError(f"{problem}; give runtime='auto' and neither int8 nor int4")
        return ["transformers"], ["torch merges its own adapter"]
    on_cuda = placement.device.type == "cuda"
    if requested == "auto" and model.source is None and not on_cuda:
        return ["transformers"], ["it was in memory"]
    if is_rounded and requested not in ("auto", "native"):
        raise RefusedError(
            f"dtype={placement.dtype!r} runs only on the native decoder, not on {requested}; leave "
            "runtime at 'auto'"
        )
    if requested != "auto":
        return [requested], ["it was requested"] if requested == "transformers" else []
    if is_rounded:
        return ["native"], []
    return ["graphs" if on_cuda else "native", "transformers"], []


def _get_backend(runtime: str):  # not annotated: the modules have the same functions, not a type
    if runtime == "native":
        return native
    # imported late: transformers' networks take seconds to import; cached conversions need none
    from foretoken.loading.runtimes import graphs, stock

    return stock if runtime == "transformers" else graphs


def _describe_remedy(placement: Placement) -> str:
    """Return the remedy for a placement that no backend supports."""
    changes = ["give dtype='float32'"] if placement.dtype in ROUNDED_DTYPES else []
    if placement.runtime != "auto":
        changes.insert(0, f"leave runtime at 'auto' (not {placement.runtime!r})")
    return "; " + ", ".join(changes)
