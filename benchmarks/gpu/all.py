"""Everything that is measured on a GPU, by one command in less than 12 minutes, most wanted first.

Each script runs for its share of the time at most, and writes its JSON as it goes; one that fails
or is ended does not keep the next from running. All tables are printed again at the end.

    python benchmarks/gpu/all.py
    python benchmarks/gpu/all.py --only paper batches --out FOLDER
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import NamedTuple

import gpu

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHOWN_LINES = 40  # at the end, the last lines of each script: its table


class Part(NamedTuple):
    seconds: int  # at most
    command: str  # a script of this folder and its options


PARTS = {
    # does it run: graphs that are recorded, one wait for the GPU in a step
    "runs": Part(80, "suite.py --only tests --tests tests/unit/test_waits.py tests/unit/models"),
    "same texts": Part(60, "suite.py --only identity --families llama t5 --runtimes graphs"),
    # the paper's headline at its scale: 3.4 times at T = 0, 2.6 times at T = 1
    "paper": Part(
        180,
        "end_to_end.py --family t5 --params 11B --draft-params 77M --alpha 0.75 0.62 --gammas 7 "
        "--batches 1 --runtimes graphs --tokens 64 --repeats 3",
    ),
    "batches": Part(
        240,
        "end_to_end.py --params 3B --draft-params 60M --alpha 0.8 --gammas 4 "
        "--batches 1 4 16 64 --runtimes compiled --tokens 64 --repeats 3",
    ),
    "passes": Part(60, "passes.py --sizes 3B --ways graphs compiled"),
    "draft passes": Part(30, "passes.py --sizes 6M --vocab 8192 --ways graphs compiled"),
    "lengths": Part(
        50, "passes.py --sizes 1B --context 16384 512 512 512 --ways graphs compiled blocks"
    ),
}


def main() -> None:
    parser = gpu.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    arguments = parser.parse_args()
    gpu.need()
    shown: list[str] = []
    for name in arguments.only:
        start = perf_counter()
        lines, outcome = _run(PARTS[name], arguments.out)
        title = f"== {name}: {outcome}, {perf_counter() - start:.0f} s"
        shown += [title, *lines[-SHOWN_LINES:]]
        print(title, flush=True)
    print("\n".join(shown))


def _run(part: Part, out: Path) -> tuple[list[str], str]:
    """The lines that the script printed, and how it ended."""
    script, *options = part.command.split()
    command = [sys.executable, str(HERE / script), *options, "--out", str(out.resolve())]
    environment = os.environ | {"COLUMNS": "140"}
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # to be ended with all processes that it has started
    ) as run:
        timer = Timer(part.seconds, os.killpg, (run.pid, signal.SIGKILL))
        timer.start()
        assert run.stdout is not None
        for line in run.stdout:  # shown as it comes: the machine may be gone before the end
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    late = not timer.is_alive()
    timer.cancel()
    if late:
        return lines, f"ended after {part.seconds} s"
    return lines, "done" if run.returncode == 0 else f"failed with {run.returncode}"


if __name__ == "__main__":
    main()
