"""Runtimes: each model gets the fastest one that serves it exactly.

OpenVINO on a CPU and graphs of fixed shapes on CUDA, for models whose family passes the self-check
in that form; else transformers on torch. Does not know prompts, drafts or tokenizers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from foretoken.costing.stored import machine
from foretoken.errors import ForetokenError, RefusedError, base_name, kind_of, one_line
from foretoken.generation_config import read_settings
from foretoken.loading.fastest import Fastest, fastest
from foretoken.loading.hub import is_folder
from foretoken.loading.options import ROUNDED
from foretoken.loading.sources import Source
from foretoken.models.base import Model
from foretoken.models.store import key_of
from foretoken.storage.cache import remember, remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.drafters.dflash import BlockModel
    from foretoken.models.onnx.conversion import OnnxConversion
    from foretoken.models.onnx.model import OnnxModel
    from foretoken.models.openvino.conversion import Conversion, Way
    from foretoken.models.stock.dflash import BlocksDraft
    from foretoken.models.stock.selfcheck import Form
    from foretoken.models.store import Convertible

log = logging.getLogger(__name__)

TITLES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
CHOICES = "runtime_choices.json"
CHOICE = "runtime 4"  # in their keys; the number is raised where they are to be made anew


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
    rows: int = 1  # that are decoded at a time


class Early:
    """A kept conversion of a folder, read by a thread while a tokenizer is read by Python."""

    def __init__(self, source: Source, placement: Placement) -> None:
        self.placement = placement
        thread = ThreadPoolExecutor(1)
        self._model = thread.submit(_kept, source, placement.dtype, placement)
        thread.shutdown(wait=False)

    def model(self) -> Model | None:
        """Return the model; None where its conversion turned out to be damaged, or where it is not
        known yet which runtime serves it."""
        return self._model.result()


def place(
    source: Source | PreTrainedModel, placement: Placement, early: Early | None = None
) -> Placed:
    """Return the model behind the Model protocol, once its family has passed the self-check.

    A network in memory is used as it is, where it is, unless a runtime is asked for by name, which
    takes a copy. Raises RefusedError for a placement that cannot be honoured. early: the model,
    where it is being read already, in this placement.
    """
    loaded = isinstance(source, Source)
    device = placement.device if loaded else source.device
    own = loaded and source.own_adapter
    if own:
        rounds = placement.dtype in ROUNDED or placement.kv_dtype
        if placement.runtime not in ("auto", "transformers") or rounds:
            problem = f"{source.name} has an adapter of its own, which is merged on torch alone"
            raise RefusedError(f"{problem}; leave runtime, int8 and int4 out")
        placement = replace(placement, runtime="transformers")
    plain = placement.runtime == "auto" and not placement.kv_dtype
    if not loaded and plain and device.type != "cuda":
        model, remarks = _torch(source, placement.dtype, device, placement.taps)
        return Placed(model, "; ".join(["it was in memory", *remarks]))
    dtype = dtype_of(source, placement)
    if early is not None and early.placement == placement and (model := early.model()) is not None:
        return Placed(model, "it passed the self-check")
    reason = "its own adapter is merged there" if own else "it was asked for"
    on_openvino = dtype in ROUNDED or placement.kv_dtype is not None
    fast = "graphs" if device.type == "cuda" and not on_openvino else "openvino"
    if placement.runtime != "auto":
        fast = placement.runtime
    elif _has_choice(dtype, replace(placement, device=device)):
        fast = _fastest(source, dtype, placement.rows)
    _require_rounding(dtype, placement.kv_dtype, fast)
    if fast != "transformers":
        try:
            return Placed(_on(fast, source, dtype, placement, device), "it passed the self-check")
        except RefusedError as error:
            if placement.runtime == fast or on_openvino:
                raise RefusedError(f"{error}{_remedy(placement, dtype)}") from error.__cause__
            reason = str(error)
            name = source.name if loaded else type(source).__name__
            log.info("%s stays on torch: %s", base_name(name), reason)
    model, packed = _torch(source, dtype, placement.device, placement.taps)
    return Placed(model, "; ".join([reason, *packed]))


def _on(
    runtime: str,
    source: Source | PreTrainedModel,
    dtype: str,
    placement: Placement,
    device: torch.device,
) -> Model:
    """Return the model on a runtime other than torch by itself. RefusedError where it is not exact
    there."""
    if runtime == "openvino":
        return _openvino(source, dtype, placement)
    if runtime == "onnx" and placement.runtime == "auto":
        return _onnx_or_openvino(source, dtype, placement)
    if runtime == "onnx":
        return _onnx(source, dtype, placement)
    if placement.taps:
        raise RefusedError(f"{runtime} shows no states between layers, which the draft reads")
    return _graphs(source, dtype, device, runtime == "compiled")


def _require_rounding(dtype: str, kv_dtype: str | None, runtime: str) -> None:
    """RefusedError for a precision that the runtime has not."""
    for name, value, runtimes in (
        ("dtype", dtype, ("onnx", "openvino")),
        ("kv_dtype", kv_dtype, ("openvino",)),
    ):
        if value in ROUNDED and runtime not in runtimes:
            names = " and ".join(TITLES[each] for each in runtimes)
            raise RefusedError(
                f"{name}={value!r} runs on {names} only, not on {runtime}; leave runtime at 'auto'"
            )


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
    dtype = placement.dtype
    if placement.runtime not in ("auto", *TITLES) or dtype == "auto" or source.trust:
        return None
    if not is_folder(source.path):
        return None
    for library in (_onnx_library, _library):
        with suppress(RefusedError):
            if facts := library().facts(source, dtype):
                return facts
    return None


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
    """Return the first form on torch that passes the self-check; what it costs, and the objection
    to the one before it. Raises RefusedError where none passes."""
    from foretoken.models.stock.media import writer  # late: takes seconds
    from foretoken.models.stock.rowwise import BY_ROW
    from foretoken.models.stock.selfcheck import ON_TORCH, UnbuiltError, self_check

    network, form, remarks = writer(network), ON_TORCH, list[str]()
    try:
        itself = self_check(network, form).itself
    except UnbuiltError:
        raise
    except RefusedError as error:
        objection, form = str(error).removesuffix(f"; {form.instead}"), BY_ROW
        itself, remarks = self_check(network, form).itself, [objection, form.costs]
    return form, [*remarks, *(["checked on the model: no small copy of it"] if itself else [])]


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
    from foretoken.models.stock.selfcheck import self_check

    self_check(source.empty if isinstance(source, Source) else source, ON_GRAPHS)
    return rehearsed(GraphModel(_loaded(source, dtype, device, ON_GRAPHS), compiled))


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


def _openvino(source: Source | PreTrainedModel, dtype: str, placement: Placement) -> Model:
    device, cache = placement.device, placement.kv_dtype
    loaded = isinstance(source, Source)
    if device.type != "cpu":
        raise RefusedError(f"OpenVINO runs on the CPU here, not on {device}")
    kept = _kept(source, dtype, replace(placement, runtime="openvino")) if loaded else None
    if kept is not None:
        return kept
    conversion = _conversion(source, dtype if loaded else "float32", device)
    conversion = replace(conversion, taps=placement.taps)
    return conversion.model(_way(source.empty if loaded else source, placement.taps), cache)


def _kept(source: Source, dtype: str, placement: Placement) -> Model | None:
    """Return a folder's model from its kept conversion; None where none is kept, or where the
    faster runtime is still to be measured."""
    if not is_folder(source.path) or placement.device.type != "cpu":
        return None
    runtime = placement.runtime
    if runtime == "auto" and _has_choice(dtype, placement):
        runtime = _known_choice(source, dtype, placement.rows)
    if runtime is None or (runtime == "onnx" and placement.kv_dtype is not None):
        return None  # as what is refused is not kept
    if runtime == "onnx":
        return replace(_onnx_conversion(source, dtype), taps=placement.taps).kept()
    conversion = replace(_conversion(source, dtype, placement.device), taps=placement.taps)
    return conversion.kept(placement.kv_dtype)


def _choice_key(source: Source | PreTrainedModel, dtype: str, rows: int) -> str | None:
    """The key of a folder's choice; None for other models, whose choices are not kept."""
    if not isinstance(source, Source) or not is_folder(source.path):
        return None
    many = [f"{rows} rows"] if rows > 1 else []
    return key_of(source, CHOICE, dtype, *many, *map(str, machine()))


def _known_choice(source: Source | PreTrainedModel, dtype: str, rows: int) -> str | None:
    """The runtime that was chosen for a folder in this precision; None where none was."""
    key = _choice_key(source, dtype, rows)
    known = remembered(CHOICES).get(key) if key else None
    return known if known in TITLES else None


def _has_choice(dtype: str, placement: Placement) -> bool:
    """Tell whether more than one runtime may serve a model in this precision and placement."""
    on_cpu = placement.device.type == "cpu" and placement.kv_dtype is None
    return on_cpu and dtype in ("float32", *ROUNDED) and find_spec("onnxruntime") is not None


def _fastest(source: Source | PreTrainedModel, dtype: str, rows: int) -> str:
    """Return the runtime for a model on this CPU: the faster one of those that are exact for its
    family. The choice is kept for a folder, whose configuration need not be read then."""
    if (known := _known_choice(source, dtype, rows)) is not None:
        return known
    best = _measured(source, dtype, rows)
    if best.sure and (key := _choice_key(source, dtype, rows)):
        remember(CHOICES, key, best.runtime)
    return best.runtime


def _measured(source: Source | PreTrainedModel, dtype: str, rows: int) -> Fastest:
    """Measure it; OpenVINO, without a measurement, where ONNX Runtime refuses the family."""
    try:
        _onnx_library()
    except RefusedError:  # may be mended, and the key of a choice would stay the same
        return Fastest("openvino", sure=False)
    network = source.empty if isinstance(source, Source) else source
    try:
        _require_onnx(network)
    except RefusedError as error:
        log.debug("not on ONNX Runtime: %s", error)
        return Fastest("openvino", sure=True)
    return _timed(source, dtype, rows, "onnx", "openvino")


def _timed(source: Source | PreTrainedModel, dtype: str, rows: int, *runtimes: str) -> Fastest:
    in_blocks = isinstance(source, Source) and source.gguf is not None
    network = source.empty if isinstance(source, Source) else source
    makes = {"onnx": _onnx_in_memory, "openvino": _openvino_in_memory}
    named = {name: makes[name] for name in runtimes}
    return fastest(network, dtype, named, in_blocks=in_blocks, rows=rows)


def timed(source: Source, placement: Placement) -> Fastest | None:
    """Return the runtime that serves a model on this CPU, in one of `ROUNDED`, and the seconds that
    some of its layers take there; None where they are not timed."""
    asked, dtype = placement.runtime, placement.dtype
    if source.empty.config.is_encoder_decoder or asked not in ("auto", *TITLES):
        return None
    if asked == "auto" and _has_choice(dtype, placement):
        best = _measured(source, dtype, placement.rows)
        if best.seconds is not None:
            return best
        asked = best.runtime
    runtime = "onnx" if asked == "onnx" else "openvino"
    return _timed(source, dtype, placement.rows, runtime)


def _require_onnx(network: PreTrainedModel) -> None:
    """RefusedError for a family that ONNX Runtime does not run exactly here."""
    from foretoken.models.stock.selfcheck import self_check  # late: takes seconds

    self_check(network, _onnx_library().form())


def _onnx_in_memory(network: PreTrainedModel, dtype: str) -> Model:
    return _onnx_library().OnnxConversion(None, dtype, lambda: network).model()


def _openvino_in_memory(network: PreTrainedModel, dtype: str) -> Model:
    way = _way(network, ())
    return _library().Conversion(None, dtype, partial(copy.deepcopy, network)).model(way)


def _onnx_or_openvino(source: Source | PreTrainedModel, dtype: str, placement: Placement) -> Model:
    try:
        return _onnx(source, dtype, placement)
    except RefusedError as error:  # which its structure did not tell
        log.info("not on ONNX Runtime: %s", error)
        return _openvino(source, dtype, placement)


def _onnx(source: Source | PreTrainedModel, dtype: str, placement: Placement) -> OnnxModel:
    if placement.device.type != "cpu":
        raise RefusedError(f"ONNX Runtime runs on the CPU here, not on {placement.device}")
    loaded = isinstance(source, Source)
    conversion = replace(
        _onnx_conversion(source, dtype if loaded else "float32"), taps=placement.taps
    )
    if loaded and is_folder(source.path) and (kept := conversion.kept()) is not None:
        return kept
    _require_onnx(source.empty if loaded else source)
    return conversion.model()


def _onnx_conversion(source: Source | PreTrainedModel, dtype: str) -> OnnxConversion:
    library = _onnx_library()
    if dtype not in library.DTYPES:
        raise RefusedError(f"ONNX Runtime has no {dtype}")
    if not isinstance(source, Source):
        return library.OnnxConversion(None, dtype, partial(copy.deepcopy, source))
    load = partial(source.network, torch.float32, torch.device("cpu"))
    return library.OnnxConversion(
        source, dtype, load, lambda: {"settings": _settings(source.empty)}
    )


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
    if runtime not in TITLES:
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
    if target.runtime == "onnx":
        return replace(_onnx_conversion(source, dtype), some=layers).companion(host)
    return replace(_conversion(source, dtype, target.device), some=layers).companion(host)


def decoder_of_pairs(
    source: Convertible, network: PreTrainedModel, target: Model, dtype: str | None
) -> Model:
    """Return a decoder of pairs where its target runs, on OpenVINO by itself in eight bits. Raises
    RefusedError for a precision that is not to be had there."""
    kind = _draft_kind(target, dtype)
    if target.runtime == "onnx" and kind in _onnx_library().DTYPES:
        conversion = _onnx_library().OnnxConversion(source, kind, partial(copy.deepcopy, network))
        try:
            return conversion.model()
        except RefusedError as error:  # a decoder of another kind
            log.info("the draft runs on OpenVINO beside its target: %s", error)
    if target.runtime in TITLES:
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
    if target.runtime in TITLES:
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
    if target.runtime in TITLES:
        kind = asked or "int8"
        if target.runtime == "openvino" or kind not in _onnx_library().DTYPES:
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


def onnx_runtime() -> str:
    """Return the precisions that ONNX Runtime has here, or why it cannot be used."""
    try:
        return f"runs, {', '.join(_onnx_library().DTYPES)}"
    except RefusedError as error:
        return str(error)


def openvino() -> str:
    """Return the arithmetic that OpenVINO has here, or why it cannot be used."""
    try:
        return _library().abilities()
    except RefusedError as error:
        return str(error)


def _onnx_library():  # not annotated: as below
    """Import the module that runs models on ONNX Runtime; RefusedError where it is not installed or
    does not load."""
    try:
        from foretoken.models.onnx import conversion
    except Exception as error:  # also a library that this machine cannot load
        raise RefusedError(f"ONNX Runtime cannot be used: {one_line(error)}") from None
    return conversion


def _library():  # not annotated: the type checker infers the module itself, as no name can
    """Import the module that runs models on OpenVINO; RefusedError where it is not installed or
    does not load."""
    try:
        from foretoken.models.openvino import conversion
    except Exception as error:  # also a library that this machine cannot load
        raise RefusedError(f"OpenVINO cannot be used: {one_line(error)}") from None
    return conversion
