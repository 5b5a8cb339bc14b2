"""What `foretoken bench serve` prints: the figures of a load, in vLLM's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from foretoken.cli.page import labelled, prose

if TYPE_CHECKING:
    from foretoken.lab.load.figures import Figures

LABEL = 26  # letters of the column of labels


def show(document: dict[str, Any], found: Figures, console: Console) -> None:
    """All of it."""
    prose(console, _head(document))
    console.print()
    labelled(console, _counts(document, found), LABEL)
    if any(found.latencies.values()):
        console.print()
        console.print(_latencies(found))
        labelled(console, _terms(found), 6)


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


def _counts(document: dict[str, Any], found: Figures) -> list[tuple[str, str]]:
    rows = [("Successful requests", str(found.completed)), ("Failed requests", str(found.failed))]
    for status, (count, said) in found.failures.items():
        rows.append((f"  {status}", f"{count}, the first: {said}"))
    if document["interrupted"]:
        left = document["num_prompts"] - found.completed - found.failed
        rows.append(("Interrupted", f"{left} requests were not sent or not over"))
    rows += [
        ("Benchmark duration", f"{found.duration:.2f} s"),
        ("Sent after they were due", "mean {:.3f} s, at most {:.3f} s".format(*found.late)),
        ("Total input tokens", str(found.input_tokens)),
        ("Total generated tokens", str(found.output_tokens)),
        ("Request throughput", f"{found.a_second(found.completed):.2f} requests/s"),
    ]
    if found.good is not None:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in document["goodput"].items())
        share = f"{found.good} of {found.completed + found.failed} within {limits}"
        rows.append(("Request goodput", f"{found.a_second(found.good):.2f} requests/s; {share}"))
    total = found.input_tokens + found.output_tokens
    rows += [
        ("Output token throughput", f"{found.a_second(found.output_tokens):.2f} tokens/s"),
        ("Total token throughput", f"{found.a_second(total):.2f} tokens/s"),
    ]
    return rows + _speculation(document["speculation"], found)


def _speculation(told: dict[str, Any] | None, found: Figures) -> list[tuple[str, str]]:
    if told is None or told["tokens_per_call"] is None:
        return []
    rows = [("Tokens a target call", f"{told['tokens_per_call']:.2f}")]
    if told["accepted_per_drafted"] is not None:
        kept = f"{told['accepted_per_drafted']:.3f}"
        rows.append(("Guesses accepted", f"{kept}, {told['accepted']} of {told['drafted']}"))
    if told["tokens"] > found.output_tokens:
        rows.append(("", f"of the {told['tokens']} tokens that the server wrote in this time"))
    return rows


def _latencies(found: Figures) -> Table:
    view = Table()
    rows = {name: one for name, one in found.latencies.items() if one is not None}
    numbers = [n for n in next(iter(rows.values())).percentiles if n != 50]  # that is the median
    for heading in ("ms", "mean", "median", *(f"P{number:g}" for number in numbers)):
        view.add_column(heading, justify="right")
    for name, one in rows.items():
        values = (one.mean, one.median, *(one.percentiles[number] for number in numbers))
        view.add_row(name.upper(), *(f"{value:.2f}" for value in values))
    return view


def _terms(found: Figures) -> list[tuple[str, str]]:
    from foretoken.lab.load.figures import METRICS

    between = "chunks, as the server does not tell how many tokens each holds"
    if found.by_tokens:
        between = "tokens; those of one chunk share the time since the last one"
    return [
        (name.upper(), METRICS[name] + (f": between {between}" if name == "itl" else ""))
        for name, one in found.latencies.items()
        if one is not None
    ]
