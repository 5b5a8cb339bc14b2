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
    requested, needs_native = placement.runtime, _find_native_option(model, placement)
    if model.source is not None and model.source.has_own_adapter:
        if requested not in ("auto", "transformers") or needs_native:
            problem = f"{model.name} has an adapter of its own, which only torch can merge"
            remedy = "give runtime='auto', neither int8 nor int4, and no kv_dtype"
            raise RefusedError(f"{problem}; {remedy}")
        return ["transformers"], ["torch merges its own adapter"]
    on_cuda = placement.device.type == "cuda"
    is_kv_native = needs_native is not None and placement.kv_dtype != "auto"
    if requested == "auto" and model.source is None and not on_cuda and not is_kv_native:
        return ["transformers"], ["it was in memory"]
    if needs_native and requested not in ("auto", "native"):
        raise RefusedError(
            f"{needs_native} runs only on the native decoder, not on {requested}; leave runtime at "
            "'auto'"
        )
    if requested != "auto":
        return [requested], ["it was requested"] if requested == "transformers" else []
    if needs_native:
        return ["native"], []
    return ["graphs" if on_cuda else "native", "transformers"], []


def _find_native_option(model: ModelFacts, placement: Placement) -> str | None:
    """Return the option, with its value, that only the native decoder can follow; None if there is
    none. Torch stores keys and values in the model's dtype."""
    if placement.dtype in ROUNDED_DTYPES:
        return f"dtype={placement.dtype!r}"
    dtype = placement.dtype
    if model.source is None:
        dtype = str(model.structure.dtype).removeprefix("torch.")
    return None if placement.kv_dtype in ("auto", dtype) else f"kv_dtype={placement.kv_dtype!r}"


def _get_backend(runtime: str):  # not annotated: the modules have the same functions, not a type
    if runtime == "native":
        return native
    # imported late: transformers' networks take seconds to import; cached conversions need none
    from foretoken.loading.runtimes import graphs, stock

    return stock if runtime == "transformers" else graphs


def _describe_remedy(placement: Placement) -> str:
    """Return the remedy for a placement that no backend supports."""
    changes = ["give dtype='float32'"] if placement.dtype in ROUNDED_DTYPES else []
    if placement.kv_dtype != "auto":
        changes.append("leave kv_dtype at 'auto'")
    if placement.runtime != "auto":
        changes.insert(0, f"leave runtime at 'auto' (not {placement.runtime!r})")
    return "; " + ", ".join(changes)
