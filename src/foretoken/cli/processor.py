"""What `foretoken doctor` says of the processor: what it can do, how fast it reads memory, and with
`--speed` which precision is fastest."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from foretoken.cli.render import bar, milliseconds
from foretoken.costing import contention

SAYS = (
    "a pass of linear layers alone over so many tokens, on OpenVINO. Precisions below float32 make "
    "another model of a target; a draft's never changes the output's law"
)


def measured() -> dict[str, Any]:
    """What it can do, and how fast it reads memory: measured, in less than a second or two."""
    import torch

    from foretoken.lab.machine import bandwidth, processor

    here, reading = processor(), contention.read()
    seconds, size = bandwidth(torch.device("cpu"))
    share = contention.share([contention.taken(reading)])
    rate = {"bytes_per_second": size / seconds.median, "read_bytes": size, "others": share}
    return {**asdict(here), "lacks": here.lacks, **rate}


def show(console: Console, document: dict[str, Any]) -> None:
    cores = "" if document["cores"] is None else f" of {document['cores']} cores"
    line = f"processor: {document['name']}, {document['threads']} threads{cores}"
    if document["abilities"] is not None:
        line += f"; {', '.join(document['abilities']) or 'none of the known abilities'}"
    if document["lacks"]:
        line += f"; no {', no '.join(document['lacks'])}"
    console.print(line, soft_wrap=True)
    cache = document["cache_bytes"]
    beyond = "" if cache is None else f", a cache of {cache / 2**20:.0f} MiB"
    size = document["read_bytes"] / 2**20
    console.print(
        f"memory: {document['bytes_per_second'] / 1e9:.1f} GB/s, reading {size:.0f} MiB{beyond}",
        soft_wrap=True,
    )
    if warning := contention.remark(document["others"]):
        console.print(warning, soft_wrap=True)


def speed(console: Console, *, as_json: bool) -> None:
    """Sizes of models by precisions, the fastest of each line marked."""
    from foretoken.loading.runtimes import require_openvino

    require_openvino()
    from foretoken.lab.speed import LAYERS, STACKS, TOKENS, speeds

    here, reading = measured(), contention.read()
    timed = list(bar(speeds(STACKS), "timing", len(STACKS) * len(LAYERS)))
    share = contention.share([contention.taken(reading)])
    if as_json:
        rows = [asdict(each) for each in timed]
        document = {"processor": here, "tokens": TOKENS, "speeds": rows, "others": share}
        print(json.dumps(document, allow_nan=False))
        return
    show(console, here)
    table = Table("weights", "tokens", *(f"{name} ms" for name in LAYERS), "fastest")
    for parameters in dict.fromkeys(each.parameters for each in timed):
        for i, tokens in enumerate(TOKENS):
            line = {
                each.dtype: None if each.seconds is None else each.seconds[i]
                for each in timed
                if each.parameters == parameters
            }
            table.add_row(f"{parameters / 1e6:.0f}M", str(tokens), *_marked(line))
    console.print(table)
    console.print(SAYS)
    if any(each.seconds is None for each in timed):
        console.print("-: time or memory did not suffice")
    if warning := contention.remark(share):
        console.print(warning)


def _marked(line: dict[str, float | None]) -> list[str]:
    """Times by precision, and which is the fastest of those that are known."""
    timings = {name: seconds for name, seconds in line.items() if seconds is not None}
    best = min(timings, key=lambda name: timings[name], default="")
    cells = ["-" if seconds is None else milliseconds(seconds) for seconds in line.values()]
    marks = zip(line, cells, strict=True)
    return [f"[bold]{text}[/bold]" if name == best else text for name, text in marks] + [best]
