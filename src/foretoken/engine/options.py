"""Options of an engine: this declaration also defines their checks and the command line's options.

Imports no torch, so that a mistake on the command line is reported without delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from foretoken.sampling.checks import FROM_ONE, as_flag, as_given
from foretoken.sampling.options import check_options, get_options, option
from foretoken.sampling.speculation import SpeculationOptions

if TYPE_CHECKING:
    from foretoken.sampling.acceptance_rules import Rule


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an `Engine`. The constructor raises an error for an invalid option."""

    max_rows: int = option(16, FROM_ONE, "Maximum number of running sequences.", "Serving")
    max_waiting: int = option(1024, FROM_ONE, "Maximum number of waiting sequences.", "Serving")
    max_length: int | None = option(
        None,
        FROM_ONE,
        "Maximum tokens per sequence, prompt included. Default: the context length.",
        "Serving",
    )
    kv_memory: int | None = option(
        None,
        FROM_ONE,
        "Bytes for the KV cache. Default: as much as running sequences need, and up to 1 GB for "
        "the prefix cache.",
        "Serving",
    )
    prefix_cache: bool = option(
        True,
        as_flag,
        "Cache the keys and values of finished sequences for later sequences with the same prefix.",
        "Serving",
        flag="--prefix-cache/--no-prefix-cache",
    )
    rule: str | Rule = option("block", as_given, "The default acceptance method of requests.", None)
    lenience: float = option(1.0, as_given, "The default lenience of requests.", None)

    def __post_init__(self) -> None:
        check_options(self)
        SpeculationOptions(None, self.rule, self.lenience)


class EngineKeywords(TypedDict, total=False):
    """Fields of `EngineOptions` except `max_rows`, as keywords of `Engine`."""

    max_waiting: int
    max_length: int | None
    kv_memory: int | None
    prefix_cache: bool
    rule: str | Rule
    lenience: float


ENGINE_OPTIONS = get_options(EngineOptions)
