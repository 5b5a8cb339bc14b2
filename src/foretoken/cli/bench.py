"""`foretoken bench`: a pair against its own plain decoding and against other libraries."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
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
from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.lab.bench.figures import Figures
    from foretoken.lab.bench.peer import Peer
    from foretoken.lab.bench.race import Contestant, Round, Task
    from foretoken.speculator import Speculator


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
        Path | None, Option(help="Folder for bench.json and plots; Ctrl-C leaves what is there.")
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Time plain decoding, several gammas, automatic gamma and peers, turn by turn."""
    gammas = _gammas(gamma)
    asked = {
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "rule": rule,
        **asdict(loading),
    }
    lines = prompt_files.read(None, prompts)
    _require(asked, gammas, vs or [], out)
    option.require_model(target, loading)
    quiet()
    with ExitStack() as stack:
        spec, tasks = _load(loading, target, draft, asked, lines)
        peers, unable = _peers(stack, spec, vs or [], asked, draft)
        contestants = _contestants(spec, peers, gammas, draft, rule)
        rounds = _race(contestants, tasks, repeats, unable)
        peers = [peer for peer in peers if peer.name not in unable]
        document, table = _document(spec, peers, rounds, asked, len(lines), unable)
    if out:
        _save(out, document, table)
    if as_json:
        print(json.dumps(document, allow_nan=False))
    else:
        scoreboard.show(document, table, page())
    if document["interrupted"]:
        raise typer.Exit(130)


def _gammas(text: str) -> list[int]:
    """Those asked for, and 0."""
    try:
        found = {int(part) for part in text.split(",")}
    except ValueError:
        raise InputError(f"gamma is {text!r:.60}; give numbers separated by commas") from None
    return sorted(found | {0})


def _require(asked: dict[str, Any], gammas: list[int], vs: list[str], out: Path | None) -> None:
    """What is wrong fails before models load."""
    from foretoken.options import keys_of, require, require_place
    from foretoken.sampling.params import SamplingParams

    SamplingParams(asked["temperature"], asked["top_k"], asked["top_p"])
    for gamma in gammas:
        require(asked["max_new_tokens"], gamma, asked["rule"], lenience=1.0)
    keys_of(asked["seed"], 1)
    require_place(asked["runtime"], asked["dtype"], asked["draft_dtype"])
    if asked["repeats"] < 1:
        raise InputError(f"repeats is {asked['repeats']}; give 1 or more")
    if asked["max_new_tokens"] < gammas[-1] + 2:
        raise InputError(
            f"max_new_tokens is {asked['max_new_tokens']}, too few to time gamma {gammas[-1]}; "
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
    loading: option.PairLoading,
    target: str | None,
    draft: str | None,
    asked: dict[str, Any],
    lines: list[prompt_files.Line],
) -> tuple[Speculator, list[Task]]:
    """The pair, with nothing that ends or begins a text; and the tasks of the first round."""
    from dataclasses import replace

    from foretoken.ends import Ends
    from foretoken.lab.bench.race import Task
    from foretoken.sampling.distributions import SamplingParams

    spec = loading.load(target, draft)
    spec = replace(spec, ends=Ends(decoder_start=spec.ends.decoder_start))
    if spec.tokenizer is None:
        lines = [prompt_files.as_ids(line) for line in lines]
    prompts = [line.prompt for line in lines]
    tokens, seed = asked["max_new_tokens"], asked["seed"]
    for i, request in enumerate(spec.requests(prompts, tokens, seed)):
        if request.limit < tokens:
            raise InputError(
                f"prompt {i} leaves room for {request.limit} new tokens, not {tokens}; "
                "give a shorter one or a smaller --max-new-tokens"
            )
    params = SamplingParams(asked["temperature"], asked["top_k"], asked["top_p"])
    ids = [spec.ids(prompt, i) for i, prompt in enumerate(prompts)]
    return spec, [Task(prompt, tokens, params, seed + i) for i, prompt in enumerate(ids)]


def _peers(
    stack: ExitStack, spec: Speculator, vs: list[str], asked: dict[str, Any], draft: str | None
) -> tuple[list[Peer], dict[str, str]]:
    """The peers, each with the same pair in its process; and why others cannot load it."""
    from foretoken.drafters.lm import LMDrafter
    from foretoken.lab.bench.peer import Peer
    from foretoken.lab.bench.race import Unable

    if not vs:
        return [], {}
    if draft != "none" and not isinstance(spec.drafter, LMDrafter):
        raise InputError(f"--vs needs a draft that peers can read: a model's folder, not {draft!r}")
    drafts = None if draft == "none" else spec.draft_name
    kinds = asked["dtype"], asked["draft_dtype"] or asked["dtype"]
    peers: list[Peer] = []
    unable: dict[str, str] = {}
    for name in vs:
        try:
            peers.append(stack.enter_context(Peer(name, spec.target_name, drafts, *kinds)))
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
    """All rounds, or those that were done when it was interrupted; progress on standard error.

    Peers that cannot go on join the `unable`, and their runs are left out.
    """
    from dataclasses import replace

    from foretoken.lab.bench.figures import label
    from foretoken.lab.bench.race import Key, race

    def of_round(i: int) -> list[Task]:
        return [replace(task, seed=task.seed + i * len(tasks)) for task in tasks]

    rounds: list[Round] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("warming up", total=(repeats + 1) * len(contestants))

        def told(key: Key) -> None:
            done = int(progress.tasks[bar].completed) // len(contestants)
            where = f"round {done} of {repeats}" if done else "warming up"
            progress.update(bar, advance=1, description=f"{where}: {key[0]}, {label(key[1])}")

        def left(key: Key, why: str) -> None:
            unable[key[0]] = f"{label(key[1])}: {why}"

        try:
            for found in race(contestants, of_round, repeats, told, left):
                rounds.append(found)
        except KeyboardInterrupt:
            pass
    if not rounds:
        Console(stderr=True).print("interrupted before the first round was done")
        raise typer.Exit(130)
    return [{key: runs for key, runs in found.items() if key[0] not in unable} for found in rounds]


def _document(
    spec: Speculator,
    peers: list[Peer],
    rounds: list[Round],
    asked: dict[str, Any],
    prompts: int,
    unable: dict[str, str],
) -> tuple[dict[str, Any], list[Figures]]:
    """All that was found, as JSON will hold it, and its rows."""
    from foretoken.lab.bench import figures as bench
    from foretoken.lab.machine import describe
    from foretoken.speculator import runtime

    table = [
        bench.figures(rounds, key, greedy=asked["temperature"] == 0) for key in list(rounds[0])
    ]
    rows = [asdict(one) | {"variant": bench.label(one.gamma)} for one in table]
    for row, one in zip(rows, table, strict=True):
        row["measured_over_predicted"] = one.measured_over_predicted
    fixed = bench.best(rounds, bench.OWN)
    automatic = bench.AUTOMATIC in rounds[0]
    document = {
        "date": date.today().isoformat(),
        "machine": asdict(describe(spec.target.device)),
        "target": spec.target_name,
        "draft": spec.draft_name,
        "runtime": spec.target.runtime,
        "draft_runtime": runtime(spec.drafter),
        "asked": asked | {"prompts": prompts},
        "rounds": len(rounds),
        "interrupted": len(rounds) < asked["repeats"],
        "precision": {bench.OWN: _precision(spec, asked["dtype"])}
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
    """What the target computes in, part by part: the cache has the computation's precision."""
    computed = dtype
    if spec.target.runtime == "openvino":
        from openvino import Core

        from foretoken.models.openvino.conversion import settings

        hint = settings(Core(), dtype)["INFERENCE_PRECISION_HINT"]
        computed = {"f32": "float32", "bf16": "bfloat16"}[hint]
    rounded = "int8" if dtype == "int8" else computed
    return {"weights": dtype, "cache": computed, "activations": rounded}


def _save(out: Path, document: dict[str, Any], table: list[Figures]) -> None:
    from foretoken.lab.bench.plot import draw

    (out / "bench.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    draw(table, out, f"{document['target']}, {document['asked']['dtype']}, {document['date']}")
