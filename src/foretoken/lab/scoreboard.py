"""A benchmark as tables on the terminal: nothing but what its document holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from foretoken.lab.bench import Agreement, Figures, label

WIDTH = 96


def show(document: dict[str, Any], table: list[Figures], console: Console) -> None:
    """The tables; nothing but what the document holds."""
    console.width = max(console.width, WIDTH)  # a file has no width; a cut number says nothing
    asked = document["asked"]
    console.print(
        f"{document['target']} on {document['runtime']}, {document['draft']} on "
        f"{document['draft_runtime']}: {asked['prompts']} prompts, {asked['max_new_tokens']} "
        f"tokens each, temperature {asked['temperature']:g}, {document['rounds']} rounds",
        soft_wrap=True,
    )
    for name, kinds in document["precision"].items():
        told = ", ".join(f"{part} {kind}" for part, kind in kinds.items())
        version = document["versions"].get(name, document["machine"]["versions"].get(name))
        console.print(f"{name} {version}{_note(document, name)}: {told}", soft_wrap=True)
    console.print(_speed(table))
    console.print(_time(table))
    best = document["best_gamma"]
    if document["automatic_over_best"] is not None:
        over = document["automatic_over_best"]
        console.print(f"automatic gamma: {over:.2f} of the speed of the best fixed one, {best}")
    for duel in document["duels"]:
        automatic = duel["automatic"]
        told = "" if automatic is None else f", automatic {automatic:.2f}x"
        rival = duel["name"] + _note(document, duel["name"])
        console.print(
            f"against {rival}: plain {duel['plain']:.2f}x, gamma {duel['gamma']} against "
            f"its gamma {duel['peer_gamma']} [bold]{duel['best']:.2f}x[/bold]{told}",
            soft_wrap=True,
        )


def _speed(table: list[Figures]) -> Table:
    """A row for each contestant: how fast, and whether its text is the same."""
    heads = ("first ms", "ms/token", "quartiles", "tokens/s", "a call", "speed-up", "same text")
    shown, name = _table("", *heads), ""
    for one in table:
        if one.name != name:
            name = one.name
            shown.add_row(name, style="bold")
        time = one.seconds_per_token
        shown.add_row(
            label(one.gamma),
            f"{one.first_seconds.median * 1e3:.1f}",
            f"{time.median * 1e3:.2f}",
            f"{time.q1 * 1e3:.2f}-{time.q3 * 1e3:.2f}",
            f"{one.tokens_per_second:.1f}",
            _number(one.tokens_per_call),
            f"{one.speedup:.2f}x",
            _same(one.agreement),
        )
    return shown


def _time(table: list[Figures]) -> Table:
    """A row for each gamma of ours: the formula, and where the time went."""
    heads = ("alpha", "c", "v", "formula", "measured", "of it")
    shown = _table("", *heads, "draft", "target", "verify", "rest")
    for one in table:
        if one.shares is None:
            continue
        said = one.predicted
        factors = (said.alpha, said.c, said.v, said.speedup) if said else (None,) * 4
        parts = (f"{share:.1%}" for share in asdict(one.shares).values())
        numbers = (*factors, one.speedup, one.measured_over_predicted)
        shown.add_row(label(one.gamma), *map(_number, numbers), *parts)
    return shown


def _table(*heads: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in heads:
        shown.add_column(head, justify="right" if head else "left", no_wrap=True)
    return shown


def _note(document: dict[str, Any], name: str) -> str:
    note = document["notes"].get(name)
    return f" ({note})" if note else ""


def _same(found: Agreement | None) -> str:
    if found is None:
        return ""
    place = found.first_difference
    return f"{found.share:.0%}" + ("" if place is None else f", differs at {place}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
