"""Races: this package with several gammas and other libraries take turns on the same tasks, round
after round, so that other load on the machine meets them all; and one prompt, speculative beside
plain, with what section 3 predicts.

A peer is another library on the same pair: a process of its own that answers in JSON lines. The
peers' scripts are in the repository's benchmarks/peers, not in an installed package.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, sleep
from typing import Any

from foretoken import theory
from foretoken.costing import contention
from foretoken.costing.costs import of
from foretoken.errors import InputError, RefusedError
from foretoken.measurement.estimate import Spread, spread
from foretoken.measurement.machine import cores
from foretoken.options import Prompt
from foretoken.records import StepRecord
from foretoken.request import Completion, uninterrupted
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator

OWN = "foretoken"
REST_SECONDS = 0.05  # between turns: threads of the last contestant may spin for a while

Gamma = int | None  # None: automatic
Key = tuple[str, Gamma]
PLAIN: Key = (OWN, 0)
AUTOMATIC: Key = (OWN, None)


@dataclass(frozen=True, slots=True)
class RaceTask:
    """A prompt to continue, in token ids."""

    prompt: list[int]
    tokens: int  # new ones, exactly: nothing ends a text early
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class RaceRun:
    """One task done. `steps`: behind the first, where there are any; empty for a peer, which keeps
    no records."""

    tokens: list[int]
    first_tokens: int  # those of the first step, which come together; 0: not known
    first_seconds: float  # from the start until these
    seconds: float
    steps: tuple[StepRecord, ...] = ()


Round = dict[Key, list[RaceRun]]  # a contestant's turn: a run for each task
Turn = Callable[[list[RaceTask]], list[RaceRun]]  # raises Unable where it cannot


class Unable(RefusedError):
    """Why a contestant cannot do a task."""


def own(
    spec: Speculator, tasks: list[RaceTask], gamma: Gamma, rule: str = "block"
) -> list[RaceRun]:
    """Take a turn of this package: all texts, alike but for prompts and seeds, in one call. Raises
    KeyboardInterrupt where it was interrupted."""
    prompts: list[Prompt] = [list(task.prompt) for task in tasks]
    params = replace(tasks[0].params, max_new_tokens=tasks[0].tokens)
    how = {"gamma": gamma, "rule": rule, "seed": [task.seed for task in tasks]}
    start = perf_counter()
    completions = uninterrupted(spec.generate(prompts, params, **how))
    seconds = perf_counter() - start
    # Time of a call outside its rows comes before the first token
    around = seconds - max(each.stats.seconds for each in completions)
    return [
        RaceRun(
            tokens=text.tokens,
            first_tokens=len(text.steps[0].kept),
            first_seconds=around + text.stats.first_seconds,
            seconds=seconds,
            steps=tuple(text.steady.steps),
        )
        for text in completions
    ]


def of_batch(tasks: list[RaceTask], texts: int) -> list[RaceTask]:
    """So many tasks: the given ones over and over, each with the seed that follows the last."""
    seed = tasks[0].seed
    return [replace(tasks[i % len(tasks)], seed=seed + i) for i in range(texts)]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Theorem 3.8 with the measured alpha and c, for the draft tokens that steps made."""

    alpha: float
    c: float
    v: float  # a target pass over the longest block against one over one token
    paper: float  # the speed-up; it takes v as 1
    predicted: float  # the same with the measured v


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of the time behind the first tokens; they sum to 1."""

    draft: float
    target: float
    verify: float  # distributions, the acceptance method, commit and rollback
    rest: float


@dataclass(frozen=True, slots=True)
class RaceAgreement:
    """With the greedy text of this package's plain decoding."""

    share: float  # of tokens before the first difference
    first_difference: int | None  # its earliest place in any run


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one contestant. Times per token leave out the first tokens; of texts at once they
    are until the last text is there. None: not known, as of a peer, which keeps no records."""

    name: str
    gamma: Gamma
    first_seconds: Spread
    seconds_per_token: Spread
    tokens_per_second: Spread
    speedup: float  # over this package's plain decoding
    tokens_per_call: float | None  # of a row
    occupancy: float | None  # rows that a pass advances, as a share of the texts
    padding: float | None  # positions computed for no row, as a share of all computed
    shares: TimeShares | None  # of texts one after another
    predicted: Predicted | None
    agreement: RaceAgreement | None


@dataclass(frozen=True, slots=True)
class Duel:
    """The speed of this package over that of a peer; `best`: each at its best fixed gamma."""

    name: str
    plain: float
    gamma: int
    peer_gamma: int
    best: float
    automatic: float | None


def label(gamma: Gamma) -> str:
    """The name of a gamma."""
    return "automatic" if gamma is None else f"gamma {gamma}" if gamma else "plain"


@dataclass(frozen=True, slots=True)
class Race:
    """Rounds that were run. `unable`: why contestants could not go on; no round holds their runs.
    `together`: whether a turn was given all its texts at once."""

    rounds: list[Round]
    unable: dict[str, str]
    together: bool = False

    def seconds(self, key: Key) -> list[float]:
        """Seconds a token, by round: of texts at once until the last is there, else without their
        first tokens unless there are no others."""
        return [self._per_token(turns[key]) for turns in self.rounds]

    def faster(self, one: Key, other: Key) -> float:
        """Return how many times as fast one is as the other: the median of the rounds' ratios."""
        pairs = zip(self.seconds(other), self.seconds(one), strict=True)
        return median(slow / fast for slow, fast in pairs)

    def best(self, name: str) -> Key:
        """The fastest fixed gamma of one library, 0 included."""
        keys = [key for key in self.rounds[0] if key[0] == name and key[1] is not None]
        return min(keys, key=lambda key: median(self.seconds(key)))

    def duel(self, peer: str) -> Duel:
        """This package against a peer."""
        mine, theirs = self.best(OWN), self.best(peer)
        assert mine[1] is not None and theirs[1] is not None
        return Duel(
            name=peer,
            plain=self.faster(PLAIN, (peer, 0)),
            gamma=mine[1],
            peer_gamma=theirs[1],
            best=self.faster(mine, theirs),
            automatic=self.faster(AUTOMATIC, theirs) if AUTOMATIC in self.rounds[0] else None,
        )

    def figures(self, key: Key, *, greedy: bool) -> Figures:
        """The figures of one contestant, over one round or more."""
        steps, seconds = self._steps(key), self.seconds(key)
        first = [fmean(run.first_seconds for run in turns[key]) for turns in self.rounds]
        texts = len(self.rounds[0][key]) if self.together else 1
        return Figures(
            name=key[0],
            gamma=key[1],
            first_seconds=spread(first),
            seconds_per_token=spread(seconds),
            tokens_per_second=spread([1 / each for each in seconds]),
            speedup=self.faster(key, PLAIN),
            tokens_per_call=fmean(len(step.kept) for step in steps) if steps else None,
            occupancy=occupancy(steps, texts) if steps else None,
            padding=padding(steps) if steps else None,
            shares=None if self.together else self._shares(key),
            predicted=None if self.together else predict(self._steps(PLAIN), steps),
            agreement=self.agreement(key) if greedy else None,
        )

    def agreement(self, key: Key) -> RaceAgreement:
        """Token by token against plain decoding of the same round."""
        pairs = [
            (run.tokens, plain.tokens)
            for turns in self.rounds
            for run, plain in zip(turns[key], turns[PLAIN], strict=True)
        ]
        equal = [_equal(text, plain) for text, plain in pairs]
        places = [n for n, (text, plain) in zip(equal, pairs, strict=True) if text != plain]
        tokens = sum(max(len(text), len(plain)) for text, plain in pairs)
        return RaceAgreement(sum(equal) / tokens, min(places, default=None))

    def _per_token(self, runs: list[RaceRun]) -> float:
        tokens = sum(len(run.tokens) for run in runs)
        if self.together:
            return max(run.seconds for run in runs) / tokens
        if others := tokens - sum(run.first_tokens for run in runs):
            return sum(run.seconds - run.first_seconds for run in runs) / others
        return sum(run.seconds for run in runs) / tokens

    def _shares(self, key: Key) -> TimeShares | None:
        steps, runs = self._steps(key), [run for turns in self.rounds for run in turns[key]]
        total = sum(run.seconds - run.first_seconds for run in runs)
        if not steps or not total:
            return None
        draft = sum(step.draft_seconds for step in steps) / total
        target = sum(step.score_seconds for step in steps) / total
        verify = sum(step.verify_seconds for step in steps) / total
        return TimeShares(draft, target, verify, 1 - draft - target - verify)

    def _steps(self, key: Key) -> list[StepRecord]:
        return [step for turns in self.rounds for run in turns[key] for step in run.steps]


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


FEW = 8  # draft tokens of all runs: from fewer neither alpha nor what they cost is known


def predict(
    plain: list[StepRecord], steps: list[StepRecord], overlaps: list[float] | None = None
) -> Predicted | None:
    """Predict the speed-up from steps of one row; None where fewer than FEW draft tokens were made.
    `overlaps`: of the draft tokens judged, where not those of the steps."""
    made = Counter(step.drafted for step in steps)
    if sum(step.drafted for step in steps) < FEW:
        return None
    judged = overlaps or [overlap for step in steps for overlap in step.overlaps]
    costs, alpha = of([*plain, *steps]), min(1.0, fmean(judged))
    return Predicted(
        alpha=alpha,
        c=costs.c,
        v=costs.v(max(made) + 1),
        paper=theory.steps_factor(alpha, made, costs.c),
        predicted=theory.steps_factor(alpha, made, costs.c, v=costs.v),
    )


def race(
    contestants: dict[Key, Turn],
    tasks: list[RaceTask],
    repeats: int,
    *,
    together: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Race:
    """Run `repeats` rounds behind one that warms up; Ctrl-C keeps those that are done.

    Every round has seeds of its own. `together`: a turn is given all its tasks at once. Where a
    contestant cannot go on, all of its name are out.
    """
    rounds: list[Round] = []
    unable: dict[str, str] = {}
    with suppress(KeyboardInterrupt):
        for i in range(repeats + 1):
            turns: Round = {}
            now = [replace(task, seed=task.seed + i * len(tasks)) for task in tasks]
            for key, turn in contestants.items():
                report(f"{f'round {i}' if i else 'warming up'}: {key[0]}, {label(key[1])}")
                if key[0] in unable:
                    continue
                sleep(REST_SECONDS)
                try:
                    parts = [now] if together else [[task] for task in now]
                    turns[key] = [run for part in parts for run in turn(part)]
                except Unable as error:
                    unable[key[0]] = f"{label(key[1])}: {error}"
            rounds += [turns] if i else []
    left = [{key: runs for key, runs in turns.items() if key[0] not in unable} for turns in rounds]
    return Race(left, unable, together)


REPOSITORY = Path(__file__).resolve().parents[3]  # where the package is not installed
SCRIPTS = {
    "transformers": "peer_transformers.py",
    "openvino-genai": "peer_openvino_genai.py",
    "onnxruntime-genai": "peer_onnxruntime_genai.py",
    "llama.cpp": "peer_llama_cpp.py",
}
# Besides its own defaults, a peer is raced with a cache and a computation as precise as ours
# ("same-precision"), and llama.cpp over blocks that it repacks for its fastest products
SETTINGS = {
    "openvino-genai": ("same-precision",),
    "llama.cpp": ("same-precision", "q4_0"),
}
ALONE = {"onnxruntime-genai", "llama.cpp"}  # our loops there hold one text
OWN_VENV = {"transformers"}  # run in the project's own venv


class Peer:
    """A running peer, a context manager. `about`: its version, precisions, and a note if any.

    Its process is stopped while it waits, so that threads which spin for work take no processor
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
        self._process.kill()  # also one that is stopped
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self._process.send_signal(signal.SIGSTOP)
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


def command(name: str) -> list[str]:
    """Return the command that starts a peer; raises InputError with the remedy if it is not
    installed."""
    chosen, name = setting(name), library(name)
    if name not in SCRIPTS:
        raise InputError(f"--vs is {name!r:.60}; give one of {', '.join(SCRIPTS)}")
    if chosen and chosen not in SETTINGS.get(name, ()):
        named = " or ".join(f"{name}:{each}" for each in SETTINGS.get(name, ()))
        raise InputError(f"--vs {name} has no setting {chosen!r:.60}; give {named or name}")
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


def library(name: str) -> str:
    """Return the library that a peer's name begins with."""
    return name.partition(":")[0]


def setting(name: str) -> str:
    """Return the setting that a peer's name ends with, "" for its own defaults."""
    return name.partition(":")[2]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over alternating runs; times are of decoding, without the prefill. The prediction
    of section 3 is None where fewer than FEW draft tokens were made."""

    plain_seconds_per_token: float
    seconds_per_token: float
    gamma: int | None  # None: automatic
    mean_gamma: float  # draft tokens made in a step
    silent: float  # share of the steps in which none was made
    others: float | None = None  # share of the processors that other processes took
    alpha: float | None = None
    c: float | None = None
    v: float | None = None
    paper: float | None = None
    predicted: float | None = None

    @property
    def speedup(self) -> float:
        return self.plain_seconds_per_token / self.seconds_per_token


REPEATS = 3  # of a comparison


def compare(spec: Speculator, prompt: Prompt, repeats: int = REPEATS, **options: Any) -> Comparison:
    """Generate `repeats` times plainly and speculatively, alternating; options are `generate`'s.

    Raises KeyboardInterrupt where one was interrupted.
    """

    def decoded(**changed: Any) -> Completion:
        (completion,) = uninterrupted(spec.generate(prompt, **(options | changed)))
        return completion

    plain: list[Completion] = []
    fast: list[Completion] = []
    decoded(max_new_tokens=max(4, options.get("min_new_tokens") or 0))  # first calls are slow
    reading = contention.read()
    for _ in range(repeats):
        plain.append(decoded(gamma=0))
        fast.append(decoded())
    span = contention.taken(reading)
    steps = [step for text in fast for step in text.steady.steps]
    plain_steps = [step for text in plain for step in text.steady.steps]
    overlaps = [overlap for text in fast for step in text.steps for overlap in step.overlaps]
    predicted = predict(plain_steps, steps, overlaps)
    return Comparison(
        plain_seconds_per_token=median(text.steady.seconds / text.steady.tokens for text in plain),
        seconds_per_token=median(text.steady.seconds / text.steady.tokens for text in fast),
        gamma=options.get("gamma"),
        mean_gamma=fmean(step.drafted for step in steps),
        silent=fmean(not step.drafted for step in steps),
        others=contention.share([span]),
        **(asdict(predicted) if predicted else {}),
    )
