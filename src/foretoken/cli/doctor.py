"""`foretoken doctor`: versions, the processor, devices, kept conversions, and which families pass
the self-check."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foretoken.cli import card, option, processor
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.costing.stored import Kept

NO_FOLDER = "no folder: nothing can be kept safely"
PACKAGES = "foretoken torch transformers openvino tokenizers safetensors numpy".split()


@command
def doctor(
    origin: option.Origin,
    placing: option.Placing,
    model: Annotated[
        str | None, typer.Argument(help="A model's folder or hub id: what it runs on, and why.")
    ] = None,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="List the converted models, with cards, and measured costs."),
    ] = False,
    clear_cache: Annotated[
        bool,
        typer.Option(
            "--clear-cache",
            help="Remove them, cards and measured costs; all but cards are made again when needed.",
        ),
    ] = False,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Text that the model (left out: the shipped target) was not trained on: what "
            "rounding to --dtype did to it, as a card kept beside the conversion."
        ),
    ] = None,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed", help="Which precision is fastest here, by size; takes about 20 s, idle."
        ),
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Versions, processor, bandwidth, memory, and which models run on what here, and why."""
    if (
        model is None
        and held_out is None
        and (origin, placing) != (option.Origin(), option.Placing())
    ):
        raise InputError("options of loading are for a model; name one: foretoken doctor MODEL")
    if sum([cache, clear_cache, speed, held_out is not None]) > 1:
        raise InputError("give one of --cache, --clear-cache, --speed and --held-out")
    if model is not None and speed:
        raise InputError(f"--speed is of this machine; give it or {model!r:.60}, not both")
    quiet()
    console = Console(highlight=False)
    if clear_cache:
        _clear(console, as_json=as_json)
    elif cache:
        _list(console, as_json=as_json)
    elif speed:
        processor.speed(console, as_json=as_json)
    elif held_out is not None:
        card.make(console, model, origin, placing, held_out, as_json=as_json)
    elif model is not None:
        _place(console, model, origin, placing, as_json=as_json)
    else:
        _everything(console, as_json=as_json)


def _everything(console: Console, *, as_json: bool) -> None:
    document = {**_machine(), "processor": processor.measured(), "families": _families()}
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return
    console.print("  ".join(f"{name} {number}" for name, number in document["versions"].items()))
    processor.show(console, document["processor"])
    console.print(f"OpenVINO: {document['openvino']}")
    for device in document["devices"]:
        free = device["free_bytes"]
        console.print(f"{device['name']}: {'?' if free is None else f'{free / 1e9:.1f}'} GB free")
    table = Table("family", "runtime", "largest difference", "seconds", "why")
    for family in document["families"]:
        if family["ok"]:
            figures = f"{family['largest_difference']:.1e}", f"{family['seconds']:.1f}"
            table.add_row(family["name"], family["runtime"], *figures, family["why"])
        else:
            table.add_row(family["name"], "[red]none[/red]", "", "", family["reason"])
    console.print(table)


def _place(
    console: Console, model: str, origin: option.Origin, placing: option.Placing, *, as_json: bool
) -> None:
    from foretoken.loading.memory import usable
    from foretoken.loading.runtimes import Placement, place
    from foretoken.loading.sources import source

    placement = Placement(placing.dtype, usable(placing.device), placing.runtime)
    placed = place(source(model, origin.revision, origin.trust_remote_code), placement)
    runtime = placed.model.runtime
    if as_json:
        print(json.dumps({"model": model, "runtime": runtime, "why": placed.why}))
    else:
        console.print(f"{model} runs on {runtime}: {placed.why}", soft_wrap=True)


def _list(console: Console, *, as_json: bool) -> None:
    from foretoken.costing import stored
    from foretoken.models.openvino import store

    entries, costs = store.entries(), stored.entries()
    if as_json:
        rows = [
            {**asdict(entry), "folder": str(entry.folder), "card": store.card(entry.folder.name)}
            for entry in entries
        ]
        measured = [asdict(each) for each in costs]
        print(json.dumps({"folder": _folder(), "models": rows, "costs": measured}))
        return
    for entry in entries:
        line = f"{_date(entry.made)}  {entry.bytes / 1e6:6.0f} MB  {entry.dtype:8}  {entry.name}"
        console.print(line, soft_wrap=True)
        card.show(console, store.card(entry.folder.name))
    total = sum(entry.bytes for entry in entries) / 1e6
    console.print(f"{total:.0f} MB in {_folder() or NO_FOLDER}", soft_wrap=True)
    for each in costs:
        console.print(f"{_date(each.when)}  costs of {each.label}: {_trust(each)}", soft_wrap=True)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _trust(kept: Kept) -> str:
    """How far kept costs can be trusted."""
    halves = "measured once" if kept.spread is None else f"halves {kept.spread:.2f} times apart"
    others = "" if kept.others is None else f", others took {kept.others:.0%} of the processors"
    off = "" if kept.off is None else f", {kept.off:.1f} times off in later steps"
    poor = kept.doubt > 1 or kept.off is not None
    return f"{halves}{others}{off}{'; measured again by a later start' if poor else ''}"


def _folder() -> str | None:
    from foretoken.models.openvino import store

    return str(store.folder()) if store.folder() else None


def _clear(console: Console, *, as_json: bool) -> None:
    from foretoken.models.openvino import store
    from foretoken.storage.cache import forget

    count = store.clear()
    forget()
    if as_json:
        print(json.dumps({"folder": _folder(), "removed": count}))
    else:
        console.print(
            f"removed {count} models from {_folder() or NO_FOLDER}, and measured costs",
            soft_wrap=True,
        )


def _machine() -> dict[str, Any]:
    import torch

    from foretoken.loading.memory import free_bytes
    from foretoken.loading.runtimes import openvino
    from foretoken.storage.cache import versions

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return {
        "versions": {"python": platform.python_version()} | versions(*PACKAGES),
        "openvino": openvino(),
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "devices": [{"name": n, "free_bytes": free_bytes(torch.device(n))} for n in names],
    }


def _families() -> list[dict[str, Any]]:
    """The self-check of every family that is known to work, on small random models."""
    from foretoken.models.families import families

    return [{"name": name, **_family(build())} for name, build in bar(families(), "checking")]


def _family(network: Any) -> dict[str, Any]:
    """The first runtime that passes, and why none before it."""
    from foretoken.errors import RefusedError
    from foretoken.loading.runtimes import forms
    from foretoken.models.stock.selfcheck import check

    objections: list[str] = []
    for runtime, form in forms(network):
        try:
            result = check(network, form)
        except RefusedError as error:
            objections.append(str(error))
            continue
        why = "; ".join([form.name, *(f"not otherwise: {text}" for text in objections)])
        row = {"ok": True, "reason": None, "runtime": runtime, "form": form.name, "why": why}
        return row | {"largest_difference": result.delta, "seconds": result.seconds}
    return {"ok": False, "reason": "; ".join(objections)}
