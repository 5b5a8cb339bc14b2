"""What other processes took: the arithmetic on files given, and a process that does spin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep

import pytest

from foretoken.costing import contention
from foretoken.costing.contention import Reading, Taken, between, read, remark, share, taken

RATE = os.sysconf("SC_CLK_TCK")
linux = pytest.mark.skipif(sys.platform != "linux", reason="others are counted on Linux only")
SPIN = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


def tree(folder: Path, cpus: dict[int, str], processes: dict[int, tuple[int, str]]) -> Path:
    """A /proc: lines of processors; of processes the parent and its four times."""
    folder.mkdir(exist_ok=True)
    lines = ["cpu 9 9 9 9", *(f"cpu{i} {ticks}" for i, ticks in cpus.items()), "intr 1 0", ""]
    (folder / "stat").write_text("\n".join(lines))
    for pid, (parent, times) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        between_ = "0 0 0 0 0 0 0 0 0"
        text = f"{pid} (a ) b) S {parent} {between_} {times} 20 0"
        (folder / str(pid) / "stat").write_text(text)
    (folder / "self").mkdir(exist_ok=True)
    return folder


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may run on processors 0 and 2."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2}, raising=False)


@pytest.mark.usefixtures("two")
def test_ticks_of_our_processors_and_of_our_processes(tmp_path: Path) -> None:
    """Idle time, waiting for disks and a guest's time, which is in user, do not count; steal does;
    of our own all that we started does, also what has ended."""
    cpus = {0: "1 2 3 1000 2000 4 5 6 70 80", 1: "9 9 9 9 9 9 9 9", 2: "10 0 0 7 7 0 0 0 0 0"}
    ours = {50: (1, "1 2 3 4"), 51: (50, "5 0 0 0"), 52: (51, "6 0 0 0"), 60: (1, "99 99 99 99")}
    parsed = read(tree(tmp_path, cpus, ours), 50)
    assert parsed is not None
    assert (parsed.cpus, parsed.busy * RATE, parsed.own * RATE) == pytest.approx((2, 31, 21))


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("cpus", [{0: "1 1 1 1 1 1 1 1"}, {0: "x", 2: "y"}, {}])
def test_what_the_system_does_not_count_is_not_guessed(
    tmp_path: Path, cpus: dict[int, str]
) -> None:
    assert read(tree(tmp_path, cpus, {50: (1, "1 2 3 4")}), 50) is None


@pytest.mark.usefixtures("two")
def test_a_process_that_is_not_there_and_no_proc_at_all(tmp_path: Path) -> None:
    lines = {0: "1 1 1 1 1 1 1 1", 2: "1 1 1 1 1 1 1 1"}
    assert read(tree(tmp_path / "a", lines, {}), 50) is None
    assert read(tmp_path / "none", 50) is None


def test_a_system_without_affinity_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert read() is None and taken(None) is None


def test_what_is_busy_and_not_ours_is_others() -> None:
    began, now = Reading(10.0, 2, 100.0, 30.0), Reading(14.0, 2, 106.0, 34.0)
    assert between(began, now) == Taken(2.0, 8.0)
    assert between(None, now) is None and between(began, now._replace(cpus=1)) is None


def test_spans_together() -> None:
    """What one span has too little, as two clocks are compared, another has too much."""
    assert share([Taken(2.0, 8.0)]) == 0.25
    assert share([Taken(-0.1, 1.0), None, Taken(0.3, 1.0)]) == 0.1
    assert share([Taken(-0.1, 1.0)]) == 0.0 and share([Taken(1.2, 1.0)]) == 1.0
    assert share([Taken(0.1, 0.1)]) is None  # too short to tell
    assert share([None]) is share([]) is None


def test_what_is_said() -> None:
    assert remark(0.05) is remark(0.0) is remark(None) is None
    said = remark(0.234)
    assert said and said.startswith("other processes took 23% of the processors")
    assert "measure again" in said


@linux
def test_a_process_that_spins_beside_us_is_seen_and_a_child_is_ours() -> None:
    """The one that spins is no child of ours: who started it has ended. Other load on this machine
    would only add to what is seen; of a child it is measured how much more it makes."""
    began = read()
    start = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPIN.format(1.0)!r}])"
    )
    subprocess.run([sys.executable, "-c", start], check=True)
    sleep(0.8)
    span = between(began, read())
    assert span is not None and span.all >= 0.8
    assert span.others > 0.15  # of about 0.8 s, on a machine that three others load as well
    child = subprocess.Popen([sys.executable, "-c", SPIN.format(0.6)])
    before, end = read(), perf_counter() + 0.4
    while perf_counter() < end:
        sleep(0.05)
    after = read()
    child.wait()
    assert before and after and after.own - before.own > 0.05
    assert contention.PROC == Path("/proc")
