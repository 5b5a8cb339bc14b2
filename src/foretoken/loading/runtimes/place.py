"""Each model gets the first backend that runs it exactly: the native decoder on a CPU, graphs of
fixed shapes on CUDA, then transformers on torch.

Does not depend on prompts, drafts or tokenizers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretoken.errors import RefusedError, base_name
from foretoken.loading.options import ROUNDED
from foretoken.loading.runtimes import native
from foretoken.models.base import Model

if TYPE_CHECKING:
    from foretoken.loading.facts import ModelFacts, Placement

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """A running model, and the reason for its backend."""

    model: Model
    why: str


def place(model: ModelFacts, placement: Placement) -> Placed:
    """Return the model on the first backend that runs its family exactly.

    A network in memory is used as it is, where it is, unless a runtime is asked for by name, which
    takes a copy. Raises RefusedError for a placement that cannot be honoured.
    """
    if model.files is None:
        placement = replace(placement, device=model.structure.device)
    placement = replace(placement, dtype=model.dtype(placement.dtype))
    runtimes, notes = _candidates(model, placement)
    for runtime in runtimes:
        backend, tried = _backend(runtime), replace(placement, runtime=runtime)
        reason = backend.refusal(model, tried)
        if reason is None:
            try:
                running, remarks = backend.build(model, tried)
                return Placed(running, "; ".join([*notes, *remarks]))
            except RefusedError as error:
                reason = str(error)
        notes.append(reason)
        log.info("%s does not run on %s: %s", base_name(model.name), runtime, reason)
    remedy = "" if runtimes[-1] == "transformers" else _remedy(placement)  # torch's reasons say it
    raise RefusedError(f"{notes[-1]}{remedy}")


def _candidates(model: ModelFacts, placement: Placement) -> tuple[list[str], list[str]]:
    """Return the runtimes to try, in order, and why torch is the first where it is. RefusedError
    for a precision that the runtime asked for lacks."""
    asked, rounds = placement.runtime, placement.dtype in ROUNDED
    if model.files is not None and model.files.own_adapter:
        if asked not in ("auto", "transformers") or rounds:
            problem = f"{model.name} has an adapter of its own, which is merged on torch alone"
            raise RefusedError(f"{problem}; leave runtime, int8 and int4 out")
        return ["transformers"], ["its own adapter is merged there"]
    on_cuda = placement.device.type == "cuda"
    if asked == "auto" and model.files is None and not on_cuda:
        return ["transformers"], ["it was in memory"]
    if rounds and asked not in ("auto", "native"):
        raise RefusedError(
            f"dtype={placement.dtype!r} runs on the native decoder only, not on {asked}; leave "
            "runtime at 'auto'"
        )
    if asked != "auto":
        return [asked], ["it was asked for"] if asked == "transformers" else []
    if rounds:
        return ["native"], []
    return ["graphs" if on_cuda else "native", "transformers"], []


def _backend(runtime: str):  # not annotated: the modules are of one form
    if runtime == "native":
        return native
    # late: these import transformers' networks, which takes seconds; a cached conversion needs none
    from foretoken.loading.runtimes import graphs, stock

    return stock if runtime == "transformers" else graphs


def _remedy(placement: Placement) -> str:
    """Return what to give instead of a placement that cannot be honoured."""
    changes = ["give dtype='float32'"] if placement.dtype in ROUNDED else []
    if placement.runtime != "auto":
        changes.insert(0, f"leave runtime at 'auto' (not {placement.runtime!r})")
    return "; " + ", ".join(changes)
