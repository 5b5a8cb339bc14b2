"""Packs models for the native kernels, stores the conversions on disk, and loads them.

Does not depend on model names, folders or tokenizers, nor on the choice of a backend.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foretoken.errors import RefusedError, log_error_kind
from foretoken.models import store
from foretoken.models.native import description
from foretoken.models.native.encoder_decoder import NativeEncoderDecoder, NativeMediaDecoder
from foretoken.models.native.media import NativeMediaModel, describe_media, import_stock_media
from foretoken.models.native.model import (
    NativeHiddenStateDraft,
    NativeModel,
    NativeMtpStack,
    NativeTargetCopy,
)
from foretoken.models.native.passes import NativePasses
from foretoken.models.stock.sizes import (
    get_context_limit,
    get_encoder_limit,
    get_encoder_vocab_size,
    get_max_positions,
    get_rope_switch_length,
    takes_ids,
)
from foretoken.models.store import ConversionSource, StoredConversion

# Raise this number if the same weights get other panels or another description, or if other models
# are refused: stored conversions are then made again
CONVERSION_FORMAT = 9
NATIVE_DTYPES = ("float32", "bfloat16", "int8", "int4")
LAYER_PRODUCTS = ("qkv", "out", "gate", "up", "down")  # weights of a layer that are quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.models.native.block_model import NativeBlockModel
    from foretoken.models.stock.dflash import BlocksDraft
    from foretoken.models.stock.selfcheck import CheckedBackend


class SharedHead(NamedTuple):
    """The first `outputs` outputs of the head of `target`."""

    target: NativePasses
    outputs: int


@dataclass(frozen=True, slots=True)
class NativeConversion:
    """A model to pack for the native kernels, and the precision to pack it in.

    Attributes:
        source: Files of the model; None for a model in memory, whose conversion is not stored.
        dtype: One of NATIVE_DTYPES.
        network: Loads transformers' model, or an `Assistant`.
        get_extra_facts: Returns entries to store in addition to the description.
        layers: The layers that a copy of the target runs; (): all.
        taps: The layers whose hidden states the model returns, as in `NativePasses`.
        kv_dtype: Precision of keys and values, float32 or float16; "auto": float16 if the weights
            are rounded.
        shared_head: The head of a network that has none of its own.
    """

    source: ConversionSource | None
    dtype: str
    network: Callable[[], PreTrainedModel]
    get_extra_facts: Callable[[], dict[str, Any]] = dict
    layers: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    kv_dtype: str = "auto"
    shared_head: SharedHead | None = None

    def __post_init__(self) -> None:
        if self.dtype not in NATIVE_DTYPES:
            raise RefusedError(f"the native decoder does not support {self.dtype}")

    @property
    def name(self) -> str:
        return "the model in memory" if self.source is None else self.source.name

    def load_model(self) -> NativeModel:
        """Return the native model. Transformers' model is loaded only if no conversion of the same
        files, code and versions is stored."""
        passes, facts = self.load_passes()
        return self._build_model(passes, facts)

    def load_cached_model(self) -> NativeModel | None:
        """Return the model from its stored conversion; None if no conversion is stored."""
        assert self.source is not None
        found = store.find(self._compute_key(self.source))
        return found and self._build_model(*self._open_conversion(found))

    def _build_model(self, passes: NativePasses, facts: dict[str, Any]) -> NativeModel:
        if facts["hears"] is not None:
            return NativeMediaDecoder(passes, facts, self.network)
        if "crossing" in passes.facts:
            return NativeEncoderDecoder(passes, facts)
        if facts["sees"] is not None:
            return NativeMediaModel(passes, facts, self.network, self._build_exact_model)
        if not passes.facts["beside"]:
            return NativeModel(passes, facts)
        stack = len(passes.facts.get("stack", [])) > 1
        return (NativeMtpStack if stack else NativeHiddenStateDraft)(passes, facts)

    def _build_exact_model(self, network: PreTrainedModel) -> NativeModel:
        """Return a float32 version of this model, converted in memory from a loaded transformers
        model."""
        return replace(self, source=None, dtype="float32", network=lambda: network).load_model()

    def build_target_copy(self, target: NativeModel) -> NativeTargetCopy:
        """Return a copy of `target` that drafts over its KV cache, in this conversion's precision
        or with only `layers` of its layers. Raises RefusedError if the copy's keys and values have
        another shape than the target's."""
        passes, facts = self.load_passes()
        layers = passes.list_layer_records(self.layers) if self.layers else passes.layers
        shape = "heads", "kv_heads", "width"
        own, targets = passes.facts["layers"], target.passes.facts["layers"]
        if any(own[i][name] != targets[i][name] for i in layers for name in shape):
            raise RefusedError(
                "the copy cannot draft over the target's KV cache, because its keys and values "
                "have another shape than the target's; give draft='lookup' or a draft model"
            )
        passes.limit_attention(target.passes, layers)
        passes.share_pages(target.passes, layers)
        return NativeTargetCopy(target, passes, facts)

    def load_block_model(self, draft: BlocksDraft) -> NativeBlockModel:
        """Return the native model of a block draft, of which this is the conversion."""
        from foretoken.models.native.block_model import NativeBlockModel  # late: takes seconds

        return NativeBlockModel(draft, *self.load_passes())

    def load_passes(self) -> tuple[NativePasses, dict[str, Any]]:
        """Return the passes of the converted network, and the facts stored with it."""
        found = None
        if self.source is not None:
            key, part = self._compute_key(self.source), self.source.part
            part += " without head" if self.shared_head else ""
            form = f"{self.dtype} (native{part and ', ' + part})"

            def write(place: Path) -> dict[str, Any]:
                return self._convert(place) | self.get_extra_facts() | {"identity": key}

            found = store.find_or_convert(self.source, key, form, write)
        return self._convert_temporarily() if found is None else self._open_conversion(found)

    def _open_conversion(self, found: StoredConversion) -> tuple[NativePasses, dict[str, Any]]:
        facts = found.facts
        if self.kv_dtype != "auto":
            network = _set_halved(facts["network"], int(self.kv_dtype == "float16"))
            facts = {**facts, "network": network}
            if identity := facts.get("identity"):
                facts["identity"] = f"{identity}, keys and values in {self.kv_dtype}"
        passes = NativePasses(found.folder, facts["network"], self.taps)
        if self.shared_head is not None:
            passes.share_head(*self.shared_head)
        return passes, facts

    def _compute_key(self, source: ConversionSource) -> str:
        head = ["without head"] if self.shared_head else []
        return store.compute_key(source, CONVERSION_FORMAT, "native", self.dtype, *head)

    def _convert_temporarily(self) -> tuple[NativePasses, dict[str, Any]]:
        """Convert into a temporary folder, removed when the passes are garbage-collected."""
        place = Path(tempfile.mkdtemp(prefix="foretoken-"))
        try:
            passes, facts = self._open_conversion(StoredConversion(place, self._convert(place)))
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        weakref.finalize(passes, shutil.rmtree, place, ignore_errors=True)
        return passes, facts

    def _convert(self, place: Path) -> dict[str, Any]:
        network = self.network().float().eval()
        config = network.config.get_text_config(decoder=True)
        switch, encodes = get_rope_switch_length(network), network.config.is_encoder_decoder
        sees = config is not network.config and not encodes
        try:
            with torch.inference_mode():
                facts = description.describe(network, place, self.dtype, switch)
        except (RefusedError, MemoryError, OSError):
            raise
        except Exception as error:  # a family's own code raises anything
            problem = f"{self.name} cannot be converted: its code raised {log_error_kind(error)}"
            raise RefusedError(problem) from error
        return {
            "network": facts,
            "vocab_size": facts["vocabulary"],
            "encoder_decoder": encodes,
            "layers": sum(not layer["source"] for layer in facts["layers"]),
            "parameters": sum(weight.numel() for weight in network.parameters()),
            "context": get_context_limit(config),
            "longest": None if switch is None else get_max_positions(config),
            "source_context": get_encoder_limit(network) if encodes else None,
            "source_vocab_size": get_encoder_vocab_size(network) if encodes else None,
            "hears": _describe_media_encoder(network) if encodes else None,
            "sees": describe_media(network) if sees else None,
            "computed": _get_compute_dtype(facts, self.dtype),
        }


def _set_halved(network: dict[str, Any], halved: int) -> dict[str, Any]:
    """Return a network's description with keys and values in float16 (`halved` 1) or float32, also
    in an encoder-decoder's other networks."""
    others = {name: network.get(name) for name in ("encoder_network", "crossing")}
    others = {name: _set_halved(part, halved) for name, part in others.items() if part}
    return {**network, **others, "halved": halved}


def _describe_media_encoder(network: PreTrainedModel) -> dict[str, Any] | None:
    """Return the input and output shapes of an encoder of images or audio, and a key of its
    weights; None for an encoder of token ids. Raises RefusedError if the encoder's inputs have no
    fixed size."""
    if takes_ids(network):
        return None
    media = import_stock_media()
    inputs = media.make_random_inputs(network)
    if inputs is None or len(inputs) != 1:
        raise RefusedError(
            "the native decoder needs encoder inputs of a fixed size, but "
            f"{type(network).__name__} takes {network.main_input_name} of any size"
        )
    ((name, x),) = inputs.items()
    states = media.make_placeholder_states(network, [0])
    key = f"{media.hash_encoder_weights(network)} float32 cpu"
    return {"input": name, "shape": [*x.shape], "states": [*states.shape[1:]], "key": key}


def _get_compute_dtype(network: dict[str, Any], dtype: str) -> str:
    """Return the precision of the matrix products: `dtype`, except int4 for dtype int8 if all of
    their weights come from a checkpoint quantized to four bits, which is stored as it is."""
    products = [layer[name] for layer in network["layers"] for name in LAYER_PRODUCTS]
    kinds = {each["kind"] for each in products if each is not None}
    return "int4" if dtype == "int8" and kinds == {"int4"} else dtype


def load_facts(source: ConversionSource, dtype: str) -> dict[str, Any] | None:
    """Return the description of a stored conversion, without loading its weights; None if no
    conversion is stored."""
    return store.load_facts(store.compute_key(source, CONVERSION_FORMAT, "native", dtype))


def make_form() -> CheckedBackend:
    """Return the backend that the self-check uses to test a model family on the native kernels: it
    converts a network to float32 in memory."""
    from foretoken.models.stock import cache, selfcheck  # late: these take seconds

    return selfcheck.CheckedBackend(
        "the native decoder",
        lambda network: NativeConversion(None, "float32", lambda: network).load_model(),
        switches_rope=True,
        admit=partial(cache.admit, states=True),
    )
