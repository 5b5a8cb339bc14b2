"""What a batch of requests costs an engine here, as `foretoken simulate` needs it: steps of one row
and of many, prompts that are read, and what an engine does beside its models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from time import perf_counter

from foretoken.claim import claimed
from foretoken.costs import TICK, Costs, Table, at
from foretoken.engine.batch import threads
from foretoken.errors import RefusedError
from foretoken.lab.measurement.result import Serving
from foretoken.options import Prompt
from foretoken.request import Completion, StepRecord
from foretoken.sampling.params import SamplingParams
from foretoken.serving.engine import Engine
from foretoken.speculator import Speculator

SIZES = (1, 16, 64, 128, 256, 512)  # tokens of a prompt that is read in one pass
REPEATS = 5  # of each; the first two are not timed: a pass of another size is slower
ROUNDS = 4  # requests for each row of an engine at work


def require(spec: Speculator) -> None:
    """RefusedError for an encoder-decoder."""
    if spec.target.encoder_decoder:
        raise RefusedError(
            f"{spec.target_name} is an encoder-decoder, whose reading is not measured; leave "
            "--rows out"
        )


def serving(
    spec: Speculator, prompts: Sequence[Prompt], wishes: SamplingParams, rows: int
) -> Serving:
    """Measure it, in some seconds, on requests like `prompts`. The models must be idle."""
    requests = spec.requests(list(prompts), wishes, 0)
    costs = spec.step_costs(requests[0].params, rows)
    ids = list(chain.from_iterable(request.prompt for request in requests))
    reading, draft_reading = _reading(spec, ids)
    found = {n: _at_work(spec, prompts, wishes, n, rows, costs) for n in sorted({1, rows})}
    return Serving(
        rows,
        costs,
        reading,
        draft_reading,
        around=tuple((n, work.around) for n, work in found.items()),
        joining=found[rows].joining,
        drafts=tuple((n, work.drafts) for n, work in found.items()),
        passes=tuple((n, work.passes) for n, work in found.items()),
    )


def _reading(spec: Speculator, ids: list[int]) -> tuple[Table, Table]:
    """Seconds that target and draft take to read beginnings of `ids`, over and over, of several
    sizes."""
    target, drafter = spec.target, spec.drafter
    context = target.context or SIZES[-1] + 1
    own: dict[int, float] = {}
    drafts: dict[int, float] = {0: 0.0}
    with claimed(target, drafter) as claim, threads(target):
        for n in (n for n in SIZES if n < context):
            text = (ids * (1 + n // len(ids)))[: n + 1]
            times: list[tuple[float, float]] = []
            for _ in range(REPEATS):
                claim.expect(1)
                began = perf_counter()
                target.start([text[:n]])
                read = perf_counter()
                drafter.start([0], [text], None)
                times.append((read - began, perf_counter() - read))
                claim.leave([0])
            own[n], drafts[n] = (median(each) for each in zip(*times[2:], strict=True))
    return _table(own), _table(drafts)


def _table(seconds: dict[int, float]) -> Table:
    """Rising: what seems to take less than something smaller was measured beside a busy machine."""
    most, points = TICK, list[tuple[int, float]]()
    for n in sorted(seconds):
        most = max(most, seconds[n])
        points.append((n, most))
    return tuple(points)


@dataclass(frozen=True, slots=True)
class _Work:
    """Of an engine at work: seconds of a step beside what its records tell, the mean; seconds of
    each request to come and go, beside what is read; drafts and passes over what costs expect."""

    around: float
    joining: float
    drafts: float
    passes: float


@dataclass(slots=True)
class _Sums:
    """Seconds of the steps of as many rows as may run: what they took, and what costs expect."""

    costs: Costs
    steps: int = 0
    around: float = 0.0
    drafts: float = 0.0
    passes: float = 0.0
    expected_drafts: float = 0.0
    expected_passes: float = 0.0

    def note(self, steps: list[StepRecord], seconds: float, last: int) -> int:
        """A step, told by each of its rows, behind a pass over `last` positions; its own."""
        one, guesses, rows = steps[0], [step.drafted for step in steps], len(steps)
        size = rows + sum(guesses) + one.padding
        self.steps += 1
        self.around += seconds - _parts(one)
        self.drafts += one.draft_seconds
        self.passes += one.score_seconds
        self.expected_drafts += float(self.costs.drafting(max(guesses), sum(guesses), rows))
        self.expected_passes += float(at(self.costs.score, size))
        self.expected_passes += self.costs.change * (size != last)
        return size


def _at_work(
    spec: Speculator,
    prompts: Sequence[Prompt],
    wishes: SamplingParams,
    count: int,
    rows: int,
    costs: Costs,
) -> _Work:
    """An engine of `rows` rows that has `count` requests at a time, until some have ended. Costs
    were measured on rows alike; here they are of several lengths, and come and go."""
    wishes = replace(wishes, ignore_eos=True)
    sums, told, steps, last = _Sums(costs), 0.0, 0, 0
    done: list[Completion] = []
    left = requests = ROUNDS * count
    with Engine(spec, rows, prefix_cache=False) as engine:
        began = perf_counter()
        while left or engine.running or engine.waiting:
            for _ in range(min(left, count - engine.running - engine.waiting)):
                number = requests - left
                engine.add(prompts[number % len(prompts)], wishes, seed=(number, 0))
                left -= 1
            joined, step = engine.waiting, perf_counter()
            events = engine.step()
            seconds = perf_counter() - step
            records = [event.steps[-1] for event in events if event.steps]
            if records and not joined and len(records) == records[0].rows == count:
                last = sums.note(records, seconds, last)
            elif records:
                last = 0
            told += _parts(records[0]) if records else seconds  # else it only read
            steps += bool(records)
            done += [event.completion for event in events if event.completion is not None]
        whole = perf_counter() - began
    around = max(TICK, sums.around / max(1, sums.steps))
    reading = sum({one.stats.prefill_seconds for one in done})  # those that join together share it
    rest = whole - told - reading - around * steps
    return _Work(
        around,
        max(0.0, rest) / requests,
        _over(sums.drafts, sums.expected_drafts),
        _over(sums.passes, sums.expected_passes),
    )


def _over(seconds: float, expected: float) -> float:
    """1 where there was nothing."""
    return seconds / expected if seconds > 0 and expected > 0 else 1.0


def _parts(step: StepRecord) -> float:
    return step.draft_seconds + step.score_seconds + step.verify_seconds
