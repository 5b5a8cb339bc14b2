"""What a model runs on: the fastest runtime that serves it exactly, and why it is that one.

OpenVINO on a CPU, graphs of fixed shapes on CUDA, for what passes the self-check in that form; else
transformers on torch. It does not know prompts, drafts or tokenizers.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from foretoken.errors import RefusedError, one_line
from foretoken.models.base import Model
from foretoken.models.exact import ExactModel, steady
from foretoken.models.graphs import GraphModel, rehearsed
from foretoken.models.packed import pack
from foretoken.models.selfcheck import ON_TORCH, Form, on_torch, self_check, strangers
from foretoken.options import require_place
from foretoken.sources import Source

ON_GRAPHS = Form("fixed shapes", GraphModel)
ON_A_GRID = Form("a grid of passes", ExactModel)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """A model that runs, and why it runs on what it runs on."""

    model: Model
    why: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller asks of a model's place; InputError for what there is not."""

    dtype: str = "float32"
    device: torch.device = torch.device("cpu")
    runtime: str = "auto"

    def __post_init__(self) -> None:
        require_place(self.runtime, self.dtype)


def place(source: Source | PreTrainedModel, wish: Wish) -> Placed:
    """The model behind the Model protocol, once its family has passed the self-check.

    One in memory is used as it is, where it is, unless OpenVINO is asked for by name: it then gets
    a copy. Raises RefusedError for what cannot be honoured.
    """
    here = isinstance(source, PreTrainedModel)
    device = source.device if isinstance(source, PreTrainedModel) else wish.device
    if here and wish.runtime == "auto" and device.type != "cuda":
        network, _ = _network(source, wish.dtype, device, ON_TORCH)
        return Placed(on_torch(network), "it was in memory")
    dtype = wish.dtype if here else stated(wish.dtype, source)
    reason = "it was asked for"
    fast = "graphs" if device.type == "cuda" and dtype != "int8" else "openvino"
    fast = fast if wish.runtime == "auto" else wish.runtime
    if fast != "transformers":
        try:
            run = _graphs if fast == "graphs" else _openvino
            return Placed(run(source, dtype, device), "it passed the self-check")
        except RefusedError as error:
            if wish.runtime == fast or dtype == "int8":
                raise
            reason = str(error)
            log.info("%s stays on torch: %s", _name(source), reason)
    if dtype == "int8":
        raise RefusedError("dtype='int8' runs on OpenVINO only; leave runtime at 'auto'")
    network, packed = _network(source, dtype, wish.device, ON_TORCH)
    return Placed(on_torch(network), "; ".join([reason, *packed]))


def place_exact(source: Source | PreTrainedModel, wish: Wish) -> Placed:
    """The same in passes of one width on a grid, so that logits are, to the bit, a function of the
    text. Raises RefusedError for what has no such form."""
    require_torch(wish)
    dtype = wish.dtype if isinstance(source, PreTrainedModel) else stated(wish.dtype, source)
    network, packed = _network(source, dtype, wish.device, ON_A_GRID)
    return Placed(steady(ExactModel(network)), "; ".join(["it was asked for", *packed]))


def require_torch(wish: Wish) -> None:
    """Raise where exact shapes are asked of another runtime than torch: those choose their kernels
    by more than a pass's shape, or were not shown not to."""
    if wish.runtime not in ("auto", "transformers"):
        raise RefusedError(
            f"exact_shapes=True runs on torch, and was not shown to be exact on {wish.runtime}; "
            "give runtime='transformers'"
        )
    if wish.dtype == "int8":
        raise RefusedError("exact_shapes=True runs on torch, which has no int8; give float32")


def _network(
    source: Source | PreTrainedModel, dtype: str, device: torch.device, form: Form
) -> tuple[PreTrainedModel, list[str]]:
    """A model on torch whose family has passed the self-check in that form; what we load ourselves
    is packed, and what became of that is told."""
    if isinstance(source, PreTrainedModel):
        self_check(source, form)
        _require_precision(source)
        return source, []
    self_check(source.empty, form)
    network = source.network(getattr(torch, dtype), device)
    _require_precision(network)
    packing = pack(network)
    packed = f"{packing.layers} layers packed" if packing.layers else f"unpacked: {packing.reason}"
    return network, [packed]


def _require_precision(network: PreTrainedModel) -> None:
    """Run one token in any precision but float32, in which the self-check ran a copy; RefusedError
    where torch cannot."""
    if network.dtype == torch.float32:
        return
    model = on_torch(network)
    try:
        model.start([[]], [[0]] if model.encoder_decoder else None)
        model.score([[0]], [1])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        dtype = str(network.dtype).removeprefix("torch.")
        raise RefusedError(
            f"{type(network).__name__} does not run in {dtype} on {network.device}: "
            f"{one_line(error)}; give dtype='float32', or model.float() in memory"
        ) from error


def stated(dtype: str, source: Source) -> str:
    """The precision by name; "auto" is what the model's own config says."""
    if dtype != "auto":
        return dtype
    own = source.empty.config.dtype
    return str(own).removeprefix("torch.") if isinstance(own, torch.dtype) else "float32"


def _graphs(source: Source | PreTrainedModel, dtype: str, device: torch.device) -> Model:
    if dtype == "int8":
        raise RefusedError("graphs have no int8; give runtime='openvino', or another dtype")
    if isinstance(source, PreTrainedModel):
        self_check(source, ON_GRAPHS)
        return rehearsed(GraphModel(source))
    self_check(source.empty, ON_GRAPHS)
    return rehearsed(GraphModel(source.network(getattr(torch, dtype), device)))


def _openvino(source: Source | PreTrainedModel, dtype: str, device: torch.device) -> Model:
    conversion = _library()
    if device.type != "cpu":
        raise RefusedError(f"OpenVINO runs on the CPU here, not on {device}")
    way = _way(source.empty if isinstance(source, Source) else source, conversion)
    if isinstance(source, PreTrainedModel):
        try:
            return way.run(copy.deepcopy(source).float().cpu())
        except Exception as error:  # whatever a stranger's forward raises
            name = type(source).__name__
            raise RefusedError(f"{name} cannot be converted: {one_line(error)}") from None
    if dtype not in conversion.DTYPES:
        raise RefusedError(f"OpenVINO has no {dtype}")
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    load = partial(source.network, kind, device)
    return conversion.converted(source, way, dtype, load, strangers(source.empty))


def _way(network: PreTrainedModel, conversion: Any) -> Any:
    """The first way to run a model on OpenVINO that passes the self-check."""
    objections: list[str] = []
    for way in conversion.ways(network):
        try:
            self_check(network, way.form)
            return way
        except RefusedError as error:
            objections.append(str(error))
    raise RefusedError("; ".join(objections))


def forms(network: PreTrainedModel) -> list[tuple[str, Form]]:
    """The runtimes that may serve a model here, and in which form, the fastest first."""
    if torch.cuda.is_available():
        return [("graphs", ON_GRAPHS), ("transformers", ON_TORCH)]
    try:
        fast = [("openvino", way.form) for way in _library().ways(network)]
    except RefusedError:
        fast = []
    return [*fast, ("transformers", ON_TORCH)]


def openvino() -> str:
    """Whether OpenVINO can be used, and what arithmetic it has here; or why it cannot."""
    try:
        conversion = _library()
    except RefusedError as error:
        return str(error)
    return conversion.abilities()


def _library() -> Any:
    """OpenVINO and what needs it, where it is installed and loads."""
    try:
        from foretoken.models import conversion
    except Exception as error:  # also a library that this machine cannot load
        raise RefusedError(f"OpenVINO cannot be used: {one_line(error)}") from None
    return conversion


def _name(source: Source | PreTrainedModel) -> str:
    return source.name if isinstance(source, Source) else type(source).__name__
