"""The target as its own draft: kinds of copies by name; a copy waits for the target to run.

Does not know what the copy runs on, nor how it guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foretoken.drafters.lm import LMDrafter
from foretoken.errors import InputError
from foretoken.loading.runtimes import Known, companion, require_shared
from foretoken.loading.sources import Source
from foretoken.models.base import Model
from foretoken.options import ROUNDED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST = "int4"


@dataclass(frozen=True, slots=True)
class OwnCopy:
    """The target with rounded weights, or with some of its layers."""

    name: str  # as it was given
    dtype: str | None  # None: `SMALLEST`, or with layers of its own the target's
    layers: tuple[int, ...]  # none: all

    def rounded(self, dtype: str | None) -> OwnCopy:
        """With its weights in `dtype`, where that is given; InputError where the name says
        otherwise."""
        if dtype is None or dtype == self.dtype:
            return self
        if self.dtype is not None:
            raise InputError(
                f"draft is {self.name!r}, draft_dtype {dtype!r}; leave one of them out"
            )
        return replace(self, dtype=dtype)

    def require(self, runtime: str) -> None:
        """RefusedError for a runtime that was asked for and shares no rows."""
        if runtime != "auto":
            require_shared(runtime)

    def attached(self, read: Source | PreTrainedModel, target: Model) -> LMDrafter:
        """The drafter, over the rows of `target`. Raises InputError where the copy would be the
        target itself, and as `companion`."""
        dtype = self.dtype or (target.computed if self.layers else SMALLEST)
        if dtype == target.computed and not self.layers:
            raise InputError(
                f"draft is {self.name!r}, but the target is in {dtype} itself; give a target of "
                "another dtype, draft='self:LAYERS' (such as self:0-3,8), or another draft"
            )
        return LMDrafter(companion(read, target, dtype, self.layers))


def own_copy(kind: str, facts: Known) -> OwnCopy:
    """The copy that "self:KIND" names. InputError for a kind that is neither a rounding nor layers
    of the target."""
    if kind in ROUNDED:
        return OwnCopy(f"self:{kind}", kind, ())
    return OwnCopy(f"self:{kind}", None, _layers(kind, facts.layers))


def kinds(dtype: str, layers: int) -> list[str]:
    """Names of the copies that may pay for a target in `dtype` with so many layers: all roundings
    that are smaller, and every other layer."""
    smaller = [kind for kind in ROUNDED if dtype not in ROUNDED[ROUNDED.index(kind) :]]
    some = sorted({*range(0, layers, 2), layers - 1})
    thinned = [",".join(map(str, some))] if layers > len(some) else []
    return [f"self:{kind}" for kind in (*smaller, *thinned)]


def _layers(kind: str, count: int) -> tuple[int, ...]:
    """Numbers and ranges of layers, such as "0-3,8"."""
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
