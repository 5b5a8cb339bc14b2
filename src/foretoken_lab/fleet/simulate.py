"""A simulation of a fleet of replicas, with requests at a rate, from one replica's measured costs.

A request comes at a random time (Poisson), goes to the replica with the fewest that are not done,
and has the acceptance of one of the prompts that were measured. Nothing is known of networks, of
HTTP, of prefixes that are shared, and of replicas that disturb one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import numpy as np

from foretoken.costing import costs
from foretoken.errors import InputError, RefusedError
from foretoken.lab.measurement.result import Measurement, Serving
from foretoken.request import Request, stats
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams
from foretoken_lab.fleet.paper import PaperReplica, PaperText, Served

FULL = 8  # batches of requests that wait at once where capacity is found
Track = Callable[[Sequence[int]], Iterable[int]]


MOST = {  # more would not be simulated in an hour
    "replicas": 10_000,
    "requests": 1_000_000,
    "prompt_tokens": 100_000,
    "output_tokens": 20_000,
}


@dataclass(frozen=True, slots=True)
class PaperFleet:
    """The fleet to simulate. Lengths in tokens; None: those of the measured prompts and texts.
    gamma: None: chosen before every step."""

    replicas: int = 1
    requests: int = 1000
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    gamma: int | None = None
    seed: int = 0

    def require(self) -> None:
        """InputError for numbers that make no fleet."""
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InputError(f"{name} is {value}; give 1 to {most:,}")
        if self.gamma is not None and self.gamma < 0:
            raise InputError(f"gamma is {self.gamma}; give 0 or more, or leave it out")


@dataclass(frozen=True, slots=True)
class Latency:
    """In seconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """Requests at a rate. The latencies are None where the load is beyond what the fleet can do:
    the queue grows as long as requests come, and so do they."""

    rate: float  # requests a second that come
    capacity: float  # and that can be answered where there are always some that wait
    first_token: Latency | None
    whole: Latency | None
    requests_per_second: float  # from the first one's coming to the last one's end
    tokens_per_second: float  # new ones
    mean_batch: float  # rows of a step, by time
    utilisation: float  # share of the time in which a replica has something to do
    tokens_per_call: float
    accepted_per_drafted: float | None

    @property
    def overloaded(self) -> bool:
        return self.rate >= self.capacity


def require(measured: Measurement, name: str) -> Serving:
    """Return the measured costs that a fleet follows from; InputError for a file without them,
    RefusedError for a draft whose draft tokens fare otherwise than at the places that were
    measured."""
    if measured.serving is None:
        raise InputError(
            f"{name} does not say what a batch costs; measure again with "
            "foretoken measure --rows 16 --out"
        )
    serving = measured.serving
    tables = serving.reading, serving.draft_reading, serving.around, serving.drafts, serving.passes
    if not (serving.costs.sound and all(map(costs.sound, (*tables, ((1, serving.joining),))))):
        raise InputError(f"{name}: serving: these are no costs; measure again")
    if serving.rows < 1:
        raise InputError(f"{name}: serving: rows is {serving.rows}; measure again")
    if measured.draft.name.partition(":")[0] == "heads":
        raise RefusedError(
            f"{name} is of heads, which guess worse the further ahead; a measurement tells how "
            "well they guess one token ahead, so simulate another draft"
        )
    return measured.serving


def arrivals(number: int, rate: float, seed: int) -> list[float]:
    """Return the seconds from the first request at which each comes: a Poisson process of `rate` a
    second, the same for the same seed. An infinite rate is all at once."""
    random = Random(f"arrivals {seed}")
    gaps = [0.0 if math.isinf(rate) else random.expovariate(rate) for _ in range(number - 1)]
    return [*accumulate(gaps, initial=0.0)]


def simulate(
    measured: Measurement,
    serving: Serving,
    fleet: PaperFleet,
    rate: float,
    *,
    capacity: float,
    track: Track = lambda numbers: numbers,
) -> Simulated:
    """Requests at `rate` a second, against the fleet's `capacity`. track: an iterable around their
    numbers, for a progress bar."""
    tasks = _tasks(measured, fleet, fleet.requests)
    replicas = [PaperReplica(tasks.texts, serving, fleet.gamma) for _ in range(fleet.replicas)]
    times = arrivals(fleet.requests, rate, fleet.seed)
    served: list[Served] = []
    for number in track(range(fleet.requests)):
        for replica in replicas:
            replica.until(times[number])
        least = min(replicas, key=lambda replica: replica.unfinished(times[number]))
        served.append(least.submit(tasks.task(number), times[number]))
    for replica in replicas:
        replica.until(math.inf)
    return _figures(served, replicas, rate, capacity)


def capacity(measured: Measurement, serving: Serving, fleet: PaperFleet) -> float:
    """Requests a second of a fleet in which some always wait: `replicas` times those of one, while
    its batch is full."""
    rows, count = serving.rows, FULL * serving.rows
    tasks = _tasks(measured, fleet, count)
    replica = PaperReplica(tasks.texts, serving, fleet.gamma)
    served = [replica.submit(tasks.task(number), 0.0) for number in range(count)]
    replica.until(math.inf)
    ends = sorted(one.ended for one in served)
    return fleet.replicas * (count - 2 * rows) / (ends[-rows - 1] - ends[rows - 1])


def like(measured: Measurement, count: int, seed: int) -> list[int]:
    """The numbers of the measured prompts that so many requests are like, at random."""
    return Random(f"texts {seed}").choices(range(len(measured.prompts)), k=count)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Requests by number."""

    texts: list[PaperText]
    limits: list[int]
    greedy: bool
    seed: int

    def task(self, number: int) -> Request:
        params = SamplingParams(temperature=0.0 if self.greedy else 1.0)
        key = RowKey(self.seed, number)
        return Request(self.texts[number].ids, self.limits[number], key, params=params)


def _tasks(measured: Measurement, fleet: PaperFleet, count: int) -> _Tasks:
    """So many, each like one of the measured prompts, at random."""
    dice, greedy = Random(f"betas {fleet.seed}"), measured.options.temperature == 0
    prompts = [measured.prompts[i] for i in like(measured, count, fleet.seed)]
    texts = [
        PaperText(
            i, fleet.prompt_tokens or one.prompt_tokens, _betas(one.overlaps, dice, greedy=greedy)
        )
        for i, one in enumerate(prompts)
    ]
    limits = [fleet.output_tokens or len(one.overlaps) for one in prompts]
    _require_fit(measured.serving, texts, limits)
    return _Tasks(texts, limits, greedy, fleet.seed)


def _require_fit(serving: Serving | None, texts: list[PaperText], limits: list[int]) -> None:
    """InputError for requests that the engine would refuse."""
    most = max(text.prompt + limit for text, limit in zip(texts, limits, strict=True))
    if serving is not None and serving.context is not None and most > serving.context:
        raise InputError(
            f"a request has up to {most} tokens, the measured target holds {serving.context}; "
            "give fewer prompt_tokens or output_tokens"
        )


def _betas(
    overlaps: Sequence[float | None], dice: Random, *, greedy: bool
) -> tuple[float | None, ...]:
    """Return the betas as measured; at temperature 0, whether a draft token is accepted is known
    where it is made."""
    if not greedy:
        return tuple(overlaps)
    return tuple(None if beta is None else float(dice.random() < beta) for beta in overlaps)


def _figures(
    served: Sequence[Served], replicas: Sequence[PaperReplica], rate: float, capacity: float
) -> Simulated:
    span = max(one.ended for one in served) - min(one.due for one in served)
    busy = sum(replica.busy for replica in replicas)
    statistics = [stats(one.row, "paper", "paper") for one in served]
    tokens = sum(len(one.row.new_tokens) for one in served)
    drafted = sum(one.drafted for one in statistics)
    steady = rate < capacity
    return Simulated(
        rate=rate,
        capacity=capacity,
        first_token=_latency([one.began - one.due for one in served]) if steady else None,
        whole=_latency([one.ended - one.due for one in served]) if steady else None,
        requests_per_second=len(served) / span,
        tokens_per_second=tokens / span,
        mean_batch=sum(replica.row_seconds for replica in replicas) / busy,
        utilisation=busy / (span * len(replicas)),
        tokens_per_call=tokens / sum(one.target_calls for one in statistics),
        accepted_per_drafted=sum(one.accepted for one in statistics) / drafted if drafted else None,
    )


def _latency(seconds: Sequence[float]) -> Latency:
    return Latency(*np.percentile(seconds, (50, 99)).tolist())
