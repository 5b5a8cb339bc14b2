"""Decoders for ONNX Runtime: their graphs, made once and kept on disk, and their loading.

It does not know names, folders or tokenizers, nor how a runtime is chosen.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import RefusedError, kind_of, one_line
from foretoken.models import store
from foretoken.models.companion import Companion, require_alike
from foretoken.models.onnx.model import OnnxModel
from foretoken.models.onnx.passes import Passes
from foretoken.models.store import Convertible, KeptConversion

# Raised where the same weights become another graph or other facts: kept ones are made again
GRAPH_FORMAT = 6
DTYPES = ("float32", "int8", "int4")

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.models.stock.selfcheck import Form

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OnnxConversion:
    """A decoder to convert: where it is, in which precision, and how it is loaded.

    source: None for a model in memory, of which nothing is kept. more: facts to keep beside the
    export's. some: layers, where it is not to have all; taps: where it is to show its states.
    """

    source: Convertible | None
    dtype: str
    network: Callable[[], PreTrainedModel]
    more: Callable[[], dict[str, Any]] = dict
    some: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "the model in memory" if self.source is None else self.source.name

    def model(self) -> OnnxModel:
        """Return the model. It is loaded only if no conversion of the same files, code and versions
        is kept on disk."""
        found = self._kept_or_made()
        return OnnxModel(*(self._temporary() if found is None else self._read(found)))

    def kept(self) -> OnnxModel | None:
        """Return the model from its kept conversion; None where none is kept."""
        assert self.source is not None
        found = store.find(self._key(self.source))
        return found and OnnxModel(*self._read(found))

    def companion(self, target: OnnxModel) -> Companion[Passes]:
        """Return a copy of `target` in this precision, or with `some` of its layers alone, over its
        rows. Raises RefusedError where it would keep its cache in another form."""
        found = self._kept_or_made()
        passes, facts = self._temporary() if found is None else self._read(found)
        passes.layers = list(self.some or passes.layers)
        require_alike(facts["keys"], [list(target.shapes[layer]) for layer in passes.layers])
        return Companion(target, passes, facts)

    def _read(self, found: KeptConversion) -> tuple[Passes, dict[str, Any]]:
        try:
            return Passes(*found), found.facts
        except RuntimeError as error:  # the library's
            raise RefusedError(f"{self.name} cannot be loaded: {one_line(error)}") from None

    def _kept_or_made(self) -> KeptConversion | None:
        """Return the graph as it is kept, or make and keep it now; None where that cannot be."""
        if self.source is None:
            return None
        key = self._key(self.source)
        return store.find(key) or self._stored(self.source, key)

    def _key(self, source: Convertible) -> str:
        choices = [f"layer {i}" for i in self.some]
        choices += [f"shows {','.join(map(str, self.taps))}"] if self.taps else []
        return store.key_of(source, GRAPH_FORMAT, "onnx", self.dtype, *choices)

    def _stored(self, source: Convertible, key: str) -> KeptConversion | None:
        def write(place: Path) -> dict[str, Any]:
            return self._written(place) | self.more() | {"identity": key}

        states = [f"with states {','.join(map(str, self.taps))}"] if self.taps else []
        form = " ".join([f"{self.dtype} (onnx)", *map(str, self.some), *states])
        with store.told(source, form, "ONNX Runtime"):
            kept = store.keep(key, write, store.title_of(source), form)
        if not kept:
            where = store.folder() or "a cache folder"
            log.warning("it could not be kept in %s and is made again each time", where)
        return store.find(key) if kept else None

    def _temporary(self) -> tuple[Passes, dict[str, Any]]:
        """The same in files that end with it."""
        place = Path(tempfile.mkdtemp(prefix="foretoken-"))
        try:
            passes, facts = self._read(KeptConversion(place, self._written(place)))
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        weakref.finalize(passes, shutil.rmtree, place, ignore_errors=True)
        return passes, facts

    def _written(self, place: Path) -> dict[str, Any]:
        from foretoken.models.onnx.export import export  # late: takes seconds

        network = self.network().float().eval()
        try:
            return export(network, place, self.dtype, self.taps, self.some)
        except (RefusedError, MemoryError, OSError):
            raise
        except Exception as error:  # a family's own code raises anything
            problem = f"{self.name} cannot be converted: its code raised {kind_of(error)}"
            raise RefusedError(problem) from error


def facts(source: Convertible, dtype: str) -> dict[str, Any] | None:
    """The facts of a kept conversion, without its graph; None where none is kept."""
    return store.facts(store.key_of(source, GRAPH_FORMAT, "onnx", dtype))


def form() -> Form:
    """For the self-check: a model in memory, in float32."""
    from foretoken.models.stock.selfcheck import Form  # late: as above

    return Form(
        "ONNX Runtime", lambda network: OnnxConversion(None, "float32", lambda: network).model()
    )
