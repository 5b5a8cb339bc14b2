"""Compares the speed of contestants: plain decoding, and speculative decoding with several gammas.
In each round the contestants take turns on the same prompts. The finished rounds give the figures
of each contestant, and the speed-up that section 3 of the paper predicts.

A contestant is a library with a gamma. This package has only its own contestants; the repository's
benchmarks/race.py adds those of other libraries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean, median
from typing import Any

from foretoken import theory
from foretoken.costing import contention
from foretoken.costing.costs import costs_from_steps
from foretoken.errors import InputError
from foretoken.generation_config import EndTokens
from foretoken.inputs import Prompt
from foretoken.records import StepRecord
from foretoken.request import Completion, require_uninterrupted
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator
from foretoken.timing import Spread, measure_seconds, summarize, take_turns

OWN_LIBRARY = "foretoken"
REST_SECONDS = 0.05  # pause between turns, as threads of the last contestant may still spin

OptionalGamma = int | None  # None: automatic
ContestantKey = tuple[str, OptionalGamma]  # a contestant: the name of a library, and a gamma
PLAIN_DECODING: ContestantKey = (OWN_LIBRARY, 0)
AUTOMATIC_GAMMA: ContestantKey = (OWN_LIBRARY, None)


@dataclass(frozen=True, slots=True)
class RaceTask:
    """A prompt to complete, in token ids."""

    prompt: list[int]
    tokens: int  # number of new tokens to generate, exactly; end tokens are ignored
    params: SamplingParams
    seed: int
    category: str = ""


@dataclass(frozen=True, slots=True)
class RaceRun:
    """The result of completing one task: its new tokens, and the times."""

    tokens: list[int]
    first_tokens: int  # number of tokens of the first step; 0: unknown
    first_seconds: float  # from the start of the run to the end of the first step
    seconds: float  # of the whole run
    steps: tuple[StepRecord, ...] = ()  # steps after the first; empty for other libraries


# A round: the runs of each contestant's turn, one for each task
RoundRuns = dict[ContestantKey, list[RaceRun]]
RunTurn = Callable[[list[RaceTask]], list[RaceRun]]  # completes the tasks of a turn


def prepare_tasks(
    spec: Speculator,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    seed: int,
    categories: Sequence[str] = (),
) -> tuple[Speculator, list[RaceTask]]:
    """Return a copy of `spec` that ignores end tokens, and a task for each prompt. `categories`:
    the category of each prompt; (): the prompts have no categories.

    Raises InputError if a prompt leaves less room in the context than `params.max_new_tokens`.
    """
    spec = replace(spec, ends=EndTokens(decoder_start=spec.ends.decoder_start))
    tokens = params.max_new_tokens
    for i, request in enumerate(spec.inputs.make_requests(list(prompts), params, seed)):
        if request.limit < tokens:
            raise InputError(
                f"prompt {i} leaves room for {request.limit} new tokens, not {tokens}; "
                "give a shorter prompt or a smaller --max-new-tokens"
            )
    ids = [spec.inputs.encode_prompt(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
    return spec, [
        RaceTask(prompt, tokens, params, seed + i, category)
        for i, (prompt, category) in enumerate(zip(ids, categories or [""] * len(ids), strict=True))
    ]


def run_own_turn(
    spec: Speculator, tasks: list[RaceTask], gamma: OptionalGamma, rule: str = "block"
) -> list[RaceRun]:
    """Complete tasks as one batch, in one call of `generate`. The tasks may differ in prompts,
    seeds and categories only.

    Raises KeyboardInterrupt if the call was interrupted.
    """
    prompts: list[Prompt] = [list(task.prompt) for task in tasks]
    params = replace(tasks[0].params, max_new_tokens=tasks[0].tokens)
    options = {"gamma": gamma, "rule": rule, "seed": [task.seed for task in tasks]}
    completions: list[Completion] = []
    seconds = measure_seconds(
        lambda: completions.extend(require_uninterrupted(spec.generate(prompts, params, **options)))
    )
    # The time that the call spends outside of sequences counts as time before the first token
    overhead_seconds = seconds - max(each.stats.seconds for each in completions)
    return [
        RaceRun(
            tokens=each.tokens,
            first_tokens=len(each.steps[0].new_tokens),
            first_seconds=overhead_seconds + each.stats.first_seconds,
            seconds=seconds,
            steps=tuple(each.steady.steps),
        )
        for each in completions
    ]


def make_own_turns(
    spec: Speculator, gammas: Sequence[int], rule: str
) -> dict[ContestantKey, RunTurn]:
    """Return this package's contestants: plain decoding and, if the pair has a draft, each of these
    gammas and automatic gamma."""
    ours = [*sorted({0, *gammas}), None] if spec.costing.drafts else [0]
    return {
        (OWN_LIBRARY, gamma): partial(run_own_turn, spec, gamma=gamma, rule=rule) for gamma in ours
    }


def group_by_category(tasks: list[RaceTask]) -> list[list[RaceTask]]:
    """Return the tasks of each category, in the order of the first tasks."""
    groups: dict[str, list[RaceTask]] = {}
    for task in tasks:
        groups.setdefault(task.category, []).append(task)
    return list(groups.values())


def repeat_tasks(tasks: list[RaceTask], count: int) -> list[RaceTask]:
    """Return `count` tasks of each category: its tasks, repeated as often as needed. The tasks get
    consecutive seeds."""
    chosen = [group[i % len(group)] for group in group_by_category(tasks) for i in range(count)]
    return [replace(task, seed=tasks[0].seed + i) for i, task in enumerate(chosen)]


def run_rounds(
    contestants: Mapping[ContestantKey, RunTurn],
    tasks: list[RaceTask],
    rounds: int,
    *,
    together: bool = False,
    report: Callable[[ContestantKey], object] = lambda key: None,
) -> Race:
    """Run a warm-up round and then `rounds` rounds. Return the rounds that finished: all of them,
    or fewer after Ctrl-C.

    Args:
        contestants: For each contestant, the function that runs its turn.
        tasks: The tasks of every turn; each round changes their seeds.
        rounds: Number of rounds without the warm-up round.
        together: Complete the tasks of a turn as one batch, or one batch for each category, instead
            of one after another.
        report: Called with the contestant's key before each turn.
    """
    batches = group_by_category(tasks) if together else [[task] for task in tasks]

    def make_turn(key: ContestantKey, turn: RunTurn) -> Callable[[], list[RaceRun]]:
        numbers = count()

        def take_turn() -> list[RaceRun]:
            report(key)
            first = next(numbers) * len(tasks)
            return [
                run
                for batch in batches
                for run in turn([replace(task, seed=task.seed + first) for task in batch])
            ]

        return take_turn

    turns = {key: make_turn(key, turn) for key, turn in contestants.items()}
    done: list[RoundRuns] = []
    with suppress(KeyboardInterrupt):
        for results in take_turns(turns, rounds, rest=REST_SECONDS):
            done.append(results)
    categories = tuple(task.category for batch in batches for task in batch)
    return Race(done, together, categories if any(categories) else ())


@dataclass(frozen=True, slots=True)
class SpeedupPrediction:
    """The speed-up that Theorem 3.8 predicts from the measured alpha and c, for the numbers of
    draft tokens that the steps had."""

    alpha: float
    c: float
    v: float  # time of a target forward pass over the longest block / time over one token
    paper: float  # the speed-up if v is 1, as in the paper
    predicted: float  # the speed-up with the measured v


MIN_PREDICTION_DRAFT_TOKENS = 8  # fewer draft tokens are too few to estimate alpha and costs


def predict(
    plain: list[StepRecord], steps: list[StepRecord], overlaps: list[float] | None = None
) -> SpeedupPrediction | None:
    """Predict the speed-up from steps of batch size 1. Return None if `steps` has fewer than
    MIN_PREDICTION_DRAFT_TOKENS draft tokens.

    Args:
        plain: Steps of plain decoding.
        steps: Steps of speculative decoding.
        overlaps: sum min(p, q) of each verified draft token, from which alpha is computed; None:
            the overlaps of `steps`.
    """
    draft_token_counts = Counter(step.drafted for step in steps)
    if sum(step.drafted for step in steps) < MIN_PREDICTION_DRAFT_TOKENS:
        return None
    all_overlaps = overlaps or [overlap for step in steps for overlap in step.overlaps]
    costs, alpha = costs_from_steps([*plain, *steps]), min(1.0, fmean(all_overlaps))
    return SpeedupPrediction(
        alpha=alpha,
        c=costs.c,
        v=costs.v(max(draft_token_counts) + 1),
        paper=theory.steps_factor(alpha, draft_token_counts, costs.c),
        predicted=theory.steps_factor(alpha, draft_token_counts, costs.c, v=costs.v),
    )


@dataclass(frozen=True, slots=True)
class ContestantFigures:
    """Figures of one contestant over all rounds. Times per token exclude the first step; for a
    batch they include everything until the batch's last token."""

    gamma: OptionalGamma
    first_seconds: Spread
    seconds_per_token: Spread
    tokens_per_second: Spread
    speedup: Spread  # over this package's plain decoding in the same round
    tokens_per_call: float | None  # new tokens of a sequence per target forward; None: unknown
    predicted: SpeedupPrediction | None  # None for a batch


@dataclass(frozen=True, slots=True)
class CategoryFigures:
    """Figures of one contestant on one category, over all rounds; ContestantFigures has the
    definitions."""

    sequences: int  # per round
    tokens_per_second: Spread
    speedup: Spread
    tokens_per_call: float | None
    alpha: float | None  # mean of sum min(p, q); None: no draft token was verified


@dataclass(frozen=True, slots=True)
class Race:
    """The finished rounds of contestants.

    Attributes:
        rounds: The runs of each contestant in each round.
        together: True if a turn completed its tasks as one batch, or one batch for each category.
        categories: The category of each run of a turn; (): the tasks have no categories.
    """

    rounds: list[RoundRuns]
    together: bool = False
    categories: tuple[str, ...] = ()

    def compute_seconds_per_token(self, key: ContestantKey) -> list[float]:
        """Return a contestant's seconds per token in each round. For batches, all time until the
        last token of each batch counts. Otherwise the first step of each run is excluded, unless
        there are no other steps."""
        return [self._compute_seconds_per_token(turns[key]) for turns in self.rounds]

    def compute_speedups(self, one: ContestantKey, other: ContestantKey) -> list[float]:
        """Return the speed of `one` / the speed of `other` in each round."""
        pairs = zip(
            self.compute_seconds_per_token(other), self.compute_seconds_per_token(one), strict=True
        )
        return [slow / fast for slow, fast in pairs]

    def compute_figures(self, key: ContestantKey) -> ContestantFigures:
        """Return the figures of one contestant. There must be at least one round."""
        steps, seconds = self.list_steps(key), self.compute_seconds_per_token(key)
        first = [fmean(run.first_seconds for run in turns[key]) for turns in self.rounds]
        return ContestantFigures(
            gamma=key[1],
            first_seconds=summarize(first),
            seconds_per_token=summarize(seconds),
            tokens_per_second=summarize([1 / each for each in seconds]),
            speedup=summarize(self.compute_speedups(key, PLAIN_DECODING)),
            tokens_per_call=fmean(len(step.new_tokens) for step in steps) if steps else None,
            predicted=None if self.together else predict(self.list_steps(PLAIN_DECODING), steps),
        )

    def compute_category_figures(self, key: ContestantKey) -> dict[str, CategoryFigures]:
        """Return the figures of one contestant for each category; {} without categories. There must
        be at least one round."""
        return {
            name: self._select(name)._compute_category(key)
            for name in dict.fromkeys(self.categories)
        }

    def _select(self, category: str) -> Race:
        """Return the race over the tasks of one category."""
        chosen = [i for i, name in enumerate(self.categories) if name == category]
        rounds = [
            {key: [runs[i] for i in chosen] for key, runs in turns.items()} for turns in self.rounds
        ]
        return Race(rounds, self.together)

    def _compute_category(self, key: ContestantKey) -> CategoryFigures:
        """Return the figures of one contestant over all tasks of this race."""
        steps = self.list_steps(key)
        overlaps = [overlap for step in steps for overlap in step.overlaps]
        seconds = self.compute_seconds_per_token(key)
        return CategoryFigures(
            sequences=len(self.rounds[0][key]),
            tokens_per_second=summarize([1 / each for each in seconds]),
            speedup=summarize(self.compute_speedups(key, PLAIN_DECODING)),
            tokens_per_call=fmean(len(step.new_tokens) for step in steps) if steps else None,
            alpha=min(1.0, fmean(overlaps)) if overlaps else None,
        )

    def list_steps(self, key: ContestantKey) -> list[StepRecord]:
        """Return the steps of a contestant in all rounds, without the first step of each run."""
        return [step for turns in self.rounds for run in turns[key] for step in run.steps]

    def _compute_seconds_per_token(self, runs: list[RaceRun]) -> float:
        tokens = sum(len(run.tokens) for run in runs)
        if self.together:
            batch_seconds: dict[str, float] = {}
            for run, category in zip(runs, self.categories or [""] * len(runs), strict=True):
                batch_seconds[category] = max(run.seconds, batch_seconds.get(category, 0.0))
            return sum(batch_seconds.values()) / tokens
        if others := tokens - sum(run.first_tokens for run in runs):
            return sum(run.seconds - run.first_seconds for run in runs) / others
        return sum(run.seconds for run in runs) / tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of speculative with plain decoding: medians over runs that alternate. Times
    exclude the prefill. The fields from `alpha` to `predicted` are None if there were fewer than
    MIN_PREDICTION_DRAFT_TOKENS draft tokens."""

    plain_seconds_per_token: float
    seconds_per_token: float
    gamma: int | None  # None: automatic
    mean_gamma: float  # draft tokens per step
    silent: float  # share of the steps without draft tokens
    others: float | None = None  # share of the CPUs that other processes used
    alpha: float | None = None
    c: float | None = None
    v: float | None = None
    paper: float | None = None
    predicted: float | None = None

    @property
    def speedup(self) -> float:
        return self.plain_seconds_per_token / self.seconds_per_token


COMPARISON_REPEATS = 3


def compare_with_plain(
    spec: Speculator, prompt: Prompt, repeats: int = COMPARISON_REPEATS, **options: Any
) -> Comparison:
    """Complete a prompt `repeats` times by plain and by speculative decoding, alternately, and
    compare the times. `options`: keyword arguments of `Speculator.generate`.

    Raises KeyboardInterrupt if a run was interrupted.
    """

    def decode(**changed: Any) -> Completion:
        (completion,) = require_uninterrupted(spec.generate(prompt, **(options | changed)))
        return completion

    plain: list[Completion] = []
    speculative: list[Completion] = []
    decode(max_new_tokens=max(4, options.get("min_new_tokens") or 0))  # warm-up
    reading = contention.take_reading()
    for _ in range(repeats):
        plain.append(decode(gamma=0))
        speculative.append(decode())
    span = contention.measure_since(reading)
    steps = [step for each in speculative for step in each.steady.steps]
    plain_steps = [step for each in plain for step in each.steady.steps]
    overlaps = [beta for each in speculative for step in each.steps for beta in step.overlaps]
    predicted = predict(plain_steps, steps, overlaps)
    return Comparison(
        plain_seconds_per_token=median(each.steady.seconds / each.steady.tokens for each in plain),
        seconds_per_token=median(each.steady.seconds / each.steady.tokens for each in speculative),
        gamma=options.get("gamma"),
        mean_gamma=fmean(step.drafted for step in steps),
        silent=fmean(not step.drafted for step in steps),
        others=contention.compute_others_share([span]),
        **(asdict(predicted) if predicted else {}),
    )
