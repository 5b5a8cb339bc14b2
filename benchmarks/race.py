"""Races: this package with several gammas and other libraries take turns on the same prompts, round
after round. The tables of docs/performance.md and of README are made of them.

A peer is another library on the same pair: a process of its own that answers in JSON lines
(`peers/`; `python benchmarks/peers/make.py` makes their venvs, once). The machine must be idle.

    python benchmarks/race.py --target DIR --draft DIR2 --prompts FILE --vs llama.cpp --out FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

import machine
from foretoken.cli import option, script
from foretoken.cli import prompts as prompt_files
from foretoken.cli.command import command, set_up_logging
from foretoken.costing import contention
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.kernels.library import choose_instruction_set
from foretoken.loading import hub, named_models
from foretoken.loading.options import ROUNDED_DTYPES
from foretoken.measurement.machine import count_cores
from foretoken.measurement.options import format_gamma
from foretoken.measurement.races import (
    AUTOMATIC_GAMMA,
    OWN_LIBRARY,
    PLAIN_DECODING,
    ContestantKey,
    Race,
    RaceRun,
    RaceTask,
    RoundRuns,
    RunTurn,
    make_own_turns,
    prepare_tasks,
    repeat_tasks,
    run_rounds,
)
from foretoken.models.native.model import NativeModel
from foretoken.records import StepRecord
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from tables import show as show_tables

HERE = Path(__file__).resolve().parent
SCRIPTS = {
    "transformers": "peer_transformers.py",
    "openvino-genai": "peer_openvino_genai.py",
    "onnxruntime-genai": "peer_onnxruntime_genai.py",
    "llama.cpp": "peer_llama_cpp.py",
    "llama-server": "peer_llama_server.py",
    "vllm": "peer_vllm.py",
}
# Besides its own defaults, a peer is raced with a cache and a computation as precise as ours
# ("same-precision"), and llama.cpp over blocks that it repacks for its fastest products, plainly
# and with its own look-up
SETTINGS = {
    "openvino-genai": ("same-precision",),
    "llama.cpp": ("same-precision", "q4_0", "lookup"),
    "llama-server": ("lookup",),
    "vllm": ("lookup",),
}
ALONE = {"onnxruntime-genai", "llama.cpp", "llama-server"}  # run with one text at a time
OWN_VENV = {"transformers"}  # run in the project's own venv


class Unable(RefusedError):
    """Why a contestant cannot do a task."""


class Peer:
    """A running peer, a context manager. `about`: its version, precisions, and a note if any.

    Its processes are stopped while it waits, so that threads which spin for work take no processor
    from the other contestants."""

    def __init__(
        self,
        name: str,
        target: str,
        draft: str | None,
        dtype: str,
        draft_dtype: str | None,
        *,
        batched: bool = False,
    ) -> None:
        """Start it and load the pair; draft None: for plain decoding only. `batched`: for several
        texts at once. `name` may have a setting after a colon: its own defaults without.

        Raises InputError where the peer is not installed, Unable where it cannot run the pair.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command_of(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is ours
        )
        try:
            self.about = self._ask(
                target=str(Path(target).resolve()),
                draft=draft and str(Path(draft).resolve()),
                dtype=dtype,
                draft_dtype=draft_dtype or dtype,
                batched=batched,
                threads=count_cores(),
                python=sys.executable,
                setting=setting(name),
            )
        except BaseException:
            self.close()
            raise

    def run(self, tasks: list[RaceTask], gamma: int) -> list[RaceRun]:
        """Tasks alike but for prompts and seeds, with gamma draft tokens a step; 0: plain. They are
        done at once, where this peer can. Raises Unable where it cannot."""
        first = tasks[0]
        replies = self._ask(
            prompts=[task.prompt for task in tasks],
            max_new_tokens=first.tokens,
            gamma=gamma,
            temperature=first.params.temperature,
            top_k=first.params.top_k,
            top_p=first.params.top_p,
            seeds=[task.seed for task in tasks],
        )["texts"]
        for reply in replies:
            if len(reply["tokens"]) != first.tokens:
                raise Unable(f"it made {len(reply['tokens'])} tokens, not {first.tokens}")
        return [RaceRun(**reply) for reply in replies]

    def close(self) -> None:
        """End the process."""
        self._signal(signal.SIGKILL)  # also one that is stopped
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self._signal(signal.SIGSTOP)
        if not line:
            raise Unable(f"it ended: {self._last_error()}")
        try:
            reply = json.loads(line)
        except ValueError:
            raise Unable(f"its answer is not valid JSON: {line.strip()[:200]}") from None
        if "error" in reply:
            raise Unable(str(reply["error"]))
        return reply

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and those that it started, unless it has ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _last_error(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1][:200] if lines else "without a word"


def command_of(name: str) -> list[str]:
    """Return the command that starts a peer; raises InputError with the remedy if it is not
    installed."""
    chosen, name = setting(name), library(name)
    if name not in SCRIPTS:
        raise InputError(f"--vs is {name!r:.60}; give one of {', '.join(SCRIPTS)}")
    if chosen and chosen not in SETTINGS.get(name, ()):
        named = " or ".join(f"{name}:{each}" for each in SETTINGS.get(name, ()))
        raise InputError(f"--vs {name} has no setting {chosen!r:.60}; give {named or name}")
    script = HERE / "peers" / SCRIPTS[name]
    if name in OWN_VENV:
        return [sys.executable, str(script)]
    home = HERE.parent / ".peers" / name
    if not (home / "ready").exists():
        raise InputError(
            f"--vs {name} has no venv; make it with: python benchmarks/peers/make.py {name}"
        )
    return [str(home / "bin" / "python"), str(script)]


def library(name: str) -> str:
    """Return the library that a peer's name begins with."""
    return name.partition(":")[0]


def setting(name: str) -> str:
    """Return the setting that a peer's name ends with, "" for its own defaults."""
    return name.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Duel:
    """The speed of this package over that of a peer; `best`: each at its best fixed gamma."""

    name: str
    plain: float
    gamma: int
    peer_gamma: int
    best: float
    automatic: float | None


def faster(raced: Race, one: ContestantKey, other: ContestantKey) -> float:
    """Return how many times as fast one is as the other: the median of the rounds' ratios."""
    return median(raced.compute_speedups(one, other))


def best(raced: Race, name: str) -> ContestantKey:
    """Return the fastest fixed gamma of one library, 0 included."""
    keys = [key for key in raced.rounds[0] if key[0] == name and key[1] is not None]
    return min(keys, key=lambda key: median(raced.compute_seconds_per_token(key)))


def duel(raced: Race, peer: str) -> Duel:
    """Return the figures of this package against a peer."""
    mine, theirs = best(raced, OWN_LIBRARY), best(raced, peer)
    assert mine[1] is not None and theirs[1] is not None
    automatic = AUTOMATIC_GAMMA in raced.rounds[0]
    return Duel(
        name=peer,
        plain=faster(raced, PLAIN_DECODING, (peer, 0)),
        gamma=mine[1],
        peer_gamma=theirs[1],
        best=faster(raced, mine, theirs),
        automatic=faster(raced, AUTOMATIC_GAMMA, theirs) if automatic else None,
    )


def agreement(rounds: list[RoundRuns], key: ContestantKey) -> dict[str, Any]:
    """Compare texts with those of greedy plain decoding of the same round: the share of tokens
    before the first difference, and its earliest place in any run."""
    pairs = [
        (run.tokens, plain.tokens)
        for turns in rounds
        for run, plain in zip(turns[key], turns[PLAIN_DECODING], strict=True)
    ]
    equal = [_equal(text, plain) for text, plain in pairs]
    places = [n for n, (text, plain) in zip(equal, pairs, strict=True) if text != plain]
    tokens = sum(max(len(text), len(plain)) for text, plain in pairs)
    return {"share": sum(equal) / tokens, "first_difference": min(places, default=None)}


def _equal(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def occupancy(steps: list[StepRecord], texts: int) -> float:
    """Return the mean share of the batch that was filled: k rows that share a forward leave k
    records, so each counts 1 / k."""
    return len(steps) / sum(1 / step.rows for step in steps) / texts


def padding(steps: list[StepRecord]) -> float:
    """A row's own positions are its last token and its draft tokens."""
    vain = sum(step.padding / step.rows for step in steps)
    return vain / (vain + sum(1 + step.drafted for step in steps))


def run_race(
    contestants: dict[ContestantKey, RunTurn],
    tasks: list[RaceTask],
    repeats: int,
    *,
    together: bool = False,
    report: Callable[[ContestantKey], object] = lambda key: None,
) -> tuple[Race, dict[str, str]]:
    """Race, and return why contestants could not go on: all of such a name are out."""
    unable: dict[str, str] = {}

    def guarded(key: ContestantKey, turn: RunTurn) -> RunTurn:
        def take(part: list[RaceTask]) -> list[RaceRun]:
            if key[0] not in unable:
                try:
                    return turn(part)
                except Unable as error:
                    unable[key[0]] = f"{format_gamma(key[1])}: {error}"
            return []

        return take

    turns = {key: guarded(key, turn) for key, turn in contestants.items()}
    raced = run_rounds(turns, tasks, repeats, together=together, report=report)
    rounds = [{k: runs for k, runs in each.items() if k[0] not in unable} for each in raced.rounds]
    return Race(rounds, together), unable


def figures(raced: Race, *, greedy: bool) -> dict[str, Any]:
    """Return the figures of a race, and its ratios."""
    fixed, contestants = best(raced, OWN_LIBRARY), list(raced.rounds[0])
    texts = len(raced.rounds[0][fixed]) if raced.together else None
    rows: list[dict[str, Any]] = []
    for key in contestants:
        row, steps = asdict(raced.compute_figures(key)), raced.list_steps(key)
        row["speedup"] = row["speedup"]["median"]
        predicted = row["predicted"] and row["predicted"]["predicted"]
        rows.append(
            {
                "name": key[0],
                **row,
                "variant": format_gamma(key[1]),
                "occupancy": occupancy(steps, texts or 1) if steps else None,
                "padding": padding(steps) if steps else None,
                "agreement": agreement(raced.rounds, key) if greedy else None,
                "measured_over_predicted": row["speedup"] / predicted if predicted else None,
            }
        )
    peers = dict.fromkeys(name for name, _ in contestants if name != OWN_LIBRARY)
    automatic = AUTOMATIC_GAMMA in contestants
    return {
        "batch": texts,
        "rounds": len(raced.rounds),
        "figures": rows,
        "best_gamma": fixed[1],
        "automatic_over_best": faster(raced, AUTOMATIC_GAMMA, fixed) if automatic else None,
        "duels": [asdict(duel(raced, name)) for name in peers],
    }


@command
def main(
    loading: option.PairLoadOptions,
    prompts: Annotated[Path, Option(help=f"File of prompts. {option.PROMPTS_HELP}")],
    vs: Annotated[
        list[str] | None,
        Option(
            help="transformers, openvino-genai, onnxruntime-genai (plain only), llama.cpp, "
            "llama-server or vllm, each with its own defaults; openvino-genai:same-precision and "
            "llama.cpp:same-precision compute as precisely as foretoken, llama.cpp:q4_0 has its "
            "fastest blocks; llama.cpp:lookup, llama-server:lookup and vllm:lookup have their own "
            "look-up; may be repeated."
        ),
    ] = None,
    target: option.Target = None,
    draft: option.Draft = None,
    gamma: Annotated[str, Option(help="Draft tokens per step, as a list.")] = "2,4,8",
    max_new_tokens: Annotated[int, Option(help="New tokens per text, exactly.")] = 96,
    repeats: Annotated[int, Option(help="Rounds to time, after one that warms up.")] = 5,
    temperature: option.Temperature = 0.0,
    top_k: option.TopK = 0,
    top_p: option.TopP = 1.0,
    seed: option.Seed = 0,
    rule: option.Rule = "block",
    batch: Annotated[
        str | None, Option(help="Race with this many texts at once, as in 1,2,4,8,16.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for bench.json.")] = None,
    as_json: option.Json = False,
) -> None:
    """Race this package against other libraries. Ctrl-C keeps the rounds that are done."""
    vs, gammas = vs or [], sorted({0, *option.parse_numbers("gamma", gamma, int)})
    sizes = sorted({*option.parse_numbers("batch", batch, int)}) if batch else []
    params = SamplingParams(temperature, top_k, top_p, max_new_tokens=max_new_tokens)
    lines = prompt_files.read_prompts(None, prompts)
    require(vs, sizes, loading)
    target = option.resolve_target(target)
    set_up_logging()
    ready: list[Any] = []
    with ExitStack() as stack:
        spec = loading.load(
            target,
            draft,
            lambda known: ready.extend(prompt_files.to_model_prompt(line, known) for line in lines),
        ).prepared()
        if spec.controls:
            controls = ", ".join(spec.controls)
            raise RefusedError(
                f"the model's generation config sets {controls}, which not all of the compared "
                "follow; --ignore-generation-config compares without"
            )
        spec, tasks = prepare_tasks(spec, ready, params, seed)
        peers, unable = start_peers(stack, spec, vs, loading, draft, batched=bool(sizes))
        contestants = make_own_turns(spec, gammas, rule)
        for peer in peers:
            theirs = gammas if readable(spec) and not peer.about.get("plain_only") else [0]
            contestants |= {(peer.name, g): partial(peer.run, gamma=g) for g in theirs}
        reading = contention.take_reading()
        parts = race_sizes(contestants, tasks, sizes, repeats, unable)
        share = contention.compute_others_share([contention.measure_since(reading)])
    if not parts:
        print("interrupted before the first round was done", file=sys.stderr)
        raise typer.Exit(130)
    named_in_race = {row["name"] for part in parts for row in part["figures"]}
    head = machine.describe()
    document = {
        "date": head["date"],
        "machine": head,
        "target": Path(spec.target_name).name,
        "draft": "+".join(Path(part).name for part in spec.draft_name.split("+")),
        "runtime": spec.target.runtime,
        **({"instructions": choose_instruction_set()} if spec.target.runtime == "native" else {}),
        "draft_runtime": spec.drafter.runtime,
        "asked": {
            "prompts": len(lines),
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
            "rule": rule,
            **option.get_changed_options(loading),
        },
        "precision": precision(spec, loading),
        "peers": {peer.name: peer.about for peer in peers if peer.name in named_in_race},
        **({"batches": parts} if sizes else parts[0]),
        "unable": unable,
        "others": share,
        "interrupted": len(parts) < len(sizes) or parts[-1]["rounds"] < repeats,
    }
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    print(json.dumps(document, allow_nan=False)) if as_json else show(document)
    if document["interrupted"]:
        raise typer.Exit(130)


def race_sizes(
    contestants: dict[ContestantKey, RunTurn],
    tasks: list[RaceTask],
    sizes: list[int],
    repeats: int,
    unable: dict[str, str],
) -> list[dict[str, Any]]:
    """Race one text after another, or with each number of texts at once, until Ctrl-C. Peers that
    fail join the `unable`."""
    parts: list[dict[str, Any]] = []
    for texts in sizes or [0]:
        where = f"batch {texts}, " if texts else ""
        raced, failed = run_race(
            {key: turn for key, turn in contestants.items() if key[0] not in unable},
            repeat_tasks(tasks, texts) if texts else tasks,
            repeats,
            together=bool(texts),
            report=lambda key, where=where: print(
                f"{where}{key[0]}, {format_gamma(key[1])}", file=sys.stderr
            ),
        )
        unable |= {name: where + why for name, why in failed.items()}
        parts += [figures(raced, greedy=tasks[0].params.greedy)] if raced.rounds else []
        if len(raced.rounds) < repeats:
            break
    return parts


def require(vs: list[str], sizes: list[int], loading: option.PairLoadOptions) -> None:
    """Raise InputError for mistakes, before models load."""
    if len(set(vs)) != len(vs):
        raise InputError(f"--vs names a peer twice: {', '.join(vs)}; give each once")
    if vs and loading.adapter is not None:
        raise InputError("--vs gives peers the target's files, without --adapter; leave out one")
    for name in vs:
        command_of(name)
        if sizes and library(name) in ALONE:
            raise InputError(f"--vs {name} runs one text at a time; leave it or --batch out")
    if sizes and not 1 <= sizes[0] <= sizes[-1] <= MAX_BATCH_SIZE:
        raise InputError(f"batch is {sizes}; give numbers from 1 to {MAX_BATCH_SIZE}")


def start_peers(
    stack: ExitStack,
    spec: Speculator,
    vs: list[str],
    loading: option.PairLoadOptions,
    draft: str | None,
    *,
    batched: bool,
) -> tuple[list[Peer], dict[str, str]]:
    """Start the peers, each with the same pair in its process, or with the target alone where it
    cannot read the draft; and return why others cannot load it."""
    own = named_models.strip_lookup(spec.draft_name)
    theirs = str(named_models.find_draft_folder(own) or own) if readable(spec) else None
    pair = hub.resolve_path(spec.target_name), theirs
    dtypes = loading.dtype, loading.draft_dtype
    peers: list[Peer] = []
    unable: dict[str, str] = {}
    for name in vs:
        try:
            peer = stack.enter_context(Peer(name, *pair, *dtypes, batched=batched))
            if theirs is None and draft != "none":
                peer.about["plain_only"] = "it cannot read the draft"
            if why := peer.about.get("plain_only"):
                notes = [peer.about.get("note"), f"plain only: {why}"]
                peer.about["note"] = "; ".join(filter(None, notes))
            peers.append(peer)
        except Unable as error:
            unable[name] = str(error)
    return peers, unable


def readable(spec: Speculator) -> bool:
    """Return True if the draft is a model's folder, which peers can read."""
    return isinstance(spec.drafter, LMDrafter) and not spec.drafter.shares


def precision(spec: Speculator, loading: option.PairLoadOptions) -> dict[str, Any]:
    """Return in which precisions this package computes."""
    computed = spec.target.compute_dtype
    cache = "float32" if computed in ROUNDED_DTYPES else computed  # rounded in products alone
    if isinstance(spec.target, NativeModel):
        cache = str(spec.target.pool.dtype)
    return {
        "weights": loading.dtype,
        "cache": cache,
        "activations": "int8" if computed in ROUNDED_DTYPES else computed,
        "draft": None if spec.drafter.model is None else spec.drafter.model.compute_dtype,
    }


def show(document: dict[str, Any]) -> None:
    """Print the contestants, and the figures of each race."""
    console = Console(highlight=False)
    ours = {
        "version": document["machine"]["versions"]["foretoken"],
        "precision": document["precision"],
    }
    for name, about in {"foretoken": ours, **document["peers"]}.items():
        kinds = ", ".join(f"{part} {kind}" for part, kind in about["precision"].items() if kind)
        note = f" ({about['note']})" if about.get("note") else ""
        console.print(f"{name} {about['version']}{note}: {kinds}", soft_wrap=True, markup=False)
    for name, why in document["unable"].items():
        console.print(f"{name} cannot run this pair: {why}", soft_wrap=True, markup=False)
    show_tables("race", document)
    if warning := contention.describe_contention(document["others"]):
        console.print(warning, soft_wrap=True, style="bold")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)
if __name__ == "__main__":
    script.run_app(app)
