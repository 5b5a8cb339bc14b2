"""What other processes took: the arithmetic on times given, and a process that does spin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep
from types import SimpleNamespace

import psutil
import pytest

from foretoken.costing.contention import (
    ProcessorReading,
    ProcessorSeconds,
    compute_others_share,
    describe_contention,
    measure_since,
    subtract_readings,
    take_reading,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="others are counted on Linux only")
SPIN = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


def test_the_processors_that_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time, waiting for disks and a guest's time, which is in user, do not count; steal
    does."""
    times = {"user": 1.0, "nice": 2.0, "system": 3.0, "idle": 1000.0, "iowait": 2000.0}
    times |= {"irq": 4.0, "softirq": 5.0, "steal": 6.0, "guest": 1.0}
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(**times)] * 3)
    monkeypatch.setattr(Path, "read_text", lambda self: "cpu  9\ncpu0 1\ncpu1 1\ncpu2 1\nintr 9")
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 2])
    reading = take_reading()
    assert reading is not None and (reading.cpus, reading.busy) == (2, 42.0)


def test_processors_that_are_off_do_not_shift_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [SimpleNamespace(user=busy) for busy in (1.0, 20.0, 300.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: counted)
    monkeypatch.setattr(Path, "read_text", lambda self: "cpu  9\ncpu0 1\ncpu2 1\ncpu13 1\nintr 9")
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 2])
    reading = take_reading()
    assert reading is not None and (reading.cpus, reading.busy) == (2, 21.0)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 1])
    assert take_reading() is None


def test_a_count_of_fewer_processors_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may show some of the host's processors, under other numbers."""
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0, 10**6])
    assert take_reading() is None


def test_a_system_without_affinity_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil.Process, "cpu_affinity", raising=False)
    assert take_reading() is None and measure_since(None) is None


def test_what_is_busy_and_not_ours_is_others() -> None:
    began, now = ProcessorReading(10.0, 2, 100.0, 30.0), ProcessorReading(14.0, 2, 106.0, 34.0)
    assert subtract_readings(began, now) == ProcessorSeconds(2.0, 8.0)
    assert (
        subtract_readings(None, now) is None
        and subtract_readings(began, now._replace(cpus=1)) is None
    )


def test_spans_together() -> None:
    """What one span has too little, as two clocks are compared, another has too much."""
    assert compute_others_share([ProcessorSeconds(2.0, 8.0)]) == 0.25
    assert (
        compute_others_share([ProcessorSeconds(-0.1, 1.0), None, ProcessorSeconds(0.3, 1.0)]) == 0.1
    )
    assert (
        compute_others_share([ProcessorSeconds(-0.1, 1.0)]) == 0.0
        and compute_others_share([ProcessorSeconds(1.2, 1.0)]) == 1.0
    )
    assert compute_others_share([ProcessorSeconds(0.1, 0.1)]) is None  # too short to tell
    assert compute_others_share([None]) is compute_others_share([]) is None


def test_what_is_said() -> None:
    assert (
        describe_contention(0.05) is describe_contention(0.0) is describe_contention(None) is None
    )
    said = describe_contention(0.234)
    assert said and said.startswith("other processes took 23% of the processors")
    assert "measure again" in said


@linux
def test_a_process_that_spins_beside_us_is_seen_and_a_child_is_ours() -> None:
    """The one that spins is no child of ours: who started it has ended. Other load on this machine
    would only add to what is seen; of a child it is measured how much more it makes."""
    began = take_reading()
    start = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SPIN.format(1.0)!r}])"
    )
    subprocess.run([sys.executable, "-c", start], check=True)
    sleep(0.8)
    span = subtract_readings(began, take_reading())
    assert span is not None and span.all >= 0.8
    assert span.others > 0.15  # of about 0.8 s, on a machine that three others load as well
    child = subprocess.Popen([sys.executable, "-c", SPIN.format(0.6)])
    before, end = take_reading(), perf_counter() + 0.4
    while perf_counter() < end:
        sleep(0.05)
    after = take_reading()
    child.wait()
    assert before and after and after.own - before.own > 0.05
