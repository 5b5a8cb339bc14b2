"""Options of an engine, each declared once: its checks and the command line follow.

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
    """Options of an `Engine` beside its Speculator, checked when made."""

    max_rows: int = option(16, FROM_ONE, "Texts generated at a time.", "Serving")
    max_waiting: int = option(1024, FROM_ONE, "Texts that may wait.", "Serving")
    max_length: int | None = option(
        None, FROM_ONE, "Tokens per text, prompt included. Default: the context.", "Serving"
    )
    kv_memory: int | None = option(
        None,
        FROM_ONE,
        "Bytes for the KV cache. Default: the need of running texts, and up to 1 GB for prefixes "
        "of finished ones.",
        "Serving",
    )
    prefix_cache: bool = option(
        True,
        as_flag,
        "Keep the KV cache of prompts for later ones that begin alike.",
        "Serving",
        flag="--prefix-cache/--no-prefix-cache",
    )
    rule: str | Rule = option(
        "block", as_given, "The acceptance method of requests that name none.", None
    )
    lenience: float = option(1.0, as_given, "The lenience of requests that name none.", None)

    def __post_init__(self) -> None:
        check_options(self)
        SpeculationOptions(None, self.rule, self.lenience)


class EngineKeywords(TypedDict, total=False):
    """Fields of `EngineOptions` but `max_rows`, as keywords of `Engine`."""

    max_waiting: int
    max_length: int | None
    kv_memory: int | None
    prefix_cache: bool
    rule: str | Rule
    lenience: float


ENGINE_OPTIONS = get_options(EngineOptions)
