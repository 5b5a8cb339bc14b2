"""Models on OpenVINO: which form serves a model, its conversion, made once and kept on disk, and
its compilation for this machine.

It does not know names, folders or tokenizers, nor how a runtime is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import openvino as ov
import torch

from foretoken.errors import RefusedError, kind_of, one_line
from foretoken.models import store
from foretoken.models.base import Model
from foretoken.models.openvino.blocks import kept
from foretoken.models.openvino.explicit import ExplicitModel
from foretoken.models.openvino.media import MediaModel
from foretoken.models.openvino.paged import PagedModel, paged
from foretoken.models.openvino.tracing import Exported, core
from foretoken.models.openvino.weights import (
    eight_bits,
    four_bits,
    halved,
    joined,
    widened_in_products,
)
from foretoken.models.store import Convertible

# Raised where the same weights become another graph: conversions kept before are made again
CACHE_FORMAT = 7
ROUNDED = {"int8": eight_bits, "int4": four_bits}
DTYPES = ("float32", "bfloat16", *ROUNDED)
CACHED = {"int8": "u8"}  # dtypes of keys and values beside that of the arithmetic

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.models.stock.selfcheck import Form

Result = TypeVar("Result")


def compiled(exported: Exported, dtype: str = "float32", cache: str | None = None) -> Model:
    """The model, ready to run on this machine's CPU. cache: the dtype of keys and values, by itself
    that of the arithmetic; RefusedError where it is given and there are no pages."""
    hears = bool(exported.facts.get("hears"))
    graphs = {name: x for name, x in exported.graphs.items() if not (hears and name == "encoder")}
    ready, facts = readied(Exported(graphs, exported.facts), dtype, cache)
    if facts["form"] == "paged":
        return PagedModel(ready["decoder"], facts, ready.get("join"))
    if not hears:
        parts = ready.get("cross"), ready.get("encoder")
        return ExplicitModel(ready["decoder"], facts, *parts)
    kind = "float32" if dtype in ROUNDED else dtype
    encoder = partial(_ready_graph, exported.graphs["encoder"], settings(kind))
    return MediaModel(ready["decoder"], facts, ready["cross"], encoder)


def readied(
    exported: Exported, dtype: str, cache: str | None = None
) -> tuple[dict[str, ov.CompiledModel], dict[str, Any]]:
    """The graphs and facts of `compiled`."""
    facts = exported.facts
    if cache is not None and facts["form"] != "paged":
        raise RefusedError(
            f"kv_dtype={cache!r} needs a cache in pages, which this model has not; leave it out"
        )
    ready = _compiled(exported, dtype, cache and CACHED[cache])
    facts = facts | {"computed": dtype if dtype in ROUNDED else arithmetic(ready["decoder"])}
    if cache is not None and "identity" in facts:
        facts["identity"] += f" with keys and values in {cache}"
    return ready, facts


def _compiled(
    exported: Exported, dtype: str, cache: str | None = None, kind: str | None = None
) -> dict[str, ov.CompiledModel]:
    """cache: the element type of keys and values in pages, by itself that of the arithmetic; kind:
    that of the arithmetic, by itself what `settings` says."""
    options, graphs = settings(dtype), dict(exported.graphs)
    kind = "f32" if exported.facts.get("states") else kind  # errors of states add up
    options |= {"INFERENCE_PRECISION_HINT": kind} if kind else {}
    if exported.facts["form"] == "paged":
        graphs["decoder"] = paged(graphs["decoder"], exported.facts["windows"])
        options["KV_CACHE_PRECISION"] = cache or options["INFERENCE_PRECISION_HINT"]
        # by channel the tokens of a page would share scales, draft tokens that are rejected too
        options |= {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"} if cache == CACHED["int8"] else {}
    return {name: _ready_graph(graph, options) for name, graph in graphs.items()}


def _ready_graph(graph: ov.Model, options: dict[str, Any]) -> ov.CompiledModel:
    return core().compile_model(widened_in_products(graph), "CPU", options)


def arithmetic(graph: ov.CompiledModel) -> str:
    """Return the precision that a compiled graph computes in, which may differ from the one asked
    for."""
    kind = graph.get_property("INFERENCE_PRECISION_HINT").to_string()
    return {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[kind]


def abilities() -> str:
    """The arithmetic of this machine's CPU, for `foretoken doctor`."""
    if settings("bfloat16")["INFERENCE_PRECISION_HINT"] == "bf16":
        return "runs, float32 and bfloat16"
    return "runs, float32; bfloat16 weights are computed with in float32 on this CPU"


def settings(dtype: str) -> dict[str, Any]:
    """Return the settings of a compilation; for bfloat16 in float32 where the CPU has no bfloat16
    arithmetic."""
    has_bfloat16 = "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    kind = "bf16" if dtype == "bfloat16" and has_bfloat16 else "f32"
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": kind,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if dtype in ROUNDED else "0",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        # Pinned, the first threads of every process are on the same processors
        "ENABLE_CPU_PINNING": torch.get_num_threads() >= (os.cpu_count() or 1),
    }


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a model on OpenVINO."""

    name: str

    def export(self, network: Any, taps: tuple[int, ...] = ()) -> Exported:
        if self is PAGED:  # late, as they import what builds networks, which takes seconds
            from foretoken.models.openvino.export_paged import export_paged

            exported = export_paged(network, taps)
        elif self is BLOCKS:
            from foretoken.models.openvino.export_dflash import export_dflash

            exported = export_dflash(network)
        else:
            from foretoken.models.openvino.export_explicit import export_explicit

            exported = export_explicit(network)
        graphs = {name: joined(graph) for name, graph in exported.graphs.items()}
        return Exported(graphs, exported.facts)

    @property
    def form(self) -> Form:
        """For the self-check."""
        from foretoken.models.stock.cache import admit  # late: as below
        from foretoken.models.stock.selfcheck import Form

        paged = self is PAGED
        return Form(
            f"OpenVINO, {self.name}", self.run, switches=paged, admit=partial(admit, states=paged)
        )

    def run(self, network: PreTrainedModel) -> Model:
        """A model in memory, in float32; the graphs share its weights."""
        return compiled(self.export(network))


PAGED = Way("paged attention")
EXPLICIT = Way("explicit cache")
BLOCKS = Way("blocks of masks")  # of a draft, which is no model by itself
WAYS = (PAGED, EXPLICIT)  # the faster first


def ways(network: PreTrainedModel) -> list[Way]:
    """The ways that may serve a model, the faster first."""
    return [EXPLICIT] if network.config.is_encoder_decoder else [PAGED, EXPLICIT]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A model to convert: where it is, in which precision, and how it is loaded.

    source: None for a model in memory, of which nothing is kept. more: facts to keep beside the
    export's. some: layers, where it is not to have all; taps: where it is to show its states, which
    only the paged form can; ends: another model, whose first and last layer it has.
    """

    source: Convertible | None
    dtype: str
    network: Callable[[], Any]
    more: Callable[[], dict[str, Any]] = dict
    some: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()
    ends: Convertible | None = None

    @property
    def name(self) -> str:
        return "the model in memory" if self.source is None else self.source.name

    def model(self, way: Way, cache: str | None = None) -> Model:
        """Return the model on OpenVINO. It is loaded only if no conversion of the same files, code
        and versions is kept on disk."""
        return self._ready(compiled, self.exported(way), cache)

    def graphs(self, way: Way) -> tuple[dict[str, ov.CompiledModel], dict[str, Any]]:
        """Return what `model` runs, and the facts."""
        return self._ready(readied, self.exported(way))

    def kept(self, cache: str | None = None) -> Model | None:
        """Return the model from its kept conversion; None where none is kept."""
        assert self.source is not None
        for way in [PAGED] if self.taps else WAYS:
            if exported := _found(self._key(self.source, way)):
                return self._ready(compiled, exported, cache)
        return None

    def _ready(
        self, make: Callable[..., Result], exported: Exported, cache: str | None = None
    ) -> Result:
        try:
            return make(exported, self.dtype, cache)
        except RuntimeError as error:  # the library's
            raise RefusedError(f"{self.name} cannot be compiled: {one_line(error)}") from None

    def companion(self, target: PagedModel | ExplicitModel) -> Model:
        """Return a copy of `target` in this precision, or with `some` of its layers alone, over its
        rows. Raises RefusedError where it cannot be made, or would keep its cache in another form.
        """
        if self.some and isinstance(target, PagedModel) and target.sizes:
            raise RefusedError(
                f"{self.name} keeps states, of which a copy with some of its layers would need its "
                "own; give draft='self:int8', 'self:int4' or 'lookup'"
            )
        exported = self.exported(PAGED if isinstance(target, PagedModel) else EXPLICIT)
        decoder = Exported({"decoder": exported.graphs["decoder"]}, exported.facts)
        # over keys and values in bfloat16 there is only that arithmetic
        kind = "bf16" if "bf16" in target.kind or target.computed == "bfloat16" else "f32"
        try:
            graph = _compiled(decoder, self.dtype, target.kind, kind)["decoder"]
        except RuntimeError as error:  # the library's
            raise RefusedError(
                f"the copy of the target in {self.dtype} cannot be compiled: {one_line(error)}; "
                "give draft='lookup', or a model"
            ) from None
        return target.companion(graph, exported.facts | {"computed": self.dtype}, self.some)

    def exported(self, way: Way) -> Exported:
        """Return the graphs as they are kept, or make and keep them now."""
        if self.source is None:
            return self._made(way)
        key = self._key(self.source, way)
        return _found(key) or self._kept(self.source, way, key)

    def _key(self, source: Convertible, way: Way) -> str:
        choices = list(map(str, self.some))
        choices += [f"shows {','.join(map(str, self.taps))}"] if self.taps else []
        choices += [name_of(self.ends, way, self.dtype)] if self.ends else []
        return name_of(source, way, self.dtype, *choices)

    def _kept(self, source: Convertible, way: Way, key: str) -> Exported:
        states = f"with states {','.join(map(str, self.taps))}"
        form = " ".join([self.dtype, *map(str, self.some), *([states] if self.taps else [])])
        made: list[Exported] = []

        def write(place: Path) -> dict[str, Any]:
            made.append(self._made(way))
            made[0].facts.update(self.more(), identity=key)  # costs are remembered by it
            return _written(made[0], place)

        title = store.title_of(source) + (f" for {self.ends.name}" if self.ends else "")
        stored = store.find_or_make(source, key, "OpenVINO", form, write, title) and _found(key)
        # from disk, so that torch's weights can be freed
        return stored or (made[0] if made else self._made(way))

    def _made(self, way: Way) -> Exported:
        loaded = self.network().float()
        try:
            if self.some:
                from foretoken.models.openvino.thinned import thinned  # late: takes seconds

                loaded = thinned(loaded, self.some)
            exported = way.export(loaded, self.taps)
            whole: dict[str, ov.Model] = {}
            if exported.facts.get("hears"):  # it computes much and reads little: no time is saved
                whole["encoder"] = halved(exported.graphs.pop("encoder"))
            smaller = ROUNDED.get(self.dtype, halved)
            bits = 4 if self.dtype == "int4" else 8  # blocks of more are rounded
            # offsets take a product of their own, so that eight bits by output are faster
            offsets = self.dtype != "int8"
            graphs = {
                name: smaller(kept(graph, bits, offsets=offsets))
                for name, graph in exported.graphs.items()
            }
            return Exported(graphs | whole, exported.facts)
        except (RefusedError, MemoryError):
            raise
        except Exception as error:  # a tracer raises anything
            problem = f"{self.name} cannot be converted: its code raised {kind_of(error)}"
            raise RefusedError(problem) from error


def _written(exported: Exported, place: Path) -> dict[str, Any]:
    for name, graph in exported.graphs.items():
        ov.save_model(graph, place / f"{name}.xml", compress_to_fp16=False)
    return {**exported.facts, "graphs": list(exported.graphs)}


def _found(key: str) -> Exported | None:
    """The conversion kept under `key`; its weights are read from disk as they are needed."""
    found = store.find(key)
    if found is None:
        return None
    try:
        names = found.facts["graphs"]
        graphs = {name: core().read_model(found.place / f"{name}.xml") for name in names}
    except (OSError, RuntimeError, KeyError):  # no memory, too many open files: it may be whole
        return None
    return Exported(graphs, found.facts)


def facts(source: Convertible, dtype: str) -> dict[str, Any] | None:
    """The facts of a kept conversion, without its graphs; None where none is kept.

    Its model has passed the self-check, with the same code, config and versions.
    """
    stored = (store.facts(name_of(source, way, dtype)) for way in WAYS)
    return next((facts for facts in stored if facts is not None), None)


def name_of(source: Convertible, way: Way, dtype: str, *choices: str) -> str:
    """The key under which a conversion is kept."""
    return store.key_of(source, CACHE_FORMAT, way.name, dtype, *choices)
