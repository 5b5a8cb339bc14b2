"""`foretoken doctor`: versions, the processor, memory and devices; or the backend of one model, and
why."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import option
from foretoken.cli.command import command, quiet
from foretoken.costing import contention
from foretoken.errors import InputError
from foretoken.loading.options import OPTIONS as LOADING
from foretoken.loading.options import LoadOptions
from foretoken.slow_log import show_waiting

# Imports in functions wait for their use: torch takes seconds, and mistakes are told before that
if TYPE_CHECKING:
    from foretoken.loading.facts import ModelFacts
    from foretoken.loading.sources import Source

PACKAGES = "foretoken torch transformers tokenizers safetensors numpy".split()
EXACT_TEXT = {
    "bitwise": "greedy text is the same to the bit with and without draft tokens, in any batch",
    "rounding": "greedy text is the same but for near-ties, which rounding may decide otherwise",
}


@command
def doctor(
    origin: option.Origin,
    placing: option.Placing,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show the backend that this model runs on, and why: a folder, hub id or GGUF file."
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(help=LOADING["adapter"].help, rich_help_panel=LOADING["adapter"].panel),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Show versions, the processor, memory and devices, or the backend of a model."""
    left_out = option.Origin(), option.Placing(), None
    if model is None and (origin, placing, adapter) != left_out:
        raise InputError("options of loading are for a model; name one: foretoken doctor MODEL")
    quiet()
    if model is None:
        document, lines = _machine(), _machine_lines
    else:
        with show_waiting(f"reading {model}"):
            document, lines = _placed(model, origin, placing, adapter), _placed_lines
    print(json.dumps(document, allow_nan=False) if as_json else "\n".join(lines(document)))


def _machine() -> dict[str, Any]:
    """Describe the machine, and measure how fast it reads memory, in a second or two."""
    import torch

    from foretoken.loading.memory import free_bytes
    from foretoken.loading.runtimes.native import abilities
    from foretoken.measurement.machine import bandwidth, processor
    from foretoken.storage.cache import versions

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    reading, here = contention.read(), processor()
    seconds, size = bandwidth(torch.device("cpu"))
    rate = {"bytes_per_second": size / seconds.median, "read_bytes": size}
    return {
        "versions": {"python": platform.python_version()} | versions(*PACKAGES),
        "machine": platform.platform(),
        "processor": {**asdict(here), "lacks": here.lacks, **rate},
        "threads": torch.get_num_threads(),
        "devices": [{"name": n, "free_bytes": free_bytes(torch.device(n))} for n in names],
        "native": abilities(),
        "others": contention.share([contention.taken(reading)]),
    }


def _machine_lines(document: dict[str, Any]) -> Iterator[str]:
    yield "  ".join(f"{name} {number}" for name, number in document["versions"].items())
    processor = document["processor"]
    abilities, lacks = processor["abilities"], processor["lacks"]
    parts = [f"{processor['name']}, {processor['threads']} threads"]
    parts += [", ".join(abilities)] if abilities else []
    parts += [f"no {', no '.join(lacks)}"] if lacks else []
    yield f"processor: {'; '.join(parts)}"
    rate, size = processor["bytes_per_second"] / 1e9, processor["read_bytes"] / 2**20
    yield f"memory: {rate:.1f} GB/s, reading {size:.0f} MiB"
    for device in document["devices"]:
        free = device["free_bytes"]
        yield f"{device['name']}: {'?' if free is None else f'{free / 1e9:.1f}'} GB free"
    yield f"native decoder: {document['native']}"
    if warning := contention.remark(document["others"]):
        yield warning
    yield "what a model runs on, and why: foretoken doctor MODEL"


def _placed(
    model: str, origin: option.Origin, placing: option.Placing, adapter: str | None
) -> dict[str, Any]:
    from foretoken.loading import published
    from foretoken.loading.facts import ModelFacts, Placement
    from foretoken.loading.memory import usable
    from foretoken.loading.runtimes.place import place
    from foretoken.loading.sources import source

    LoadOptions(**vars(placing))
    if draft := published.find(model, origin.revision):
        return {"model": draft.name, "runtime": None, "why": draft.described}
    device = usable(placing.device)
    placement = Placement(placing.dtype, device, placing.runtime)
    read = source(model, origin.revision, origin.trust_remote_code, adapter)
    facts = ModelFacts(read, placement)
    placed = place(facts, placement)
    steady = placed.model.capabilities.batch_invariant
    found = {"model": read.name, "runtime": placed.model.runtime, "why": placed.why}
    lacks, ends = _lacks(read), _remark_on_ends(read, facts)
    exact = {"exact": "bitwise" if steady else "rounding", "lacks": lacks, "ends": ends}
    return {**found, **exact, "dtype": placed.model.computed, "asked": placement.dtype}


def _remark_on_ends(read: Source, facts: ModelFacts) -> str | None:
    """Say where the chat template ends turns with another token than the model's files name."""
    from foretoken.loading.sources import tokenizer
    from foretoken.loading.target import ends_of_chats

    file = read.path if read.gguf is None else read.gguf
    known = tokenizer(file, read.options.get("revision"), read.trust)
    return ends_of_chats(facts.settings.ends, known)[1]


def _lacks(read: Source) -> str | None:
    """Say why the processor of a model's pictures and sounds cannot be loaded; None where it can,
    or there is none."""
    from foretoken.loading.sources import processor

    load = processor(read)
    try:
        if load is not None:
            load()
    except InputError as error:
        return str(error)
    return None


def _placed_lines(document: dict[str, Any]) -> Iterator[str]:
    runs = "{model} runs on {runtime}: {why}" if document["runtime"] else "{model} {why}"
    yield runs.format(**document)
    if document.get("exact"):
        yield EXACT_TEXT[document["exact"]]
    if document["runtime"] and document["asked"] == "int8" and document["dtype"] == "int4":
        yield "its weights have four bits already, which int8 keeps: the same as in int4"
    if document.get("ends"):
        yield document["ends"]
    if document.get("lacks"):
        yield f"text alone: {document['lacks']}"
