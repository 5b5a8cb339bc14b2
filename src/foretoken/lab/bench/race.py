"""Contestants that take turns on the same tasks, round after round, so that other load on the
machine meets them all.

Knows runs and their times; figures.py compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter, sleep
from typing import Protocol

from foretoken.errors import RefusedError
from foretoken.lab.uninterrupted import uninterrupted
from foretoken.options import Prompt
from foretoken.request import Completion, StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator

OWN = "foretoken"
REST_SECONDS = 0.05  # between turns: threads of the last contestant may spin for a while

Gamma = int | None  # None: automatic
Key = tuple[str, Gamma]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt to continue, in token ids."""

    prompt: list[int]
    tokens: int  # new ones, exactly: nothing ends a text early
    params: SamplingParams
    seed: int

    @property
    def wishes(self) -> SamplingParams:
        return replace(self.params, max_new_tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """One task done. `steps`: behind the first, where there are any; empty for a peer, which keeps
    no records."""

    tokens: list[int]
    first_tokens: int  # those of the first step, which come together; 0: not known
    first_seconds: float  # from the start until these
    seconds: float
    steps: tuple[StepRecord, ...] = ()
    loop_seconds: float = 0.0  # of the steps


Round = dict[Key, list[Run]]  # a contestant's turn: a run for each task


class Unable(RefusedError):
    """Why a contestant cannot do a task."""


class Contestant(Protocol):
    """Continues prompts, a run for each; `turn` raises Unable where it cannot, and the others go on
    without it."""

    @property
    def key(self) -> Key: ...

    def turn(self, tasks: list[Task]) -> list[Run]: ...


@dataclass(frozen=True, slots=True)
class Own:
    """This package with one gamma, all texts of a turn in one call."""

    spec: Speculator
    gamma: Gamma
    rule: str = "block"

    @property
    def key(self) -> Key:
        return (OWN, self.gamma)

    def turn(self, tasks: list[Task]) -> list[Run]:
        """Tasks alike but for prompts and seeds. Raises KeyboardInterrupt where it was
        interrupted."""
        prompts: list[Prompt] = [list(task.prompt) for task in tasks]
        how = {"gamma": self.gamma, "rule": self.rule, "seed": [task.seed for task in tasks]}
        start = perf_counter()
        completions = uninterrupted(self.spec.generate(prompts, tasks[0].wishes, **how))
        seconds = perf_counter() - start
        return [_run(text, completions, seconds) for text in completions]


def _run(text: Completion, completions: list[Completion], seconds: float) -> Run:
    """A text of a call that took so long; what is around its rows comes before the first token."""
    stats, first, steady = text.stats, text.steps[0], text.steady
    around = seconds - max(each.stats.seconds for each in completions)
    return Run(
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

    def turn(self, tasks: list[Task]) -> list[Run]:
        return [run for task in tasks for run in self.contestant.turn([task])]


def race(
    contestants: list[Contestant],
    tasks: Callable[[int], list[Task]],
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
