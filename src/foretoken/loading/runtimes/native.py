"""The backend native: the native decoder on CPUs, in float32 to int4. Conversions and refusals are
cached, so that the next process neither loads the model's config nor repeats the self-check.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from foretoken.errors import ForetokenError, RefusedError
from foretoken.generation_config import read_settings
from foretoken.kernels import library
from foretoken.models.base import Model
from foretoken.models.native import conversion
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.store import compute_key
from foretoken.storage.cache import load_cached_values, save_cached_value

if TYPE_CHECKING:
    from foretoken.loading.facts import ModelFacts, Placement
    from foretoken.loading.sources import ModelSource

REFUSALS_FILE = "not-native.json"  # digest of a folder -> why the native decoder cannot run it


def find_refusal(model: ModelFacts, placement: Placement) -> str | None:
    """Return why the native decoder cannot run a model; None if the model's family passed the
    self-check, now or at an earlier conversion."""
    if placement.device.type != "cpu":
        return f"the native decoder runs on the CPU, not on {placement.device}"
    try:
        dtype = _make_conversion(model, _choose_dtype(model, placement)).dtype
        if folder := model.folder:
            if conversion.load_facts(folder, dtype) is not None:
                return None
            if known := load_cached_values(REFUSALS_FILE).get(_compute_refusal_key(folder, dtype)):
                return known
        # imported late: takes seconds, which a cached conversion does not need
        from foretoken.models.stock.check_results import run_self_check

        with _save_refusals(model, placement):
            run_self_check(model.structure, conversion.make_form())
    except RefusedError as error:
        return str(error)
    return None


def build(model: ModelFacts, placement: Placement) -> tuple[Model, list[str]]:
    """Return the model, loaded from its cached conversion, and remarks on how it runs. If no
    conversion is cached, one is made first."""
    with _save_refusals(model, placement):
        converted = _make_conversion(model, _choose_dtype(model, placement))
        converted = replace(converted, taps=placement.taps, kv_dtype=placement.kv_dtype)
        return converted.load_model(), ["it passed the self-check"]


@contextmanager
def _save_refusals(model: ModelFacts, placement: Placement) -> Iterator[None]:
    """Store the message of a RefusedError raised in this context, so that the next process refuses
    the folder at once. The message is not stored if the cause may be a draft's taps or an error in
    the family's code."""
    try:
        yield
    except RefusedError as error:
        if model.folder and not placement.taps and error.__cause__ is None:
            save_cached_value(
                REFUSALS_FILE, _compute_refusal_key(model.folder, placement.dtype), str(error)
            )
        raise


def _compute_refusal_key(folder: ModelSource, dtype: str) -> str:
    return compute_key(folder, "not native", conversion.CONVERSION_FORMAT, dtype)


def read_cached_facts(model: ModelFacts, placement: Placement) -> dict[str, Any] | None:
    """Return the model's description stored with its cached conversion; None if no conversion is
    cached, if the placement needs another backend, or if the model's config would have to be loaded
    first (a model on the hub, dtype auto or custom code)."""
    folder, dtype = model.folder, placement.dtype
    if placement.runtime not in ("auto", "native") or placement.device.type != "cpu":
        return None
    if folder is None or dtype == "auto" or folder.trust:
        return None
    with suppress(RefusedError):
        require_library()
        return conversion.load_facts(folder, dtype)
    return None


def start_loading(model: ModelFacts, placement: Placement) -> Future[Model | None]:
    """Start a thread that loads a folder's cached conversion while the caller loads the tokenizer.
    The future's result is None if the conversion is damaged."""

    def load() -> Model | None:
        with suppress(RefusedError):
            converted = _make_conversion(model, placement.dtype)
            return replace(converted, kv_dtype=placement.kv_dtype).load_cached_model()
        return None

    thread = ThreadPoolExecutor(1)
    future = thread.submit(load)
    thread.shutdown(wait=False)
    return future


def make_companion(
    model: ModelFacts, target: Model, dtype: str, layers: tuple[int, ...] = ()
) -> Model:
    """Return a copy of `target` that shares its KV cache. The copy has weights in `dtype` and, if
    `layers` is not empty, only these layers."""
    host: Any = target  # on the native decoder
    return replace(_make_conversion(model, dtype), layers=layers).build_target_copy(host)


def describe_abilities() -> str:
    """Return the instruction set and dtypes of the native decoder on this machine, or why the
    decoder cannot run."""
    try:
        require_library()
        return f"runs on {library.choose_instruction_set()}, {', '.join(conversion.NATIVE_DTYPES)}"
    except ForetokenError as error:
        return str(error)


def require_library() -> None:
    """Raise RefusedError if the native decoder was not compiled."""
    library.load_library()


def _choose_dtype(model: ModelFacts, placement: Placement) -> str:
    return "float32" if model.source is None else placement.dtype  # in memory: copied in float32


def _make_conversion(model: ModelFacts, dtype: str) -> NativeConversion:
    """Return the conversion of a model; a model in memory is copied. Raises RefusedError for a
    precision that the native decoder lacks, or if the decoder was not compiled."""
    require_library()
    if model.source is None:
        return NativeConversion(None, dtype, partial(copy.deepcopy, model.structure))
    load = partial(model.load_network, "float32", torch.device("cpu"))
    return NativeConversion(model.source, dtype, load, partial(_read_facts_to_store, model))


def _read_facts_to_store(model: ModelFacts) -> dict[str, Any]:
    """Return the facts to store with a conversion: as "settings" the model's generation config, or
    None if the model cannot be a target."""
    try:
        settings = read_settings(model.structure).to_dict()
    except ForetokenError:
        settings = None
    return {"settings": settings}
