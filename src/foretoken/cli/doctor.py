"""`foretoken doctor`: versions, the processor and its speed, devices, stored conversions, and the
families that pass the self-check."""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from dataclasses import asdict, replace
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from foretoken.cli import option
from foretoken.cli.command import command, quiet
from foretoken.cli.render import bar, table
from foretoken.costing import contention
from foretoken.errors import InputError, RefusedError
from foretoken.loading.options import OPTIONS as LOADING
from foretoken.slow_log import show_waiting
from foretoken.storage.files import read_text

if TYPE_CHECKING:
    from foretoken.costing.stored import Kept
    from foretoken.loading.runtimes import Placement
    from foretoken.loading.sources import Source
    from foretoken.models.base import Model

EXACT = "float32"
ROOM = 8_000_000_000  # bytes that a class may take to be tried
OUTCOMES = ("equal", "refused", "differs", "failed", "no text", "no inputs", "not built")
PACKAGES = "foretoken torch transformers onnxruntime openvino tokenizers safetensors numpy".split()


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
    cache: Annotated[
        bool,
        typer.Option("--cache", help="List converted models and measured costs."),
    ] = False,
    clear_cache: Annotated[
        bool,
        typer.Option(
            "--clear-cache",
            help="Remove converted models and measured costs, or with MODEL its conversions alone. "
            "They are made again.",
        ),
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(help=LOADING["adapter"].help, rich_help_panel=LOADING["adapter"].panel),
    ] = None,
    rows: Annotated[
        int,
        typer.Option(min=1, help="Say it for so many texts at a time, as foretoken serve has."),
    ] = 1,
    held_out: Annotated[
        Path | None,
        typer.Option(
            help="Measure on this text how rounding to --dtype changes the model (default: the "
            "shipped target), for --cache too. Give text it was not trained on."
        ),
    ] = None,
    families: Annotated[
        bool,
        typer.Option(
            "--families",
            help="Compare every class of transformers that generates text, tiny and random, with "
            "its own generate; takes minutes, and goes on where it was stopped.",
        ),
    ] = False,
    as_json: option.Json = False,
) -> None:
    """Show versions, the processor, memory bandwidth, and the backend of each model family."""
    if (
        model is None
        and held_out is None
        and (origin, placing, adapter, rows) != (option.Origin(), option.Placing(), None, 1)
    ):
        raise InputError("options of loading are for a model; name one: foretoken doctor MODEL")
    if sum([cache, clear_cache, families, held_out is not None]) > 1:
        raise InputError("give one of --cache, --clear-cache, --families and --held-out")
    if clear_cache and rows != 1:
        raise InputError(
            "--clear-cache removes conversions for any number of texts; leave --rows out"
        )
    others = [("--families is of all", families), ("--cache is of all models", cache)]
    for name, on in others:
        if model is not None and on:
            raise InputError(f"{name}; give it or {model!r:.60}, not both")
    quiet()
    console = Console(highlight=False)
    reading = contention.read()
    if clear_cache:
        document, show = _cleared(model), _show_cleared
    elif cache:
        document, show = _cached(), _show_cached
    elif families:
        document, show = _families(None if as_json else console), _show_families
    elif held_out is not None:
        document = _rounded(model, origin, placing, adapter, rows, held_out)
        show = _show_rounded
    elif model is not None:
        with show_waiting(f"reading {model}"):
            document = _placed(model, origin, placing, adapter, rows)
        show = _show_placed
    else:
        document, show = _everything(), _show_everything
    document["others"] = contention.share([contention.taken(reading)])
    if as_json:
        print(json.dumps(document, allow_nan=False))
        return
    show(console, document)
    warning = contention.remark(document["others"])
    if warning and "processor" in document:  # it was timed
        console.print(warning, soft_wrap=True)


def _everything() -> dict[str, Any]:
    import torch

    from foretoken.loading.memory import free_bytes
    from foretoken.loading.runtimes import onnx_runtime, openvino
    from foretoken.models.families import FAMILIES, build
    from foretoken.storage.cache import versions

    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    checked = bar(FAMILIES, "checking")
    return {
        "versions": {"python": platform.python_version()} | versions(*PACKAGES),
        "onnx": onnx_runtime(),
        "openvino": openvino(),
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "devices": [{"name": n, "free_bytes": free_bytes(torch.device(n))} for n in names],
        "processor": _processor(),
        "families": [{"name": name, **_family(build(name))} for name in checked],
    }


def _family(network: Any) -> dict[str, Any]:
    """Return the first backend that passes the self-check, and why none before it did."""
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


def _show_everything(console: Console, document: dict[str, Any]) -> None:
    console.print("  ".join(f"{name} {number}" for name, number in document["versions"].items()))
    _show_processor(console, document["processor"])
    console.print(f"ONNX Runtime: {document['onnx']}")
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


def _processor() -> dict[str, Any]:
    """Describe the processor, and measure how fast it reads memory, in a second or two."""
    import torch

    from foretoken.measurement.machine import bandwidth, processor

    here = processor()
    seconds, size = bandwidth(torch.device("cpu"))
    rate = {"bytes_per_second": size / seconds.median, "read_bytes": size}
    return {**asdict(here), "lacks": here.lacks, **rate}


def _show_processor(console: Console, document: dict[str, Any]) -> None:
    abilities = document["abilities"]
    parts = [f"{document['name']}, {document['threads']} threads"]
    parts += [", ".join(abilities)] if abilities else []
    parts += [f"no {', no '.join(document['lacks'])}"] if document["lacks"] else []
    rate = f"{document['bytes_per_second'] / 1e9:.1f} GB/s"
    console.print(f"processor: {'; '.join(parts)}", soft_wrap=True)
    console.print(f"memory: {rate}, reading {document['read_bytes'] / 2**20:.0f} MiB")


def _families(console: Console | None) -> dict[str, Any]:
    """Judge every class in as many processes as there are processors and memory for, with a line
    for each as it comes."""
    import psutil

    from foretoken.lab.census import census, classes
    from foretoken.storage.cache import versions

    names = sorted(classes())
    workers = min(psutil.cpu_count() or 1, psutil.virtual_memory().available // ROOM)
    families: list[dict[str, Any]] = []
    for verdict in bar(census(names, max(1, workers)), "trying", len(names)):
        said = ", ".join(filter(None, [verdict.form, verdict.reason]))
        if console is not None:
            line = f"{verdict.name}: {verdict.outcome}{f' ({said})' if said else ''}"
            console.print(line, soft_wrap=True, markup=False)
        families.append(asdict(verdict))
    return {"versions": versions(), "families": families}


def _show_families(console: Console, document: dict[str, Any]) -> None:
    """Count the outcomes."""
    families = sorted(document["families"], key=lambda each: each["name"])
    outcomes = Counter((each["kind"], each["outcome"]) for each in families)
    view = table("classes that read", *OUTCOMES)
    for kind in dict.fromkeys(each["kind"] for each in families):
        view.add_row(kind, *(str(outcomes[kind, outcome]) for outcome in OUTCOMES))
    console.print(view)


def _placed(
    model: str, origin: option.Origin, placing: option.Placing, adapter: str | None, rows: int
) -> dict[str, Any]:
    from foretoken.loading import published
    from foretoken.loading.fastest import measured_for
    from foretoken.loading.memory import usable
    from foretoken.loading.options import LoadOptions
    from foretoken.loading.runtimes import Placement, place
    from foretoken.loading.sources import source
    from foretoken.models.base import BatchInvariant

    LoadOptions(**vars(placing))
    if draft := published.find(model, origin.revision):
        return {"model": draft.name, "runtime": None, "why": draft.described}
    device = usable(placing.device)
    placement = Placement(placing.dtype, device, placing.runtime, rows=measured_for(rows))
    read = source(model, origin.revision, origin.trust_remote_code, adapter)
    placed = place(read, placement)
    steady = isinstance(placed.model, BatchInvariant) and placed.model.batch_invariant
    found = {"model": read.name, "runtime": placed.model.runtime, "why": placed.why}
    lacks, ends = _lacks(read), _remark_on_ends(read, placement)
    exact = {"exact": "bitwise" if steady else "rounding", "lacks": lacks, "ends": ends}
    return {**found, **exact, **_precision(read, placed.model, placement)}


def _precision(read: Source, model: Model, placement: Placement) -> dict[str, Any]:
    """Return the precision that a model has, and in four bits its time over that in eight, of some
    layers; None where other processes ran meanwhile, or a GGUF file's blocks decide."""
    from foretoken.loading.runtimes import timed

    ratio = None
    if placement.dtype == "int4" and read.gguf is None:
        kinds = [timed(read, replace(placement, dtype=kind)) for kind in ("int4", "int8")]
        four, eight = (each.seconds if each and each.sure else None for each in kinds)
        ratio = four / eight if four and eight else None
    return {"dtype": model.computed, "asked": placement.dtype, "time_over_int8": ratio}


def _remark_on_ends(read: Source, placement: Placement) -> str | None:
    """Say where the chat template ends turns with another token than the model's files name."""
    from foretoken.loading.sources import tokenizer
    from foretoken.loading.target import ModelFacts, ends_of_chats

    file = read.path if read.gguf is None else read.gguf
    known = tokenizer(file, read.options.get("revision"), read.trust)
    return ends_of_chats(ModelFacts(read, placement).settings.ends, known)[1]


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


EXACT_TEXT = {
    "bitwise": "greedy text is the same to the bit with and without draft tokens, in any batch",
    "rounding": "greedy text is the same but for near-ties, which rounding may decide otherwise",
}


def _show_placed(console: Console, document: dict[str, Any]) -> None:
    runs = "{model} runs on {runtime}: {why}" if document["runtime"] else "{model} {why}"
    line = runs.format(**document)
    console.print(line, soft_wrap=True, markup=False)
    if document.get("exact"):
        console.print(EXACT_TEXT[document["exact"]], soft_wrap=True)
    if document["runtime"] and document["asked"] == "int8" and document["dtype"] == "int4":
        line = "its weights have four bits already, which int8 keeps: the same as in int4"
        console.print(line, soft_wrap=True)
    if ratio := document.get("time_over_int8"):
        better = "" if ratio < 1 else ": int8 is the better choice here"
        line = f"int4 takes {ratio:.2f} of the time of int8, over some layers{better}"
        console.print(line, soft_wrap=True)
    if document.get("ends"):
        console.print(document["ends"], soft_wrap=True, markup=False)
    if document.get("lacks"):
        console.print(f"text alone: {document['lacks']}", soft_wrap=True, markup=False)


def _rounded(
    model: str | None,
    origin: option.Origin,
    placing: option.Placing,
    adapter: str | None,
    rows: int,
    held_out: Path,
) -> dict[str, Any]:
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
    options: dict[str, Any] = {**vars(origin), **vars(placing), "adapter": adapter, "rows": rows}
    options["generation_config"] = "ignore"
    as_it_was: dict[str, Any] = options | {"dtype": EXACT}
    exact = load(model, "none", **as_it_was)
    if exact.tokenizer is None:
        raise RefusedError(f"{model} has no tokenizer, so no bits per byte; save one in its folder")
    from foretoken.lab.rounding import pieces, rounding

    texts = pieces(content, exact.tokenizer)
    rounded = load(model, "none", **options)
    document = {
        "model": rounded.target_name,
        "dtype": placing.dtype,
        "date": date.today().isoformat(),
        "held_out": held_out.name,
        "held_out_sha256": hashlib.sha256(content.encode()).hexdigest(),
        **asdict(rounding(exact.target, rounded.target, texts)),
    }
    from foretoken.models import store  # where it runs, or not at all

    identity = getattr(rounded.target, "identity", None) or ""
    return {**document, "kept": store.keep_card(identity.partition(" ")[0], document)}


def _show_rounded(console: Console, document: dict[str, Any]) -> None:
    console.print(
        f"{document['model']} in {document['dtype']}, on {document['tokens']} tokens of "
        f"{document['held_out']} (sha256 {document['held_out_sha256'][:12]}); ± is 95 %, over "
        "pieces of the text",
        soft_wrap=True,
        markup=False,
    )
    bits, rounded = (document[name]["value"] for name in ("bits_per_byte", "rounded_bits_per_byte"))
    more = _told(document, "more_bits_per_byte", "+.4f")
    view = table("", EXACT, document["dtype"])
    view.add_row("bits per byte", f"{bits:.3f}", f"{rounded:.3f} ({more})")
    view.add_row(f"likeliest token is {EXACT}'s", "", _told(document, "same", ".1%"))
    view.add_row("sum min(p, q) at temperature 1", "", _told(document, "overlap", ".4f"))
    console.print(view)
    if not document["kept"]:
        console.print("not kept for --cache: the conversion is not in the cache folder")


def _told(document: dict[str, Any], name: str, form: str) -> str:
    part = document[name]
    return f"{part['value']:{form}} ± {(part['high'] - part['low']) / 2:{form.lstrip('+')}}"


def _folder() -> str:
    from foretoken.models import store

    return str(store.folder() or "no folder: nothing can be kept safely")


def _cached() -> dict[str, Any]:
    from foretoken.costing import stored
    from foretoken.models import store

    rows = [{**asdict(entry), "folder": str(entry.folder)} for entry in store.entries()]
    costs = [{**asdict(each), "trust": _trust(each)} for each in stored.entries()]
    return {"folder": _folder(), "models": rows, "costs": costs}


def _show_cached(console: Console, document: dict[str, Any]) -> None:
    for row in document["models"]:
        line = (
            f"{_date(row['made'])}  {row['bytes'] / 1e6:6.0f} MB  {row['dtype']:8}  {row['name']}"
        )
        console.print(line, soft_wrap=True, markup=False)
        if row["card"]:
            console.print(f"    {_card(row['card'])}", soft_wrap=True, markup=False)
    total = sum(row["bytes"] for row in document["models"]) / 1e6
    console.print(f"{total:.0f} MB in {document['folder']}", soft_wrap=True, markup=False)
    for each in document["costs"]:
        line = f"{_date(each['when'])}  costs of {each['label']}: {each['trust']}"
        console.print(line, soft_wrap=True, markup=False)


def _card(card: dict[str, Any]) -> str:
    """Say in a line how rounding changed a model, as `--held-out` measured it."""
    bits, rounded = (card[name]["value"] for name in ("bits_per_byte", "rounded_bits_per_byte"))
    return (
        f"on {card['held_out']}, {card['date']}: {rounded:.3f} bits per byte "
        f"({_told(card, 'more_bits_per_byte', '+.4f')} from {EXACT}'s {bits:.3f}), likeliest token "
        f"the same at {_told(card, 'same', '.1%')}, sum min(p, q) {_told(card, 'overlap', '.4f')}"
    )


def _trust(kept: Kept) -> str:
    """Say how far stored costs can be trusted."""
    halves = "measured once" if kept.spread is None else f"halves {kept.spread:.2f} times apart"
    others = "" if kept.others is None else f", others took {kept.others:.0%} of the processors"
    off = "" if kept.off is None else f", {kept.off:.1f} times off in later steps"
    return f"{halves}{others}{off}{'; measured again by a later start' if off else ''}"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _cleared(model: str | None) -> dict[str, Any]:
    """Remove all that is kept, or a model's conversions."""
    from foretoken.models import store
    from foretoken.storage.cache import forget

    if model is not None:
        names = {entry.name for entry in store.entries()} & {model, str(Path(model).resolve())}
        if not names:
            raise InputError(f"no conversion of {model!r:.200} is kept; --cache lists their names")
        return {"folder": _folder(), "removed": sum(map(store.clear, names)), "of": model}
    count = store.clear()
    forget()
    return {"folder": _folder(), "removed": count, "of": None}


def _show_cleared(console: Console, document: dict[str, Any]) -> None:
    more = f" of {document['of']}" if document["of"] else ", and measured costs"
    said = "removed {removed} models from {folder}".format(**document)
    console.print(f"{said}{more}", soft_wrap=True, markup=False)
