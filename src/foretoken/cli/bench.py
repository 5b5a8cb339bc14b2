"""`foretoken bench`: whether speculative decoding pays here, with which draft and gamma."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer import Option

from foretoken.cli import option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, flag, quiet
from foretoken.cli.render import labelled, milliseconds, page, prose, table
from foretoken.costing import contention
from foretoken.errors import InputError, base_name
from foretoken.loading import hub, named
from foretoken.sampling.checks import SEED
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.speculation import SpeculationOptions
from foretoken.storage import files

# Imports in functions wait for their use: torch takes seconds, and mistakes are told before that
if TYPE_CHECKING:
    from foretoken.measurement.bench import Key, Race, RaceTask, Turn
    from foretoken.speculator import Speculator

DEFAULT_PROMPTS = (
    "The old house stood at the end of the lane, and",
    "She opened the letter with trembling hands, for",
    "The three most important things to know about the weather are",
    "def average(numbers):\n    ",
)
PLAINLY = {"rule": "block", "temperature": 0.0, "top_k": 0, "top_p": 1.0}  # left out of commands
LEGEND = {
    "first ms": "until the first tokens",
    "tokens/s": "after these, or of texts at once with their prompts: the median over rounds, and "
    "its quartiles",
    "a call": "tokens that a text gains in a forward pass of the target",
    "alpha": "mean of sum min(p, q) over the draft tokens judged",
    "c": "time of a draft token over that of a target pass",
    "v": "time of a target pass over the longest block over that of one over 1",
    "theory": "speed-up by Theorem 3.8 from alpha, c and v",
    "speed-up": "over plain decoding of the same round, the median",
}


@dataclass(frozen=True)
class TimedTexts:
    """Options of the texts that are timed, and of the rounds."""

    max_new_tokens: Annotated[int, "New tokens per text, exactly: no text ends earlier."] = 96
    repeats: Annotated[int, "Rounds to time, after one that warms up."] = 5
    temperature: option.Temperature = 0.0
    top_k: option.TopK = 0
    top_p: option.TopP = 1.0
    seed: option.Seed = 0
    rule: option.Rule = "block"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(TimedTexts):
    """Options that all contestants share. Results of equal options go on from one another."""

    target: str
    drafts: list[str | None]  # None: the default one
    gammas: list[int]
    batch: list[int]  # texts at once
    prompts: int
    prompts_sha256: str
    loading: dict[str, Any]  # keywords of `foretoken.load` that are not its defaults

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            self.temperature, self.top_k, self.top_p, max_new_tokens=self.max_new_tokens
        )

    def require(self) -> None:
        """Raise InputError for mistakes, before models load."""
        assert self.params  # raises InputError
        for gamma in self.gammas:
            SpeculationOptions(gamma, self.rule)
        SEED("seed", self.seed)
        if self.repeats < 1:
            raise InputError(f"repeats is {self.repeats}; give 1 or more")
        if self.max_new_tokens < self.gammas[-1] + 2:
            raise InputError(
                f"max_new_tokens is {self.max_new_tokens}, too few to time gamma "
                f"{self.gammas[-1]}; give {self.gammas[-1] + 2} or more"
            )
        if len(set(self.drafts)) < len(self.drafts):
            raise InputError("--draft names a draft twice; give each once")
        if self.batch[0] < 1:
            raise InputError(f"batch is {self.batch}; give numbers from 1")
        if self.batch[-1] > 1:
            from foretoken.speculator import MAX_ROWS

            if self.batch[-1] > MAX_ROWS:
                raise InputError(f"batch is {self.batch}; give numbers from 1 to {MAX_ROWS}")


@command
def bench(
    loading: option.PairLoading,
    texts: TimedTexts,
    place: option.Place = None,
    target: option.Target = None,
    draft: Annotated[
        list[str] | None,
        Option(help=option.DRAFT + " Repeat it to compare drafts.", show_default=False),
    ] = None,
    gamma: Annotated[
        str, "Draft tokens per step, as a list. 0 (plain) and automatic always run."
    ] = "2,4,8",
    prompts: Annotated[
        Path | None,
        f'File of prompts like yours. {option.PROMPTS} "messages" may stand in place of '
        '"prompt". Default: four short texts.',
    ] = None,
    batch: Annotated[
        str, "Texts at once, as a list such as 1,8; 1 generates one after another."
    ] = "1",
    out: Annotated[
        Path | None,
        "Save the results as JSON, which serve --speculative-config reads. The same "
        "command goes on where it was stopped.",
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Measure whether speculative decoding pays here, with which draft and gamma.

    Plain decoding, every gamma and automatic gamma take turns on the same prompts, draft by draft.
    Ctrl-C keeps the rounds that are done.
    """
    target = option.chosen(option.target(place, target))
    lines = (
        prompt_files.read(None, prompts, prompt_files.TALKING)
        if prompts
        else list(map(prompt_files.Line, DEFAULT_PROMPTS))
    )
    written = json.dumps([line.messages or line.prompt for line in lines]).encode()
    asked = BenchOptions(
        **asdict(texts),
        target=target,
        drafts=list(draft or [None]),
        gammas=sorted({0, *numbers("gamma", gamma)}),
        batch=numbers("batch", batch),
        prompts=len(lines),
        prompts_sha256=hashlib.sha256(written).hexdigest(),
        loading=option.changed(loading),
    )
    asked.require()
    loading.require(target)
    if out is not None:
        option.require_file(out)
    quiet()
    running = Benchmark(asked, loading, lines, out)
    running.run()
    document = running.document
    if document["best"] is None:
        Console(stderr=True).print("interrupted before the first round was done")
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        _show(document, page())
    if running.unsaved:
        raise running.unsaved
    if document["interrupted"]:
        raise typer.Exit(130)


def numbers(name: str, text: str) -> list[int]:
    """Read the numbers in an option, in order."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f"{name} is {text!r:.60}; give numbers separated by commas") from None


@dataclass(slots=True)
class Benchmark:
    """A benchmark under way: its document grows draft by draft, and is saved as it grows."""

    asked: BenchOptions
    loading: option.PairLoading
    lines: list[prompt_files.Line]
    out: Path | None
    document: dict[str, Any] = field(init=False)
    unsaved: OSError | None = None  # why the last figures are not in the file

    def __post_init__(self) -> None:
        """Begin with what the same command has saved. InputError for another file at `out`."""
        import torch

        from foretoken.measurement.machine import describe
        from foretoken.measurement.plan import FORMAT

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
                print(f"{self.out}: {len(whole)} lines are done already", file=sys.stderr)
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
        from foretoken.measurement.bench import own_turns, prepare, repeat_tasks

        asked, prompts = self.asked, list[Any]()
        spec = self.loading.load(
            asked.target,
            draft,
            lambda target: prompts.extend(prompt_files.Template().prompts(self.lines, target)),
        ).prepared()
        spec, tasks = prepare(spec, prompts, asked.params, asked.seed)
        self.document["runtime"] = spec.target.runtime
        self.document["memory"] = self.document["memory"] or measure_memory(spec, self.loading)
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
        """Run the rounds, with progress on standard error."""
        from foretoken.measurement.bench import label, race

        repeats, texts = self.asked.repeats, len(tasks) if together else 1
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task(draft, total=(repeats + 1) * len(turns))

            def report(key: Key) -> None:
                progress.update(
                    bar, advance=1, description=f"{draft}, {texts} at once: {label(key[1])}"
                )

            return race(turns, tasks, repeats, together=together, report=report)

    def _conclude(self) -> None:
        """Note the fastest draft and gamma, and the share of the processors that others took."""
        from foretoken.measurement.plan import PlanOptions, choose

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


def measure_memory(spec: Speculator, loading: option.PairLoading) -> dict[str, Any]:
    """Return the bytes that a pass of the target reads, and how fast this machine reads."""
    from foretoken.measurement.footprint import of_model
    from foretoken.measurement.machine import bandwidth, peak_bytes

    trust = loading.trust_remote_code
    model = of_model(spec.target, spec.target_name, loading.dtype, loading.revision, trust=trust)
    peak = peak_bytes(spec.target.device)  # before the large read
    seconds, size = bandwidth(spec.target.device)
    return {
        "weight_bytes": model.weight_bytes,
        "pass_bytes": model.pass_bytes,
        "peak_bytes": peak,
        "bytes_per_second": size / seconds.median,
    }


def _show(document: dict[str, Any], console: Console) -> None:
    """Print the figures, what memory allows, and the advice."""
    from foretoken.measurement.plan import FEWEST

    asked = document["asked"]
    how = f"temperature {asked['temperature']:g}" if asked["temperature"] else "greedy"
    prose(
        console,
        f"{asked['target']} on {document['runtime']}: {asked['prompts']} prompts, "
        f"{asked['max_new_tokens']} tokens each, {how}, rounds: {asked['repeats']}; "
        f"{document['machine']['cpu']}, cores: {document['machine']['cores']}",
    )
    console.print()
    console.print(_table(document["figures"]))
    console.print()
    labelled(console, LEGEND.items(), 10)
    console.print()
    if line := _floor(document):
        prose(console, line)
    if warning := contention.remark(document["others"]):
        prose(console, warning, bold=warning)
    if asked["repeats"] < FEWEST:
        prose(console, f"of fewer than {FEWEST} rounds the quartiles are unknown")
    _advise(document["best"], console)


def _table(figures: list[dict[str, Any]]) -> Table:
    from foretoken.measurement.bench import label

    heads = ("first ms", "tokens/s", "quartiles", "a call", "alpha", "c", "v", "theory", "speed-up")
    view, last = table("", *heads, gap=0), None
    for row in figures:
        if last != (last := (row["draft"], row["batch"])):
            texts = f", {row['batch']} at once" if row["batch"] > 1 else ""
            view.add_row(f"{base_name(row['draft'])}{texts}", style="bold")
        rate, predicted = row["tokens_per_second"], row["predicted"] or {}
        view.add_row(
            label(row["gamma"]),
            milliseconds(row["first_seconds"]["median"]),
            _rate(rate["median"]),
            f"{_rate(rate['q1'])}-{_rate(rate['q3'])}",
            _number(row["tokens_per_call"]),
            *(_number(predicted.get(name)) for name in ("alpha", "c", "v", "predicted")),
            f"{row['speedup']['median']:.2f}x",
        )
    return view


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _floor(document: dict[str, Any]) -> str:
    """Say how long a plain token takes at least: the weights that it needs are read once."""
    memory = document["memory"]
    peak = f"process peak {memory['peak_bytes'] / 1e9:.2f} GB"
    if not memory["pass_bytes"]:
        return peak
    floor = memory["pass_bytes"] / memory["bytes_per_second"]
    plain = [row for row in document["figures"] if row["batch"] == 1 and row["gamma"] == 0]
    taken = plain[0]["seconds_per_token"]["median"] / floor if plain else None
    return (
        f"memory: a pass of the target reads {memory['pass_bytes'] / 1e6:.0f} MB, at "
        f"{memory['bytes_per_second'] / 1e9:.1f} GB/s {floor * 1e3:.2f} ms at least"
        + (f"; a plain token takes {taken:.2f} times that" if taken else "")
        + f"; {peak}"
    )


def _advise(best: dict[str, Any], console: Console) -> None:
    """Print the draft and gamma to use, and the command that does."""
    tried, made, load = best["tried"], dict(best["generate"]), dict(best["load"])
    speculate, gamma = best["draft"] != "none", made.pop("gamma")
    advice, reason = "do not speculate", "there is no draft"
    if speculate:
        name = "automatic gamma" if gamma is None else f"gamma {gamma}"
        advice, reason = f"speculate with {tried}, {name}", f"{best['speedup']:.2f}x plain decoding"
    elif tried != "none":
        reason = f"{tried} gives {best['speedup']:.2f}x plain decoding at best"
        if not best["certain"]:
            reason = (
                f"no draft was certainly faster than plain decoding ({reason}); to be sure, "
                "measure again with more prompts or --repeats, on an idle machine"
            )
    prose(console, f"{advice}: {reason}", bold=advice)
    words = ["foretoken", "generate", "--target", load.pop("target"), "--draft", load.pop("draft")]
    words += ["--gamma", str(gamma)] if speculate and gamma is not None else []
    words += option.flags(load)
    for name, value in made.items():
        if value != PLAINLY[name]:
            words += [flag(name), f"{value:g}" if isinstance(value, float) else str(value)]
    console.print(shlex.join(words), "PROMPT", soft_wrap=True, markup=False)
