"""`foretoken bench`: race a pair against its own plain decoding and against other libraries."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from typer import Option

from foretoken.cli import option, scoreboard
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, quiet
from foretoken.cli.render import page
from foretoken.cli.scoreboard import BenchOptions
from foretoken.costing import contention
from foretoken.errors import InputError, RefusedError

if TYPE_CHECKING:
    from foretoken.lab.bench.race import Contestant, Peer, RaceTask, Round
    from foretoken.speculator import Speculator


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
        Option(help="Measure tokens per second with this many texts at once, as in 1,2,4,8,16."),
    ] = None,
    assisted: Annotated[
        str | None,
        Option(
            help="Sizes of --batch at which transformers speculates too, one text after another. "
            "Default: all."
        ),
    ] = None,
    vs: Annotated[
        list[str] | None,
        Option(help="Race against transformers, openvino-genai or llama.cpp; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Folder for bench.json and plots. Ctrl-C keeps the rounds that are done."),
    ] = None,
    as_json: option.Json = False,
) -> None:
    """Time plain decoding, several gammas, automatic gamma and other libraries in turns."""
    gammas = sorted({0, *_numbers("gamma", gamma)})
    batches = _numbers("batch", batch) if batch else []
    helped = _numbers("assisted", assisted) if assisted else batches
    options = BenchOptions(max_new_tokens, repeats, temperature, top_k, top_p, seed, rule, loading)
    lines = prompt_files.read(None, prompts)
    _require_batches(batches, helped, vs or [])
    _require(options, gammas, vs or [], out)
    loading.require(target)
    quiet()
    with ExitStack() as stack:
        spec, tasks = _load(options, target, draft, lines)
        peers, unable = _peers(stack, spec, vs or [], loading, draft, batched=bool(batches))
        contestants = _contestants(spec, peers, gammas, batched=bool(batches), rule=rule)
        reading = contention.read()
        if batches:
            rounds = _race_batches(contestants, tasks, repeats, unable, batches, helped)
        else:
            rounds = {1: _race(contestants, tasks, repeats, unable)}
        if not any(rounds.values()):
            Console(stderr=True).print("interrupted before the first round was done")
            raise typer.Exit(130)
        share = contention.share([contention.taken(reading)])
        setting = scoreboard.BenchSetting(spec, peers, options, len(lines), unable, share)
        result = (
            scoreboard.batches(setting, batches, rounds)
            if batches
            else scoreboard.one_by_one(setting, rounds[1])
        )
    if out:
        result.save(out)
    if as_json:
        print(json.dumps(result.document, allow_nan=False))
    else:
        result.show(page())
    if result.document["interrupted"]:
        raise typer.Exit(130)


def _numbers(name: str, text: str) -> list[int]:
    """Read the numbers in an option, in order."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise InputError(f"{name} is {text!r:.60}; give numbers separated by commas") from None


def _require(options: BenchOptions, gammas: list[int], vs: list[str], out: Path | None) -> None:
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
    if out and not find_spec("matplotlib"):
        raise InputError("--out draws; give it matplotlib: pip install 'foretoken[plot]'")
    if vs:
        from foretoken.lab.bench.race import command  # late: torch takes seconds to import

        for name in vs:
            command(name)
    if out:
        out.mkdir(parents=True, exist_ok=True)


def _require_batches(batches: list[int], helped: list[int], vs: list[str]) -> None:
    """Raise InputError for invalid batch sizes, and for peers that take one text at a time."""
    if not set(helped) <= set(batches):
        raise InputError(f"--assisted is {helped}; give some of --batch, which is {batches}")
    if not batches:
        return
    from foretoken.lab.bench.race import ALONE  # late: torch takes seconds to import
    from foretoken.speculator import BATCH

    if not 1 <= batches[0] <= batches[-1] <= BATCH:
        raise InputError(f"batch is {batches}; give numbers from 1 to {BATCH}")
    for name in ALONE.intersection(vs):
        raise InputError(f"--vs {name} runs one text at a time; leave it or --batch out")


def _load(
    options: BenchOptions, target: str | None, draft: str | None, lines: list[prompt_files.Line]
) -> tuple[Speculator, list[RaceTask]]:
    """Load the pair, without tokens that end a text, and make the tasks of the first round."""
    from foretoken.generation_config import Ends
    from foretoken.lab.bench.race import RaceTask

    spec = options.loading.load(target, draft)
    if spec.controls:
        names = ", ".join(spec.controls)
        raise RefusedError(
            f"the model's generation config sets {names}, which not all of the compared follow; "
            "--ignore-generation-config compares without"
        )
    spec = replace(spec, ends=Ends(decoder_start=spec.ends.decoder_start))
    prompts = [prompt_files.for_model(line, spec) for line in lines]
    tokens, seed = options.max_new_tokens, options.seed
    sampling = replace(options.params, max_new_tokens=tokens)
    for i, request in enumerate(spec.inputs.requests(prompts, sampling, seed)):
        if request.limit < tokens:
            raise InputError(
                f"prompt {i} leaves room for {request.limit} new tokens, not {tokens}; "
                "give a shorter one or a smaller --max-new-tokens"
            )
    ids = [spec.inputs.ids(prompt, i) for i, prompt in enumerate(prompts)]
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
    from foretoken.lab.bench.race import Peer, Unable

    pair = spec.target_name, spec.draft_name if _readable(spec) else None
    dtypes = loading.dtype, loading.draft_dtype
    peers: list[Peer] = []
    unable: dict[str, str] = {}
    for name in vs:
        try:
            peer = stack.enter_context(Peer(name, *pair, *dtypes, batched=batched))
            if pair[1] is None and draft != "none":
                notes = [peer.about.get("note"), "plain only: it cannot read the draft"]
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
    spec: Speculator, peers: list[Peer], gammas: list[int], rule: str, *, batched: bool
) -> list[Contestant]:
    from foretoken.drafters.none import NoDrafter
    from foretoken.lab.bench.race import Guest, OneByOne, OwnContestant

    gammas_run = [0] if isinstance(spec.drafter, NoDrafter) else [*gammas, None]
    runners = [OwnContestant(spec, gamma, rule) for gamma in gammas_run]
    guests = [Guest(peer, g) for peer in peers for g in (gammas if _readable(spec) else [0])]
    contestants: list[Contestant] = [*runners, *guests]
    return contestants if batched else [OneByOne(one) for one in contestants]


def _race_batches(
    contestants: list[Contestant],
    tasks: list[RaceTask],
    repeats: int,
    unable: dict[str, str],
    batches: list[int],
    helped: list[int],
) -> dict[int, list[Round]]:
    """Race with each number of texts at once, until Ctrl-C. transformers speculates only at the
    sizes in `helped`."""
    from foretoken.lab.bench.figures import of_batch

    by_batch: dict[int, list[Round]] = {}
    for texts in batches:
        some = [
            one
            for one in contestants
            if one.key[0] not in unable
            and (texts in helped or one.key[0] != "transformers" or not one.key[1])
        ]
        rounds = _race(some, of_batch(tasks, texts), repeats, unable, f"batch {texts}, ")
        by_batch |= {texts: rounds} if rounds else {}
        if len(rounds) < repeats:
            break
    return by_batch


def _race(
    contestants: list[Contestant],
    tasks: list[RaceTask],
    repeats: int,
    unable: dict[str, str],
    where: str = "",
) -> list[Round]:
    """Run all rounds, or those before Ctrl-C, with progress on standard error.

    Peers that fail join the `unable`, and their runs are left out.
    """
    from foretoken.lab.bench.figures import label
    from foretoken.lab.bench.race import Key, race

    def of_round(i: int) -> list[RaceTask]:
        return [replace(task, seed=task.seed + i * len(tasks)) for task in tasks]

    rounds: list[Round] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"{where}warming up", total=(repeats + 1) * len(contestants))

        def report(key: Key) -> None:
            done = int(progress.tasks[bar].completed) // len(contestants)
            phase = f"round {done} of {repeats}" if done else "warming up"
            description = f"{where}{phase}: {key[0]}, {label(key[1])}"
            progress.update(bar, advance=1, description=description)

        def fail(key: Key, reason: str) -> None:
            unable[key[0]] = f"{where}{label(key[1])}: {reason}"

        with suppress(KeyboardInterrupt):
            for done in race(contestants, of_round, repeats, report, fail):
                rounds.append(done)
    return [{key: runs for key, runs in done.items() if key[0] not in unable} for done in rounds]
