"""Measures what serving a batch costs on this machine: steps of one row and of many, prefill, and
the engine's own work; and a pair's betas on the target's own texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median
from time import perf_counter

from foretoken.costing.costs import MIN_FORWARD_SECONDS, CostTable, interpolate
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import limit_torch_threads
from foretoken.engine.engine import Engine
from foretoken.errors import InputError, RefusedError
from foretoken.inputs import Prompt
from foretoken.lease import hold_lease
from foretoken.measurement.agreement import compute_overlaps
from foretoken.records import StepRecord
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from reproduction.costs import MeasuredText, ServingCosts

SIZES = (1, 16, 64, 128, 256, 512)  # tokens of a prompt that is read in one pass
REPEATS = 5  # of each; the first two are not timed: a pass of another size is slower
ROUNDS = 4  # requests for each row of an engine at work


Track = Callable[[Sequence[int]], Iterable[int]]


def require(spec: Speculator) -> None:
    """Raise RefusedError for a pair whose fleet would not follow from these measurements."""
    if spec.target.encoder_decoder:
        raise RefusedError(
            f"{spec.target_name} is an encoder-decoder, whose reading is not measured; "
            "give a decoder"
        )
    if isinstance(spec.drafter, NoDrafter):
        raise InputError("the drafter makes no draft tokens; give another")
    if spec.draft_name.partition(":")[0].endswith("heads"):
        raise RefusedError(
            "heads guess worse the further ahead, and only one token ahead is measured; give "
            "another draft"
        )


def betas(
    spec: Speculator,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams,
    seed: int,
    track: Track = lambda numbers: numbers,
) -> tuple[MeasuredText, ...]:
    """Measure beta at every token that the target writes after each prompt. track: an iterable
    around their numbers, for a progress bar."""
    requests = spec.inputs.make_requests(list(prompts), sampling_params, seed)
    texts: list[MeasuredText] = []
    for i in track(range(len(prompts))):
        (plain,) = spec.generate([prompts[i]], sampling_params, gamma=0, seed=[(seed, i)])
        found = compute_overlaps(
            spec.target, spec.drafter, requests[i], plain.tokens, sampling_params
        )
        rounded = (None if beta is None else round(beta, 6) for beta in found)
        texts.append(MeasuredText(len(requests[i].prompt), tuple(rounded)))
    return tuple(texts)


def serving_costs(
    spec: Speculator, prompts: Sequence[Prompt], sampling_params: SamplingParams, rows: int
) -> ServingCosts:
    """Measure the costs, in some seconds, on requests like `prompts`; the models must be idle."""
    requests = spec.inputs.make_requests(list(prompts), sampling_params, 0)
    costs = spec.costing.get_step_costs(requests[0].params, rows)
    ids = list(chain.from_iterable(request.prompt for request in requests))
    reading, draft_reading = _reading(spec, ids)
    works = [_at_work(spec, prompts, sampling_params, n, rows) for n in sorted({1, rows})]
    measured = ServingCosts(rows, costs, reading, draft_reading, around=((1, 0.0),), joining=0.0)

    def table(quantity: Callable[[_Work], float]) -> CostTable:
        return tuple((work.count, quantity(work)) for work in works)

    measured = replace(
        measured,
        around=table(lambda work: _mean([step.around for step in work.plain])),
        drafts=table(lambda work: _drafts(work, measured)),
        passes=table(lambda work: _passes(work, measured)),
    )
    joining = _joining(works[-1], measured)
    return replace(measured, joining=joining, context=spec.target.max_context)


def _reading(spec: Speculator, ids: list[int]) -> tuple[CostTable, CostTable]:
    """Time the prefill of prompts of several sizes, in target and draft."""
    target, drafter = spec.target, spec.drafter
    context = target.context or SIZES[-1] + 1
    own: dict[int, float] = {}
    drafts: dict[int, float] = {0: 0.0}
    with hold_lease(target, drafter) as lease, limit_torch_threads(target):
        for n in (n for n in SIZES if n < context):
            text = (ids * (1 + n // len(ids)))[: n + 1]
            times: list[tuple[float, float]] = []
            for _ in range(REPEATS):
                lease.count_joining(1)
                start = perf_counter()
                target.start([text[:n]])
                read = perf_counter()
                drafter.start([0], [text], None)
                times.append((read - start, perf_counter() - read))
                lease.leave([0])
            own[n], drafts[n] = (median(each) for each in zip(*times[2:], strict=True))
    return _table(own), _table(drafts)


def _table(seconds: dict[int, float]) -> CostTable:
    """Make a rising table: a larger size that seems faster was measured on a busy machine."""
    most, points = MIN_FORWARD_SECONDS, list[tuple[int, float]]()
    for n in sorted(seconds):
        most = max(most, seconds[n])
        points.append((n, most))
    return tuple(points)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of an engine at work."""

    seconds: float
    rows: list[StepRecord]
    joined: list[int]  # tokens of the prompts of rows that it began with
    before: int  # positions of the pass before; 0: not known

    @property
    def around(self) -> float:
        """Seconds of the step outside draft, forward and verification."""
        one = self.rows[0]
        return self.seconds - one.draft_seconds - one.score_seconds - one.verify_seconds

    @property
    def guesses(self) -> list[int]:
        return [row.drafted for row in self.rows]

    @property
    def size(self) -> int:
        """Positions of its forward."""
        return len(self.rows) + sum(self.guesses) + self.rows[0].padding


@dataclass(slots=True)
class _Work:
    """Steps of an engine with `count` requests at a time."""

    count: int
    steps: list[_Step] = field(default_factory=list[_Step])
    adding: list[float] = field(default_factory=list[float])  # seconds to take a request on

    @property
    def plain(self) -> list[_Step]:
        """Steps with all rows, none of which was new."""
        plain_steps = [step for step in self.steps if step.before and not step.joined]
        return [step for step in plain_steps if len(step.rows) == self.count]


def _at_work(
    spec: Speculator,
    prompts: Sequence[Prompt],
    sampling_params: SamplingParams,
    count: int,
    rows: int,
) -> _Work:
    """Run an engine of `rows` rows with `count` requests at a time, and record its steps.

    Step costs were measured on equal rows; here rows have several lengths, and come and go.
    """
    sampling_params = replace(sampling_params, ignore_eos=True)
    work, last, fresh = _Work(count), 0, dict[int, int]()
    unsent = requests = ROUNDS * count
    with Engine(spec, rows, prefix_cache=False) as engine:
        while unsent or engine.running or engine.waiting:
            for _ in range(min(unsent, count - engine.running - engine.waiting)):
                number, start = (requests - unsent) % len(prompts), perf_counter()
                id = engine.add(prompts[number], sampling_params, seed=(requests - unsent, 0))
                work.adding.append(perf_counter() - start)
                fresh[id] = len(
                    spec.inputs.make_requests([prompts[number]], sampling_params, 0)[0].prompt
                )
                unsent -= 1
            start = perf_counter()
            events = engine.step()
            seconds = perf_counter() - start
            records = [event.steps[-1] for event in events if event.steps]
            joined = [fresh.pop(event.id) for event in events if event.id in fresh]
            if not records or len(records) < records[0].rows or engine.waiting:
                last = 0  # of rows that are still being read nothing is told
                continue
            work.steps.append(_Step(seconds, records, joined, last))
            last = 0 if joined else work.steps[-1].size  # the draft reads prompts in the next step
    return work


def _mean(seconds: list[float]) -> float:
    return max(MIN_FORWARD_SECONDS, fmean(seconds or [0.0]))


def _over(seconds: list[float], expected: list[float]) -> float:
    """Return measured over expected seconds, in all; 1 if there were none."""
    return sum(seconds) / sum(expected) if sum(seconds) > 0 and sum(expected) > 0 else 1.0


def _drafts(work: _Work, measured: ServingCosts) -> float:
    expected = [measured.draft_seconds(step.guesses) for step in work.plain]
    return _over([step.rows[0].draft_seconds for step in work.plain], expected)


def _passes(work: _Work, measured: ServingCosts) -> float:
    expected = [
        measured.target_seconds(step.size, 0, work.count, changed=step.size != step.before)
        for step in work.plain
    ]
    return _over([step.rows[0].score_seconds for step in work.plain], expected)


def _joining(work: _Work, measured: ServingCosts) -> float:
    """Return the seconds that a request costs beside its steps and prefill; medians.

    These are the excess of the steps in which rows begin, and the time to add a request.
    """
    beyond = [
        (step.seconds - _expected(step, measured)) / len(step.joined)
        for step in work.steps
        if step.joined and (len(step.rows) > len(step.joined) or len(step.rows) == 1)
    ]
    return max(0.0, median(beyond or [0.0]) + median(work.adding))


def _expected(step: _Step, measured: ServingCosts) -> float:
    """Return the expected seconds of a step in which rows begin, whose prompts the draft reads
    behind it.

    A single row is prefilled by its first forward, others by a forward before it.
    """
    rows, read = len(step.rows), sum(step.joined) - len(step.joined)
    judged = rows + sum(step.guesses)
    seconds = measured.draft_seconds(step.guesses)
    seconds += interpolate(measured.costs.verify, judged) + interpolate(measured.around, rows)
    if rows == 1:
        return float(seconds + measured.target_seconds(step.size + read, read, 1, changed=True))
    pass_seconds = measured.target_seconds(step.size, 0, rows, changed=step.size != read)
    return float(seconds + measured.target_seconds(read, read, rows, changed=True) + pass_seconds)
