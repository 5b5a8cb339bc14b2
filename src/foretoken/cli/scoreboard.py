"""The document of `foretoken bench`, its tables on the terminal, and its pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from foretoken.cli import option
from foretoken.cli.render import labelled, milliseconds, prose, table
from foretoken.costing.contention import remark
from foretoken.loading.options import ROUNDED

if TYPE_CHECKING:
    from foretoken.lab.bench.figures import Figures, RaceAgreement, Throughput
    from foretoken.lab.bench.race import Peer, Round
    from foretoken.sampling.params import SamplingParams
    from foretoken.speculator import Speculator


SPEED = [
    ("first ms", "until the first tokens"),
    ("ms/token", "for those behind them: the median over rounds, and its quartiles"),
    ("a call", "tokens a target call"),
    ("speed-up", "over foretoken's plain decoding of the same round"),
    ("same", "tokens until one differs from plain greedy text; at: the place"),
]
TIME = [
    ("alpha", "mean of sum min(p, q) over the draft tokens judged"),
    ("c", "time of a draft token over that of a target pass"),
    ("v", "time of a target pass over gamma + 1 tokens over that of one over 1"),
    ("formula", "speed-up by Theorem 3.8 from these; of it: measured over formula"),
    ("draft ..", "shares of the time; verify: distributions, verification and rollback"),
]
THROUGHPUT = [
    ("tokens/s", "of all texts, prompts included: the median over rounds, and its quartiles"),
    ("speed-up", "over foretoken's plain decoding of the same round"),
    ("a call", "tokens a row gains in a target call"),
    ("rows", "that such a call advances, as a share of the texts"),
    ("padding", "positions computed for no row, as a share of all in these calls"),
    ("prompts", "share of the time before the first of these calls"),
    ("same", "tokens until one differs from plain greedy text; at: the place"),
]


def show(document: dict[str, Any], figures: list[Figures], console: Console) -> None:
    """Print the tables and a legend of their columns."""
    _head(document, console)
    console.print(_speed(figures, document["unable"]))
    _unable(document, console)
    labelled(console, SPEED, 10)
    console.print()
    console.print(_time(figures))
    console.print()
    labelled(console, TIME, 10)
    console.print()
    best = document["best_gamma"]
    if document["automatic_over_best"] is not None:
        over = document["automatic_over_best"]
        prose(console, f"automatic gamma: {over:.2f} of the speed of the best fixed one, {best}")
    for duel in document["duels"]:
        _duel(console, duel, duel["name"] + _note(document, duel["name"]))
    _others(document, console)


def show_batches(
    document: dict[str, Any], by_batch: dict[int, list[Throughput]], console: Console
) -> None:
    """Print a table for each number of texts at once, and a legend."""
    _head(document, console)
    for texts, rows in by_batch.items():
        console.print(_throughput(f"{texts} at once", rows))
        for row in rows:
            if row.ahead:
                _ahead(console, row)
        console.print()
    _unable(document, console)
    labelled(console, THROUGHPUT, 10)
    _others(document, console)


def _head(document: dict[str, Any], console: Console) -> None:
    """Print the contestants and their backends."""
    options = document["asked"]
    rounds = document.get("rounds", options["repeats"])
    prose(
        console,
        f"{document['target']} on {document['runtime']}, {document['draft']} on "
        f"{document['draft_runtime']}: {options['prompts']} prompts, {options['max_new_tokens']} "
        f"tokens each, temperature {options['temperature']:g}, rounds: {rounds}",
    )
    for name, dtypes in document["precision"].items():
        precision = ", ".join(f"{part} {dtype}" for part, dtype in dtypes.items())
        version = document["versions"].get(name, document["machine"]["versions"].get(name))
        prose(console, f"{name} {version}{_note(document, name)}: {precision}")
    console.print()


def _unable(document: dict[str, Any], console: Console) -> None:
    for name, why in document["unable"].items():
        prose(console, f"{name} cannot run this pair: {why}")
    console.print()


def _others(document: dict[str, Any], console: Console) -> None:
    if warning := remark(document["others"]):
        prose(console, warning, bold=warning)


def _ahead(console: Console, row: Throughput) -> None:
    from foretoken.lab.bench.figures import label

    ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row.ahead.items())
    prose(console, f"against {row.name}, {label(row.gamma)}: {ratios}")


def _throughput(title: str, rows: list[Throughput]) -> Table:
    """Make a table with a row for each contestant."""
    from foretoken.lab.bench.figures import label

    heads = ("tokens/s", "quartiles", "speed-up", "a call", "rows", "padding", "prompts")
    view, name = table(title, *heads, "same", "at", gap=0), ""
    for row in rows:
        if row.name != name:
            name = row.name
            view.add_row(name, style="bold")
        rates = row.tokens_per_second
        view.add_row(
            label(row.gamma),
            _rate(rates.median),
            f"{_rate(rates.q1)}-{_rate(rates.q3)}",
            f"{row.speedup:.2f}x",
            _number(row.tokens_per_call),
            *map(_percent, (row.occupancy, row.padding, row.reading)),
            *_same(row.agreement),
        )
    return view


def _duel(console: Console, duel: dict[str, Any], rival: str) -> None:
    automatic = duel["automatic"]
    best = f"{duel['best']:.2f}x"
    prose(
        console,
        f"against {rival}: plain {duel['plain']:.2f}x, gamma {duel['gamma']} against its gamma "
        f"{duel['peer_gamma']} {best}"
        + ("" if automatic is None else f", automatic {automatic:.2f}x"),
        bold=best,
    )


def _speed(figures: list[Figures], unable: dict[str, str]) -> Table:
    """Make a table of speeds, and of agreement with plain greedy text."""
    from foretoken.lab.bench.figures import label

    heads = ("first ms", "ms/token", "quartiles", "tokens/s", "a call", "speed-up", "same", "at")
    view, name = table("", *heads, gap=0), ""
    for row in figures:
        if row.name != name:
            name = row.name
            view.add_row(name, style="bold")
        time = row.seconds_per_token
        view.add_row(
            label(row.gamma),
            milliseconds(row.first_seconds.median),
            milliseconds(time.median),
            f"{milliseconds(time.q1)}-{milliseconds(time.q3)}",
            f"{row.tokens_per_second:.1f}",
            _number(row.tokens_per_call),
            f"{row.speedup:.2f}x",
            *_same(row.agreement),
        )
    for name in unable:
        view.add_row(name, style="bold")
        view.add_row("cannot run")
    return view


def _time(figures: list[Figures]) -> Table:
    """Make a table of the formula and the shares of the time, for each gamma."""
    from foretoken.lab.bench.figures import label

    heads = ("alpha", "c", "v", "formula", "measured", "of it")
    view = table("", *heads, "draft", "target", "verify", "rest", gap=0)
    for row in figures:
        if row.shares is None:
            continue
        p = row.predicted
        factors = (p.alpha, p.c, p.v, p.speedup) if p else (None,) * 4
        parts = (f"{share:.1%}" for share in asdict(row.shares).values())
        numbers = (*factors, row.speedup, row.measured_over_predicted)
        view.add_row(label(row.gamma), *map(_number, numbers), *parts)
    return view


def _note(document: dict[str, Any], name: str) -> str:
    note = document["notes"].get(name)
    return f" ({note})" if note else ""


def _same(agreement: RaceAgreement | None) -> tuple[str, str]:
    if agreement is None:
        return "", ""
    place = agreement.first_difference
    return f"{agreement.share:.0%}", "" if place is None else str(place)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options that all contestants share."""

    max_new_tokens: int
    repeats: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    rule: str
    loading: option.PairLoading

    @property
    def params(self) -> SamplingParams:
        from foretoken.sampling.params import SamplingParams  # late: NumPy

        return SamplingParams(self.temperature, self.top_k, self.top_p)

    def document(self, prompts: int) -> dict[str, Any]:
        """Return the document's `asked`."""
        options = asdict(self)
        return options | options.pop("loading") | {"prompts": prompts}


@dataclass(frozen=True, slots=True)
class BenchSetting:
    """The contestants, and the peers that could not run."""

    spec: Speculator
    peers: list[Peer]
    options: BenchOptions
    prompts: int
    unable: dict[str, str]
    others: float | None = None  # share of the processors that no contestant had

    @property
    def greedy(self) -> bool:
        return self.options.temperature == 0

    def head(self, rounds: list[Round]) -> dict[str, Any]:
        """Return the beginning of the document; peers are those with a round."""
        from foretoken.lab.bench.race import OWN
        from foretoken.lab.machine import describe

        spec, names = self.spec, {name for turns in rounds for name, _ in turns}
        peers = [peer for peer in self.peers if peer.name in names]
        return {
            "date": date.today().isoformat(),
            "machine": asdict(describe(spec.target.device)),
            "target": spec.target_name,
            "draft": spec.draft_name,
            "runtime": spec.target.runtime,
            "draft_runtime": spec.drafter.runtime,
            "asked": self.options.document(self.prompts),
            "precision": {OWN: _precision(spec, self.options.loading)}
            | {peer.name: peer.about["precision"] for peer in peers},
            "versions": {peer.name: peer.about["version"] for peer in peers},
            "notes": {p.name: p.about["note"] for p in peers if "note" in p.about},
            "unable": self.unable,
            "others": self.others,
        }


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A JSON document, and functions that print its tables and draw its pictures."""

    document: dict[str, Any]
    show: Callable[[Console], None]
    draw: Callable[[Path, str], object]

    def save(self, out: Path) -> None:
        """Write the document and the pictures."""
        document = self.document
        (out / "bench.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        self.draw(out, f"{document['target']}, {document['asked']['dtype']}, {document['date']}")


def one_by_one(setting: BenchSetting, rounds: list[Round]) -> BenchReport:
    """Report rounds in which texts ran one after another."""
    from foretoken.lab.bench import figures as bench

    peers = dict.fromkeys(name for name, _ in rounds[0] if name != bench.OWN)
    entries = [bench.figures(rounds, key, greedy=setting.greedy) for key in rounds[0]]
    rows = [asdict(row) | {"variant": bench.label(row.gamma)} for row in entries]
    for entry, row in zip(rows, entries, strict=True):
        entry["measured_over_predicted"] = row.measured_over_predicted
    fixed = bench.best(rounds, bench.OWN)
    automatic = bench.AUTOMATIC in rounds[0]
    document = setting.head(rounds) | {
        "rounds": len(rounds),
        "interrupted": len(rounds) < setting.options.repeats,
        "figures": rows,
        "best_gamma": fixed[1],
        "automatic_over_best": bench.faster(rounds, bench.AUTOMATIC, fixed) if automatic else None,
        "duels": [asdict(bench.duel(rounds, name)) for name in peers],
    }
    return BenchReport(document, partial(show, document, entries), partial(_draw, entries))


def batches(
    setting: BenchSetting, sizes: list[int], by_batch: dict[int, list[Round]]
) -> BenchReport:
    """Report rounds by the number of texts at once, for the `sizes` that were begun."""
    from foretoken.lab.bench.figures import label, throughput

    repeats = setting.options.repeats
    entries = {
        texts: [throughput(rounds, key, greedy=setting.greedy) for key in rounds[0]]
        for texts, rounds in by_batch.items()
    }
    document = setting.head([*chain.from_iterable(by_batch.values())])
    document["asked"]["batch"] = sizes
    document |= {
        "interrupted": any(len(by_batch.get(texts, ())) < repeats for texts in sizes),
        "batches": [
            {
                "batch": texts,
                "rounds": len(by_batch[texts]),
                "figures": [asdict(row) | {"variant": label(row.gamma)} for row in rows],
            }
            for texts, rows in entries.items()
        ],
    }
    tables = partial(show_batches, document, entries)
    return BenchReport(document, tables, partial(_draw_batches, entries))


def _precision(spec: Speculator, loading: option.PairLoading) -> dict[str, str]:
    """Return the target's dtypes by part; the cache has that of the computation by default."""
    computed = spec.target.computed
    cache = "float32" if computed in ROUNDED else computed  # rounded in products alone
    dtypes = {"weights": loading.dtype, "cache": cache, "activations": computed}
    drafted = None if spec.drafter.model is None else spec.drafter.model.computed
    return dtypes if drafted is None else dtypes | {"draft": drafted}


def _draw(figures: list[Figures], out: Path, title: str) -> None:
    from foretoken.lab.bench.figures import draw  # late: matplotlib

    draw(figures, out, title)


def _draw_batches(table: dict[int, list[Throughput]], out: Path, title: str) -> None:
    from foretoken.lab.bench.figures import draw_batches  # late: matplotlib

    draw_batches(table, out, title)
