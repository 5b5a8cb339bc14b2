"""Several texts at once: how many tokens contestants make in a second, the reading of prompts
included.

Padding and occupancy are of the target's passes that advance rows, by this package's step records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from foretoken.lab.bench.figures import (
    PLAIN,
    Agreement,
    Shares,
    agreement,
    label,
    shares,
)
from foretoken.lab.bench.race import OWN, Gamma, Key, Round, Run, Task
from foretoken.lab.estimate import Spread, spread
from foretoken.request import StepRecord


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of one contestant, over turns of the same number of texts. What is read from step records is
    None for a peer."""

    name: str
    gamma: Gamma
    tokens_per_second: Spread
    speedup: float  # over this package's plain decoding
    ahead: dict[str, float]  # how many times as fast this package is, by its gamma; of a peer only
    tokens_per_call: float | None  # of a row
    occupancy: float | None  # rows that a pass advances, as a share of the texts
    padding: float | None  # positions computed for no row, as a share of all computed
    reading: float | None  # share of the time before the first step
    shares: Shares | None
    agreement: Agreement | None


def of_batch(tasks: list[Task], texts: int) -> list[Task]:
    """So many tasks: the given ones over and over, each with the seed that follows the last."""
    seed = tasks[0].seed
    return [replace(tasks[i % len(tasks)], seed=seed + i) for i in range(texts)]


def throughput(rounds: list[Round], key: Key, *, greedy: bool) -> Throughput:
    """The figures of one contestant, over one round or more."""
    runs = [run for turns in rounds for run in turns[key]]
    steps = [step for run in runs for step in run.steps]
    rates = spread([rate(turns[key]) for turns in rounds])
    assert rates
    own = [mine for mine in rounds[0] if mine[0] == OWN and key[0] != OWN]
    return Throughput(
        name=key[0],
        gamma=key[1],
        tokens_per_second=rates,
        speedup=faster(rounds, key, PLAIN),
        ahead={label(mine[1]): faster(rounds, mine, key) for mine in own},
        tokens_per_call=sum(len(step.kept) for step in steps) / len(steps) if steps else None,
        occupancy=occupancy(steps, len(rounds[0][key])) if steps else None,
        padding=padding(steps) if steps else None,
        reading=median(reading(turns[key]) for turns in rounds) if steps else None,
        shares=shares(runs) if steps else None,
        agreement=agreement(rounds, key) if greedy else None,
    )


def rate(runs: list[Run]) -> float:
    """Tokens a second of a turn, until its last text is there."""
    return sum(len(run.tokens) for run in runs) / max(run.seconds for run in runs)


def faster(rounds: list[Round], one: Key, other: Key) -> float:
    """How many times as fast one is as the other: the median of the rounds' ratios."""
    return median(rate(turns[one]) / rate(turns[other]) for turns in rounds)


def occupancy(steps: list[StepRecord], texts: int) -> float:
    """Of rows' records: k rows that share a pass leave k of them, so each is 1 / k of the pass."""
    return len(steps) / sum(1 / step.rows for step in steps) / texts


def padding(steps: list[StepRecord]) -> float:
    """A row's own positions are its last token and its guesses."""
    vain = sum(step.padding / step.rows for step in steps)
    return vain / (vain + sum(1 + step.drafted for step in steps))


def reading(runs: list[Run]) -> float:
    """What the steps leave of a turn's time: the prompts, and the call itself."""
    return 1 - max(run.loop_seconds for run in runs) / max(run.seconds for run in runs)
