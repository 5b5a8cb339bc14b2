"""Shared by all tests: no network, one thread a worker, no time limit on hypothesis examples."""

import atexit
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" not in os.environ:  # else the one of all workers
    # Nothing that is found out here is kept for the user's own runs, nor taken from them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="foretoken-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

os.environ["FORETOKEN_TARGET"] = "novels"  # whatever else is installed
os.environ.pop("COLUMNS", None)  # workers of pytest-xdist have one, as a terminal would

import pytest
import torch
from hypothesis import settings

from console import Run, script
from foretoken import slow_log
from foretoken.costing import contention, pair_costs
from foretoken.costing.costs import Costs
from foretoken.costing.stored_costs import StoredCosts
from foretoken.errors import RefusedError
from foretoken.loading.runtimes import native

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job, and its children
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
# Two busy cores make times meaningless. Examples are drawn anew every time, more by `make prove`
settings.register_profile("foretoken", deadline=None, max_examples=10)
settings.register_profile("prove", deadline=None, max_examples=200)
settings.load_profile("foretoken")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The native decoder runs on CPUs; what draws its examples is among the proofs, as are the
    cases of tests marked `daily` that it does not name."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        marked = item.get_closest_marker("daily") and not item.get_closest_marker("prove")
        if marked and hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        for item in rare(alike):
            item.add_marker("prove")
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("drawn")
        if "native" in item.keywords:
            item.add_marker("cpu_only")


def rare(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of a test marked `daily` that `make test` leaves to `make prove`: all without an id
    that the mark names; where it names none, all that are not needed to show every id once."""
    ids = {case: {*enumerate(case.callspec._idlist)} for case in cases}  # pyright: ignore
    if named := {*map(str, cases[0].get_closest_marker("daily").args)}:  # pyright: ignore
        left = [case for case in cases if named.isdisjoint(id for _, id in ids[case])]
        if len(left) == len(cases) > 1:
            raise pytest.UsageError(f"{cases[0].nodeid}: {sorted(named)} are no ids of its cases")
        return left
    missing, left = set().union(*ids.values()), list(cases)
    while missing:
        left.remove(most := max(left, key=lambda case: len(ids[case] & missing)))
        missing -= ids[most]
    return left


# Frozen, for all pairs: what is measured on a busy machine differs from run to run, and takes up to
# a second for each kind of sampling and size of batch
PROBED = StoredCosts(Costs(((0, 0.0), (8, 0.8)), ((1, 1.0), (8, 1.3)), ((1, 0.1),)), 1.0, 0.0)
REAL = {"probe": pair_costs.probe, "probe_shared": pair_costs.probe_shared}
FROZEN = {"probe": lambda *args: PROBED, "probe_shared": lambda costs, *args: PROBED}
vars(pair_costs).update(FROZEN)  # also in fixtures of modules


@pytest.fixture(autouse=True)
def step_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs of steps are measured in tests marked `real_costs` only."""
    if "real_costs" in request.keywords:
        for name, probe in REAL.items():
            monkeypatch.setattr(pair_costs, name, probe)


@pytest.fixture(autouse=True)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models run on torch here, as if the native decoder were missing: a conversion takes a second.
    Tests marked `native` have it."""

    def missing() -> None:
        raise RefusedError("the native decoder cannot be used: it is off in this test")

    if "native" not in request.keywords:
        monkeypatch.setattr(native, "require_library", missing)


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on this machine is not counted, nor for how long anything takes: no output and
    no kept costs depend on it."""
    monkeypatch.setattr(contention, "take_reading", lambda: None)
    monkeypatch.setattr(slow_log, "LOG_AFTER_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """What a command called in this process sets for all of it, set back."""
    level, ends = logging.root.level, (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(end) for end in ends]
    yield
    logging.root.setLevel(level)
    for end, handler in zip(ends, handlers, strict=True):
        signal.signal(end, handler)


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """No file can grow beyond so many bytes."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def at(size: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return at


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the console script in this process."""
    return script(monkeypatch, capsys)
