"""Runtimes: each model gets the fastest one that serves it exactly.

OpenVINO on a CPU and graphs of fixed shapes on CUDA, for models whose family passes the self-check
in that form; else transformers on torch. Does not know prompts, drafts or tokenizers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from foretoken.errors import ForetokenError, RefusedError, kind_of, one_line
from foretoken.generation_config import read_settings
from foretoken.loading.hub import is_folder
from foretoken.loading.options import ROUNDED
from foretoken.loading.sources import Source
from foretoken.models.base import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.drafters.dflash import BlockModel
    from foretoken.models.openvino.conversion import Conversion, Convertible, Way
    from foretoken.models.stock.dflash import BlocksDraft
    from foretoken.models.stock.selfcheck import Form

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """A running model, and the reason for its runtime."""

    model: Model
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The runtime, device and precision that a model is to have, as `LoadOptions` has them."""

    dtype: str = "float32"
    device: torch.device = torch.device("cpu")
    runtime: str = "auto"
    kv_dtype: str | None = None  # of keys and values; None: that of the arithmetic
    taps: tuple[int, ...] = ()  # where it is to show its states


class Early:
    """A kept conversion of a folder, read by a thread while a tokenizer is read by Python."""

    def __init__(self, source: Source, placement: Placement) -> None:
        self.placement = placement
        thread = ThreadPoolExecutor(1)
        self._model = thread.submit(_kept, source, placement.dtype, placement)
        thread.shutdown(wait=False)

    def model(self) -> Model | None:
        """Return the model; None where its conversion turned out to be damaged."""
        return self._model.result()


def place(
    source: Source | PreTrainedModel, placement: Placement, early: Early | None = None
) -> Placed:
    """Return the model behind the Model protocol, once its family has passed the self-check.

    A network in memory is used as it is, where it is, unless OpenVINO is asked for by name, which
    takes a copy. Raises RefusedError for a placement that cannot be honoured. early: the model,
    where it is being read already, in this placement.
    """
    loaded = isinstance(source, Source)
    device = placement.device if loaded else source.device
    plain = placement.runtime == "auto" and not placement.kv_dtype
    if not loaded and plain and device.type != "cuda":
        model, remarks = _torch(source, placement.dtype, device, placement.taps)
        return Placed(model, "; ".join(["it was in memory", *remarks]))
    dtype = dtype_of(source, placement)
    reason = "it was asked for"
    on_openvino = dtype in ROUNDED or placement.kv_dtype is not None
    fast = "graphs" if device.type == "cuda" and not on_openvino else "openvino"
    fast = fast if placement.runtime == "auto" else placement.runtime
    for name, value in (("dtype", dtype), ("kv_dtype", placement.kv_dtype)):
        if value in ROUNDED and fast != "openvino":
            raise RefusedError(f"{name}={value!r} runs on OpenVINO only; leave runtime at 'auto'")
    if fast != "transformers":
        try:
            if fast == "openvino":
                model = _openvino(source, dtype, placement, early)
            elif placement.taps:
                raise RefusedError(f"{fast} shows no states between layers, which the draft reads")
            else:
                model = _graphs(source, dtype, device, fast == "compiled")
            return Placed(model, "it passed the self-check")
        except RefusedError as error:
            if placement.runtime == fast or on_openvino:
                raise RefusedError(f"{error}{_remedy(placement, dtype)}") from error.__cause__
            reason = str(error)
            name = source.name if loaded else type(source).__name__
            log.info("%s stays on torch: %s", name, reason)
    model, packed = _torch(source, dtype, placement.device, placement.taps)
    return Placed(model, "; ".join([reason, *packed]))


def _remedy(placement: Placement, dtype: str) -> str:
    """Say what to give instead where a model cannot run as it was asked to."""
    changes = ["give dtype='float32'"] if dtype in ROUNDED else []
    changes += ["leave kv_dtype out"] if placement.kv_dtype else []
    if placement.runtime != "auto":
        changes.insert(0, f"leave runtime at 'auto' (not {placement.runtime!r})")
    return "; " + ", ".join(changes)


def kept_facts(source: Source, placement: Placement) -> dict[str, Any] | None:
    """Read the facts that are kept with a folder's conversion; for a hub model's, its config would
    have to be read."""
    if placement.runtime not in ("auto", "openvino") or placement.dtype == "auto" or source.trust:
        return None
    try:
        return _library().facts(source, placement.dtype) if is_folder(source.path) else None
    except RefusedError:
        return None


def place_exact(source: Source | PreTrainedModel, placement: Placement) -> Placed:
    """Do as `place`, in forwards of one width on a grid, so that logits are, to the bit, a function
    of the text. Raises RefusedError for a model that cannot run so."""
    from foretoken.models.stock.grid import ON_A_GRID, ExactModel, steady  # late: takes seconds

    network = _network(source, dtype_of(source, placement), placement.device, ON_A_GRID)
    packed = _packed(source, network)
    return Placed(steady(ExactModel(network)), "; ".join(["it was asked for", *packed]))


def _torch(
    source: Source | PreTrainedModel, dtype: str, device: torch.device, taps: tuple[int, ...]
) -> tuple[Model, list[str]]:
    """Return the model on torch, over a ragged cache or else row by row; and remarks on that.
    Raises RefusedError where it cannot show its states at the taps."""
    from foretoken.models.stock.selfcheck import UnbuiltError  # late: takes seconds

    try:
        form, objections = _form(source.empty if isinstance(source, Source) else source)
        network = _loaded(source, dtype, device, form)
    except UnbuiltError as error:
        if not isinstance(source, Source):
            raise
        if dtype != "float32":
            raise RefusedError(
                f"{error}; in dtype='float32' the model itself is checked"
            ) from error
        network = source.network(getattr(torch, dtype), device)
        form, objections = _form(network)
    packed = _packed(source, network)  # before it is run: runners keep its layers
    model = form.run(network)
    if taps:
        if not hasattr(model, "tap"):
            raise RefusedError(
                f"{type(network).__name__} runs in {form.name}, and so shows no states between "
                "layers, which the draft reads; give another draft"
            )
        model.tap(taps)  # pyright: ignore
    return model, [*objections, *packed]


def _form(network: PreTrainedModel) -> tuple[Form, list[str]]:
    """Return the first form on torch that passes the self-check; what it costs, and the objections
    to those before it. Raises RefusedError where none passes."""
    from foretoken.models.stock.rowwise import BY_ROW, BY_TOKEN  # late: takes seconds
    from foretoken.models.stock.selfcheck import ON_TORCH, UnbuiltError, self_check

    objections: list[str] = []
    for form in (ON_TORCH, BY_ROW, BY_TOKEN):
        try:
            itself = self_check(network, form).itself
            remarks = [form.costs, "checked on the model: no small copy of it" if itself else ""]
            return form, [*dict.fromkeys(objections), *filter(None, remarks)]
        except UnbuiltError:
            raise
        except RefusedError as error:
            objections.append(str(error).removesuffix(f"; {form.instead}"))
    raise RefusedError(f"{objections[-1]}; {BY_TOKEN.instead}")


def _packed(source: Source | PreTrainedModel, network: PreTrainedModel) -> list[str]:
    """Pack the layers of a network that was loaded here; say how many, or why none."""
    if not isinstance(source, Source):
        return []
    from foretoken.models.stock.packed import pack  # late: takes seconds

    packing = pack(network)
    return [f"{packing.layers} layers packed" if packing.layers else f"unpacked: {packing.reason}"]


def _graphs(
    source: Source | PreTrainedModel, dtype: str, device: torch.device, compiled: bool
) -> Model:
    from foretoken.models.graphs import ON_GRAPHS, GraphModel, rehearsed  # late: seconds

    return rehearsed(GraphModel(_network(source, dtype, device, ON_GRAPHS), compiled))


def _network(
    source: Source | PreTrainedModel, dtype: str, device: torch.device, form: Form
) -> PreTrainedModel:
    """Return a network whose family passes the self-check in that form."""
    from foretoken.models.stock.selfcheck import self_check  # late: takes seconds

    self_check(source.empty if isinstance(source, Source) else source, form)
    return _loaded(source, dtype, device, form)


def _loaded(
    source: Source | PreTrainedModel, dtype: str, device: torch.device, form: Form
) -> PreTrainedModel:
    """Return the network of a source, which runs in its precision in that form."""
    read = isinstance(source, Source)
    network = source.network(getattr(torch, dtype), device) if read else source
    require_precision(network, form)
    return network


def require_precision(network: PreTrainedModel, form: Form) -> None:
    """RefusedError where torch cannot run the network in its precision, tried on one token unless
    that is float32, in which the self-check has run."""
    if network.dtype == torch.float32:
        return
    model = form.run(network)
    try:
        model.start([[]], [[0]] if model.encoder_decoder else None)
        model.score([[0]], [1])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        dtype = str(network.dtype).removeprefix("torch.")
        raise RefusedError(
            f"{type(network).__name__} does not run in {dtype} on {network.device}: its code "
            f"raised {kind_of(error)}; give dtype='float32', or model.float() in memory"
        ) from error


def dtype_of(source: Source | PreTrainedModel, placement: Placement) -> str:
    """Return the precision by name; "auto" is that of the model's own config."""
    if placement.dtype != "auto" or not isinstance(source, Source):
        return placement.dtype
    dtype = source.config.dtype
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else "float32"


def _openvino(
    source: Source | PreTrainedModel, dtype: str, placement: Placement, early: Early | None
) -> Model:
    device, cache = placement.device, placement.kv_dtype
    loaded = isinstance(source, Source)
    if device.type != "cpu":
        raise RefusedError(f"OpenVINO runs on the CPU here, not on {device}")
    if early is not None and early.placement == placement:
        kept = early.model()
    else:
        kept = _kept(source, dtype, placement) if loaded else None
    if kept is not None:
        return kept
    conversion = _conversion(source, dtype if loaded else "float32", device)
    conversion = replace(conversion, taps=placement.taps)
    return conversion.model(_way(source.empty if loaded else source, placement.taps), cache)


def _kept(source: Source, dtype: str, placement: Placement) -> Model | None:
    """Return a folder's model from its kept conversion; None where none is kept."""
    if not is_folder(source.path):
        return None
    conversion = replace(_conversion(source, dtype, placement.device), taps=placement.taps)
    return conversion.kept(placement.kv_dtype)


def _conversion(source: Source | PreTrainedModel, dtype: str, device: torch.device) -> Conversion:
    library = _library()
    _require_known(dtype)
    if not isinstance(source, Source):
        return library.Conversion(None, dtype, partial(copy.deepcopy, source))
    loaded_in = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    load = partial(source.network, loaded_in, device)
    return library.Conversion(source, dtype, load, lambda: {"settings": _settings(source.empty)})


def _require_known(dtype: str) -> None:
    if dtype not in _library().DTYPES:
        raise RefusedError(f"OpenVINO has no {dtype}")


def require_shared(runtime: str) -> None:
    """RefusedError for a runtime whose models cannot share their rows with a copy."""
    if runtime != "openvino":
        raise RefusedError(
            f"draft='self' reads the target's own keys and values, which {runtime} does not share; "
            "give runtime='openvino', or draft='lookup'"
        )


def companion(
    source: Source | PreTrainedModel, target: Model, dtype: str, layers: tuple[int, ...] = ()
) -> Model:
    """Return a copy of `target`, made from the same source with weights in `dtype`, and with these
    layers alone where there are some, that drafts over the target's own rows. Raises RefusedError
    where the target shares no rows."""
    require_shared(target.runtime)
    host: Any = target  # one of that library's models
    return replace(_conversion(source, dtype, target.device), some=layers).companion(host)


def decoder_of_pairs(
    source: Convertible, network: PreTrainedModel, target: Model, dtype: str | None
) -> Model:
    """Return a decoder of pairs where its target runs, on OpenVINO by itself in eight bits. Raises
    RefusedError for a precision that is not to be had there."""
    kind = _draft_kind(target, dtype)
    if target.runtime == "openvino":
        library = _library()
        conversion = library.Conversion(source, kind, partial(copy.deepcopy, network))
        return conversion.model(library.PAGED)
    from foretoken.models.stock.pairs import PairsNetwork, StockPairs  # late: takes seconds

    assert isinstance(network, PairsNetwork)
    ready: Any = network
    return StockPairs(ready.to(target.device, getattr(torch, kind)))


def model_of_blocks(
    source: Convertible,
    read: Callable[[], BlocksDraft],
    ends: Source | PreTrainedModel,
    target: Model,
    dtype: str | None,
) -> BlockModel:
    """Return the model of a draft by blocks, read anew by each `read`, where its target runs, in
    the precision of `decoder_of_pairs`. ends: what the target was made from."""
    kind, draft = _draft_kind(target, dtype), read()
    if target.runtime == "openvino":
        from foretoken.models.openvino.dflash import CompiledBlocks  # late: takes seconds
        from foretoken.models.openvino.export_dflash import HeadedBlocks

        def network() -> HeadedBlocks:
            fresh = read()  # which is widened in place
            return HeadedBlocks(fresh.network, fresh.head)

        model = ends if isinstance(ends, Source) else None  # beside one in memory nothing is kept
        library = _library()
        conversion = library.Conversion(model and source, kind, network, ends=model)
        return CompiledBlocks(draft, *conversion.graphs(library.BLOCKS))
    from foretoken.models.stock.dflash import StockBlocks  # late: as above

    draft.network.to(target.device, getattr(torch, kind))
    return StockBlocks(draft)


def _draft_kind(target: Model, dtype: str | None) -> str:
    """Return the precision of a draft over a target's states, by itself the target's, or eight bits
    on OpenVINO. Raises RefusedError for one that is not to be had there."""
    asked = None if dtype == "auto" else dtype
    if target.runtime == "openvino":
        kind = asked or "int8"
        _require_known(kind)
        return kind
    if asked in ROUNDED:
        raise RefusedError(f"draft_dtype={asked!r} runs on OpenVINO only; leave it out")
    return asked or target.computed


def _settings(network: PreTrainedModel) -> dict[str, Any] | None:
    """Return the generation config, to be kept with a conversion; None where no target may have
    it."""
    try:
        return read_settings(network).to_dict()
    except ForetokenError:
        return None


def _way(network: PreTrainedModel, taps: tuple[int, ...]) -> Way:
    """Return the first way to run a model on OpenVINO that passes the self-check, and can show the
    states at the taps."""
    from foretoken.models.stock.selfcheck import self_check  # late: takes seconds

    objections: list[str] = []
    for way in _library().ways(network)[: 1 if taps else None]:
        try:
            self_check(network, way.form)
            return way
        except RefusedError as error:
            objections.append(str(error))
    raise RefusedError("; ".join(dict.fromkeys(objections)))


def forms(network: PreTrainedModel) -> list[tuple[str, Form]]:
    """Return the runtimes that may serve a model here, each with its form, the fastest first."""
    from foretoken.models.graphs import ON_GRAPHS  # late: takes seconds
    from foretoken.models.stock.rowwise import BY_ROW, BY_TOKEN
    from foretoken.models.stock.selfcheck import ON_TORCH

    stock = [("transformers", form) for form in (ON_TORCH, BY_ROW, BY_TOKEN)]
    if torch.cuda.is_available():
        return [("graphs", ON_GRAPHS), *stock]
    try:
        fast = [("openvino", way.form) for way in _library().ways(network)]
    except RefusedError:
        fast = []
    return [*fast, *stock]


def openvino() -> str:
    """Return the arithmetic that OpenVINO has here, or why it cannot be used."""
    try:
        return _library().abilities()
    except RefusedError as error:
        return str(error)


def require_openvino() -> None:
    """RefusedError where OpenVINO cannot be used."""
    _library()


def _library():  # not annotated: the type checker infers the module itself, as no name can
    """Import the module that runs models on OpenVINO; RefusedError where it is not installed or
    does not load."""
    try:
        from foretoken.models.openvino import conversion
    except Exception as error:  # also a library that this machine cannot load
        raise RefusedError(f"OpenVINO cannot be used: {one_line(error)}") from None
    return conversion
