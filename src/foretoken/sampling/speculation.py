"""Options of speculation: the number of draft tokens and the acceptance method.

This module imports neither torch nor NumPy, so that errors on the command line appear at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError, RefusedError, format_value
from foretoken.sampling.checks import Count, Number
from foretoken.sampling.options import check_options, get_options, option

if TYPE_CHECKING:
    from foretoken.sampling.acceptance_rules import Rule

COUPLED_RULE = "coupled"  # not a Rule: its verifier needs the noise, not only p and q
RULE_NAMES = ("speculative", "block", "match", "rejection", COUPLED_RULE)


def as_rule(name: str, value: Any) -> Any:
    """Return `value` if it is one of `RULE_NAMES` or a function, else raise InputError."""
    if value not in RULE_NAMES if isinstance(value, str) else not callable(value):
        raise InputError(
            f"{name} is {format_value(value)}; give one of {', '.join(RULE_NAMES)}, or a function"
        )
    return value


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """The options of speculation of a request, checked on creation.

    Raises:
        InputError: A value is invalid.
        RefusedError: Two options contradict each other.
    """

    gamma: int | None = option(
        None,
        Count(ge=0, remedy="0 (plain decoding) or more, or None"),
        "Draft tokens per step; 0 is plain decoding. Default: chosen before every step.",
        None,
    )
    rule: str | Rule = option(
        "block",
        as_rule,
        "Acceptance method: block, speculative, or coupled (a seed gives the same output with any "
        "draft); match and rejection are for comparison.",
        None,
    )
    lenience: float = option(
        1.0,
        # a float32 probability divided by a smaller lenience would overflow
        Number(ge=1e-30, le=1, remedy="a number from 1e-30 to 1; 1 is exact"),
        "Below 1, accept draft tokens more easily and change the distribution; 1: exact.",
        None,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.lenience != 1 and self.rule == COUPLED_RULE:
            raise RefusedError(
                f"lenience={self.lenience} has no meaning for rule='coupled', which accepts only "
                "the target's own tokens; leave out lenience"
            ).with_option("lenience")


SPECULATION_OPTIONS = get_options(SpeculationOptions)
