"""Drafts that wait for their target to run: each becomes a drafter then.

Does not know how drafts are named, nor how a drafter guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch

from foretoken.drafters.base import Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.loading.options import NO_MODEL, ROUNDED, LoadOptions
from foretoken.loading.runtimes import Placement, companion, place, require_shared
from foretoken.loading.sources import Source
from foretoken.loading.target import LoadedTarget, ModelFacts
from foretoken.models.base import OpenModel

if TYPE_CHECKING:
    from foretoken.drafters.blockwise import Heads
    from foretoken.drafters.heads import HeadsDrafter

SMALLEST = "int4"


class PendingDraft(Protocol):
    """A draft that fits its target and becomes a drafter once the target runs."""

    def require(self, options: LoadOptions) -> None:
        """Raise InputError or RefusedError for an option that this draft cannot honour."""
        ...

    def attach(self, target: LoadedTarget) -> Drafter: ...


class ReadyDraft(NamedTuple):
    """A drafter that needs nothing of its target."""

    name: str
    drafter: Drafter

    def require(self, options: LoadOptions) -> None:
        options.refuse("same_tokenizer", "draft_dtype", because=f"{self.name} {NO_MODEL}")

    def attach(self, target: LoadedTarget) -> Drafter:
        return self.drafter


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """A model of the target's vocabulary that runs already."""

    name: str
    facts: ModelFacts
    placement: Placement
    drafter: LMDrafter

    @property
    def loaded(self) -> bool:
        """True where it is from files, and not a network in memory."""
        return isinstance(self.facts.read, Source)

    def require(self, options: LoadOptions) -> None:
        if not self.loaded:
            options.refuse("draft_dtype", because=f"{self.name} {NO_MODEL}")

    def attach(self, target: LoadedTarget) -> LMDrafter:
        return self.drafter

    def rounded(self, dtype: str, V: int) -> LMDrafter:
        """Return the same model, with weights in `dtype`, as a drafter for V tokens."""
        return LMDrafter(place(self.facts.read, replace(self.placement, dtype=dtype)).model, V)


class DetachedHeads(NamedTuple):
    """Heads that fit the target."""

    name: str
    heads: Heads

    def require(self, options: LoadOptions) -> None:
        options.refuse("same_tokenizer", "draft_dtype", because=f"{self.name} {NO_MODEL}")
        if options.exact_shapes:
            raise RefusedError(
                "exact_shapes=True shows no hidden states, which heads read; give another draft"
            )

    def attach(self, target: LoadedTarget) -> HeadsDrafter:
        """Return the drafter on the target's output layer, which is read anew where torch's weights
        are gone."""
        from foretoken.drafters.blockwise import ends_of
        from foretoken.drafters.heads import HeadsDrafter  # late: takes seconds

        network = getattr(target.model, "model", None)
        if network is None:
            read = target.read
            loaded = isinstance(read, Source)
            network = read.network(torch.float32, target.model.device) if loaded else read
        self.heads.require_target(self.name, network)
        output, embeddings = ends_of(network)
        self.heads.to(embeddings.weight.device, embeddings.weight.dtype)
        return HeadsDrafter(cast(OpenModel, target.model), self.heads, output, embeddings)


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """The target with rounded weights, or with some of its layers."""

    name: str  # as it was given
    dtype: str | None  # None: `SMALLEST`, or with layers of its own the target's
    layers: tuple[int, ...]  # none: all

    def rounded(self, dtype: str | None) -> OwnCopy:
        """Return the copy with its weights in `dtype`, where that is given; InputError where the
        name says otherwise."""
        if dtype is None or dtype == self.dtype:
            return self
        if self.dtype is not None:
            raise InputError(
                f"draft is {self.name!r}, draft_dtype {dtype!r}; leave one of them out"
            )
        return replace(self, dtype=dtype)

    def require(self, options: LoadOptions) -> None:
        """Raise InputError for a revision of its own, RefusedError for a runtime that was asked for
        and shares no rows."""
        options.refuse("same_tokenizer", because=f"{self.name} {NO_MODEL}")
        options.refuse("draft_revision", because="the draft is the target's copy")
        runtime = "transformers" if options.exact_shapes else options.runtime
        if runtime != "auto":
            require_shared(runtime)

    def attach(self, target: LoadedTarget) -> LMDrafter:
        """Return the drafter, over the target's rows. Raises InputError where the copy would be the
        target itself, and as `companion`."""
        computed = target.model.computed
        dtype = self.dtype or (computed if self.layers else SMALLEST)
        if dtype == computed and not self.layers:
            raise InputError(
                f"draft is {self.name!r}, but the target is in {dtype} itself; give a target of "
                "another dtype, draft='self:LAYERS' (such as self:0-3,8), or another draft"
            )
        return LMDrafter(companion(target.read, target.model, dtype, self.layers))


def own_copy(kind: str, facts: ModelFacts, dtype: str | None) -> OwnCopy:
    """Return the copy that "self:KIND" names, in `dtype` if that is given. InputError for a kind
    that is neither a rounding nor layers of the target."""
    name = f"self:{kind}"
    if kind in ROUNDED:
        return OwnCopy(name, kind, ()).rounded(dtype)
    return OwnCopy(name, None, _layers(kind, facts.layers)).rounded(dtype)


def _layers(kind: str, count: int) -> tuple[int, ...]:
    """Read numbers and ranges of layers, such as "0-3,8"."""
    layers: list[int] = []
    for part in kind.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(
                f"draft is {f'self:{kind}'!r:.60}; give self, self:int4, self:int8, or self: with "
                "numbers of layers, such as self:0-3,8"
            )
        layers += range(int(first), min(int(last if dash else first), count) + 1)
    if not layers or layers[-1] >= count or sorted(set(layers)) != layers or len(layers) == count:
        raise InputError(
            f"draft is {f'self:{kind}'!r:.60}; give some of the target's {count} layers, 0 to "
            f"{count - 1}, in order"
        )
    return tuple(layers)
