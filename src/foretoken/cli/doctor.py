"""`foretoken doctor`: show the versions, processor, memory and devices of this machine, or the
backend of a model and the reason for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from foretoken.cli import option
from foretoken.cli.command import command, set_up_logging
from foretoken.costing import contention
from foretoken.errors import InputError
from foretoken.loading.options import LOAD_OPTIONS as LOADING
from foretoken.loading.options import LoadOptions
from foretoken.slow_log import show_waiting

EXACT_TEXT = {
    "bitwise": "greedy output is identical with and without draft tokens, in any batch",
    "rounding": "greedy output is identical with and without draft tokens, except that rounding "
    "may decide near-ties differently",
}


@command
def doctor(
    origin: option.OriginOptions,
    placing: option.PlacementOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show the backend of this model, and why: a folder, hub id or GGUF file."
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help=LOADING["adapter"].help, rich_help_panel=LOADING["adapter"].panel),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Show versions, the processor, memory and devices, or the backend of a model."""
    left_out = option.OriginOptions(), option.PlacementOptions(), None
    if model is None and (origin, placing, adapter) != left_out:
        raise InputError("options of loading need a model; name the model: foretoken doctor MODEL")
    given = LoadOptions(**vars(origin), **vars(placing), adapter=adapter)
    set_up_logging()
    from foretoken.measurement import diagnosis  # late: imports torch

    if model is None:
        document, lines = diagnosis.describe_machine(), _format_machine
    else:
        with show_waiting(f"loading {model}"):
            document, lines = diagnosis.describe_model(model, given), _format_model
    print(json.dumps(document, allow_nan=False) if as_json else "\n".join(lines(document)))


def _format_machine(document: dict[str, Any]) -> Iterator[str]:
    yield "  ".join(f"{name} {number}" for name, number in document["versions"].items())
    processor = document["processor"]
    abilities, lacks = processor["abilities"], processor["lacks"]
    parts = [f"{processor['name']}, {processor['threads']} threads"]
    parts += [", ".join(abilities)] if abilities else []
    parts += [f"no {', no '.join(lacks)}"] if lacks else []
    yield f"processor: {'; '.join(parts)}"
    rate, size = processor["bytes_per_second"] / 1e9, processor["read_bytes"] / 2**20
    yield f"memory: {rate:.1f} GB/s when reading {size:.0f} MiB"
    for device in document["devices"]:
        free = device["free_bytes"]
        yield f"{device['name']}: {'?' if free is None else f'{free / 1e9:.1f}'} GB free"
    yield f"native decoder: {document['native']}"
    if warning := contention.describe_contention(document["others"]):
        yield warning
    yield "the backend of a model, and the reason: foretoken doctor MODEL"


def _format_model(document: dict[str, Any]) -> Iterator[str]:
    runs = "{model} runs on {runtime}: {why}" if document["runtime"] else "{model} {why}"
    yield runs.format(**document)
    if document.get("exact"):
        yield EXACT_TEXT[document["exact"]]
    if document["runtime"] and document["asked"] == "int8" and document["dtype"] == "int4":
        yield "its weights have four bits already, so int8 is the same as int4 for this model"
    if document.get("ends"):
        yield document["ends"]
    if document.get("lacks"):
        yield f"no images or audio: {document['lacks']}"
