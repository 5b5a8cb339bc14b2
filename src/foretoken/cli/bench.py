"""`foretoken bench`: race a pair against its own plain decoding and against other libraries."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer import Option

from foretoken.cli import option
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, quiet
from foretoken.cli.render import labelled, milliseconds, page, prose, table
from foretoken.costing import contention
from foretoken.errors import InputError, RefusedError
from foretoken.loading import hub, named
from foretoken.loading.options import ROUNDED

if TYPE_CHECKING:
    from foretoken.measurement.bench import Key, Peer, Race, RaceTask, Turn
    from foretoken.options import Prompt
    from foretoken.sampling.params import SamplingParams
    from foretoken.speculator import Speculator


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


@command
def bench(
    loading: option.PairLoading,
    prompts: option.Prompts,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: Annotated[
        str, Option(help="Draft tokens per step, as a list. 0 (plain) and automatic always run.")
    ] = "2,4,8",
    max_new_tokens: Annotated[
        int, Option(help="New tokens per text, exactly: no text ends earlier.")
    ] = 96,
    repeats: Annotated[int, Option(help="Rounds to time, after one that warms up.")] = 5,
    temperature: option.Temperature = 0.0,
    top_k: option.TopK = 0,
    top_p: option.TopP = 1.0,
    seed: option.Seed = 0,
    rule: option.Rule = "block",
    batch: Annotated[
        str | None,
        Option(
            help="Measure tokens per second with this many texts at once, as in 1,2,4,8,16, on the "
            "backend that is faster for the most of them."
        ),
    ] = None,
    vs: Annotated[
        list[str] | None,
        Option(
            help="Race against transformers, openvino-genai, onnxruntime-genai (plain only) or "
            "llama.cpp, each with its own defaults; openvino-genai:same-precision and "
            "llama.cpp:same-precision compute as precisely as foretoken, llama.cpp:q4_0 has its "
            "fastest blocks; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Folder for bench.json. Ctrl-C keeps the rounds that are done."),
    ] = None,
    svg: Annotated[
        Path | None, Option(help="File for a picture: speed-up by gamma, measured and predicted.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Time plain decoding, several gammas, automatic gamma and other libraries in turns."""
    gammas = sorted({0, *_numbers("gamma", gamma)})
    sizes = _numbers("batch", batch) if batch else []
    options = BenchOptions(max_new_tokens, repeats, temperature, top_k, top_p, seed, rule, loading)
    lines = prompt_files.read(None, prompts)
    _require(options, gammas, sizes, vs or [])
    target = option.chosen(target)
    loading.require(target)
    if svg:
        option.require_picture(svg)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    quiet()
    with ExitStack() as stack:
        spec, tasks = _load(options, target, draft, lines, max(sizes, default=1))
        peers, unable = _peers(stack, spec, vs or [], loading, draft, batched=bool(sizes))
        reading = contention.read()
        races = _race(_contestants(spec, peers, gammas, rule), tasks, repeats, sizes, unable)
        share = contention.share([contention.taken(reading)])
    if not races:
        Console(stderr=True).print("interrupted before the first round was done")
        raise typer.Exit(130)
    document = _document(spec, peers, options, len(lines), races) | {
        "unable": unable,
        "others": share,
        "interrupted": len(races) < len(sizes) or len(races[-1].rounds) < repeats,
    }
    if out:
        (out / "bench.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    if svg:
        from foretoken.measurement.speedup_picture import draw  # late: as above

        draw(document, svg)
    if as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        _show(document, page())
    if document["interrupted"]:
        raise typer.Exit(130)


def _numbers(name: str, text: str) -> list[int]:
    """Read the numbers in an option, in order."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f"{name} is {text!r:.60}; give numbers separated by commas") from None


def _require(options: BenchOptions, gammas: list[int], sizes: list[int], vs: list[str]) -> None:
    """Raise InputError for mistakes, before models load."""
    from foretoken.options import keys_of, require

    assert options.params  # raises InputError
    for gamma in gammas:
        require(gamma, options.rule, lenience=1.0)
    keys_of(options.seed, [1])
    if options.repeats < 1:
        raise InputError(f"repeats is {options.repeats}; give 1 or more")
    if options.max_new_tokens < gammas[-1] + 2:
        raise InputError(
            f"max_new_tokens is {options.max_new_tokens}, too few to time gamma {gammas[-1]}; "
            f"give {gammas[-1] + 2} or more"
        )
    if len(set(vs)) != len(vs):
        raise InputError(f"--vs names a peer twice: {', '.join(vs)}; give each once")
    if vs and options.loading.adapter is not None:
        raise InputError("--vs gives peers the target's files, without --adapter; leave out one")
    if not (vs or sizes):
        return
    from foretoken.measurement.bench import (
        ALONE,
        command,
        library,
    )  # late: torch takes seconds to import
    from foretoken.speculator import BATCH

    for name in vs:
        if sizes and library(name) in ALONE:
            raise InputError(f"--vs {name} runs one text at a time; leave it or --batch out")
        command(name)
    if sizes and not 1 <= sizes[0] <= sizes[-1] <= BATCH:
        raise InputError(f"batch is {sizes}; give numbers from 1 to {BATCH}")


def _load(
    options: BenchOptions,
    target: str | None,
    draft: str | None,
    lines: list[prompt_files.Line],
    rows: int,
) -> tuple[Speculator, list[RaceTask]]:
    """Load the pair, without tokens that end a text, and make the tasks of the first round."""
    from foretoken.generation_config import Ends
    from foretoken.measurement.bench import RaceTask

    prompts: list[Prompt] = []
    spec = options.loading.load(
        target,
        draft,
        rows,
        lambda known: prompts.extend(prompt_files.for_model(line, known) for line in lines),
    ).prepared()
    if spec.controls:
        names = ", ".join(spec.controls)
        raise RefusedError(
            f"the model's generation config sets {names}, which not all of the compared follow; "
            "--ignore-generation-config compares without"
        )
    spec = replace(spec, ends=Ends(decoder_start=spec.ends.decoder_start))
    tokens, seed = options.max_new_tokens, options.seed
    sampling = replace(options.params, max_new_tokens=tokens)
    for i, request in enumerate(spec.inputs.requests(prompts, sampling, seed)):
        if request.limit < tokens:
            raise InputError(
                f"prompt {i} leaves room for {request.limit} new tokens, not {tokens}; "
                "give a shorter one or a smaller --max-new-tokens"
            )
    ids = [spec.inputs.ids(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
    return spec, [
        RaceTask(prompt, tokens, options.params, seed + i) for i, prompt in enumerate(ids)
    ]


def _peers(
    stack: ExitStack,
    spec: Speculator,
    vs: list[str],
    loading: option.PairLoading,
    draft: str | None,
    *,
    batched: bool,
) -> tuple[list[Peer], dict[str, str]]:
    """The peers, each with the same pair in its process, or with the target alone where the draft
    is none that they can read; and why others cannot load it."""
    from foretoken.measurement.bench import Peer, Unable

    theirs = str(named.draft(spec.draft_name) or spec.draft_name) if _readable(spec) else None
    pair = hub.path(spec.target_name), theirs
    dtypes = loading.dtype, loading.draft_dtype
    peers: list[Peer] = []
    unable: dict[str, str] = {}
    for name in vs:
        try:
            peer = stack.enter_context(Peer(name, *pair, *dtypes, batched=batched))
            if pair[1] is None and draft != "none":
                peer.about["plain_only"] = "it cannot read the draft"
            if why := peer.about.get("plain_only"):
                notes = [peer.about.get("note"), f"plain only: {why}"]
                peer.about["note"] = "; ".join(filter(None, notes))
            peers.append(peer)
        except Unable as error:
            unable[name] = str(error)
    return peers, unable


def _readable(spec: Speculator) -> bool:
    """Return True if the draft is a model's folder, which peers can read."""
    from foretoken.drafters.lm import LMDrafter

    return isinstance(spec.drafter, LMDrafter) and not spec.drafter.shares


def _contestants(
    spec: Speculator, peers: list[Peer], gammas: list[int], rule: str
) -> dict[Key, Turn]:
    from foretoken.drafters.none import NoDrafter
    from foretoken.measurement.bench import OWN, own

    ours = [0] if isinstance(spec.drafter, NoDrafter) else [*gammas, None]
    turns: dict[Key, Turn] = {(OWN, g): partial(own, spec, gamma=g, rule=rule) for g in ours}
    for peer in peers:
        theirs = gammas if _readable(spec) and not peer.about.get("plain_only") else [0]
        turns |= {(peer.name, g): partial(peer.run, gamma=g) for g in theirs}
    return turns


def _race(
    contestants: dict[Key, Turn],
    tasks: list[RaceTask],
    repeats: int,
    sizes: list[int],
    unable: dict[str, str],
) -> list[Race]:
    """Race one text after another, or with each number of texts at once, until Ctrl-C, with
    progress on standard error. Peers that fail join the `unable`."""
    from foretoken.measurement.bench import of_batch, race

    races: list[Race] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for texts in sizes or [0]:
            some = {key: turn for key, turn in contestants.items() if key[0] not in unable}
            where = f"batch {texts}, " if texts else ""
            bar = progress.add_task(where, total=(repeats + 1) * len(some))

            def report(text: str, bar: Any = bar, where: str = where) -> None:
                progress.update(bar, advance=1, description=where + text)

            given = of_batch(tasks, texts) if texts else tasks
            done = race(some, given, repeats, together=bool(texts), report=report)
            unable |= {name: where + why for name, why in done.unable.items()}
            progress.remove_task(bar)
            races += [done] if done.rounds else []
            if len(done.rounds) < repeats:
                break
    return races


def _document(
    spec: Speculator, peers: list[Peer], options: BenchOptions, prompts: int, races: list[Race]
) -> dict[str, Any]:
    """Return the document: one race's figures, or those of each number of texts at once."""
    from foretoken.measurement.machine import describe

    computed, loading = spec.target.computed, options.loading
    cache = "float32" if computed in ROUNDED else computed  # rounded in products alone
    drafted = None if spec.drafter.model is None else spec.drafter.model.computed
    asked = asdict(options)
    raced = {name for race in races for turns in race.rounds for name, _ in turns}
    parts = [_part(race, greedy=options.temperature == 0) for race in races]
    return {
        "date": date.today().isoformat(),
        "machine": asdict(describe(spec.target.device)),
        "target": spec.target_name,
        "draft": spec.draft_name,
        "runtime": spec.target.runtime,
        "draft_runtime": spec.drafter.runtime,
        "asked": asked | asked.pop("loading") | {"prompts": prompts},
        "precision": {
            "weights": loading.dtype,
            "cache": loading.kv_dtype or cache,
            "activations": "int8" if computed in ROUNDED else computed,
            "draft": drafted,
        },
        "peers": {peer.name: peer.about for peer in peers if peer.name in raced},
        **({"batches": parts} if races[0].together else parts[0]),
    }


def _part(race: Race, *, greedy: bool) -> dict[str, Any]:
    """Return the figures of a race, and its ratios."""
    from foretoken.measurement.bench import AUTOMATIC, OWN, label

    fixed, contestants = race.best(OWN), list(race.rounds[0])
    rows: list[dict[str, Any]] = []
    for key in contestants:
        row = race.figures(key, greedy=greedy)
        over = row.speedup / row.predicted.predicted if row.predicted else None
        rows.append({**asdict(row), "variant": label(row.gamma), "measured_over_predicted": over})
    peers = dict.fromkeys(name for name, _ in contestants if name != OWN)
    automatic = AUTOMATIC in contestants
    return {
        "batch": len(race.rounds[0][fixed]) if race.together else None,
        "rounds": len(race.rounds),
        "figures": rows,
        "best_gamma": fixed[1],
        "automatic_over_best": race.faster(AUTOMATIC, fixed) if automatic else None,
        "duels": [asdict(race.duel(name)) for name in peers],
    }


ONE_BY_ONE = {  # the columns of the table, and what they mean
    "first ms": "until the first tokens",
    "ms/token": "behind these: the median over rounds, and its quartiles",
    "quartiles": "",
    "tokens/s": "the same in a second",
    "a call": "tokens a row gains in a target call",
    "speed-up": "over foretoken's plain decoding of the same round",
    "same": "tokens until one differs from plain greedy text; at: the place",
    "at": "",
}
TIME = {  # those of a second table
    "alpha": "mean of sum min(p, q) over the draft tokens judged",
    "c": "time of a draft token over that of a target pass",
    "v": "time of a target pass over the longest block over that of one over 1",
    "formula": "speed-up by Theorem 3.8 from these; of it: measured over formula",
    "of it": "",
    "draft": "shares of the time; verify: distributions, acceptance and rollback",
    "target": "",
    "verify": "",
    "rest": "",
}
TOGETHER = {
    "tokens/s": "of all texts, prompts included: the median over rounds, and its quartiles",
    "quartiles": "",
    "a call": ONE_BY_ONE["a call"],
    "rows": "that such a call advances, as a share of the texts",
    "padding": "positions computed for no row, as a share of all in these calls",
    "speed-up": ONE_BY_ONE["speed-up"],
    "same": ONE_BY_ONE["same"],
    "at": "",
}


def _cells(row: dict[str, Any], *, together: bool) -> list[str]:
    """Return the cells of a row of figures, in the order of the columns."""
    spread = row["tokens_per_second"] if together else row["seconds_per_token"]
    show = _rate if together else milliseconds
    agreement = row["agreement"] or {}
    place = agreement.get("first_difference")
    first = [] if together else [milliseconds(row["first_seconds"]["median"])]
    rate = [] if together else [_rate(row["tokens_per_second"]["median"])]
    shares = [_percent(row["occupancy"]), _percent(row["padding"])] if together else []
    return [
        *first,
        show(spread["median"]),
        f"{show(spread['q1'])}-{show(spread['q3'])}",
        *rate,
        _number(row["tokens_per_call"]),
        *shares,
        f"{row['speedup']:.2f}x",
        _percent(agreement.get("share")),
        "" if place is None else str(place),
    ]


def _time(rows: list[dict[str, Any]]) -> Table:
    """Make the table of the formula, and of where the time went: a row for each gamma of ours."""
    view = table("", *TIME, gap=0)
    for row in rows:
        if row["shares"]:
            predicted = row["predicted"] or {}
            numbers = [predicted.get(name) for name in ("alpha", "c", "v", "predicted")]
            numbers += [row["measured_over_predicted"]]
            shares = [f"{share:.1%}" for share in row["shares"].values()]
            view.add_row(row["variant"], *map(_number, numbers), *shares)
    return view


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _show(document: dict[str, Any], console: Console) -> None:
    """Print the contestants, a table for each race, the ratios and a legend of the columns."""
    asked, peers = document["asked"], document["peers"]
    prose(
        console,
        f"{document['target']} on {document['runtime']}, {document['draft']} on "
        f"{document['draft_runtime']}: {asked['prompts']} prompts, {asked['max_new_tokens']} "
        f"tokens each, temperature {asked['temperature']:g}, rounds: "
        f"{document.get('rounds', asked['repeats'])}",
    )
    ours = {
        "version": document["machine"]["versions"]["foretoken"],
        "precision": document["precision"],
    }
    for name, about in {"foretoken": ours, **peers}.items():
        kinds = ", ".join(f"{part} {kind}" for part, kind in about["precision"].items() if kind)
        note = f" ({about['note']})" if about.get("note") else ""
        prose(console, f"{name} {about['version']}{note}: {kinds}")
    for name, why in document["unable"].items():
        prose(console, f"{name} cannot run this pair: {why}")
    together = "batches" in document
    columns = TOGETHER if together else ONE_BY_ONE
    for part in document.get("batches", [document]):
        console.print()
        title = f"{part['batch']} at once" if part["batch"] else ""
        console.print(_table(title, columns, part["figures"], together=together))
        if not together:
            console.print()
            console.print(_time(part["figures"]))
        _ratios(part, console)
    console.print()
    columns = columns if together else columns | TIME
    labelled(console, [(name, meaning) for name, meaning in columns.items() if meaning], 10)
    if warning := contention.remark(document["others"]):
        prose(console, warning, bold=warning)


def _table(
    title: str, columns: dict[str, str], rows: list[dict[str, Any]], *, together: bool
) -> Table:
    view, name = table(title, *columns, gap=0), ""
    for row in rows:
        if row["name"] != name:
            name = row["name"]
            view.add_row(name, style="bold")
        view.add_row(row["variant"], *_cells(row, together=together))
    return view


def _ratios(part: dict[str, Any], console: Console) -> None:
    """Print how automatic gamma and this package compare."""
    if part["automatic_over_best"] is not None:
        best, over = part["best_gamma"], part["automatic_over_best"]
        prose(console, f"automatic gamma: {over:.2f} of the speed of the best fixed one, {best}")
    for duel in part["duels"]:
        best = f"{duel['best']:.2f}x"
        automatic = duel["automatic"]
        prose(
            console,
            f"against {duel['name']}: plain {duel['plain']:.2f}x, gamma {duel['gamma']} against "
            f"its gamma {duel['peer_gamma']} {best}"
            + ("" if automatic is None else f", automatic {automatic:.2f}x"),
            bold=best,
        )
