"""What a command has imported when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from scripts import ROOT

HEAVY = (
    "torch",
    "transformers",
    "native",
    "safetensors",
    "scipy",
    "matplotlib",
)
CALL = """
import json, sys
from importlib import import_module

for args in json.loads(sys.argv[1]):
    sys.argv = args
    try:
        import_module(args[0] + ".cli").main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


def modules(*calls: tuple[str, ...], name: str = "foretoken") -> list[tuple[int, set[str], str]]:
    """Of every call of a package's command in a fresh process: exit code, what is imported after
    it, and its errors."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", CALL, json.dumps([(name, *call) for call in calls])]
    process = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert not process.returncode, process.stderr[-2000:]
    found, said = [], []
    for line in process.stderr.splitlines():
        if line.startswith("["):
            code, names = json.loads(line)
            found.append((code, set(names), "\n".join(said)))
            said = []
        else:
            said.append(line)
    assert len(found) == len(calls)
    return found
