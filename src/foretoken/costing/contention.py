"""The share of the processors that other processes took while something was timed.

The system counts for how long each processor was busy. Busy time beyond this process and those
it started is others'; so is the time that a hypervisor gave to other machines. Where it does not
say which processors this process may run on (macOS), nothing is known, and nothing is said.

In a container the counts are mostly the host's: of its processors those count that this process
may run on, so neighbours there are others, though a quota on processor time may keep them from
disturbing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import psutil

BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq", "steal")
MAX_OTHERS_SHARE = 0.05  # share beyond which times are not to be trusted
MIN_PROCESSOR_SECONDS = 0.5  # processor seconds: less is a few ticks, of 1/100 s each


class ProcessorReading(NamedTuple):
    """A moment: the clock, and processor seconds until then."""

    clock: float
    cpus: int
    busy: float
    own: float  # of this process and of those it started


class ProcessorSeconds(NamedTuple):
    """Processor seconds of a span of time: those that others took, and all."""

    others: float  # somewhat below 0 where others took nothing: the two are counted apart
    all: float


def take_reading() -> ProcessorReading | None:
    """The counters now; None where the system does not say which processors this process may run
    on."""
    own = psutil.Process()
    try:
        cpus, times = own.cpu_affinity(), psutil.cpu_times(percpu=True)
        numbered = zip(_list_processors(len(times)), times, strict=False)
        busy = [_sum_busy_seconds(each) for i, each in numbered if i in cpus]
        spent = sum(map(_sum_process_seconds, [own, *own.children(recursive=True)]))
    except (AttributeError, OSError, psutil.Error):
        return None
    if len(busy) < len(cpus):  # a container's own count, which numbers them otherwise
        return None
    return ProcessorReading(perf_counter(), len(cpus), sum(busy), spent)


def measure_since(since: ProcessorReading | None) -> ProcessorSeconds | None:
    """Return the processor seconds from `since` until now."""
    return subtract_readings(since, take_reading())


def subtract_readings(
    since: ProcessorReading | None, until: ProcessorReading | None
) -> ProcessorSeconds | None:
    """Return the processor seconds from one reading to another; None where either is missing, or
    processors were given or taken away meanwhile."""
    if since is None or until is None or since.cpus != until.cpus:
        return None
    others = (until.busy - since.busy) - (until.own - since.own)
    return ProcessorSeconds(others, (until.clock - since.clock) * until.cpus)


def compute_others_share(spans: Iterable[ProcessorSeconds | None]) -> float | None:
    """The share of the processors that others took in all of these spans; None where they are too
    short to tell, or nothing is known."""
    present = [span for span in spans if span is not None]
    total = sum(span.all for span in present)
    if total < MIN_PROCESSOR_SECONDS:
        return None
    return round(min(1.0, max(0.0, sum(span.others for span in present) / total)), 3)


def describe_contention(share: float | None) -> str | None:
    """Return the remark beside times that were taken meanwhile; None for none."""
    if share is None or share <= MAX_OTHERS_SHARE:
        return None
    return (
        f"other processes took {share:.0%} of the processors meanwhile: these times are uncertain, "
        "so measure again on an idle machine"
    )


def _list_processors(count: int) -> list[int]:
    """Numbers of the processors that are counted: on Linux those that are switched on."""
    try:
        lines = Path("/proc/stat").read_text()
    except OSError:
        return list(range(count))
    return [int(number) for number in re.findall(r"^cpu(\d+) ", lines, re.MULTILINE)]


def _sum_busy_seconds(times: Any) -> float:
    """Processor seconds of one processor; a guest's are in `user`."""
    return sum(getattr(times, name, 0.0) for name in BUSY_FIELDS)


def _sum_process_seconds(process: psutil.Process) -> float:
    """Seconds of a process and of those below it that have ended; 0 where it has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
