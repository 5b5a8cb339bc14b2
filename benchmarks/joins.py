"""What a row that joins and leaves costs beside others, against the same on an empty model.

Rows of random ids: one of 64 tokens joins and leaves, alone and beside 15 of 1,024 tokens, in turn.
The first to join makes new arrays, as those of 15 copies of a row are full ("growing"): measured
apart, as are a pass and one behind the leave of the first row, which closes its gap.

Expected: beside the others at most 1.2 times as long as alone.

    python benchmarks/joins.py DIR/target --runtime native    # DIR: a folder of pairs.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foretoken.engine.batch import limit_torch_threads
from foretoken.models.base import Model
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.packed import pack
from machine import describe


def packed(network: Any) -> Model:
    pack(network)
    return CausalModel(network)


RUNTIMES: dict[str, Callable[[Any], Model]] = {
    "stock": CausalModel,
    "packed": packed,
    "native": lambda network: NativeConversion(None, "float32", lambda: network).load_model(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--runtime", choices=RUNTIMES, required=True)
    parser.add_argument("--rows", type=int, default=15)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = RUNTIMES[arguments.runtime](
        AutoModelForCausalLM.from_pretrained(arguments.target, trust_remote_code=False).eval()
    )
    with limit_torch_threads(model):
        rounds = [
            measured(model, arguments.rows, arguments.context, arguments.prompt)
            for _ in range(1 + arguments.rounds)  # the first warms up
        ]
    seconds = {name: median(each[name] for each in rounds[1:]) for name in rounds[0]}
    ratio = seconds["beside"] / seconds["alone"]
    result = {"machine": describe(), **vars(arguments), "seconds": seconds, "ratio": ratio}
    print(json.dumps(result | {"rounds": rounds[1:]}, indent=2))


def measured(model: Model, rows: int, context: int, prompt: int) -> dict[str, float]:
    """Seconds of each case, on a model without rows, which it has again afterwards."""
    model.permute([])
    seconds = {"alone": joining(model, prompt, 0)}
    model.start([ids(model, context)])
    model.permute([0] * rows)
    model.score([[1]] * rows, [1] * rows)
    seconds["growing"] = joining(model, prompt, rows)
    seconds["beside"] = joining(model, prompt, rows)
    seconds["pass"] = scoring(model, rows)
    model.leave([0])
    seconds["pass that closes a gap"] = scoring(model, rows - 1)
    model.permute([])
    return seconds


def joining(model: Model, prompt: int, others: int) -> float:
    """Seconds in which a row joins and leaves."""
    fresh = ids(model, prompt)
    start = perf_counter()
    model.start([fresh])
    model.leave([others])
    return perf_counter() - start


def scoring(model: Model, rows: int) -> float:
    start = perf_counter()
    model.score([[1]] * rows, [1] * rows)
    return perf_counter() - start


def ids(model: Model, count: int) -> list[int]:
    return torch.randint(model.vocab_size, (count,)).tolist()


if __name__ == "__main__":
    main()
