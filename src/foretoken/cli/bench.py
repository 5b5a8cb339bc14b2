"""`foretoken bench`: a pair against its own plain decoding and against other libraries."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer import Option

from foretoken.cli import option, scoreboard
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command
from foretoken.cli.page import page
from foretoken.cli.quiet import quiet
from foretoken.errors import InputError, RefusedError

if TYPE_CHECKING:
    from foretoken.lab.bench.figures import Figures
    from foretoken.lab.bench.peer import Peer
    from foretoken.lab.bench.race import Contestant, Round, Task
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


@command
def bench(
    loading: option.PairLoading,
    prompts: option.Prompts,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: Annotated[
        str, Option(help="Guesses per target call; 0 (plain) and automatic always run.")
    ] = "2,4,8",
    max_new_tokens: Annotated[int, Option(help="New tokens, exactly: no text ends earlier.")] = 96,
    repeats: Annotated[int, Option(help="Rounds that count, after one that warms up.")] = 5,
    temperature: option.Temperature = 0.0,
    top_k: option.TopK = 0,
    top_p: option.TopP = 1.0,
    seed: option.Seed = 0,
    rule: Annotated[
        str, Option(help="block, speculative or coupled; to compare: match, rejection.")
    ] = "block",
    vs: Annotated[
        list[str] | None,
        Option(help="transformers, openvino-genai, llama.cpp; give it again for another."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Folder for bench.json and plots; Ctrl-C keeps the rounds that were done."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Time plain decoding, several gammas, automatic gamma and peers, turn by turn."""
    gammas = _gammas(gamma)
    options = Options(max_new_tokens, repeats, temperature, top_k, top_p, seed, rule, loading)
    lines = prompt_files.read(None, prompts)
    _require(options, gammas, vs or [], out)
    loading.require(target)
    quiet()
    with ExitStack() as stack:
        spec, tasks = _load(options, target, draft, lines)
        peers, unable = _peers(stack, spec, vs or [], loading, draft)
        contestants = _contestants(spec, peers, gammas, draft, rule)
        rounds = _race(contestants, tasks, repeats, unable)
        peers = [peer for peer in peers if peer.name not in unable]
        document, table = _document(spec, peers, rounds, options, len(lines), unable)
    if out:
        _save(out, document, table)
    if as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        scoreboard.show(document, table, page())
    if document["interrupted"]:
        raise typer.Exit(130)


def _gammas(text: str) -> list[int]:
    """Those in `--gamma`, and 0."""
    try:
        return sorted({0, *(int(part) for part in text.split(","))})
    except ValueError:
        raise InputError(f"gamma is {text!r:.60}; give numbers separated by commas") from None


def _require(options: Options, gammas: list[int], vs: list[str], out: Path | None) -> None:
    """InputError for mistakes, before models load."""
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
    if out and not find_spec("matplotlib"):
        raise InputError("--out draws; give it matplotlib: pip install 'foretoken[plot]'")
    if vs:
        from foretoken.lab.bench.peer import command  # late: torch takes seconds to import

        for name in vs:
            command(name)
    if out:
        out.mkdir(parents=True, exist_ok=True)


def _load(
    options: Options, target: str | None, draft: str | None, lines: list[prompt_files.Line]
) -> tuple[Speculator, list[Task]]:
    """The pair, with no tokens that end or begin a text; and the tasks of the first round."""
    from foretoken.ends import Ends
    from foretoken.lab.bench.race import Task

    spec = options.loading.load(target, draft)
    if spec.controls:
        named = ", ".join(spec.controls)
        raise RefusedError(
            f"the model's generation config sets {named}, which not all of the compared follow; "
            "--ignore-generation-config compares without"
        )
    spec = replace(spec, ends=Ends(decoder_start=spec.ends.decoder_start))
    prompts = [prompt_files.for_model(line, spec) for line in lines]
    tokens, seed = options.max_new_tokens, options.seed
    wishes = replace(options.params, max_new_tokens=tokens)
    for i, request in enumerate(spec.requests(prompts, wishes, seed)):
        if request.limit < tokens:
            raise InputError(
                f"prompt {i} leaves room for {request.limit} new tokens, not {tokens}; "
                "give a shorter one or a smaller --max-new-tokens"
            )
    ids = [spec.ids(prompt, i) for i, prompt in enumerate(prompts)]
    return spec, [Task(prompt, tokens, options.params, seed + i) for i, prompt in enumerate(ids)]


def _peers(
    stack: ExitStack,
    spec: Speculator,
    vs: list[str],
    loading: option.PairLoading,
    draft: str | None,
) -> tuple[list[Peer], dict[str, str]]:
    """The peers, each with the same pair in its process; and why others cannot load it."""
    from foretoken.drafters.lm import LMDrafter
    from foretoken.lab.bench.peer import Peer
    from foretoken.lab.bench.race import Unable

    if not vs:
        return [], {}
    if draft != "none" and not isinstance(spec.drafter, LMDrafter):
        raise InputError(f"--vs needs a draft that peers can read: a model's folder, not {draft!r}")
    pair = spec.target_name, None if draft == "none" else spec.draft_name
    dtypes = loading.dtype, loading.draft_dtype
    peers: list[Peer] = []
    unable: dict[str, str] = {}
    for name in vs:
        try:
            peers.append(stack.enter_context(Peer(name, *pair, *dtypes)))
        except Unable as error:
            unable[name] = str(error)
    return peers, unable


def _contestants(
    spec: Speculator, peers: list[Peer], gammas: list[int], draft: str | None, rule: str
) -> list[Contestant]:
    from foretoken.lab.bench.peer import Guest
    from foretoken.lab.bench.race import Own

    if draft == "none":
        return [Own(spec, 0, rule), *(Guest(peer, 0) for peer in peers)]
    own = [Own(spec, gamma, rule) for gamma in (*gammas, None)]
    return [*own, *(Guest(peer, gamma) for peer in peers for gamma in gammas)]


def _race(
    contestants: list[Contestant], tasks: list[Task], repeats: int, unable: dict[str, str]
) -> list[Round]:
    """All rounds, or those before an interruption; progress on standard error.

    Peers that fail join the `unable`, and their runs are left out.
    """
    from foretoken.lab.bench.figures import label
    from foretoken.lab.bench.race import Key, race

    def of_round(i: int) -> list[Task]:
        return [replace(task, seed=task.seed + i * len(tasks)) for task in tasks]

    rounds: list[Round] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("warming up", total=(repeats + 1) * len(contestants))

        def report(key: Key) -> None:
            done = int(progress.tasks[bar].completed) // len(contestants)
            phase = f"round {done} of {repeats}" if done else "warming up"
            progress.update(bar, advance=1, description=f"{phase}: {key[0]}, {label(key[1])}")

        def fail(key: Key, reason: str) -> None:
            unable[key[0]] = f"{label(key[1])}: {reason}"

        with suppress(KeyboardInterrupt):
            for done in race(contestants, of_round, repeats, report, fail):
                rounds.append(done)
    if not rounds:
        Console(stderr=True).print("interrupted before the first round was done")
        raise typer.Exit(130)
    return [{key: runs for key, runs in done.items() if key[0] not in unable} for done in rounds]


def _document(
    spec: Speculator,
    peers: list[Peer],
    rounds: list[Round],
    options: Options,
    prompts: int,
    unable: dict[str, str],
) -> tuple[dict[str, Any], list[Figures]]:
    """The JSON document, and its figures."""
    from foretoken.lab.bench import figures as bench
    from foretoken.lab.machine import describe
    from foretoken.speculator import runtime

    table = [bench.figures(rounds, key, greedy=options.temperature == 0) for key in rounds[0]]
    rows = [asdict(row) | {"variant": bench.label(row.gamma)} for row in table]
    for entry, row in zip(rows, table, strict=True):
        entry["measured_over_predicted"] = row.measured_over_predicted
    fixed = bench.best(rounds, bench.OWN)
    automatic = bench.AUTOMATIC in rounds[0]
    document = {
        "date": date.today().isoformat(),
        "machine": asdict(describe(spec.target.device)),
        "target": spec.target_name,
        "draft": spec.draft_name,
        "runtime": spec.target.runtime,
        "draft_runtime": runtime(spec.drafter),
        "asked": options.document(prompts),
        "rounds": len(rounds),
        "interrupted": len(rounds) < options.repeats,
        "precision": {bench.OWN: _precision(spec, options.loading.dtype)}
        | {peer.name: peer.about["precision"] for peer in peers},
        "versions": {peer.name: peer.about["version"] for peer in peers},
        "notes": {peer.name: peer.about["note"] for peer in peers if "note" in peer.about},
        "unable": unable,
        "figures": rows,
        "best_gamma": fixed[1],
        "automatic_over_best": bench.faster(rounds, bench.AUTOMATIC, fixed) if automatic else None,
        "duels": [asdict(bench.duel(rounds, peer.name)) for peer in peers],
    }
    return document, table


def _precision(spec: Speculator, dtype: str) -> dict[str, str]:
    """The target's dtypes, part by part: the cache has that of the computation."""
    computed = spec.target.computed
    cache = "float32" if computed == "int8" else computed  # int8: rounded in products alone
    return {"weights": dtype, "cache": cache, "activations": computed}


def _save(out: Path, document: dict[str, Any], table: list[Figures]) -> None:
    from foretoken.lab.bench.plot import draw

    (out / "bench.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    draw(table, out, f"{document['target']}, {document['asked']['dtype']}, {document['date']}")
