"""A benchmark that can be resumed: after each draft and batch size, the results are added to a JSON
document and saved."""

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
from foretoken.loading import hub, named_models
from foretoken.loading.options import LoadOptions
from foretoken.loading.target import TargetInfo
from foretoken.measurement.footprint import compute_model_footprint
from foretoken.measurement.machine import get_machine, get_peak_bytes, measure_bandwidth
from foretoken.measurement.options import BenchOptions, format_gamma
from foretoken.measurement.plan import BENCH_FILE_FORMAT, PlanOptions, choose_plan
from foretoken.measurement.races import (
    ContestantKey,
    Race,
    RaceTask,
    RunTurn,
    make_own_turns,
    prepare_tasks,
    repeat_tasks,
    run_rounds,
)
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from foretoken.storage import files

LoadPair = Callable[[str, str | None, Callable[[TargetInfo], object]], Speculator]


@dataclass(slots=True)
class Benchmark:
    """A benchmark of a target with each of several drafts.

    Attributes:
        options: Options of the benchmark, such as the drafts and gammas to measure.
        load: Function that loads a target (first argument) with a draft (second argument). Before
            loading weights, it calls its third argument with the description of the target.
        prompts: Function that makes the prompts for a target.
        out: File for the results; None: they are not saved.
        progress: Context manager that shows a progress bar, given a title and a number of turns. It
            yields a function to call with the name of each turn.
        document: The results so far, as a JSON object.
        categories: The category of each prompt; []: the prompts have no categories.
        num_resumed: Number of results that were in the file; None for a new benchmark.
        save_error: The error of the last attempt to save the results.
    """

    options: BenchOptions
    load: LoadPair
    prompts: Callable[[TargetInfo], list[Prompt]]
    out: Path | None
    progress: Callable[[str, int], AbstractContextManager[Callable[[str], None]]]
    document: dict[str, Any] = field(init=False)
    categories: list[str] = field(default_factory=list[str])
    num_resumed: int | None = None
    save_error: OSError | None = None

    def __post_init__(self) -> None:
        """Load the results from `out` if an earlier run with the same options on this machine saved
        them there. Raises InputError if `out` is any other existing file."""
        if self.options.batch[-1] > MAX_BATCH_SIZE:
            raise InputError(
                f"batch is {self.options.batch}; give numbers from 1 to {MAX_BATCH_SIZE}"
            )
        machine = get_machine(torch.device(self.options.loading.get("device", "cpu")))
        identity = {
            "format": BENCH_FILE_FORMAT,
            "machine": asdict(machine),
            "asked": asdict(self.options),
        }
        identity["files_sha256"] = self._hash_files()
        self.document = {"date": date.today().isoformat(), "figures": [], **identity}
        self.document |= dict.fromkeys(("runtime", "memory", "others", "best"))
        if self.out is None or not self.out.exists():
            return
        with suppress(ValueError, KeyError, TypeError):  # raised for a file of another program
            stored = files.parse_json(files.read_text(self.out, "JSON"))
            if {key: stored[key] for key in identity} == identity:
                complete = [row for row in stored["figures"] if self._is_complete(row)]
                self.document = stored | {"figures": complete}
                self._conclude()
                self.num_resumed = len(complete)
                return
        raise InputError(
            f"{self.out} has results of another command or of other models; remove the file "
            "or give another --out"
        )

    def _hash_files(self) -> str:
        """Return a digest of the sizes and modification times of the files of all models, to detect
        that a model has changed."""
        given = [named_models.strip_lookup(draft) for draft in self.options.drafts if draft]
        drafts = [draft for each in given for draft in named_models.split_drafts(each)]
        places = [named_models.find_draft_folder(draft) or draft for draft in drafts]
        names = [self.options.target, *places, self.options.loading.get("adapter")]
        stamps = [hub.list_file_stamps(name) for name in names if name]
        return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()

    def _is_complete(self, row: dict[str, Any]) -> bool:
        return row["tokens_per_second"]["n"] == self.options.repeats

    def run(self) -> None:
        """Measure the results that `document` lacks and add them. After Ctrl-C return early."""
        done = [*self.document["figures"]]
        self.document["interrupted"] = True
        with suppress(KeyboardInterrupt):
            for draft in self.options.drafts:
                measured = {row["batch"] for row in done if row["asked"] == draft}
                missing = [size for size in self.options.batch if size not in measured]
                if missing and not self._measure(draft, missing):
                    return
            self.document["interrupted"] = False
            self._save()

    def _measure(self, draft: str | None, batch: list[int]) -> bool:
        """Measure a draft with each batch size of `batch` and add the results. Return False after
        Ctrl-C."""
        options, prompts = self.options, list[Prompt]()
        spec = self.load(options.target, draft, lambda info: prompts.extend(self.prompts(info)))
        spec, tasks = prepare_tasks(
            spec.prepared(), prompts, options.params, options.seed, self.categories
        )
        self.document["runtime"] = spec.target.runtime
        self.document["memory"] = self.document["memory"] or self._measure_memory(spec)
        turns = make_own_turns(spec, options.gammas, options.rule)
        for batch_size in batch:
            batch_tasks = repeat_tasks(tasks, batch_size) if batch_size > 1 else tasks
            reading = contention.take_reading()
            raced = self._run_race(turns, batch_tasks, spec.draft_name, batch_size)
            if raced.rounds:
                others = contention.compute_others_share([contention.measure_since(reading)])
                head = {
                    "asked": draft,
                    "draft": spec.draft_name,
                    "batch": batch_size,
                    "others": others,
                }
                self.document["figures"] += [
                    head | _describe_contestant(raced, key) for key in raced.rounds[0]
                ]
                self._conclude()
                self._save()
            if len(raced.rounds) < options.repeats:
                return False
        return True

    def _run_race(
        self,
        turns: dict[ContestantKey, RunTurn],
        tasks: list[RaceTask],
        draft: str,
        batch_size: int,
    ) -> Race:
        """Run the rounds of one draft and batch size with a progress bar, and return the rounds
        that finished."""
        repeats, together = self.options.repeats, batch_size > 1
        with self.progress(draft, (repeats + 1) * len(turns)) as show:

            def report(key: ContestantKey) -> None:
                show(f"{draft}, batch size {batch_size}: {format_gamma(key[1])}")

            return run_rounds(turns, tasks, repeats, together=together, report=report)

    def _measure_memory(self, spec: Speculator) -> dict[str, Any]:
        """Return the bytes that a forward pass of the target loads, and the memory bandwidth."""
        options = LoadOptions(**self.options.loading)
        model = compute_model_footprint(
            spec.target,
            spec.target_name,
            options.dtype,
            options.revision,
            trust=options.trust_remote_code,
        )
        peak = get_peak_bytes(spec.target.device)  # before a large tensor is made
        seconds, size = measure_bandwidth(spec.target.device)
        return {
            "weight_bytes": model.weight_bytes,
            "pass_bytes": model.pass_bytes,
            "peak_bytes": peak,
            "bytes_per_second": size / seconds.median,
        }

    def _conclude(self) -> None:
        """Update the document's summary: the best draft and gamma, and the largest share of the
        CPUs that other processes used."""
        options, rows = self.options, self.document["figures"]
        measured = PlanOptions(
            None, options.rule, options.temperature, options.top_k, options.top_p
        )
        load = {"target": options.target, **options.loading}
        self.document["best"] = asdict(choose_plan(rows, measured, load)) if rows else None
        shares = [row["others"] for row in rows if row["others"] is not None]
        self.document["others"] = max(shares, default=None)

    def _save(self) -> None:
        """Save the document. Store an OSError in `save_error` instead of raising it, so that the
        results are still printed at the end."""
        if self.out is not None:
            text = json.dumps(self.document, indent=2, allow_nan=False) + "\n"
            try:
                files.write_atomically(self.out, text.encode())
                self.save_error = None
            except OSError as error:
                self.save_error = error


def _describe_contestant(raced: Race, key: ContestantKey) -> dict[str, Any]:
    """Return the figures of one contestant as a JSON object, with those of each category if the
    prompts have categories."""
    figures = asdict(raced.compute_figures(key))
    categories = raced.compute_category_figures(key)
    if categories:
        figures["categories"] = {name: asdict(each) for name, each in categories.items()}
    return figures
