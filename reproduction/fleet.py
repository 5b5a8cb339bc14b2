"""A fleet on paper: replicas with requests at a rate, from one replica's measured costs.

A replica is the engine's own scheduler, batch, step, rule and keyed numbers over models that run
nothing, whose clock goes on by measured costs; a draft token is kept with the beta that was
measured at its place of a text. A vocabulary of two tokens is enough: a draft token is always 0,
and beta is the target's probability of it.

A request comes at a random time (Poisson), goes to the replica with the fewest that are not done,
and has the acceptance of one of the prompts that were measured. Nothing is known of networks, of
HTTP, of prefixes that are shared, and of replicas that disturb one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

import numpy as np
import torch
from torch import Tensor

from foretoken.costing.costs import interpolate
from foretoken.costing.gamma import AdaptiveGamma, FixedGamma, GammaPolicy
from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.engine.core import EngineCore
from foretoken.engine.scheduler import SequenceTask
from foretoken.errors import InputError
from foretoken.models.base import Blocks, Model
from foretoken.models.row_slots import list_remaining_rows
from foretoken.request import Request, SequenceState, compute_stats
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verifier import ScoredBlock, Verification, Verifier, make_verifier
from reproduction.costs import FleetCosts, ServingCosts

BLOCK = make_verifier(block)
FULL = 8  # batches of requests that wait at once where capacity is found
Track = Callable[[Sequence[int]], Iterable[int]]


@dataclass(frozen=True, slots=True)
class PaperText:
    """A request: its prompt's length, and beta at every new token; None where the draft is silent.
    Its ids are a prompt of its number and zeros."""

    number: int
    prompt: int
    betas: tuple[float | None, ...]

    @property
    def ids(self) -> list[int]:
        return [self.number] + [0] * (self.prompt - 1)


@dataclass(slots=True)
class Clock:
    """Seconds of a replica, which go on as work is done."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def add(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass(slots=True)
class PaperParts:
    """Parts that target, drafter and judge of a replica share."""

    texts: list[PaperText]  # by number
    serving: ServingCosts
    clock: Clock = field(default_factory=Clock)


class PaperTarget(Model):
    """A Model over the lengths of texts."""

    runtime = "paper"
    compute_dtype = "float64"
    vocab_size = 2

    def __init__(self, parts: PaperParts) -> None:
        self.parts, self.padding, self._size = parts, 0, 0  # tokens of the last pass
        self._numbers: list[int] = []  # of the rows' texts; -1: nothing is read
        self._lengths: list[int] = []

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self._size = self._size if self._lengths else 0
        first = len(self._lengths)
        self._numbers += [-1] * len(prompts)
        self._lengths += [0] * len(prompts)
        if any(prompts):
            self.score([*([] for _ in range(first)), *prompts], [0] * len(self._lengths))

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        self._pass(blocks, sum(need))
        for b, part in enumerate(blocks):
            if part and not self._lengths[b]:
                self._numbers[b] = part[0]
            self._lengths[b] += len(part)
        distributions = [self._distributions(b, n, max(need)) for b, n in enumerate(need)]
        chances = torch.tensor(distributions, dtype=torch.float64).reshape(
            len(blocks), max(need), 1
        )
        return torch.cat([chances, 1 - chances], 2).log()

    def _pass(self, blocks: list[list[int]], judged: int) -> None:
        """The time of a pass: of the positions that are judged, and what it takes more for those
        that are only read."""
        size, last = sum(len(part) for part in blocks), self._size
        self._size = size
        self.parts.clock.add(
            self.parts.serving.target_seconds(
                size, size - judged, len(blocks), changed=size != last
            )
        )

    def _distributions(self, b: int, need: int, width: int) -> list[float]:
        """The probabilities of 0 behind the last `need` tokens of a row; 1 in the padding."""
        if not need:
            return [1.0] * width
        text = self.parts.texts[self._numbers[b]]
        first = self._lengths[b] - need + 1 - text.prompt
        betas = (text.betas[place % len(text.betas)] for place in range(first, first + need))
        return [*(beta or 0.0 for beta in betas), *[1.0] * (width - need)]

    def set_lengths(self, lengths: list[int]) -> None:
        self._lengths = list(lengths)

    def permute(self, rows: list[int]) -> None:
        self._numbers = [self._numbers[b] for b in rows]
        self._lengths = [self._lengths[b] for b in rows]

    def leave(self, rows: list[int]) -> None:
        self.permute(list_remaining_rows(len(self._lengths), rows))


class PaperDrafter(Drafter):
    """Guesses 0 wherever a draft token was made when betas were measured."""

    def __init__(self, parts: PaperParts) -> None:
        self.parts = parts
        self._texts: list[PaperText] = []
        self._lengths: list[int] = []  # new tokens

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        texts = [self.parts.texts[prompt[0]] for prompt in prompts]
        self._texts += texts
        self._lengths += [
            len(prompt) - text.prompt for prompt, text in zip(prompts, texts, strict=True)
        ]
        read = sum(map(len, prompts)) - len(prompts)
        if read:
            self.parts.clock.add(float(interpolate(self.parts.serving.draft_reading, read)))

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        rows = zip(self._texts, self._lengths, gamma, strict=True)
        counts = [_offered(text, length, g) for text, length, g in rows]
        self.parts.clock.add(self.parts.serving.draft_seconds(counts))
        return pack([[0] * count for count in counts], calls=max(counts))

    def commit(self, tokens: list[list[int]]) -> None:
        pairs = zip(self._lengths, tokens, strict=True)
        self._lengths = [length + len(new) for length, new in pairs]

    def leave(self, rows: list[int]) -> None:
        stay = list_remaining_rows(len(self._texts), rows)
        self._texts = [self._texts[b] for b in stay]
        self._lengths = [self._lengths[b] for b in stay]


@dataclass(frozen=True, slots=True, eq=False)
class PaperVerifier:
    """The engine's judge of block verification, whose time is what follows a pass."""

    parts: PaperParts
    verifier: Verifier = BLOCK

    @property
    def draw_class(self) -> type[Draw]:
        return self.verifier.draw_class

    def __call__(self, block: ScoredBlock, draw: Draw) -> Verification:
        judged = len(block.x) + int(block.lengths.sum())
        self.parts.clock.add(float(interpolate(self.parts.serving.costs.verify, judged)))
        return self.verifier(block, draw)


def _offered(text: PaperText, place: int, most: int) -> int:
    """Guesses up to the first place where the draft was silent."""
    betas = text.betas
    for i in range(most):
        if betas[(place + i) % len(betas)] is None:
            return i
    return most


@dataclass(slots=True)
class Served:
    """A request on its way; in seconds since the first request of all."""

    seq: SequenceState
    due: float
    began: float = math.inf  # when its first token was there
    ended: float = math.inf


class PaperReplica:
    """A batch of at most `serving.rows` rows, of requests whose `texts` are known. gamma: a fixed
    number of draft tokens; None: chosen before every step, as an engine does by itself."""

    def __init__(self, texts: list[PaperText], serving: ServingCosts, gamma: int | None) -> None:
        parts = PaperParts(texts, serving)
        target, drafter = PaperTarget(parts), PaperDrafter(parts)
        self.serving, self.clock, self.verifier = serving, parts.clock, PaperVerifier(parts)
        self.core = EngineCore(target, drafter, serving.rows, clock=self.clock)
        self.gamma: GammaPolicy = (
            AdaptiveGamma(serving.costs) if gamma is None else FixedGamma(gamma)
        )
        self.open: list[Served] = []  # in the order in which they came
        self.busy = 0.0  # seconds in which it had something to do
        self.row_seconds = 0.0  # these, times the rows that ran
        self._last = 0  # requests that ended with the last step

    def submit(self, request: Request, time: float) -> Served:
        """A request that comes now, or while a step runs that began before."""
        if not self.open:
            self.clock.seconds = max(self.clock.seconds, time)
        served = Served(SequenceState.from_request(request), time)
        self.open.append(served)
        self.core.add([SequenceTask(served.seq, self.verifier, self.gamma)])
        return served

    def until(self, seconds: float) -> None:
        """Take all steps that begin before then."""
        while self.open and self.clock.seconds < seconds:
            self.step()

    def unfinished(self, seconds: float) -> int:
        """Requests that were not done then, as whoever sends requests knows."""
        return len(self.open) + (self._last if self.clock.seconds > seconds else 0)

    def step(self) -> None:
        """Advance all that run, and note whose first or last token came."""
        start, waiting = self.clock.seconds, len(self.core.scheduler.waiting)
        self.core.step()
        queued = len(self.core.scheduler.waiting)
        rows = len(self.open) - queued  # those that have finished since are still there
        around = (
            float(interpolate(self.serving.around, rows))
            + (waiting - queued) * self.serving.joining
        )
        self.clock.add(around)
        now = self.clock.seconds
        self.busy, self.row_seconds = (
            self.busy + now - start,
            self.row_seconds + (now - start) * rows,
        )
        for one in self.open:
            if one.seq.records:
                one.began = min(one.began, now)
            if one.seq.finish_reason is not None:
                one.ended = now
        before = len(self.open)
        self.open = [one for one in self.open if one.seq.finish_reason is None]
        self._last = before - len(self.open)


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


Latency = dict[str, float]  # "p50" and "p99", in seconds


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


def arrivals(number: int, rate: float, seed: int) -> list[float]:
    """Return the seconds from the first request at which each comes: a Poisson process of `rate` a
    second, the same for the same seed. An infinite rate is all at once."""
    random = Random(f"arrivals {seed}")
    gaps = [0.0 if math.isinf(rate) else random.expovariate(rate) for _ in range(number - 1)]
    return [*accumulate(gaps, initial=0.0)]


def simulate(
    measured: FleetCosts,
    fleet: PaperFleet,
    rate: float,
    *,
    capacity: float,
    track: Track = lambda numbers: numbers,
) -> Simulated:
    """Requests at `rate` a second, against the fleet's `capacity`. track: an iterable around their
    numbers, for a progress bar."""
    tasks = _tasks(measured, fleet, fleet.requests)
    serving = measured.serving
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


def capacity(measured: FleetCosts, fleet: PaperFleet) -> float:
    """Requests a second of a fleet in which some always wait: `replicas` times those of one, while
    its batch is full."""
    rows = measured.serving.rows
    count = FULL * rows
    tasks = _tasks(measured, fleet, count)
    replica = PaperReplica(tasks.texts, measured.serving, fleet.gamma)
    served = [replica.submit(tasks.task(number), 0.0) for number in range(count)]
    replica.until(math.inf)
    ends = sorted(one.ended for one in served)
    return fleet.replicas * (count - 2 * rows) / (ends[-rows - 1] - ends[rows - 1])


def like(measured: FleetCosts, count: int, seed: int) -> list[int]:
    """The numbers of the measured prompts that so many requests are like, at random."""
    return Random(f"texts {seed}").choices(range(len(measured.texts)), k=count)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Requests by number."""

    texts: list[PaperText]
    limits: list[int]
    params: SamplingParams
    seed: int

    def task(self, number: int) -> Request:
        key = SequenceKey(self.seed, number)
        return Request(self.texts[number].ids, self.limits[number], key, params=self.params)


def _tasks(measured: FleetCosts, fleet: PaperFleet, count: int) -> _Tasks:
    """So many, each like one of the measured prompts, at random. InputError for requests that the
    engine would refuse."""
    dice, greedy = Random(f"betas {fleet.seed}"), measured.temperature == 0
    alike = [measured.texts[i] for i in like(measured, count, fleet.seed)]
    texts: list[PaperText] = []
    for i, one in enumerate(alike):
        betas = one.betas
        if greedy:  # whether a draft token is accepted is known where it is made
            betas = [b if b is None else float(dice.random() < b) for b in betas]
        texts.append(PaperText(i, fleet.prompt_tokens or one.prompt_tokens, tuple(betas)))
    limits = [fleet.output_tokens or len(one.betas) for one in alike]
    most = max(text.prompt + limit for text, limit in zip(texts, limits, strict=True))
    context = measured.serving.context
    if context is not None and most > context:
        raise InputError(
            f"a request has up to {most} tokens, the measured target holds {context}; "
            "give fewer prompt_tokens or output_tokens"
        )
    return _Tasks(texts, limits, SamplingParams(0.0 if greedy else 1.0), fleet.seed)


def _figures(
    served: Sequence[Served], replicas: Sequence[PaperReplica], rate: float, capacity: float
) -> Simulated:
    span = max(one.ended for one in served) - min(one.due for one in served)
    busy = sum(replica.busy for replica in replicas)
    statistics = [compute_stats(one.seq, "paper", "paper") for one in served]
    tokens = sum(len(one.seq.new_tokens) for one in served)
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
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return {"p50": p50, "p99": p99}
