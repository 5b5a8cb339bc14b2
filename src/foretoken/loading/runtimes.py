"""What a model runs on: the fastest runtime that serves it exactly, and why it is that one.

OpenVINO on a CPU, graphs of fixed shapes on CUDA, for what passes the self-check in that form; else
transformers on torch. It does not know prompts, drafts or tokenizers.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from foretoken.ends import Settings, read_settings
from foretoken.errors import ForetokenError, RefusedError, one_line
from foretoken.loading.hub import is_folder
from foretoken.loading.sources import Source
from foretoken.models.base import Model
from foretoken.options import require_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.models.stock.selfcheck import Form

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
    here = not isinstance(source, Source)
    device = wish.device if isinstance(source, Source) else source.device
    if here and wish.runtime == "auto" and device.type != "cuda":
        return Placed(_torch(source, wish.dtype, device)[0], "it was in memory")
    dtype = stated(wish.dtype, source) if isinstance(source, Source) else wish.dtype
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
    model, packed = _torch(source, dtype, wish.device)
    return Placed(model, "; ".join([reason, *packed]))


class Known:
    """What must be known of a model before it runs: from its kept conversion, which takes a moment,
    else from its structure, whose making takes seconds."""

    def __init__(self, read: Source | PreTrainedModel, wish: Wish) -> None:
        self.read = read
        self._facts = _kept_facts(read, wish) if isinstance(read, Source) else None

    @cached_property
    def structure(self) -> PreTrainedModel:
        return self.read.empty if isinstance(self.read, Source) else self.read

    @property
    def V(self) -> int:
        """Rows of the output layer."""
        if self._facts:
            return self._facts["vocab_size"]
        from foretoken.models.stock.sizes import output_rows  # late: takes seconds

        return output_rows(self.structure)

    @property
    def encoder_decoder(self) -> bool:
        if self._facts:
            return self._facts.get("encoder_decoder", False)
        return bool(self.structure.config.is_encoder_decoder)

    @property
    def settings(self) -> Settings:
        """Of its texts; raises as `read_settings` does."""
        own = self._facts and self._facts.get("settings")
        return Settings.of(own) if own else read_settings(self.structure)


def _kept_facts(source: Source, wish: Wish) -> dict[str, Any] | None:
    """Of a folder's kept conversion; of the hub's the config would have to be read first."""
    if wish.runtime not in ("auto", "openvino") or wish.dtype == "auto" or source.trust:
        return None
    try:
        return _library().facts(source, wish.dtype) if is_folder(source.path) else None
    except RefusedError:
        return None


def place_exact(source: Source | PreTrainedModel, wish: Wish) -> Placed:
    """The same in passes of one width on a grid, so that logits are, to the bit, a function of the
    text. Raises RefusedError for what has no such form."""
    require_torch(wish)
    from foretoken.models.stock.grid import ON_A_GRID, ExactModel, steady  # late: takes seconds

    dtype = stated(wish.dtype, source) if isinstance(source, Source) else wish.dtype
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


def _torch(
    source: Source | PreTrainedModel, dtype: str, device: torch.device
) -> tuple[Model, list[str]]:
    """On torch over a ragged cache, and what became of packing."""
    from foretoken.models.stock.selfcheck import ON_TORCH  # late: takes seconds

    network, packed = _network(source, dtype, device, ON_TORCH)
    return ON_TORCH.run(network), packed


def _network(
    source: Source | PreTrainedModel, dtype: str, device: torch.device, form: Form
) -> tuple[PreTrainedModel, list[str]]:
    """A model on torch whose family has passed the self-check in that form; what we load ourselves
    is packed, and what became of that is told."""
    from foretoken.models.stock.packed import pack  # late: takes seconds
    from foretoken.models.stock.selfcheck import self_check

    if not isinstance(source, Source):
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
    from foretoken.models.stock.selfcheck import on_torch  # late: takes seconds

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
    own = source.config.dtype
    return str(own).removeprefix("torch.") if isinstance(own, torch.dtype) else "float32"


def _graphs(source: Source | PreTrainedModel, dtype: str, device: torch.device) -> Model:
    if dtype == "int8":
        raise RefusedError("graphs have no int8; give runtime='openvino', or another dtype")
    from foretoken.models.graphs.model import ON_GRAPHS, GraphModel, rehearsed  # late: seconds
    from foretoken.models.stock.selfcheck import self_check

    if not isinstance(source, Source):
        self_check(source, ON_GRAPHS)
        return rehearsed(GraphModel(source))
    self_check(source.empty, ON_GRAPHS)
    return rehearsed(GraphModel(source.network(getattr(torch, dtype), device)))


def _openvino(source: Source | PreTrainedModel, dtype: str, device: torch.device) -> Model:
    conversion = _library()
    if device.type != "cpu":
        raise RefusedError(f"OpenVINO runs on the CPU here, not on {device}")
    if not isinstance(source, Source):
        way = _way(source, conversion)
        try:
            return way.run(copy.deepcopy(source).float().cpu())
        except Exception as error:  # whatever a stranger's forward raises
            name = type(source).__name__
            raise RefusedError(f"{name} cannot be converted: {one_line(error)}") from None
    if dtype not in conversion.DTYPES:
        raise RefusedError(f"OpenVINO has no {dtype}")
    kept = conversion.kept(source, dtype) if is_folder(source.path) else None
    if kept is not None:
        return kept
    way = _way(source.empty, conversion)
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    load = partial(source.network, kind, device)
    return conversion.converted(source, way, dtype, load, {"settings": _settings(source.empty)})


def _settings(network: PreTrainedModel) -> dict[str, Any] | None:
    """To be kept with a conversion; None where they are no target's."""
    try:
        return read_settings(network).to_dict()
    except ForetokenError:
        return None


def _way(network: PreTrainedModel, conversion: Any) -> Any:
    """The first way to run a model on OpenVINO that passes the self-check."""
    from foretoken.models.stock.selfcheck import self_check  # late: takes seconds

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
    from foretoken.models.graphs.model import ON_GRAPHS  # late: takes seconds
    from foretoken.models.stock.selfcheck import ON_TORCH

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
        from foretoken.models.openvino import conversion
    except Exception as error:  # also a library that this machine cannot load
        raise RefusedError(f"OpenVINO cannot be used: {one_line(error)}") from None
    return conversion


def _name(source: Source | PreTrainedModel) -> str:
    return source.name if isinstance(source, Source) else type(source).__name__
