"""A benchmark under way: its document grows draft by draft, is saved as it grows, and is continued
by the same command."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from foretoken.costing import contention
from foretoken.errors import InputError
from foretoken.inputs import Prompt
from foretoken.loading import hub, named
from foretoken.loading.options import LoadOptions
from foretoken.loading.target import KnownTarget
from foretoken.measurement.bench import (
    Key,
    Race,
    RaceTask,
    Turn,
    own_turns,
    prepare,
    race,
    repeat_tasks,
)
from foretoken.measurement.footprint import of_model
from foretoken.measurement.machine import bandwidth, describe, peak_bytes
from foretoken.measurement.options import BenchOptions, label
from foretoken.measurement.plan import FORMAT, PlanOptions, choose
from foretoken.speculator import MAX_ROWS, Speculator
from foretoken.storage import files

Load = Callable[[str, str | None, Callable[[KnownTarget], object]], Speculator]


@dataclass(slots=True)
class Benchmark:
    """A benchmark of a target with each of several drafts.

    Attributes:
        load: Loads the target with a draft, once the target's files are checked.
        prompts: Makes the prompts for a target.
        out: The file that is written; None for none.
        progress: Shows a bar with a title and a number of turns; what it yields is called with
            the name of each turn.
        document: The results so far, as JSON has them.
        resumed: Lines of results that were in the file; None for a new benchmark.
        unsaved: Why the last figures are not in the file.
    """

    asked: BenchOptions
    load: Load
    prompts: Callable[[KnownTarget], list[Prompt]]
    out: Path | None
    progress: Callable[[str, int], AbstractContextManager[Callable[[str], None]]]
    document: dict[str, Any] = field(init=False)
    resumed: int | None = None
    unsaved: OSError | None = None

    def __post_init__(self) -> None:
        """Begin with what the same command has saved. InputError for another file at `out`."""
        if self.asked.batch[-1] > MAX_ROWS:
            raise InputError(f"batch is {self.asked.batch}; give numbers from 1 to {MAX_ROWS}")
        machine = describe(torch.device(self.asked.loading.get("device", "cpu")))
        same = {"format": FORMAT, "machine": asdict(machine), "asked": asdict(self.asked)}
        same["files_sha256"] = self._files()
        self.document = {"date": date.today().isoformat(), "figures": [], **same}
        self.document |= dict.fromkeys(("runtime", "memory", "others", "best"))
        if self.out is None or not self.out.exists():
            return
        with suppress(ValueError, KeyError, TypeError):  # of a file that something else wrote
            found = files.parse_json(files.read_text(self.out, "JSON"))
            if {key: found[key] for key in same} == same:
                whole = [row for row in found["figures"] if self._whole(row)]
                self.document = found | {"figures": whole}
                self._conclude()
                self.resumed = len(whole)
                return
        raise InputError(
            f"{self.out} is not of the same command and models; remove it or give another"
        )

    def _files(self) -> str:
        """Return a digest of the sizes and times of the files of all models that are here."""
        drafts = [named.without_front(draft) for draft in self.asked.drafts if draft]
        places = [named.draft(draft) or draft for draft in drafts]
        names = [self.asked.target, *places, self.asked.loading.get("adapter")]
        stamps = [hub.stamps(name) for name in names if name]
        return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()

    def _whole(self, row: dict[str, Any]) -> bool:
        return row["tokens_per_second"]["n"] == self.asked.repeats

    def run(self) -> None:
        """Measure what is missing, until Ctrl-C."""
        done = [*self.document["figures"]]
        self.document["interrupted"] = True
        with suppress(KeyboardInterrupt):
            for draft in self.asked.drafts:
                known = {row["batch"] for row in done if row["asked"] == draft}
                left = [texts for texts in self.asked.batch if texts not in known]
                if left and not self._measure(draft, left):
                    return
            self.document["interrupted"] = False
            self._save()

    def _measure(self, draft: str | None, batch: list[int]) -> bool:
        """Measure a draft with each number of texts at once; return False after Ctrl-C."""
        asked, prompts = self.asked, list[Prompt]()
        spec = self.load(asked.target, draft, lambda known: prompts.extend(self.prompts(known)))
        spec, tasks = prepare(spec.prepared(), prompts, asked.params, asked.seed)
        self.document["runtime"] = spec.target.runtime
        self.document["memory"] = self.document["memory"] or self._memory(spec)
        turns = own_turns(spec, asked.gammas, asked.rule)
        for texts in batch:
            given = repeat_tasks(tasks, texts) if texts > 1 else tasks
            reading = contention.read()
            raced = self._race(turns, given, spec.draft_name, together=texts > 1)
            if raced.rounds:
                others = contention.share([contention.taken(reading)])
                about = {"asked": draft, "draft": spec.draft_name, "batch": texts, "others": others}
                self.document["figures"] += [
                    about | asdict(raced.figures(key)) for key in raced.rounds[0]
                ]
                self._conclude()
                self._save()
            if len(raced.rounds) < asked.repeats:
                return False
        return True

    def _race(
        self, turns: dict[Key, Turn], tasks: list[RaceTask], draft: str, *, together: bool
    ) -> Race:
        """Run the rounds, and show progress."""
        repeats, texts = self.asked.repeats, len(tasks) if together else 1
        with self.progress(draft, (repeats + 1) * len(turns)) as show:

            def report(key: Key) -> None:
                show(f"{draft}, {texts} at once: {label(key[1])}")

            return race(turns, tasks, repeats, together=together, report=report)

    def _memory(self, spec: Speculator) -> dict[str, Any]:
        """Return the bytes that a pass of the target reads, and how fast this machine reads."""
        options = LoadOptions(**self.asked.loading)
        how = options.dtype, options.revision
        model = of_model(spec.target, spec.target_name, *how, trust=options.trust_remote_code)
        peak = peak_bytes(spec.target.device)  # before the large read
        seconds, size = bandwidth(spec.target.device)
        return {
            "weight_bytes": model.weight_bytes,
            "pass_bytes": model.pass_bytes,
            "peak_bytes": peak,
            "bytes_per_second": size / seconds.median,
        }

    def _conclude(self) -> None:
        """Note the fastest draft and gamma, and the share of the processors that others took."""
        asked, rows = self.asked, self.document["figures"]
        measured = PlanOptions(None, asked.rule, asked.temperature, asked.top_k, asked.top_p)
        load = {"target": asked.target, **asked.loading}
        self.document["best"] = asdict(choose(rows, measured, load)) if rows else None
        shares = [row["others"] for row in rows if row["others"] is not None]
        self.document["others"] = max(shares, default=None)

    def _save(self) -> None:
        """Write the file; where that fails, the figures are printed at the end all the same."""
        if self.out is not None:
            text = json.dumps(self.document, indent=2, allow_nan=False) + "\n"
            try:
                files.write(self.out, text.encode())
                self.unsaved = None
            except OSError as error:
                self.unsaved = error
