"""Versions of the libraries that results stored on disk depend on."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("foretoken", "torch", "transformers", "openvino")


@cache
def versions(*packages: str) -> dict[str, str]:
    """Versions of the installed ones among `packages`; without any, of LIBRARIES."""
    installed: dict[str, str] = {}
    for name in packages or LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed
