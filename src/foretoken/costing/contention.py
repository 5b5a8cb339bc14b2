"""The share of the processors that other processes took while something was timed.

Linux counts in /proc/stat for how long each processor was busy. What is busy there beyond this
process and those it started is others'; so is what a hypervisor gave to other machines. Elsewhere
nothing is known, and nothing is said.

In a container that file is mostly the host's: of its processors those count that this process may
run on, so neighbours there are others, though a quota on processor time may keep them from
disturbing. Where the file is made up for the container, what it leaves out is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

PROC = Path("/proc")
IDLE = (3, 4)  # columns of a processor's line: idle, and waiting for a disk
COLUMNS = 8  # user, nice, system, idle, iowait, irq, softirq, steal; what follows is in user
MOST = 0.05  # share beyond which times are not to be trusted
LEAST = 0.5  # processor seconds: less is a few ticks, of 1/100 s each


class Reading(NamedTuple):
    """A moment: the clock, and processor seconds until then."""

    clock: float
    cpus: int
    busy: float
    own: float  # of this process and of those it started


class Taken(NamedTuple):
    """Processor seconds of a span of time: those that others took, and all."""

    others: float  # somewhat below 0 where others took nothing: the two are counted apart
    all: float


def read(proc: Path = PROC, pid: int | None = None) -> Reading | None:
    """The counters now; None where the system has none."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cpus = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    try:
        rate = os.sysconf("SC_CLK_TCK")
        lines = [line.split() for line in (proc / "stat").read_text().splitlines()]
        busy = [_busy(line[1:]) for line in lines if line and line[0] in cpus]
        ticks = _ticks(proc, os.getpid() if pid is None else pid)
    except (OSError, ValueError, KeyError):
        return None
    if len(busy) < len(cpus):
        return None
    return Reading(perf_counter(), len(cpus), sum(busy) / rate, ticks / rate)


def taken(since: Reading | None) -> Taken | None:
    """Return the processor seconds from `since` until now."""
    return between(since, read())


def between(since: Reading | None, until: Reading | None) -> Taken | None:
    """Return the processor seconds from one reading to another; None where either is missing, or
    processors were given or taken away meanwhile."""
    if since is None or until is None or since.cpus != until.cpus:
        return None
    others = (until.busy - since.busy) - (until.own - since.own)
    return Taken(others, (until.clock - since.clock) * until.cpus)


def share(spans: Iterable[Taken | None]) -> float | None:
    """The share of the processors that others took in all of these spans; None where they are too
    short to tell, or nothing is known."""
    present = [span for span in spans if span is not None]
    there = sum(span.all for span in present)
    if there < LEAST:
        return None
    return round(min(1.0, max(0.0, sum(span.others for span in present) / there)), 3)


def remark(share: float | None) -> str | None:
    """Return the remark beside times that were taken meanwhile; None for none."""
    if share is None or share <= MOST:
        return None
    return (
        f"other processes took {share:.0%} of the processors meanwhile: these times are uncertain, "
        "so measure again on an idle machine"
    )


def _busy(ticks: list[str]) -> int:
    return sum(int(each) for i, each in enumerate(ticks[:COLUMNS]) if i not in IDLE)


def _ticks(proc: Path, pid: int) -> int:
    """Ticks of a process and of all below it, those that have ended and were waited for included.
    KeyError where it is not there."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # the name, in brackets, may hold anything
            rest = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        number = int(entry.name)
        parents[number], ticks[number] = int(rest[1]), sum(map(int, rest[11:15]))
    return sum(ticks[each] for each in _below(pid, parents)) + ticks[pid]


def _below(pid: int, parents: dict[int, int]) -> list[int]:
    """The children of a process, theirs, and so on."""
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [each for child in children for each in _below(child, parents)]
