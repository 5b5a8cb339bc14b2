"""Options for replicas on Ray; ray itself is imported in `foretoken.cluster` alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from foretoken.errors import InputError


def _scale(text: str) -> Any:
    return Option(help=text, rich_help_panel="Replicas")


@dataclass(frozen=True)
class Cluster:
    """Number of engines, and the Ray cluster they run on."""

    replicas: Annotated[
        int | None, _scale("Run this many engines, each in a process that Ray places.")
    ] = None
    threads: Annotated[
        int | None, _scale("Threads per replica. Default: an equal share of the processors.")
    ] = None
    ray: Annotated[
        str | None,
        _scale("Ray cluster: host:port, auto (running on this machine), or local (start one)."),
    ] = None

    @property
    def used(self) -> bool:
        return self.ray is not None or self.replicas is not None

    @property
    def address(self) -> str:
        return self.ray or "local"

    def require(self) -> None:
        """Raise InputError for values that are wrong whatever the cluster."""
        for name, value in (("replicas", self.replicas), ("threads", self.threads)):
            if value is not None and value < 1:
                raise InputError(f"--{name} is {value}; give a whole number from 1")
        if self.threads is not None and not self.used:
            raise InputError("--threads is for replicas; give --replicas, or set OMP_NUM_THREADS")
        if self.ray == "":
            raise InputError("--ray is empty; give host:port, auto or local")


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Raise InputError, with the command that installs it, where a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("foretoken"):
            raise
        raise InputError(
            f"this needs {error.name}, which is missing; pip install 'foretoken[{extra}]'"
        ) from None
