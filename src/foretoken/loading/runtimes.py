"""Runtimes: each model gets the first one that serves it exactly.

On a CPU the native decoder, on CUDA graphs of fixed shapes, for models whose family passes the
self-check in that form. Else transformers on torch. Does not depend on prompts, drafts or
tokenizers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from foretoken.errors import ForetokenError, RefusedError, base_name, kind_of
from foretoken.generation_config import read_settings
from foretoken.loading.hub import is_folder
from foretoken.loading.options import ROUNDED
from foretoken.loading.sources import Source
from foretoken.models.base import Model
from foretoken.models.store import key_of
from foretoken.storage.cache import remember, remembered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.drafters.dflash import BlockModel
    from foretoken.models.native.conversion import NativeConversion
    from foretoken.models.native.model import NativeModel
    from foretoken.models.stock.dflash import BlocksDraft
    from foretoken.models.stock.selfcheck import Form
    from foretoken.models.store import Convertible

log = logging.getLogger(__name__)

REFUSALS = "not-native.json"  # of folders


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
    taps: tuple[int, ...] = ()  # where it is to show its states


class Early:
    """A kept conversion of a folder, read by a thread while a tokenizer is read by Python."""

    def __init__(self, source: Source, placement: Placement) -> None:
        self.placement = placement
        thread = ThreadPoolExecutor(1)
        self._model = thread.submit(_kept, source, placement.dtype, placement)
        thread.shutdown(wait=False)

    def model(self) -> Model | None:
        """Return the model; None if it has no conversion, or a damaged one."""
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
        if placement.runtime not in ("auto", "transformers") or placement.dtype in ROUNDED:
            problem = f"{source.name} has an adapter of its own, which is merged on torch alone"
            raise RefusedError(f"{problem}; leave runtime, int8 and int4 out")
        placement = replace(placement, runtime="transformers")
    if not loaded and placement.runtime == "auto" and device.type != "cuda":
        model, remarks = _torch(source, placement.dtype, device, placement.taps)
        return Placed(model, "; ".join(["it was in memory", *remarks]))
    dtype = dtype_of(source, placement)
    if early is not None and early.placement == placement and (model := early.model()) is not None:
        return Placed(model, "it passed the self-check")
    refusals = list[str]()
    order = _order(dtype, placement, device)
    for runtime in order:
        if runtime == "transformers":
            break
        try:
            model = _on(runtime, source, dtype, placement, device)
            return Placed(model, "; ".join([*refusals, "it passed the self-check"]))
        except RefusedError as error:
            refusals.append(str(error))
            if runtime == order[-1]:
                problem = "; ".join(refusals)
                raise RefusedError(f"{problem}{_remedy(placement, dtype)}") from error.__cause__
            name = base_name(source.name if loaded else type(source).__name__)
            title = "the native decoder" if runtime == "native" else runtime
            log.info("%s does not run on %s: %s", name, title, error)
    if not refusals:
        refusals = ["its own adapter is merged there" if own else "it was asked for"]
    model, packed = _torch(source, dtype, placement.device, placement.taps)
    return Placed(model, "; ".join([*refusals, *packed]))


def _order(dtype: str, placement: Placement, device: torch.device) -> list[str]:
    """Return the runtimes to try, in order. RefusedError for a precision that the one asked for
    has not."""
    if placement.runtime != "auto":
        _require_rounding(dtype, placement.runtime)
        return [placement.runtime]
    if dtype in ROUNDED:
        return ["native"]
    return ["graphs" if device.type == "cuda" else "native", "transformers"]


def _on(
    runtime: str,
    source: Source | PreTrainedModel,
    dtype: str,
    placement: Placement,
    device: torch.device,
) -> Model:
    """Return the model on a runtime other than torch by itself. RefusedError where it is not exact
    there."""
    if runtime == "native":
        return _native(source, dtype, placement)
    if placement.taps:
        raise RefusedError(f"{runtime} shows no states between layers, which the draft reads")
    return _graphs(source, dtype, device, runtime == "compiled")


def _require_rounding(dtype: str, runtime: str) -> None:
    """RefusedError for a precision that the runtime has not."""
    if dtype in ROUNDED and runtime != "native":
        raise RefusedError(
            f"dtype={dtype!r} runs on the native decoder only, not on {runtime}; leave runtime at "
            "'auto'"
        )


def _remedy(placement: Placement, dtype: str) -> str:
    """Say what to give instead where a model cannot run as it was asked to."""
    changes = ["give dtype='float32'"] if dtype in ROUNDED else []
    if placement.runtime != "auto":
        changes.insert(0, f"leave runtime at 'auto' (not {placement.runtime!r})")
    return "; " + ", ".join(changes)


def kept_facts(source: Source, placement: Placement) -> dict[str, Any] | None:
    """Read the facts that are kept with a folder's conversion; for a hub model's, its config would
    have to be read."""
    dtype = placement.dtype
    if placement.runtime not in ("auto", "native") or dtype == "auto" or source.trust:
        return None
    if not is_folder(source.path):
        return None
    with suppress(RefusedError):
        return _native_library().facts(source, dtype)
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
    from foretoken.models.stock.check_results import self_check
    from foretoken.models.stock.media import writer  # late: takes seconds
    from foretoken.models.stock.rowwise import BY_ROW
    from foretoken.models.stock.selfcheck import ON_TORCH, UnbuiltError

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
    from foretoken.models.stock.check_results import self_check

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


def _kept(source: Source, dtype: str, placement: Placement) -> Model | None:
    """Return a folder's model from its kept conversion; None if none is kept, or if the runtime
    that serves it is not known without its configuration."""
    if not is_folder(source.path) or placement.device.type != "cpu":
        return None
    if "native" in _order(dtype, placement, placement.device):
        with suppress(RefusedError):
            return replace(_native_conversion(source, dtype), taps=placement.taps).kept()
    return None


def _native(source: Source | PreTrainedModel, dtype: str, placement: Placement) -> NativeModel:
    if placement.device.type != "cpu":
        raise RefusedError(f"the native decoder runs on the CPU, not on {placement.device}")
    loaded = isinstance(source, Source)
    conversion = _native_conversion(source, dtype if loaded else "float32")
    conversion = replace(conversion, taps=placement.taps)
    folder = source if loaded and is_folder(source.path) else None
    if folder and (kept := conversion.kept()) is not None:
        return kept
    if folder and (known := _refusal(folder, dtype)) is not None:
        raise RefusedError(known)
    from foretoken.models.stock.check_results import self_check
    from foretoken.models.stock.selfcheck import Unfinished  # late: takes seconds

    try:
        self_check(source.empty if loaded else source, _native_library().form())
        return conversion.model()
    except Unfinished:
        raise
    except RefusedError as error:
        if folder and not placement.taps and error.__cause__ is None:  # else a draft may be why
            remember(REFUSALS, _refusal_key(folder, dtype), str(error))
        raise


def _refusal(source: Source, dtype: str) -> str | None:
    """Return why a folder does not run on the native decoder, as was found before: its
    configuration need not be read for that again."""
    return remembered(REFUSALS).get(_refusal_key(source, dtype))


def _refusal_key(source: Source, dtype: str) -> str:
    return key_of(source, "not native", _native_library().FORMAT, dtype)


def _native_conversion(source: Source | PreTrainedModel, dtype: str) -> NativeConversion:
    library = _native_library()
    if dtype not in library.DTYPES:
        raise RefusedError(f"the native decoder has no {dtype}")
    if not isinstance(source, Source):
        return library.NativeConversion(None, dtype, partial(copy.deepcopy, source))
    load = partial(source.network, torch.float32, torch.device("cpu"))
    return library.NativeConversion(
        source, dtype, load, lambda: {"settings": _settings(source.empty)}
    )


def require_shared(runtime: str) -> None:
    """RefusedError for a runtime whose models cannot share their rows with a copy."""
    if runtime != "native":
        raise RefusedError(
            f"draft='self' reads the target's own keys and values, which {runtime} does not share; "
            "give runtime='native', or draft='lookup'"
        )


def companion(
    source: Source | PreTrainedModel, target: Model, dtype: str, layers: tuple[int, ...] = ()
) -> Model:
    """Return a copy of `target`, made from the same source with weights in `dtype`, and with these
    layers alone where there are some, that drafts over the target's own rows. Raises RefusedError
    where the target shares no rows."""
    require_shared(target.runtime)
    host: Any = target  # one of the native decoder's
    return replace(_native_conversion(source, dtype), some=layers).companion(host)


def decoder_of_pairs(
    source: Convertible, network: PreTrainedModel, target: Model, dtype: str | None
) -> Model:
    """Return a decoder of pairs: with a native target on the native decoder, by itself in eight
    bits, where it is built as that expects, else on torch. Raises RefusedError for a precision that
    is not to be had there."""
    asked = None if dtype == "auto" else dtype
    if target.runtime == "native":
        try:
            load = partial(copy.deepcopy, network)
            return _native_library().NativeConversion(source, asked or "int8", load).model()
        except RefusedError as refusal:
            log.info("%s", refusal)
    from foretoken.models.stock.pairs import PairsNetwork, StockPairs  # late: takes seconds

    assert isinstance(network, PairsNetwork)
    ready: Any = network
    return StockPairs(ready.to(target.device, _on_torch(target, asked)))


def model_of_blocks(
    read: Callable[[], BlocksDraft], target: Model, dtype: str | None
) -> BlockModel:
    """Return the model of a draft by blocks on torch, where its target is."""
    from foretoken.models.stock.dflash import StockBlocks  # late: as above

    draft = read()
    draft.network.to(target.device, _on_torch(target, None if dtype == "auto" else dtype))
    return StockBlocks(draft)


def _on_torch(target: Model, asked: str | None) -> torch.dtype:
    """Return the precision of a draft over a target's states on torch, by itself the target's.
    Raises RefusedError for one that torch has not."""
    if asked in ROUNDED:
        raise RefusedError(
            f"draft_dtype={asked!r} runs on the native decoder only, and this draft does not; "
            "leave it out"
        )
    own = "float32" if target.computed in ROUNDED else target.computed
    return getattr(torch, asked or own)


def _settings(network: PreTrainedModel) -> dict[str, Any] | None:
    """Return the generation config, to be kept with a conversion; None where no target may have
    it."""
    try:
        return read_settings(network).to_dict()
    except ForetokenError:
        return None


def native() -> str:
    """Return what the native decoder runs on here, or why it cannot be used."""
    try:
        return _native_library().abilities()
    except ForetokenError as error:
        return str(error)


def _native_library():  # not annotated: as below
    """Import the module that runs models natively; RefusedError if it was not compiled."""
    from foretoken.kernels import library
    from foretoken.models.native import conversion

    library.library()
    return conversion
