"""`foretoken doctor`: what is installed, what there is to run on, and which families pass the
self-check."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken.cli.quiet import quiet

PACKAGES = ("foretoken", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Versions, device, memory, and which model families can be run exactly here."""
    quiet()
    document = {**_machine(), "families": _families()}
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return
    console = Console(highlight=False)
    console.print("  ".join(f"{name} {number}" for name, number in document["versions"].items()))
    for device in document["devices"]:
        free = device["free_bytes"]
        console.print(f"{device['name']}: {'?' if free is None else f'{free / 1e9:.1f}'} GB free")
    table = Table("family", "runtime", "self-check", "largest difference", "seconds")
    for family in document["families"]:
        if family["ok"]:
            figures = f"{family['largest_difference']:.1e}", f"{family['seconds']:.1f}"
            table.add_row(family["name"], "transformers", "[green]ok[/green]", *figures)
        else:
            table.add_row(family["name"], "", f"[red]{family['reason']}[/red]")
    console.print(table)


def _machine() -> dict[str, Any]:
    import torch

    from foretoken.memory import free_bytes

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return {
        "versions": {"python": platform.python_version()} | {n: version(n) for n in PACKAGES},
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "devices": [{"name": n, "free_bytes": free_bytes(torch.device(n))} for n in names],
    }


def _families() -> list[dict[str, Any]]:
    """The self-check of every family that is known to work, on small random models."""
    from foretoken.errors import RefusedError
    from foretoken.models.families import families
    from foretoken.models.selfcheck import check

    found: list[dict[str, Any]] = []
    for name, build in track(families(), "checking", console=Console(stderr=True)):
        try:
            result = check(build())
        except RefusedError as error:
            found.append({"name": name, "ok": False, "reason": str(error)})
        else:
            passed = {"name": name, "ok": True, "reason": None}
            found.append({**passed, "largest_difference": result.delta, "seconds": result.seconds})
    return found
