"""What `foretoken bench serve` prints: the figures of a load, in vLLM's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from foretoken.cli.render import labelled, prose

if TYPE_CHECKING:
    from foretoken.lab.load.figures import Figures

LABEL = 26  # letters of the column of labels


def show(document: dict[str, Any], figures: Figures, console: Console) -> None:
    """All of it."""
    prose(console, _head(document))
    console.print()
    labelled(console, _counts(document, figures), LABEL)
    if any(figures.latencies.values()):
        console.print()
        console.print(_latencies(figures))
        labelled(console, _terms(figures), 6)


def _head(document: dict[str, Any]) -> str:
    rate, bound = document["request_rate"], document["max_concurrency"]
    pace = "all at once" if rate == "inf" else f"{rate:g} a second, at random times"
    pace += f", {bound} at a time" if bound else ""
    length = document["random_input_len"]
    kind = f"random prompts of {length} tokens" if length else f"{document['dataset_path']}"
    law = f"temperature {document['temperature']:g}" if document["temperature"] else "greedy"
    return (
        f"{document['model_id']} at {document['base_url']}: {document['num_prompts']} requests, "
        f"{pace}; {kind}, up to {document['output_len']} new ones, {law}"
    )


def _counts(document: dict[str, Any], figures: Figures) -> list[tuple[str, str]]:
    rows = [
        ("Successful requests", str(figures.completed)),
        ("Failed requests", str(figures.failed)),
    ]
    for status, (count, reason) in figures.failures.items():
        rows.append((f"  {status}", f"{count}, the first: {reason}"))
    if document["interrupted"]:
        interrupted = document["num_prompts"] - figures.completed - figures.failed
        rows.append(("Interrupted", f"{interrupted} requests were not sent or not over"))
    rows += [
        ("Benchmark duration", f"{figures.duration:.2f} s"),
        ("Sent after they were due", "mean {:.3f} s, at most {:.3f} s".format(*figures.late)),
        ("Total input tokens", str(figures.input_tokens)),
        ("Total generated tokens", str(figures.output_tokens)),
        ("Request throughput", f"{figures.a_second(figures.completed):.2f} requests/s"),
    ]
    if figures.good is not None:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in document["goodput"].items())
        share = f"{figures.good} of {figures.completed + figures.failed} within {limits}"
        rows.append(
            ("Request goodput", f"{figures.a_second(figures.good):.2f} requests/s; {share}")
        )
    total = figures.input_tokens + figures.output_tokens
    rows += [
        ("Output token throughput", f"{figures.a_second(figures.output_tokens):.2f} tokens/s"),
        ("Total token throughput", f"{figures.a_second(total):.2f} tokens/s"),
    ]
    return rows + _speculation(document["speculation"], figures)


def _speculation(speculation: dict[str, Any] | None, figures: Figures) -> list[tuple[str, str]]:
    if speculation is None or speculation["tokens_per_call"] is None:
        return []
    rows = [("Tokens a target call", f"{speculation['tokens_per_call']:.2f}")]
    if speculation["accepted_per_drafted"] is not None:
        share = f"{speculation['accepted_per_drafted']:.3f}"
        rows.append(
            ("Guesses accepted", f"{share}, {speculation['accepted']} of {speculation['drafted']}")
        )
    if speculation["tokens"] > figures.output_tokens:
        rows.append(
            ("", f"of the {speculation['tokens']} tokens that the server wrote in this time")
        )
    return rows


def _latencies(figures: Figures) -> Table:
    view = Table()
    rows = {name: one for name, one in figures.latencies.items() if one is not None}
    numbers = [n for n in next(iter(rows.values())).percentiles if n != 50]  # that is the median
    for heading in ("ms", "mean", "median", *(f"P{number:g}" for number in numbers)):
        view.add_column(heading, justify="right")
    for name, one in rows.items():
        values = (one.mean, one.median, *(one.percentiles[number] for number in numbers))
        view.add_row(name.upper(), *(f"{value:.2f}" for value in values))
    return view


def _terms(figures: Figures) -> list[tuple[str, str]]:
    from foretoken.lab.load.figures import METRICS

    between = "chunks, as the server does not tell how many tokens each holds"
    if figures.by_tokens:
        between = "tokens; those of one chunk share the time since the last one"
    return [
        (name.upper(), METRICS[name] + (f": between {between}" if name == "itl" else ""))
        for name, one in figures.latencies.items()
        if one is not None
    ]
