"""The share of the processors that other processes used during a measurement.

The system counts the busy time of each processor. The time of other processes is the busy time
minus the time of this process and its children; it includes the steal time of a hypervisor. The
share is unknown on systems that do not report a process' CPU affinity (macOS).

In a container, the counters are mostly the host's; only counters of processors that this process
may run on are used. Processes of other containers count as other processes, although a CPU quota
may prevent them from slowing this process.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import psutil

BUSY_FIELDS = ("user", "nice", "system", "irq", "softirq", "steal")
MAX_OTHERS_SHARE = 0.05  # above this share, times are reported as uncertain
MIN_PROCESSOR_SECONDS = 0.5  # counters advance by 1/100 s, too coarse for shorter times


class ProcessorReading(NamedTuple):
    """The clock and the processor time counters at one moment."""

    clock: float  # seconds
    cpus: int
    busy: float  # processor seconds of all processes
    own: float  # processor seconds of this process and its children


class ProcessorSeconds(NamedTuple):
    """Processor seconds of a span of time."""

    others: float  # used by other processes; computed from counters, may be slightly below 0
    all: float  # available


def take_reading() -> ProcessorReading | None:
    """Return the counters now; None if the system does not report the CPU affinity."""
    own = psutil.Process()
    try:
        cpus, times = own.cpu_affinity(), psutil.cpu_times(percpu=True)
        numbered = zip(_list_processors(len(times)), times, strict=False)
        busy = [_sum_busy_seconds(each) for i, each in numbered if i in cpus]
        spent = sum(map(_sum_process_seconds, [own, *own.children(recursive=True)]))
    except (AttributeError, OSError, psutil.Error):
        return None
    if len(busy) < len(cpus):  # a container's own counters, with other processor numbers
        return None
    return ProcessorReading(perf_counter(), len(cpus), sum(busy), spent)


def measure_since(since: ProcessorReading | None) -> ProcessorSeconds | None:
    """Return the processor seconds from `since` until now."""
    return subtract_readings(since, take_reading())


def subtract_readings(
    since: ProcessorReading | None, until: ProcessorReading | None
) -> ProcessorSeconds | None:
    """Return the processor seconds between two readings; None if either is missing or if the
    number of processors has changed."""
    if since is None or until is None or since.cpus != until.cpus:
        return None
    others = (until.busy - since.busy) - (until.own - since.own)
    return ProcessorSeconds(others, (until.clock - since.clock) * until.cpus)


def compute_others_share(spans: Iterable[ProcessorSeconds | None]) -> float | None:
    """Return the share of the processors that other processes used during these spans together;
    None if the share is unknown or the spans are too short."""
    present = [span for span in spans if span is not None]
    total = sum(span.all for span in present)
    if total < MIN_PROCESSOR_SECONDS:
        return None
    return round(min(1.0, max(0.0, sum(span.others for span in present) / total)), 3)


def describe_contention(share: float | None) -> str | None:
    """Return a warning for times that were measured while other processes used this share of the
    processors; None if the share is small or unknown."""
    if share is None or share <= MAX_OTHERS_SHARE:
        return None
    return (
        f"other processes took {share:.0%} of the processors during the measurement, so these "
        "times are uncertain; measure again on an idle machine"
    )


def _list_processors(count: int) -> list[int]:
    """Return the processor number of each of the `count` entries of psutil's counters: on Linux,
    these are the processors that are online."""
    try:
        lines = Path("/proc/stat").read_text()
    except OSError:
        return list(range(count))
    return [int(number) for number in re.findall(r"^cpu(\d+) ", lines, re.MULTILINE)]


def _sum_busy_seconds(times: Any) -> float:
    """Return the busy seconds of one processor; `user` includes the time of guests."""
    return sum(getattr(times, name, 0.0) for name in BUSY_FIELDS)


def _sum_process_seconds(process: psutil.Process) -> float:
    """Return the processor seconds of a process and of its children that have ended; 0 if the
    process itself has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system
