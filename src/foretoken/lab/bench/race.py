"""Contestants that take turns on the same tasks, round after round, so that what the machine does
meanwhile meets them all.

A run says what came and when; it does not know who it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import sleep
from typing import Protocol

from foretoken.errors import RefusedError
from foretoken.options import Prompt
from foretoken.request import StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator

REST_SECONDS = 0.05  # between turns: threads of the last one may spin for a while

Gamma = int | None  # None: automatic
Key = tuple[str, Gamma]


@dataclass(frozen=True, slots=True)
class Task:
    """What every contestant is asked, in token ids."""

    prompt: list[int]
    tokens: int  # new ones, exactly: nothing ends a text earlier
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One task done. `steps` is empty for a stranger, who keeps no records."""

    tokens: list[int]
    first_tokens: int  # that came together, first
    first_seconds: float  # until then, from the start
    seconds: float
    steps: tuple[StepRecord, ...] = ()
    loop_seconds: float = 0.0  # of the steps, from the end of the prefill


Round = dict[Key, list[Run]]  # a run for each task


class Unable(RefusedError):
    """A contestant cannot do what it is asked; why."""


class Contestant(Protocol):
    """Somebody who continues prompts; `run` raises Unable where it cannot, and the others go on."""

    @property
    def key(self) -> Key: ...

    def run(self, task: Task) -> Run: ...


@dataclass(frozen=True, slots=True)
class Own:
    """This package with one gamma."""

    spec: Speculator
    gamma: Gamma
    rule: str = "block"

    @property
    def key(self) -> Key:
        return ("foretoken", self.gamma)

    def run(self, task: Task) -> Run:
        """Raises KeyboardInterrupt where it was interrupted: times of parts say nothing."""
        prompt: Prompt = list(task.prompt)
        (done,) = self.spec.generate(
            prompt,
            max_new_tokens=task.tokens,
            temperature=task.params.temperature,
            top_k=task.params.top_k,
            top_p=task.params.top_p,
            gamma=self.gamma,
            rule=self.rule,
            seed=task.seed,
        )
        if done.finish_reason == "interrupted":
            raise KeyboardInterrupt
        stats, first = done.stats, done.steps[0]
        seconds = first.draft_seconds + first.score_seconds + first.verify_seconds
        return Run(
            tokens=done.tokens,
            first_tokens=len(first.kept),
            first_seconds=stats.prefill_seconds + seconds,
            seconds=stats.seconds,
            steps=tuple(done.steps),
            loop_seconds=stats.seconds - stats.prefill_seconds,
        )


def race(
    contestants: list[Contestant],
    tasks: Callable[[int], list[Task]],
    rounds: int,
    told: Callable[[Key], None] = lambda key: None,
    left: Callable[[Key, str], None] = lambda key, why: None,
) -> Iterator[Round]:
    """`rounds` rounds after one that warms up; `tasks(i)` are those of round i.

    `told` hears of every turn that is done, `left` of who cannot go on, and why: all of that name
    are out from then on, this round included.
    """
    out: set[str] = set()
    for i in range(rounds + 1):
        found: Round = {}
        for contestant in contestants:
            if contestant.key[0] in out:
                continue
            sleep(REST_SECONDS)
            try:
                found[contestant.key] = [contestant.run(task) for task in tasks(i)]
            except Unable as error:
                out.add(contestant.key[0])
                left(contestant.key, str(error))
            else:
                told(contestant.key)
        if i:
            yield {key: runs for key, runs in found.items() if key[0] not in out}
