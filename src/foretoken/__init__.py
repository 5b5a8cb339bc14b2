"""foretoken: exact, fast generation by speculative decoding (arXiv 2211.17192).

Names are imported when they are first used: importing torch and transformers takes seconds, and
`--help` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken import theory
    from foretoken.drafters.base import Draft, Drafter
    from foretoken.drafters.cascade import CascadeDrafter
    from foretoken.drafters.lm import LMDrafter
    from foretoken.drafters.lookup import LookupDrafter
    from foretoken.drafters.mixture import MixtureDrafter
    from foretoken.drafters.uniform import UniformDrafter
    from foretoken.engine.async_engine import AsyncEngine
    from foretoken.engine.engine import Engine, EngineStats, Event
    from foretoken.errors import (
        ControlError,
        ForeignError,
        ForetokenError,
        InputError,
        NumericsError,
        RefusedError,
    )
    from foretoken.loading.load import load
    from foretoken.loading.target import LoadedTarget
    from foretoken.records import Stats, StepRecord
    from foretoken.request import Completion, Piece
    from foretoken.sampling.draw import Draw
    from foretoken.sampling.params import SamplingParams
    from foretoken.speculator import Speculator
    from foretoken.transformers_integration.attach import attach, detach

_HOMES = {
    "drafters.base": ("Draft", "Drafter"),
    "drafters.cascade": ("CascadeDrafter",),
    "drafters.lm": ("LMDrafter",),
    "drafters.lookup": ("LookupDrafter",),
    "drafters.mixture": ("MixtureDrafter",),
    "drafters.uniform": ("UniformDrafter",),
    "sampling.draw": ("Draw",),
    "errors": (
        "ControlError",
        "ForeignError",
        "ForetokenError",
        "InputError",
        "NumericsError",
        "RefusedError",
    ),
    "transformers_integration.attach": ("attach", "detach"),
    "loading.load": ("load",),
    "loading.target": ("LoadedTarget",),
    "sampling.params": ("SamplingParams",),
    "records": ("Stats", "StepRecord"),
    "request": ("Completion", "Piece"),
    "engine.async_engine": ("AsyncEngine",),
    "engine.engine": ("Engine", "EngineStats", "Event"),
    "speculator": ("Speculator",),
}
_MODULES = ("theory",)

__all__ = [
    "AsyncEngine",
    "CascadeDrafter",
    "Completion",
    "ControlError",
    "Draft",
    "Drafter",
    "Draw",
    "Engine",
    "EngineStats",
    "Event",
    "ForeignError",
    "ForetokenError",
    "InputError",
    "LMDrafter",
    "LoadedTarget",
    "LookupDrafter",
    "MixtureDrafter",
    "NumericsError",
    "Piece",
    "RefusedError",
    "SamplingParams",
    "Speculator",
    "Stats",
    "StepRecord",
    "UniformDrafter",
    "attach",
    "detach",
    "load",
    "theory",
]


def __dir__() -> list[str]:
    names = {name for name in globals() if name.startswith("__")}
    return sorted({*names, *__all__, "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # late: takes as long as importing foretoken

        return version("foretoken")
    if name in _MODULES:
        return import_module(f"foretoken.{name}")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"foretoken.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
