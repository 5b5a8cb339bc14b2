"""`foretoken bench serve`: load on an OpenAI-compatible server, in vLLM's terms."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from foretoken.cli import loadsheet, option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command
from foretoken.cli.render import page
from foretoken.cli.sources import KEY
from foretoken.errors import InputError, shown
from foretoken.storage.files import write

if TYPE_CHECKING:
    from foretoken.cli.load import Load, Server
    from foretoken.lab.load.figures import Figures
    from foretoken.lab.load.trace import Trace

DATASETS = ("random", "custom")
INPUT, OUTPUT, CUSTOM_OUTPUT = 128, 128, 256  # tokens, where nobody says


def _panel(name: str, text: str, *flags: str) -> Any:
    return Option(*flags, help=text, rich_help_panel=name)


@dataclass(frozen=True)
class Traffic:
    """How many requests, and when."""

    num_prompts: Annotated[int, _panel("Load", "Requests, after one that warms up.")] = 100
    request_rate: Annotated[
        float, _panel("Load", "Requests a second, at random times (Poisson); inf: all at once.")
    ] = math.inf
    max_concurrency: Annotated[
        int | None, _panel("Load", "Requests at a time at most; left out: no bound.")
    ] = None
    seed: Annotated[int, _panel("Load", "Of times, prompts and, plus its number, a request.")] = 0

    def require(self) -> None:
        """InputError for numbers that make no load."""
        from foretoken.options import as_seed  # late: NumPy, which `--help` does without

        as_seed(self.seed)
        if self.num_prompts < 1:
            raise InputError(f"num_prompts is {self.num_prompts}; give 1 or more")
        if not self.request_rate > 0:
            raise InputError(f"request_rate is {self.request_rate:g}; give one above 0, or inf")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise InputError(f"max_concurrency is {self.max_concurrency}; give 1 or more")


@dataclass(frozen=True)
class Data:
    """What the prompts are; an option of the other dataset is refused."""

    dataset_name: Annotated[str, _panel("Prompts", "random or custom.")] = "random"
    dataset_path: Annotated[
        Path | None, _panel("Prompts", f"Of custom, over and over. {option.PROMPTS}")
    ] = None
    random_input_len: Annotated[
        int | None, _panel("Prompts", f"Tokens of a random prompt; left out: {INPUT}.")
    ] = None
    random_output_len: Annotated[
        int | None, _panel("Prompts", f"New tokens at most; left out: {OUTPUT}.")
    ] = None
    custom_output_len: Annotated[
        int | None, _panel("Prompts", f"The same for custom; left out: {CUSTOM_OUTPUT}.")
    ] = None
    vocab_size: Annotated[
        int | None, _panel("Prompts", "Ids of random prompts are below; left out: ask the server.")
    ] = None

    @property
    def random(self) -> bool:
        return self.dataset_name == "random"

    @property
    def input_len(self) -> int | None:
        return (self.random_input_len or INPUT) if self.random else None

    @property
    def output_len(self) -> int:
        if self.random:
            return self.random_output_len or OUTPUT
        return self.custom_output_len or CUSTOM_OUTPUT

    def require(self) -> None:
        """InputError for options that do not go together."""
        if self.dataset_name not in DATASETS:
            quoted = shown(self.dataset_name)
            raise InputError(f"dataset_name is {quoted}; give one of {', '.join(DATASETS)}")
        lengths = ("random_input_len", "random_output_len", "vocab_size")
        unused = ("dataset_path", "custom_output_len") if self.random else lengths
        for name in unused:
            if getattr(self, name) is not None:
                other = DATASETS[self.random]
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} is for --dataset-name {other}; leave one of them out")
        for name in (*lengths, "custom_output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; give 1 or more")
        if not self.random and self.dataset_path is None:
            raise InputError("--dataset-name custom needs a file; give --dataset-path")

    def prompts(self, server: Server, number: int, seed: int) -> list[str | list[int]]:
        """So many, of the server's vocabulary."""
        if self.input_len is None:
            lines = prompt_files.read(None, self.dataset_path)
            return [line.prompt for line in islice(cycle(lines), number)]
        from foretoken.lab.load.arrivals import prompts

        return [*islice(prompts(self.input_len, self._vocabulary(server), seed), number)]

    def _vocabulary(self, server: Server) -> int:
        V: int | None = server.facts.get("vocab_size")
        if self.vocab_size is None:
            if V is None:
                raise InputError(
                    f"{server.url} does not tell its vocabulary, of which random prompts are made; "
                    "give --vocab-size"
                )
            return V
        if V is not None and self.vocab_size > V:
            raise InputError(
                f"vocab_size is {self.vocab_size}, the server's is {V}; give that at most"
            )
        return self.vocab_size


@dataclass(frozen=True)
class Report:
    """What is reported, and where."""

    percentile_metrics: Annotated[
        str, _panel("Report", "Latencies to report: some of ttft, tpot, itl, e2el.")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, _panel("Report", "Their percentiles.")] = "50,90,99"
    goodput: Annotated[
        list[str] | None,
        _panel("Report", 'Milliseconds of a good request at most: "ttft:200 e2el:3000".'),
    ] = None
    save_result: Annotated[
        bool, _panel("Report", "Write JSON, named by itself, into --result-dir.", "--save-result")
    ] = False
    result_dir: Annotated[
        Path | None, _panel("Report", "Its folder; left out: the current one.")
    ] = None
    out: Annotated[Path | None, _panel("Report", "Write JSON to this file.")] = None
    as_json: Annotated[bool, _panel("Report", "One JSON document.", "--json")] = False

    def require(self) -> None:
        """InputError for what cannot be reported, or not there."""
        assert self.metrics and self.percentiles and self.limits is not None  # raise InputError
        if self.result_dir is not None and not self.save_result:
            raise InputError("--result-dir is for --save-result; add that, or give --out FILE")
        if self.out is not None:
            option.require_file(self.out)
        if self.result_dir is not None:
            self.result_dir.mkdir(parents=True, exist_ok=True)

    @property
    def metrics(self) -> list[str]:
        from foretoken.lab.load.figures import METRICS  # late: NumPy

        names = [name.strip() for name in self.percentile_metrics.split(",")]
        for name in names:
            if name not in METRICS:
                choices = ", ".join(METRICS)
                raise InputError(f"percentile_metrics holds {shown(name)}; give some of {choices}")
        return list(dict.fromkeys(names))

    @property
    def percentiles(self) -> list[float]:
        try:
            percentiles = [float(part) for part in self.metric_percentiles.split(",")]
        except ValueError:
            percentiles = [math.nan]
        if not all(0 <= number <= 100 for number in percentiles):
            value = shown(self.metric_percentiles)
            raise InputError(f"metric_percentiles is {value}; give numbers from 0 to 100 by commas")
        return list(dict.fromkeys(percentiles))

    @property
    def limits(self) -> dict[str, float]:
        from foretoken.lab.load.figures import limits

        return limits(self.goodput or [])

    def save(self, document: dict[str, Any]) -> None:
        """To the files that are asked for."""
        content = (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
        for path in self._files(document):
            write(path, content)

    def _files(self, document: dict[str, Any]) -> list[Path]:
        paths = [] if self.out is None else [self.out]
        if self.save_result:
            rate, bound = document["request_rate"], document["max_concurrency"]
            at_once = f"-concurrency{bound}" if bound else ""
            model = document["model_id"].replace("\\", "/").split("/")[-1]
            name = f"openai-{rate}qps{at_once}-{model}-{document['date']}.json"
            paths.append((self.result_dir or Path()) / name)
        return paths


@command
def bench_serve(
    traffic: Traffic,
    data: Data,
    report: Report,
    base_url: Annotated[str, Option(help="The server; /v1 may be left out.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[str | None, Option(help="One of its models; left out: its first.")] = None,
    api_key: Annotated[
        str | None, Option(help=f"Its key; left out: {KEY} of the environment.")
    ] = None,
    temperature: option.Temperature = 0.0,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="No text ends early (vLLM's field, and ours).")
    ] = False,
) -> None:
    """Put load on an OpenAI-compatible server and report latencies and throughput.

    Completions that stream, in vLLM's names and terms. Exit code 1: some requests failed; Ctrl-C
    reports those that are over. docs/serving.md says what the numbers mean.
    """
    from foretoken.sampling.params import SamplingParams

    traffic.require()
    data.require()
    report.require()
    SamplingParams(temperature=temperature)
    if not data.random:
        prompt_files.read(None, data.dataset_path)
    from foretoken.cli.load import Load, server

    service = server(base_url, os.environ.get(KEY) if api_key is None else api_key, model)
    prompts = data.prompts(service, traffic.num_prompts + 1, traffic.seed)
    wishes: dict[str, Any] = {"max_tokens": data.output_len, "temperature": temperature}
    wishes |= {"ignore_eos": True} if ignore_eos else {}
    load = Load(service, prompts, wishes, traffic.seed)
    figures, document = _measured(load, traffic, report)
    document = _head(load, traffic, data, report) | document
    report.save(document)
    if report.as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        loadsheet.show(document, figures, page())
    if document["interrupted"]:
        raise typer.Exit(130)
    if figures.failed:
        raise typer.Exit(1)


def _measured(load: Load, traffic: Traffic, report: Report) -> tuple[Figures, dict[str, Any]]:
    """The load is put, with a bar on a terminal; and its figures."""
    from foretoken.lab.load.arrivals import arrivals
    from foretoken.lab.load.figures import figures

    times = arrivals(traffic.num_prompts, traffic.request_rate, traffic.seed)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar, failed = progress.add_task("requests", total=len(times)), 0

        def ended(trace: Trace) -> None:
            nonlocal failed
            failed += trace.failure is not None
            description = f"requests, {failed} failed" if failed else "requests"
            progress.update(bar, advance=1, description=description)

        seconds = load.run(times, traffic.max_concurrency, ended)
    measured = figures(load.traces, seconds, report.metrics, report.percentiles, report.limits)
    interrupted = len(load.traces) < len(times)
    return measured, measured.document | {
        "interrupted": interrupted,
        "speculation": _speculation(load, measured),
    }


def _speculation(load: Load, measured: Figures) -> dict[str, Any] | None:
    """What the server counted of its guesses meanwhile, whoever asked; None where it tells none."""
    guesses = load.guesses(measured.output_tokens)
    if guesses is None:
        return None
    rates = {"tokens_per_call": guesses.tokens_per_call}
    return asdict(guesses) | rates | {"accepted_per_drafted": guesses.accepted_per_drafted}


def _head(load: Load, traffic: Traffic, data: Data, report: Report) -> dict[str, Any]:
    """The document's beginning, by vLLM's names."""
    server, rate = load.server, traffic.request_rate
    names = ("target", "draft", "runtime", "draft_runtime", "dtype", "max_rows")
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "base_url": server.url,
        "model_id": server.model,
        "server": {name: server.facts.get(name) for name in names} if server.facts else None,
        "num_prompts": traffic.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "max_concurrency": traffic.max_concurrency,
        "seed": traffic.seed,
        "dataset_name": data.dataset_name,
        "dataset_path": None if data.dataset_path is None else str(data.dataset_path),
        "random_input_len": data.input_len,
        "output_len": data.output_len,
        "temperature": load.wishes["temperature"],
        "ignore_eos": "ignore_eos" in load.wishes,
        "goodput": {name: seconds * 1e3 for name, seconds in report.limits.items()},
    }
