"""A target, before it runs and after.

All that a draft must fit is known from the model's files, so that a draft that does not fit is
refused before the target is loaded or converted. Does not know which drafts there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from foretoken.drafters.base import Drafter
from foretoken.generation_config import Ends, Settings, read_settings
from foretoken.loading.ends import TargetEnds
from foretoken.loading.runtimes import Placement, kept_facts
from foretoken.loading.sources import Source
from foretoken.models.base import Model
from foretoken.speculator import Speculator
from foretoken.text.turns import known_ends, special_ids, turn_ends

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ModelFacts:
    """Facts of a model that does not run yet: from its kept conversion, at once, or else from its
    structure, which takes seconds to build."""

    def __init__(self, read: Source | PreTrainedModel, placement: Placement) -> None:
        self.read = read
        self._facts = kept_facts(read, placement) if isinstance(read, Source) else None

    @property
    def kept(self) -> bool:
        """True where a conversion is kept."""
        return self._facts is not None

    @cached_property
    def structure(self) -> PreTrainedModel:
        return self.read.empty if isinstance(self.read, Source) else self.read

    @property
    def V(self) -> int:
        """Rows of the output layer."""
        if self._facts:
            return self._facts["vocab_size"]
        from foretoken.models.stock.sizes import output_rows  # late: takes seconds

        return output_rows(self.structure)

    @property
    def encoder_decoder(self) -> bool:
        if self._facts:
            return self._facts["encoder_decoder"]
        return bool(self.structure.config.is_encoder_decoder)

    @property
    def parameters(self) -> int:
        """Numbers in all of its weights."""
        if self._facts:
            return self._facts["parameters"]
        return sum(weight.numel() for weight in self.structure.parameters())

    @property
    def layers(self) -> int:
        """Layers of the decoder."""
        if self._facts:
            return self._facts["layers"]
        from foretoken.models.stock.taps import layers_of  # late: as above

        return len(layers_of(self.structure))

    @property
    def settings(self) -> Settings:
        """Its generation config; raises as `read_settings` does."""
        stored = self._facts and self._facts.get("settings")
        if stored and "controls" in stored:
            return Settings.of(stored)
        return read_settings(self.structure)  # a conversion of before the controls has none of them


def ends_of_chats(ends: Ends, tokenizer: PreTrainedTokenizerBase | None) -> tuple[Ends, str | None]:
    """Return a model's ends, with the token that ends the chat template's turns where it is known
    to do so, and a remark where the model's files name none of the template's."""
    names = [] if tokenizer is None else turn_ends(tokenizer)
    if tokenizer is None or not names:
        return ends, None
    ids = cast(list[int], tokenizer.convert_tokens_to_ids(names))
    if ends.eos.intersection(ids):
        return ends, None
    remark = f"the chat template ends turns with {names[-1]!r}, which eos_token_id does not name"
    if ids[-1] in known_ends(special_ids(tokenizer)):
        return replace(ends, eos=ends.eos | {ids[-1]}), f"{remark}: texts end there, too"
    where = "where chats run past a turn, add it in generation_config.json"
    return ends, f"{remark}; {where} (id {ids[-1]})"


@dataclass(frozen=True, slots=True)
class KnownTarget:
    """A target that does not run yet: all that a draft must fit."""

    name: str
    facts: ModelFacts
    settings: Settings
    tokenizer: PreTrainedTokenizerBase | None
    processor: Callable[[], Any] | None = None  # loads that of pictures and sounds


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target that runs, as the function `drafter` of a module of yours is given it
    (docs/drafters.md).

    Attributes:
        known: The facts that were known before it ran.
        model: The model that scores tokens. `model.hidden`, where it has that, is what its output
            layer read at the positions of the last forward pass.

    Examples:
        >>> import foretoken
        >>> def drafter(argument: str, target: foretoken.LoadedTarget) -> foretoken.Drafter:
        ...     return foretoken.UniformDrafter(target.vocab_size)
    """

    known: KnownTarget
    model: Model

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer: the size of a drafter's distributions."""
        return self.model.vocab_size

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None where only ids are used."""
        return self.known.tokenizer

    @property
    def structure(self) -> PreTrainedModel:
        """Its network, whose weights may be missing (on the device "meta"), with its config."""
        return self.known.facts.structure

    @property
    def network(self) -> PreTrainedModel:
        """Its network with weights: the one that runs where torch runs it, else loaded again in
        float32, so that only the layers you keep should outlive your function."""
        return TargetEnds(self.read, self.model).network

    @property
    def read(self) -> Source | PreTrainedModel:
        """The files or the network that it was made from."""
        return self.known.facts.read

    def speculator(self, drafter: Drafter, draft_name: str) -> Speculator:
        settings = self.known.settings
        return Speculator(
            target=self.model,
            drafter=drafter,
            tokenizer=self.known.tokenizer,
            ends=settings.ends,
            controls=settings.controls,
            target_name=self.known.name,
            draft_name=draft_name,
            suggested=settings.suggested,
            processor=self.known.processor,
            structure=lambda: self.known.facts.structure,
        )
