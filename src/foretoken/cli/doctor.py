"""`foretoken doctor`: versions, the processor and its speed, devices, stored conversions, and the
families that pass the self-check."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foretoken.cli import option
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar, milliseconds, prose, table
from foretoken.costing import contention
from foretoken.errors import InputError, RefusedError
from foretoken.storage.files import read_text

if TYPE_CHECKING:
    from foretoken.costing.stored import Kept

EXACT = "float32"
NO_FOLDER = "no folder: nothing can be kept safely"
SAYS = (
    "a pass of linear layers alone over so many tokens, on OpenVINO. Precisions below float32 make "
    "another model of a target; a draft's never changes the output's distribution"
)
PACKAGES = "foretoken torch transformers openvino tokenizers safetensors numpy".split()


@command
def doctor(
    origin: option.Origin,
    placing: option.Placing,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show the backend that this model runs on, and why: a folder or hub id."
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option("--cache", help="List converted models and measured costs."),
    ] = False,
    clear_cache: Annotated[
        bool,
        typer.Option(
            "--clear-cache",
            help="Remove converted models and measured costs. They are made again.",
        ),
    ] = False,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Measure on this text how rounding to --dtype changes the model (default: the "
            "shipped target). Give text it was not trained on."
        ),
    ] = None,
    speed: Annotated[
        bool,
        typer.Option("--speed", help="Time each precision by model size; takes about 20 s."),
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Show versions, the processor, memory bandwidth, and the backend of each model family."""
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
        _speed(console, as_json=as_json)
    elif held_out is not None:
        _rounded(console, model, origin, placing, held_out, as_json=as_json)
    elif model is not None:
        _place(console, model, origin, placing, as_json=as_json)
    else:
        _everything(console, as_json=as_json)


def _everything(console: Console, *, as_json: bool) -> None:
    document = {**_machine(), "processor": _processor(), "families": _families()}
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return
    console.print("  ".join(f"{name} {number}" for name, number in document["versions"].items()))
    _show_processor(console, document["processor"])
    console.print(f"OpenVINO: {document['openvino']}")
    for device in document["devices"]:
        free = device["free_bytes"]
        console.print(f"{device['name']}: {'?' if free is None else f'{free / 1e9:.1f}'} GB free")
    view = table("family", "runtime", "largest difference", "seconds", "why", left=5)
    for family in document["families"]:
        if family["ok"]:
            figures = f"{family['largest_difference']:.1e}", f"{family['seconds']:.1f}"
            view.add_row(family["name"], family["runtime"], *figures, family["why"])
        else:
            view.add_row(family["name"], "[red]none[/red]", "", "", family["reason"])
    console.print(view)


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


def _rounded(
    console: Console,
    model: str | None,
    origin: option.Origin,
    placing: option.Placing,
    held_out: Path,
    *,
    as_json: bool,
) -> None:
    """Measure on a text how rounding changes a model. Raises InputError and RefusedError for one
    that cannot be rounded or read."""
    from foretoken.loading.load import load
    from foretoken.loading.options import ROUNDED

    if placing.dtype not in ROUNDED:
        raise InputError(
            f"--dtype is {placing.dtype}, which rounds no weights; give {' or '.join(ROUNDED)}"
        )
    content = read_text(held_out, "held-out text")
    # the distribution as it is, without bans and penalties
    options: dict[str, Any] = {**vars(origin), **vars(placing), "generation_config": "ignore"}
    exact = load(model, "none", **(options | {"dtype": EXACT}))
    if exact.tokenizer is None:
        raise RefusedError(f"{model} has no tokenizer, so no bits per byte; save one in its folder")
    from foretoken.lab.rounding import pieces, rounding

    texts = pieces(content, exact.tokenizer)
    rounded = load(model, "none", **options)
    loss = rounding(exact.target, rounded.target, texts)
    digest = hashlib.sha256(content.encode()).hexdigest()
    names = {"model": rounded.target_name, "dtype": placing.dtype, "held_out_sha256": digest}
    if as_json:
        print(json.dumps({**names, **asdict(loss)}, allow_nan=False))
        return
    more, same, overlap = loss.more_bits_per_byte, loss.same, loss.overlap
    view = table("", EXACT, placing.dtype)
    view.add_row(
        "bits per byte",
        f"{loss.bits_per_byte.value:.3f}",
        f"{loss.rounded_bits_per_byte.value:.3f} ({more.value:+.4f} ± {more.error:.4f})",
    )
    likeliest = f"{same.value:.1%} ± {same.error:.1%}"
    view.add_row(f"likeliest token is {EXACT}'s", "", likeliest)
    shared = f"{overlap.value:.4f} ± {overlap.error:.4f}"
    view.add_row("sum min(p, q) at temperature 1", "", shared)
    prose(
        console,
        f"{rounded.target_name} in {placing.dtype}, on {loss.tokens} tokens of {held_out.name} "
        f"(sha256 {digest[:12]}); ± is 95 %, over pieces of the text",
    )
    console.print(view)


def _list(console: Console, *, as_json: bool) -> None:
    from foretoken.costing import stored
    from foretoken.models.openvino import store

    entries, costs = store.entries(), stored.entries()
    if as_json:
        rows = [{**asdict(entry), "folder": str(entry.folder)} for entry in entries]
        measured = [asdict(each) for each in costs]
        print(json.dumps({"folder": _folder(), "models": rows, "costs": measured}))
        return
    for entry in entries:
        line = f"{_date(entry.made)}  {entry.bytes / 1e6:6.0f} MB  {entry.dtype:8}  {entry.name}"
        console.print(line, soft_wrap=True)
    total = sum(entry.bytes for entry in entries) / 1e6
    console.print(f"{total:.0f} MB in {_folder() or NO_FOLDER}", soft_wrap=True)
    for each in costs:
        console.print(f"{_date(each.when)}  costs of {each.label}: {_trust(each)}", soft_wrap=True)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _trust(kept: Kept) -> str:
    """Say how far stored costs can be trusted."""
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
    """Run the self-check of every known family, on small random models."""
    from foretoken.models.families import families

    return [{"name": name, **_family(build())} for name, build in bar(families(), "checking")]


def _family(network: Any) -> dict[str, Any]:
    """Return the first backend that passes, and why none before it did."""
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


def _processor() -> dict[str, Any]:
    """Describe the processor, and measure how fast it reads memory, in a second or two."""
    import torch

    from foretoken.lab.machine import bandwidth, processor

    here, reading = processor(), contention.read()
    seconds, size = bandwidth(torch.device("cpu"))
    share = contention.share([contention.taken(reading)])
    rate = {"bytes_per_second": size / seconds.median, "read_bytes": size, "others": share}
    return {**asdict(here), "lacks": here.lacks, **rate}


def _show_processor(console: Console, document: dict[str, Any]) -> None:
    line = f"processor: {document['name']}, {document['threads']} threads"
    if document["abilities"] is not None:
        line += f"; {', '.join(document['abilities']) or 'none of the known abilities'}"
    if document["lacks"]:
        line += f"; no {', no '.join(document['lacks'])}"
    console.print(line, soft_wrap=True)
    size = document["read_bytes"] / 2**20
    console.print(
        f"memory: {document['bytes_per_second'] / 1e9:.1f} GB/s, reading {size:.0f} MiB",
        soft_wrap=True,
    )
    if warning := contention.remark(document["others"]):
        console.print(warning, soft_wrap=True)


def _speed(console: Console, *, as_json: bool) -> None:
    """Time sizes of models in each precision, and mark the fastest of each row."""
    from foretoken.loading.runtimes import require_openvino

    require_openvino()
    from foretoken.lab.speed import LAYERS, STACKS, TOKENS, speeds

    here, reading = _processor(), contention.read()
    timed = list(bar(speeds(STACKS), "timing", len(STACKS) * len(LAYERS)))
    share = contention.share([contention.taken(reading)])
    if as_json:
        rows = [asdict(each) for each in timed]
        document = {"processor": here, "tokens": TOKENS, "speeds": rows, "others": share}
        print(json.dumps(document, allow_nan=False))
        return
    _show_processor(console, here)
    view = table("weights", "tokens", *(f"{name} ms" for name in LAYERS), "fastest")
    for parameters in dict.fromkeys(each.parameters for each in timed):
        for i, tokens in enumerate(TOKENS):
            line = {
                each.dtype: None if each.seconds is None else each.seconds[i]
                for each in timed
                if each.parameters == parameters
            }
            view.add_row(f"{parameters / 1e6:.0f}M", str(tokens), *_marked(line))
    console.print(view)
    console.print(SAYS)
    if any(each.seconds is None for each in timed):
        console.print("-: time or memory did not suffice")
    if warning := contention.remark(share):
        console.print(warning)


def _marked(line: dict[str, float | None]) -> list[str]:
    """Return the cells of a row, the fastest in bold, and its name."""
    timings = {name: seconds for name, seconds in line.items() if seconds is not None}
    best = min(timings, key=lambda name: timings[name], default="")
    cells = ["-" if seconds is None else milliseconds(seconds) for seconds in line.values()]
    marks = zip(line, cells, strict=True)
    return [f"[bold]{text}[/bold]" if name == best else text for name, text in marks] + [best]
