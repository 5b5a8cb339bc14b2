"""What a batch of requests costs an engine here, as `foretoken simulate` needs it: steps of one row
and of many, prompts that are read, and what an engine does beside its models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from time import perf_counter

from foretoken.claim import claimed
from foretoken.costs import TICK, Table
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
    alone = _beside(spec, prompts, wishes, 1, rows)
    full = _beside(spec, prompts, wishes, rows, rows)
    around = ((1, alone[0]),) if rows == 1 else ((1, alone[0]), (rows, full[0]))
    return Serving(rows, costs, reading, draft_reading, around, full[1])


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


def _beside(
    spec: Speculator, prompts: Sequence[Prompt], wishes: SamplingParams, count: int, rows: int
) -> tuple[float, float]:
    """Seconds of an engine's step of `count` rows beside what its records tell, the median; and of
    each request to come and go, beside what is read."""
    wishes = replace(wishes, ignore_eos=True)
    told = 0.0  # seconds of drafts, passes and verdicts
    besides: list[tuple[int, float]] = []  # rows of each step, and its seconds beside these
    done: list[Completion] = []
    with Engine(spec, rows, prefix_cache=False) as engine:
        began = perf_counter()
        for number in range(count):
            engine.add(prompts[number % len(prompts)], wishes, seed=(number, 0))
        while engine.running or engine.waiting:
            step = perf_counter()
            events = engine.step()
            seconds = perf_counter() - step
            record = next((event.steps[0] for event in events if event.steps), None)
            if record is not None:
                told += _parts(record)
                besides.append((record.rows, seconds - _parts(record)))
            else:  # it only read
                told += seconds
            done += [event.completion for event in events if event.completion is not None]
        whole = perf_counter() - began
    most = max(n for n, _ in besides)
    usual = max(TICK, median(seconds for n, seconds in besides if n == most))
    reading = sum({one.stats.prefill_seconds for one in done})  # those that join together share it
    rest = whole - told - reading - usual * len(besides)
    return usual, max(0.0, rest) / count


def _parts(step: StepRecord) -> float:
    return step.draft_seconds + step.score_seconds + step.verify_seconds
