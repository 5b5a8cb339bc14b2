"""The description of a model that is not loaded yet: vocabulary size, number of layers, generation
config. It comes from the cached conversion of the model's files if there is one, else from the
model's structure, which takes seconds to build.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from foretoken.generation_config import GenerationSettings, read_settings
from foretoken.loading.hub import is_folder
from foretoken.loading.runtimes import native
from foretoken.loading.sources import ModelSource
from foretoken.models.stock.sizes import get_output_vocab_size
from foretoken.models.stock.taps import get_decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.models.stock.selfcheck import CheckedBackend


@dataclass(frozen=True, slots=True)
class Placement:
    """The requested backend, device and precision of a model. For the values see `LoadOptions`."""

    dtype: str = "float32"
    device: torch.device = torch.device("cpu")
    runtime: str = "auto"
    taps: tuple[int, ...] = ()  # layers whose inputs the model must expose
    named: bool = False  # whether the user named the backend
    kv_dtype: str = "auto"


class ModelFacts:
    """The description of a model in files or in memory, available before its weights are loaded.

    Attributes:
        source: The files; None for a model in memory, which is used as it is.
        form_on_torch: The backend on torch that passed the self-check, with remarks on it; None if
            no backend on torch has been checked or has passed.
    """

    def __init__(
        self, model: ModelSource | PreTrainedModel, placement: Placement | None = None
    ) -> None:
        self.source = model if isinstance(model, ModelSource) else None
        self.form_on_torch: tuple[CheckedBackend, list[str]] | None = None
        self._model = model
        self._facts = native.read_cached_facts(self, placement) if placement else None

    @property
    def folder(self) -> ModelSource | None:
        """The source, if its files are in a folder or a GGUF file; None for a model on the hub or
        in memory."""
        return self.source if self.source and is_folder(self.source.path) else None

    @property
    def cached(self) -> bool:
        """True if a conversion to the native decoder is cached and fits the placement."""
        return self._facts is not None

    @property
    def name(self) -> str:
        return self.source.name if self.source else type(self._model).__name__

    @property
    def structure(self) -> PreTrainedModel:
        """The transformers network. If the model is in files, its weights are missing (on the
        device "meta")."""
        return self._model.structure if isinstance(self._model, ModelSource) else self._model

    def load_network(self, dtype: str, device: torch.device) -> PreTrainedModel:
        """Return the network with its weights. A network in memory is returned unchanged. Raises
        the errors of `ModelSource.load_network`."""
        if isinstance(self._model, ModelSource):
            return self._model.load_network(getattr(torch, dtype), device)
        return self._model

    def resolve_dtype(self, requested: str) -> str:
        """Return the requested dtype. For "auto" and a model in files, return the dtype in the
        model's config, or float32 if the config has no dtype."""
        if requested != "auto" or self.source is None:
            return requested
        dtype = self.source.config.dtype
        return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else "float32"

    @property
    def V(self) -> int:
        """The number of rows of the output layer."""
        return self._facts["vocab_size"] if self._facts else get_output_vocab_size(self.structure)

    @property
    def encoder_decoder(self) -> bool:
        if self._facts:
            return self._facts["encoder_decoder"]
        return bool(self.structure.config.is_encoder_decoder)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        if self._facts:
            return self._facts["parameters"]
        return sum(weight.numel() for weight in self.structure.parameters())

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self._facts["layers"] if self._facts else len(get_decoder_layers(self.structure))

    @cached_property
    def settings(self) -> GenerationSettings:
        """The model's generation config. Raises the errors of `read_settings`."""
        stored = self._facts and self._facts.get("settings")
        if stored and "controls" in stored:
            return GenerationSettings.from_dict(stored)
        return read_settings(self.structure)  # conversions of older versions store no controls
