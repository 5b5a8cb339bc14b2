"""Seconds and memory of loading a model: converting it, from the cache, and as transformers does.

Each in a process of its own. Memory is the process's anonymous memory, at the peak and at rest;
pages mapped from files, which the system can drop at any time, are a column of their own.
Expected: from the cache about as fast as transformers, memory at rest little above the weights.

    python benchmarks/loading.py --target DIR
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from machine import save

ROUNDS = 5
CODE = """
import json, sys, threading, time
def kilobytes():
    status = dict(line.split(":") for line in open("/proc/self/status"))
    return {k: int(status[k].split()[0]) for k in ("RssAnon", "RssFile")}
import torch, transformers, foretoken
from foretoken.loading.sources import find_source
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.runtimes.place import place
transformers.utils.logging.disable_progress_bar()
before, peak, done = kilobytes(), [0], threading.Event()
def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], kilobytes()["RssAnon"])
threading.Thread(target=watch, daemon=True).start()
began = time.perf_counter()
if sys.argv[2] == "transformers":
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32, trust_remote_code=False)
    weights = sum(p.numel() for p in model.parameters()) * 4
else:
    read = find_source(sys.argv[1], None, trust=False)
    model = place(ModelFacts(read), Placement()).model
    weights = sum(p.numel() for p in read.structure.parameters()) * 4
seconds = time.perf_counter() - began
done.set()
after = kilobytes()
print(json.dumps({
    "seconds": seconds, "weights_mb": weights / 1e6,
    "rest_mb": (after["RssAnon"] - before["RssAnon"]) / 1e3,
    "mapped_mb": (after["RssFile"] - before["RssFile"]) / 1e3,
    "peak_mb": (peak[0] - before["RssAnon"]) / 1e3,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    target = parser.parse_args().target
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        rows.append({"how": "converted", **loaded(target, "ours", cache)})
        loads: dict[str, list[dict[str, float]]] = {"from the cache": [], "transformers": []}
        for _ in range(ROUNDS):
            loads["from the cache"].append(loaded(target, "ours", cache))
            loads["transformers"].append(loaded(target, "transformers", cache))
    for way, each in loads.items():
        rows.append({"how": way} | {k: median(one[k] for one in each) for k in each[0]})
    print(save("loading", {"rounds": ROUNDS, "rows": rows}), file=sys.stderr)
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.2f}" for v in row.values()))
    Console().print(table)


def loaded(target: str, way: str, cache: str) -> dict[str, float]:
    process = subprocess.run(
        [sys.executable, "-c", CODE, target, way],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return json.loads(process.stdout)


if __name__ == "__main__":
    main()
