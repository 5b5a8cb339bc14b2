"""Milliseconds of a forward on a GPU against the floor of reading its weights once.

Random Llamas of any size, n new tokens behind a context, in five ways: eager over the ragged
cache, as a recorded graph, as one whose layers torch compiles first, as one whose compiled
attention reads only the blocks that each sequence has, and transformers' own model compiled by
torch over its static cache (in a batch, with the longest context for all). "first" are the seconds
of the first pass of each n.

    python benchmarks/gpu/passes.py             # 60M to 8B
    python benchmarks/gpu/passes.py --sizes 6M --vocab 8192  # 6M do not hold more tokens
    python benchmarks/gpu/passes.py --sizes 6M 1B --ways eager graphs
    python benchmarks/gpu/passes.py --sizes 1B --context 16384 512 512 512 --ways compiled blocks
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import StaticCache

import gpu
from foretoken.models.graphs import GraphModel
from foretoken.models.stock.model import CausalModel

NEW = (1, 2, 4, 8, 16)
SIZES = ("60M", "500M", "1B", "3B", "8B")


def main() -> None:
    parser = gpu.parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--context", type=int, nargs="+", default=[256], help="of each sequence")
    arguments = parser.parse_args()
    gpu.need()
    speed = gpu.bandwidth()
    table = Table("model", "way", *(f"n={n}" for n in NEW), "floor", "n=1 over floor", "first")
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes:
        dtype, room = getattr(torch, arguments.dtype), max(arguments.context) + 64
        model = gpu.random_network(size, arguments.vocab, dtype, context=max(4096, room))
        floor = gpu.weight_bytes(model) / speed
        for way in arguments.ways:
            times = {n: _timed(way, model, n, arguments.context) for n in NEW}
            first = {n: times[n][0] for n in NEW}
            seconds = {n: times[n][1] for n in NEW}
            rows.append({"size": size, "way": way, "floor": floor, "seconds": seconds})
            rows[-1]["first"] = first
            print(rows[-1], flush=True)  # the machine may be gone before the end
            cells = [f"{1e3 * seconds[n]:.3f}" for n in NEW]
            more = f"{1e3 * floor:.3f}", f"{seconds[1] / floor:.2f}", f"{sum(first.values()):.1f}"
            table.add_row(size, way, *cells, *more)
        del model
        torch.cuda.empty_cache()
    Console().print(table, "milliseconds; floor: weights read once at", f"{speed / 1e9:.0f} GB/s")
    gpu.save("gpu-passes", arguments.out, {"bandwidth": speed, "rows": rows} | vars(arguments))


@torch.inference_mode()
def _timed(way: str, model: Any, n: int, context: list[int]) -> tuple[float, float]:
    """Seconds of the first pass, and of a later one."""
    run, start = WAYS[way](model, n, context), perf_counter()
    run()
    torch.cuda.synchronize()
    return perf_counter() - start, gpu.seconds(run)


def _over(kind: Callable[[Any], CausalModel | GraphModel]) -> Callable[..., Callable[[], object]]:
    def ready(model: Any, n: int, context: list[int]) -> Callable[[], object]:
        size = len(context)
        runner, block = kind(model), torch.ones(size, n, dtype=torch.long, device=gpu.DEVICE)
        runner.start([[1] * length for length in context])

        def run() -> object:
            logits = runner.score(block, [n] * size)
            runner.set_lengths(context)
            return logits

        return run

    return ready


def _static(model: Any, n: int, contexts: list[int]) -> Callable[[], object]:
    context, size = max(contexts), len(contexts)
    torch.compiler.reset()
    cache = StaticCache(config=model.config, max_cache_len=context + 64)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    prompt = torch.ones(size, context, dtype=torch.long, device=gpu.DEVICE)
    model(input_ids=prompt, past_key_values=cache)
    block = torch.ones(size, n, dtype=torch.long, device=gpu.DEVICE)
    places = torch.arange(context, context + n, device=gpu.DEVICE)[None]

    def run() -> object:
        for layer in cache.layers:  # back to where it was
            getattr(layer, "cumulative_length", torch.zeros(1)).fill_(context)
        return forward(input_ids=block, position_ids=places, past_key_values=cache)

    return run


WAYS = {
    "eager": _over(CausalModel),
    "graphs": _over(GraphModel),
    "compiled": _over(partial(GraphModel, compiled=True)),
    "blocks": _over(partial(GraphModel, compiled=True, by_blocks=True)),
    "static": _static,
}


if __name__ == "__main__":
    main()
