"""Passes in a forked child, in two threads, beside networks that close, behind a Ctrl-C: each in a
process of its own, whose threads are as a user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.kernels import library

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.cpu_only
BEGINNING = """
import gc, os, signal, threading, time
import torch
import tiny
from foretoken.models.native.conversion import NativeConversion

torch.set_num_threads(2)

def made(seed):
    model = NativeConversion(None, "int8", lambda: tiny.llama(seed=seed, head_dim=16)).load_model()
    model.passes.threads = 3  # more than some machines have processors
    return model

def logits(model, tokens=tuple(range(2, 50))):
    model.permute([])
    model.start([[]])
    return model.score([list(tokens)], [len(tokens)])[0].numpy().tobytes()

model = made(0)
expected = logits(model)

class Beside:
    # passes of another network, in another thread, until told to end
    def __enter__(self):
        self.model, self.ended, self.same = made(1), False, True
        self.expected = logits(self.model)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def run(self):
        while not self.ended:
            self.same &= logits(self.model) == self.expected

    def __exit__(self, *error):
        self.ended = True
        self.thread.join()
        assert self.same
"""
FORKED = """
def child_runs():
    child = os.fork()
    if not child:
        try:
            os._exit(0 if logits(model) == expected else 3)
        finally:
            os._exit(4)
    assert os.waitpid(child, 0)[1] == 0
    assert logits(model) == expected

child_runs()
with Beside():
    for _ in range(20):
        child_runs()
"""
TWO = """
with Beside():
    assert all(logits(model) == expected for _ in range(100))
"""
CLOSED = """
with Beside():
    for _ in range(5):
        other = made(0)
        assert logits(other) == expected
        del other
        gc.collect()
"""
INTERRUPTED = """
def interrupt():
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)

with Beside():
    threading.Thread(target=interrupt).start()
    begun = time.monotonic()
    try:
        while time.monotonic() < begun + 60:
            model.permute([])
            model.start([list(range(2, 90))])
    except KeyboardInterrupt:
        assert time.monotonic() < begun + 30
    else:
        raise AssertionError("not interrupted")
    assert logits(model) == expected
"""
HELD = """
import subprocess, sys

# processes that hold every processor, so that runs do with fewer threads
hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
try:
    for _ in range(100):
        assert logits(model) == expected
    long = [2 + i % 60 for i in range(model.context)]
    assert len({logits(model, long) for _ in range(3)}) == 1
finally:
    for hog in hogs:
        hog.kill()
        hog.wait()
model.passes.threads, model.passes._opened = 1, None
assert logits(model, long) == logits(made(0), long)
"""
ENDS = """
def run():
    while True:
        logits(model)

threading.Thread(target=run, daemon=True).start()
time.sleep(0.2)
"""
FEW = """
import resource

# this user's threads are as many as there may be: no helper can start
pid = os.fork()  # whose team has no threads yet
if pid:
    assert os.waitpid(pid, 0)[1] == 0
else:
    try:
        os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        try:
            logits(model)
        except MemoryError:
            os._exit(0)
        os._exit(3)
    finally:
        os._exit(4)
"""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not library.LIBRARY_FILE.exists():
        pytest.skip("the native decoder was not compiled")


MORE = [
    pytest.param(script, marks=pytest.mark.prove) for script in (TWO, CLOSED, INTERRUPTED, ENDS)
]


@pytest.mark.parametrize("script", [FORKED, HELD, *MORE])
def test_each_engine_has_its_bits_whatever_runs_beside_it(script: str) -> None:
    ended = run(script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.prove
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="limits bind others")
def test_a_system_without_threads_refuses_a_pass() -> None:
    ended = run(FEW)
    assert (ended.returncode, ended.stderr) == (0, "")


def run(script: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    command = [sys.executable, "-W", "ignore", "-c", BEGINNING + script]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
