"""Contestants that take turns on the same tasks, round after round, so that other load on the
machine meets them all; and one prompt, speculative beside plain, with what section 3 predicts.

A peer is another library on the same pair: a process of its own that answers in JSON lines. The
peers' scripts are in the repository's benchmarks/peers, not in an installed package. Knows runs
and their times; figures.py compares them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, sleep
from typing import Any, Protocol

from foretoken import theory
from foretoken.costing import contention
from foretoken.costing.costs import of
from foretoken.errors import InputError, RefusedError
from foretoken.lab.machine import cores
from foretoken.options import Prompt
from foretoken.records import StepRecord
from foretoken.request import Completion, uninterrupted
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator

OWN = "foretoken"
REST_SECONDS = 0.05  # between turns: threads of the last contestant may spin for a while

Gamma = int | None  # None: automatic
Key = tuple[str, Gamma]


@dataclass(frozen=True, slots=True)
class RaceTask:
    """A prompt to continue, in token ids."""

    prompt: list[int]
    tokens: int  # new ones, exactly: nothing ends a text early
    params: SamplingParams
    seed: int

    @property
    def sampling(self) -> SamplingParams:
        return replace(self.params, max_new_tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class RaceRun:
    """One task done. `steps`: behind the first, where there are any; empty for a peer, which keeps
    no records."""

    tokens: list[int]
    first_tokens: int  # those of the first step, which come together; 0: not known
    first_seconds: float  # from the start until these
    seconds: float
    steps: tuple[StepRecord, ...] = ()
    loop_seconds: float = 0.0  # of the steps


Round = dict[Key, list[RaceRun]]  # a contestant's turn: a run for each task


class Unable(RefusedError):
    """Why a contestant cannot do a task."""


class Contestant(Protocol):
    """Continues prompts, a run for each; `turn` raises Unable where it cannot, and the others go on
    without it."""

    @property
    def key(self) -> Key: ...

    def turn(self, tasks: list[RaceTask]) -> list[RaceRun]: ...


@dataclass(frozen=True, slots=True)
class OwnContestant:
    """This package with one gamma, all texts of a turn in one call."""

    spec: Speculator
    gamma: Gamma
    rule: str = "block"

    @property
    def key(self) -> Key:
        return (OWN, self.gamma)

    def turn(self, tasks: list[RaceTask]) -> list[RaceRun]:
        """Tasks alike but for prompts and seeds. Raises KeyboardInterrupt where it was
        interrupted."""
        prompts: list[Prompt] = [list(task.prompt) for task in tasks]
        how = {"gamma": self.gamma, "rule": self.rule, "seed": [task.seed for task in tasks]}
        start = perf_counter()
        completions = uninterrupted(self.spec.generate(prompts, tasks[0].sampling, **how))
        seconds = perf_counter() - start
        return [_run(text, completions, seconds) for text in completions]


def _run(text: Completion, completions: list[Completion], seconds: float) -> RaceRun:
    """A text of a call that took so long; what is around its rows comes before the first token."""
    stats, first, steady = text.stats, text.steps[0], text.steady
    around = seconds - max(each.stats.seconds for each in completions)
    return RaceRun(
        tokens=text.tokens,
        first_tokens=len(first.kept),
        first_seconds=around + stats.first_seconds,
        seconds=seconds,
        steps=tuple(steady.steps),
        loop_seconds=steady.seconds,
    )


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A contestant that is given the texts of a turn one after another."""

    contestant: Contestant

    @property
    def key(self) -> Key:
        return self.contestant.key

    def turn(self, tasks: list[RaceTask]) -> list[RaceRun]:
        return [run for task in tasks for run in self.contestant.turn([task])]


def race(
    contestants: list[Contestant],
    tasks: Callable[[int], list[RaceTask]],
    rounds: int,
    on_turn: Callable[[Key], None] = lambda key: None,
    on_exit: Callable[[Key, str], None] = lambda key, why: None,
) -> Iterator[Round]:
    """`rounds` rounds after a warm-up round; `tasks(i)` are those of round i.

    `on_turn` is called after every turn, `on_exit` for a contestant that cannot go on, with the
    reason: all contestants of its name are out from then on, this round included.
    """
    failed: set[str] = set()
    for i in range(rounds + 1):
        turns: Round = {}
        for contestant in contestants:
            if contestant.key[0] in failed:
                continue
            sleep(REST_SECONDS)
            try:
                turns[contestant.key] = contestant.turn(tasks(i))
            except Unable as error:
                failed.add(contestant.key[0])
                on_exit(contestant.key, str(error))
            else:
                on_turn(contestant.key)
        if i:
            yield {key: runs for key, runs in turns.items() if key[0] not in failed}


REPOSITORY = Path(__file__).resolve().parents[4]  # where the package is not installed
SCRIPTS = {
    "transformers": "peer_transformers.py",
    "openvino-genai": "peer_openvino_genai.py",
    "llama.cpp": "peer_llama_cpp.py",
}
ALONE = {"llama.cpp"}  # our loop there holds one text
OWN_VENV = {"transformers"}  # run in the project's own venv


class Peer:
    """A running peer, a context manager. `about`: its version, precisions, and a note if any."""

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
        texts at once.

        Raises InputError where the peer is not installed, Unable where it cannot run the pair.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command(name),
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
                threads=cores(),
                python=sys.executable,
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
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Unable(f"it ended: {self._last_error()}")
        try:
            reply = json.loads(line)
        except ValueError:
            raise Unable(f"its answer is no JSON: {line.strip()[:200]}") from None
        if "error" in reply:
            raise Unable(str(reply["error"]))
        return reply

    def _last_error(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1][:200] if lines else "without a word"


@dataclass(frozen=True, slots=True)
class Guest:
    """A peer with one gamma, as a contestant: all texts of a turn in one request."""

    peer: Peer
    gamma: int

    @property
    def key(self) -> Key:
        return (self.peer.name, self.gamma)

    def turn(self, tasks: list[RaceTask]) -> list[RaceRun]:
        return self.peer.run(tasks, self.gamma)


def command(name: str) -> list[str]:
    """The command that starts a peer; InputError with the remedy where it is not installed."""
    if name not in SCRIPTS:
        raise InputError(f"--vs is {name!r:.60}; give one of {', '.join(SCRIPTS)}")
    script = REPOSITORY / "benchmarks" / "peers" / SCRIPTS[name]
    if not script.exists():
        raise InputError(
            f"--vs {name} needs a checkout of the repository, installed with pip install -e: "
            "the peers are no part of the package"
        )
    if name in OWN_VENV:
        return [sys.executable, str(script)]
    home = REPOSITORY / ".peers" / name
    if not (home / "ready").exists():
        raise InputError(
            f"--vs {name} has no venv; make it with: python benchmarks/peers/make.py {name}"
        )
    return [str(home / "bin" / "python"), str(script)]


FEW = 8  # draft tokens of all runs: from fewer neither alpha nor what they cost is known


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over alternating runs; times are of decoding, without the prefill."""

    plain_seconds_per_token: float
    seconds_per_token: float
    gamma: int | None  # None: automatic
    mean_gamma: float  # draft tokens made in a step
    silent: float  # share of the steps in which none was made
    # What section 3 makes of the measured alpha, c and v; None where fewer than FEW were made
    alpha: float | None = None
    c: float | None = None
    v: float | None = None  # a target pass over the longest block against one over one token
    paper: float | None = None  # Theorem 3.8 for the draft tokens made; it takes v as 1
    predicted: float | None = None  # the same with the measured v
    others: float | None = None  # share of the processors that other processes took

    @property
    def speedup(self) -> float:
        return self.plain_seconds_per_token / self.seconds_per_token


def compare(spec: Speculator, prompt: Prompt, repeats: int = 3, **options: Any) -> Comparison:
    """Generate `repeats` times plainly and speculatively, alternating; options are `generate`'s.

    Raises KeyboardInterrupt where one was interrupted.
    """
    plain: list[Completion] = []
    fast: list[Completion] = []
    few = max(4, options.get("min_new_tokens") or 0)
    _decoded(spec, prompt, options, max_new_tokens=few)  # warm up: first calls are slow
    reading = contention.read()
    for _ in range(repeats):
        plain.append(_decoded(spec, prompt, options, gamma=0))
        fast.append(_decoded(spec, prompt, options))
    span = contention.taken(reading)
    steps = [step for completion in fast for step in completion.steady.steps]
    comparison = Comparison(
        plain_seconds_per_token=median(map(_per_token, plain)),
        seconds_per_token=median(map(_per_token, fast)),
        gamma=options.get("gamma"),
        mean_gamma=fmean(step.drafted for step in steps),
        silent=fmean(not step.drafted for step in steps),
        others=contention.share([span]),
    )
    plain_steps = [step for completion in plain for step in completion.steady.steps]
    if sum(step.drafted for step in steps) < FEW:
        return comparison
    overlaps = [
        overlap for completion in fast for step in completion.steps for overlap in step.overlaps
    ]
    return _predicted(comparison, overlaps, steps, plain_steps)


def _predicted(
    comparison: Comparison, overlaps: list[float], steps: list[StepRecord], plain: list[StepRecord]
) -> Comparison:
    """With the predictions of section 3 for the draft tokens that the steps made."""
    costs, alpha = of([*plain, *steps]), min(1.0, fmean(overlaps))
    made = Counter(step.drafted for step in steps)
    return replace(
        comparison,
        alpha=alpha,
        c=costs.c,
        v=costs.v(max(made) + 1),
        paper=theory.steps_factor(alpha, made, costs.c),
        predicted=theory.steps_factor(alpha, made, costs.c, v=costs.v),
    )


def _decoded(
    spec: Speculator, prompt: Prompt, options: dict[str, Any], **changed: Any
) -> Completion:
    (completion,) = uninterrupted(spec.generate(prompt, **(options | changed)))
    return completion


def _per_token(completion: Completion) -> float:
    return completion.steady.seconds / completion.steady.tokens
