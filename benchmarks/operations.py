"""Where a pass goes inside OpenVINO: time by kind of operation and kernel, from its own counters.

Expected: nearly all in the matrix products, whose weights are read from memory.

    python benchmarks/operations.py --tokens 8                  # the target that ships
    python benchmarks/operations.py --target DIR --dtype int8   # another, one token a pass
"""

from __future__ import annotations

import argparse
from collections import Counter
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from foretoken import load
from foretoken.models.openvino import conversion
from foretoken.models.openvino.paged import PagedModel
from foretoken.timing import measure_seconds

PROMPT, PASSES, WARM = 32, 60, 10
settings = conversion.settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="a folder; left out: the pair that ships")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=1, help="of a pass")
    arguments = parser.parse_args()
    conversion.settings = counting
    spec = (
        load(arguments.target, "none", dtype=arguments.dtype)
        if arguments.target
        else load("novels")
    )
    if not isinstance(spec.target, PagedModel):
        parser.error(f"the target runs on {spec.target.runtime}, without these counters")
    seconds = passes(spec.target, arguments.tokens)
    print(f"{1e3 * seconds:.2f} ms a pass of {arguments.tokens} tokens, median of {PASSES - WARM}")
    show(spec.target)


def counting(*arguments: Any) -> dict[str, Any]:
    return {**settings(*arguments), "PERF_COUNT": "YES"}


def passes(model: PagedModel, tokens: int) -> float:
    """Median seconds of a pass over so many tokens behind a short prompt."""
    model.start([list(range(5, 5 + PROMPT))])
    seconds = []
    for i in range(1, PASSES + 1):
        seconds.append(measure_seconds(partial(model.score, [[7] * tokens], [tokens])))
        model.set_lengths([PROMPT + i])
    return median(seconds[WARM:])


def show(model: PagedModel) -> None:
    """The counters: averages over all passes, the prompt's among them."""
    microseconds: Counter[tuple[str, str]] = Counter()
    nodes: Counter[tuple[str, str]] = Counter()
    for node in model.flat.request.get_profiling_info():
        kind = node.node_type, node.exec_type
        nodes[kind] += 1
        microseconds[kind] += node.real_time // timedelta(microseconds=1)
    table = Table("operation", "kernel", "how many", "ms", "share")
    for kind, time in microseconds.most_common(8):
        table.add_row(
            *kind, str(nodes[kind]), f"{time / 1e3:.3f}", f"{time / microseconds.total():.1%}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
