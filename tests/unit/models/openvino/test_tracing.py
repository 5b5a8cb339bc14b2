"""Signals arrive, whatever models have run on OpenVINO in this process and are gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from tiny import folder, llama

pytestmark = pytest.mark.cpu_only

PROGRAM = """
import faulthandler, os, signal, sys
faulthandler.enable()
import foretoken
a, b = (foretoken.load(name, "none", runtime="openvino") for name in sys.argv[1:])
del a
del b
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.prove
def test_a_signal_after_models_that_are_gone(tmp_path: Path):
    names = [folder(tmp_path / name, llama(64, seed=seed)) for seed, name in enumerate("ab")]
    command = [sys.executable, "-c", PROGRAM, *map(str, names)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert process.stdout == "heard\n", (process.returncode, process.stderr)
