"""A target before and after it is loaded. Drafts are checked against the target's files alone, so
that a draft that does not fit is refused before the target is loaded or converted. Does not depend
on the kinds of drafts.
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


GGUF_EMBEDDING, GGUF_OUTPUT = "token_embd.weight", "output.weight"  # names in GGUF files


def add_turn_ends(
    ends: EndTokens, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[EndTokens, str | None]:
    """Return a model's end tokens, completed by the token with which its chat template ends turns,
    and a remark to log. If that token is not a well-known end of turn, it is not added, and the
    remark describes how to add it. The remark is None if the end tokens already include the token,
    or if there is no chat template."""
    names = [] if tokenizer is None else find_turn_end_tokens(tokenizer)
    if tokenizer is None or not names:
        return ends, None
    ids = cast(list[int], tokenizer.convert_tokens_to_ids(names))
    if ends.eos.intersection(ids):
        return ends, None
    remark = f"the chat template ends turns with {names[-1]!r}, which is not in eos_token_id"
    if ids[-1] in find_turn_end_ids(get_special_ids(tokenizer)):
        return replace(ends, eos=ends.eos | {ids[-1]}), f"{remark}: it ends outputs as well"
    remedy = "if chats continue past a turn, add it in generation_config.json"
    return ends, f"{remark}; {remedy} (id {ids[-1]})"


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The description of a target from its files, before its weights are loaded. Drafts are checked
    against it."""

    name: str
    facts: ModelFacts
    settings: GenerationSettings
    tokenizer: PreTrainedTokenizerBase | None
    processor: Callable[[], Any] | None = None  # loads the processor of images and audio


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A loaded target, as passed to the function `drafter` of your own module (docs/drafts.md).

    Attributes:
        info: The target's description from its files: name, generation config, tokenizer.
        model: The model that scores tokens. `model.hidden`, if present, holds the inputs of its
            output layer at the positions of the last forward pass.

    Examples:
        >>> import foretoken
        >>> def drafter(argument: str, target: foretoken.LoadedTarget) -> foretoken.Drafter:
        ...     return foretoken.UniformDrafter(target.vocab_size)
    """

    info: TargetInfo
    model: Model

    @property
    def vocab_size(self) -> int:
        """The number V of rows of the output layer. Distributions of drafters need V entries."""
        return self.model.vocab_size

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None if the target has no tokenizer: prompts must then be token ids."""
        return self.info.tokenizer

    @property
    def structure(self) -> PreTrainedModel:
        """The transformers network with its config and modules; its weights may be missing (on the
        device "meta")."""
        return self.info.facts.structure

    @property
    def network(self) -> PreTrainedModel:
        """The transformers network with its weights. It is the running network if the target runs
        on torch; otherwise it is loaded again, in float32, so keep references only to the layers
        that you need."""
        return TargetEmbeddings(self.info.facts, self.model).network

    def make_speculator(self, drafter: Drafter, draft_name: str) -> Speculator:
        """Return a Speculator of this target and a drafter."""
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
    """A draft that fits its target and waits until the target is loaded."""

    attach: Callable[[LoadedTarget], Drafter]  # makes the drafter, once the target is loaded
    # loads the draft in int8 or int4, which may be faster; None if its precision must not change
    load_rounded: Callable[[str], LMDrafter] | None = None
    taps: tuple[int, ...] = ()  # layers whose inputs the target must expose
    runtime: str | None = None  # backend that the target must run on; None: any


class TargetEmbeddings:
    """A target's embedding and output layer, for drafts that share them. If possible, only these
    weights are read from the target's files, so that the whole target is not loaded twice."""

    def __init__(self, facts: ModelFacts, model: Model | None) -> None:
        """`model` is the loaded target, or None if the target is not loaded yet."""
        self.facts = facts
        self._network: Any = None if model is None else model.model  # None unless on torch
        if self._network is None and facts.source is None:
            self._network = facts.structure

    @property
    def embedding(self) -> nn.Module:
        """The embedding layer of the target, with its weights."""
        if self._network is None:
            structure: Any = self.facts.structure
            part = structure.get_input_embeddings()
            weight = self._read_weight(part.weight)
            # a buffer would be a scale, which has no value on the meta device
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
        """The transformers network with its weights: the running network if the target runs on
        torch, else loaded here in float32 at the first use."""
        if self._network is None:
            self._network = self.facts.load_network("float32", torch.device("cpu"))
        return self._network

    def _read_weight(self, weight: Any) -> Tensor | None:
        """Return the values of a weight of the structure, read from the target's files; None if the
        target is not in a folder, is changed by an adapter, or lacks this weight in its files."""
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
        return None if found is None else weights.read_weights([found])[found]
