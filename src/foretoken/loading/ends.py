"""A target's embeddings and output layer, read from its files without the rest where that is
possible: a draft that shares them must not load the target twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.loading import gguf
from foretoken.loading.hub import is_folder
from foretoken.loading.sources import Source
from foretoken.loading.tensors import Weights
from foretoken.models.base import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"  # in GGUF files


class TargetEnds:
    """The two ends of a target that was made from `read` and runs as `model`; None: it does not run
    yet."""

    def __init__(self, read: Source | PreTrainedModel, model: Model | None) -> None:
        self.read = read
        self._network: Any = getattr(model, "model", None)  # of torch
        if self._network is None and not isinstance(read, Source):
            self._network = read

    @property
    def embedding(self) -> nn.Module:
        """The embeddings, as the target computes them."""
        if self._network is None:
            structure: Any = self._structure
            part = structure.get_input_embeddings()
            weight = self._stored(part.weight)
            # a scale would be a buffer, whose value the structure on meta has not
            if weight is not None and not list(part.buffers()):
                part = copy.copy(part)
                part._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
                return part
        return self.network.get_input_embeddings()

    @property
    def head(self) -> Tensor:
        """The output layer's weights, `[V, H]`."""
        if self._network is None:
            structure: Any = self._structure
            weight = self._stored(structure.get_output_embeddings().weight)
            if weight is None and structure.config.get_text_config().tie_word_embeddings:
                weight = self._stored(structure.get_input_embeddings().weight)
            if weight is not None:
                return weight
        head = self.network.get_output_embeddings()
        return head.unpacked().weight if hasattr(head, "unpacked") else head.weight

    @property
    def _structure(self) -> PreTrainedModel:
        assert isinstance(self.read, Source)
        return self.read.empty

    @property
    def network(self) -> Any:
        """The network with its weights, which is loaded where torch does not run it."""
        if self._network is None:
            assert isinstance(self.read, Source)
            self._network = self.read.network(torch.float32, torch.device("cpu"))
        return self._network

    def _stored(self, weight: Any) -> Tensor | None:
        """Map the weight from the files of the target; None where it is not there by itself."""
        read = self.read
        if not isinstance(read, Source) or read.adapter:
            return None
        if read.gguf:
            embeds = weight is read.empty.get_input_embeddings().weight
            own = gguf.weight(read.gguf, EMBEDDING if embeds else OUTPUT)
            return own if own is not None and own.shape == weight.shape else None
        if not is_folder(read.path):
            return None
        weights = Weights(Path(read.path))
        named = read.empty.named_parameters(remove_duplicate=False)
        names = [name for name, own in named if own is weight]
        found = next((name for name in names if name in weights.keys), None)
        return None if found is None else weights.read([found])[found]
