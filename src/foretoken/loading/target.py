"""A target, before it runs and after.

All that a draft must fit is known from the model's files, so that a draft that does not fit is
refused before the target is loaded or converted. Does not know which drafts there are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from foretoken.drafters.base import Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens, GenerationSettings
from foretoken.loading import gguf
from foretoken.loading.facts import ModelFacts
from foretoken.loading.weights import FolderWeights
from foretoken.models.base import Model
from foretoken.speculator import Speculator
from foretoken.text.templates import find_turn_end_ids, find_turn_end_tokens, get_special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


GGUF_EMBEDDING, GGUF_OUTPUT = "token_embd.weight", "output.weight"  # in GGUF files


def add_turn_ends(
    ends: EndTokens, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[EndTokens, str | None]:
    """Return a model's ends, with the token that ends the chat template's turns where it is known
    to do so, and a remark where the model's files name none of the template's."""
    names = [] if tokenizer is None else find_turn_end_tokens(tokenizer)
    if tokenizer is None or not names:
        return ends, None
    ids = cast(list[int], tokenizer.convert_tokens_to_ids(names))
    if ends.eos.intersection(ids):
        return ends, None
    remark = f"the chat template ends turns with {names[-1]!r}, which eos_token_id does not name"
    if ids[-1] in find_turn_end_ids(get_special_ids(tokenizer)):
        return replace(ends, eos=ends.eos | {ids[-1]}), f"{remark}: texts end there, too"
    where = "where chats run past a turn, add it in generation_config.json"
    return ends, f"{remark}; {where} (id {ids[-1]})"


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """A target that does not run yet: all that a draft must fit."""

    name: str
    facts: ModelFacts
    settings: GenerationSettings
    tokenizer: PreTrainedTokenizerBase | None
    processor: Callable[[], Any] | None = None  # loads that of pictures and sounds


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target that runs, as the function `drafter` of a module of yours is given it
    (docs/drafts.md).

    Attributes:
        info: The facts that were known before it ran.
        model: The model that scores tokens. `model.hidden`, where it has that, is what its output
            layer read at the positions of the last forward pass.

    Examples:
        >>> import foretoken
        >>> def drafter(argument: str, target: foretoken.LoadedTarget) -> foretoken.Drafter:
        ...     return foretoken.UniformDrafter(target.vocab_size)
    """

    info: TargetInfo
    model: Model

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer: the size of a drafter's distributions."""
        return self.model.vocab_size

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None where only ids are used."""
        return self.info.tokenizer

    @property
    def structure(self) -> PreTrainedModel:
        """Its network, whose weights may be missing (on the device "meta"), with its config."""
        return self.info.facts.structure

    @property
    def network(self) -> PreTrainedModel:
        """Its network with weights: the one that runs where torch runs it, else loaded again in
        float32, so that only the layers you keep should outlive your function."""
        return TargetEmbeddings(self.info.facts, self.model).network

    def make_speculator(self, drafter: Drafter, draft_name: str) -> Speculator:
        settings = self.info.settings
        return Speculator(
            target=self.model,
            drafter=drafter,
            tokenizer=self.info.tokenizer,
            ends=settings.ends,
            controls=settings.controls,
            target_name=self.info.name,
            draft_name=draft_name,
            suggested=settings.suggested,
            processor=self.info.processor,
            structure=lambda: self.info.facts.structure,
        )


@dataclass(frozen=True, slots=True)
class PendingDraft:
    """A draft that fits its target."""

    attach: Callable[[LoadedTarget], Drafter]  # makes the drafter, once the target runs
    # loads it in another precision, where none was asked for and another may be faster
    load_rounded: Callable[[str], LMDrafter] | None = None
    taps: tuple[int, ...] = ()  # where the target is to show its states
    runtime: str | None = None  # that the target must have; None: any


class TargetEmbeddings:
    """A target's embeddings and output layer, read from its files without the rest if possible: a
    draft that shares them must not load the target twice.

    model: The target that runs; None: it does not run yet.
    """

    def __init__(self, facts: ModelFacts, model: Model | None) -> None:
        self.facts = facts
        self._network: Any = None if model is None else model.model  # of torch
        if self._network is None and facts.source is None:
            self._network = facts.structure

    @property
    def embedding(self) -> nn.Module:
        """The embeddings, as the target computes them."""
        if self._network is None:
            structure: Any = self.facts.structure
            part = structure.get_input_embeddings()
            weight = self._read_weight(part.weight)
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
            structure: Any = self.facts.structure
            weight = self._read_weight(structure.get_output_embeddings().weight)
            if weight is None and structure.config.get_text_config().tie_word_embeddings:
                weight = self._read_weight(structure.get_input_embeddings().weight)
            if weight is not None:
                return weight
        head = self.network.get_output_embeddings()
        return head.unpack().weight if hasattr(head, "unpack") else head.weight

    @property
    def network(self) -> Any:
        """The network with its weights, which is loaded where torch does not run it."""
        if self._network is None:
            self._network = self.facts.load_network("float32", torch.device("cpu"))
        return self._network

    def _read_weight(self, weight: Any) -> Tensor | None:
        """Map the weight from the files of the target; None where it is not there by itself."""
        folder, structure = self.facts.folder, self.facts.structure
        if folder is None or folder.adapter:
            return None
        if folder.gguf:
            embeds = weight is structure.get_input_embeddings().weight
            own = gguf.read_weight(folder.gguf, GGUF_EMBEDDING if embeds else GGUF_OUTPUT)
            return own if own is not None and own.shape == weight.shape else None
        weights = FolderWeights(Path(folder.path))
        named = structure.named_parameters(remove_duplicate=False)
        names = [name for name, own in named if own is weight]
        found = next((name for name in names if name in weights.keys), None)
        return None if found is None else weights.read([found])[found]
