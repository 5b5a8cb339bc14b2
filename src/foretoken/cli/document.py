"""A benchmark's document, with what shows and draws it."""

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

from foretoken.cli import option, scoreboard

if TYPE_CHECKING:
    from foretoken.lab.bench.figures import Figures
    from foretoken.lab.bench.peer import Peer
    from foretoken.lab.bench.race import Round
    from foretoken.lab.bench.throughput import Throughput
    from foretoken.sampling.params import SamplingParams
    from foretoken.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Options:
    """What every contestant is given, and how often."""

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
        """As the document's `asked`."""
        options = asdict(self)
        return options | options.pop("loading") | {"prompts": prompts}


@dataclass(frozen=True, slots=True)
class Setting:
    """Who ran, on what, and who could not."""

    spec: Speculator
    peers: list[Peer]
    options: Options
    prompts: int
    unable: dict[str, str]
    others: float | None = None  # share of the processors that no contestant had

    @property
    def greedy(self) -> bool:
        return self.options.temperature == 0

    def head(self, rounds: list[Round]) -> dict[str, Any]:
        """What every document begins with; the peers are those in one of the rounds."""
        from foretoken.lab.bench.race import OWN
        from foretoken.lab.machine import describe
        from foretoken.speculator import runtime

        spec, names = self.spec, {name for turns in rounds for name, _ in turns}
        peers = [peer for peer in self.peers if peer.name in names]
        return {
            "date": date.today().isoformat(),
            "machine": asdict(describe(spec.target.device)),
            "target": spec.target_name,
            "draft": spec.draft_name,
            "runtime": spec.target.runtime,
            "draft_runtime": runtime(spec.drafter),
            "asked": self.options.document(self.prompts),
            "precision": {OWN: _precision(spec, self.options.loading)}
            | {peer.name: peer.about["precision"] for peer in peers},
            "versions": {peer.name: peer.about["version"] for peer in peers},
            "notes": {p.name: p.about["note"] for p in peers if "note" in p.about},
            "unable": self.unable,
            "others": self.others,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The JSON document; its tables on a console; its pictures in a folder, under a title."""

    document: dict[str, Any]
    show: Callable[[Console], None]
    draw: Callable[[Path, str], object]

    def save(self, out: Path) -> None:
        """Document and pictures."""
        document = self.document
        (out / "bench.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        self.draw(out, f"{document['target']}, {document['asked']['dtype']}, {document['date']}")


def one_by_one(setting: Setting, rounds: list[Round]) -> Report:
    """Of rounds in which texts came one after another."""
    from foretoken.lab.bench import figures as bench

    peers = dict.fromkeys(name for name, _ in rounds[0] if name != bench.OWN)
    table = [bench.figures(rounds, key, greedy=setting.greedy) for key in rounds[0]]
    rows = [asdict(row) | {"variant": bench.label(row.gamma)} for row in table]
    for entry, row in zip(rows, table, strict=True):
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
    return Report(document, partial(scoreboard.show, document, table), partial(_draw, table))


def batches(setting: Setting, sizes: list[int], by_batch: dict[int, list[Round]]) -> Report:
    """Of rounds by how many texts came at once: those of `sizes` that were begun."""
    from foretoken.lab.bench.figures import label
    from foretoken.lab.bench.throughput import throughput

    repeats = setting.options.repeats
    table = {
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
            for texts, rows in table.items()
        ],
    }
    show = partial(scoreboard.show_batches, document, table)
    return Report(document, show, partial(_draw_batches, table))


def _precision(spec: Speculator, loading: option.PairLoading) -> dict[str, str]:
    """The target's dtypes, part by part: the cache has by itself that of the computation."""
    from foretoken.options import ROUNDED  # late: numpy

    computed = spec.target.computed
    cache = "float32" if computed in ROUNDED else computed  # rounded in products alone
    dtypes = {"weights": loading.dtype, "cache": loading.kv_dtype or cache, "activations": computed}
    drafted = getattr(getattr(spec.drafter, "model", None), "computed", None)
    return dtypes if drafted is None else dtypes | {"draft": drafted}


def _draw(table: list[Figures], out: Path, title: str) -> None:
    from foretoken.lab.bench.plot import draw  # late: matplotlib

    draw(table, out, title)


def _draw_batches(table: dict[int, list[Throughput]], out: Path, title: str) -> None:
    from foretoken.lab.bench.plot import draw_batches  # late: matplotlib

    draw_batches(table, out, title)
