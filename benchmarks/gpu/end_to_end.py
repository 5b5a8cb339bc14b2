"""Tokens a second on a GPU, on a synthetic pair, against transformers; and one step looked at.

The pair is built here: random networks that share a core (benchmarks/networks.py), and for each
temperature a draft whose alpha is that asked for, found by bisection as benchmarks/pairs.py does.
The formula is Theorem 3.8 with the alpha that the texts had, and with passes timed by the GPU's
clock. transformers' static cache is compiled for each batch size, which takes a minute: it runs at
the first one.

    python benchmarks/gpu/end_to_end.py --params 3B --draft-params 60M --alpha 0.8
    python benchmarks/gpu/end_to_end.py --family t5 --params 11B --draft-params 77M \\
        --alpha 0.75 0.62 --gammas 7 --batches 1 --runtimes graphs  # the paper's headline
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import cycle
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import foretoken
import gpu
import pairs
from foretoken import theory
from foretoken.models.base import Model
from networks import FAMILIES, count, network, shape

PROMPT = 32


def main() -> None:
    parser = gpu.parser(__doc__)
    parser.add_argument("--family", choices=("llama", "t5"), default="llama")
    parser.add_argument("--params", default="1B")
    parser.add_argument("--draft-params", default="60M")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.8], help="one per temperature")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--runtimes", nargs="+", default=["graphs", "compiled"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    arguments = parser.parse_args()
    gpu.need()
    target = _network(arguments, arguments.params, pairs.TARGET_EPS, 0)
    goals = dict(zip(arguments.temperatures, cycle(arguments.alpha), strict=False))
    drafts = {t: _draft(arguments, target, t, alpha) for t, alpha in goals.items()}
    table = Table(
        "batch", "T", "way", "tokens/s", "over plain", "formula", "alpha", "waits", "load"
    )
    rows: list[dict[str, Any]] = []
    for batch in arguments.batches:
        for temperature in arguments.temperatures:
            rows += _rows(arguments, target, drafts[temperature], batch, temperature)
            gpu.save("gpu-end-to-end", arguments.out, {"rows": rows} | vars(arguments))
    names = ("batch", "temperature", "way", "speed", "speedup", "formula", "alpha", "waits", "load")
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in names))
    Console().print(table)


def _network(arguments: Any, params: str, eps: float, seed: int) -> Any:
    family, dtype = FAMILIES[arguments.family], getattr(torch, arguments.dtype)
    size = shape(family, count(params), arguments.vocab)
    config = family.config(*size, arguments.vocab, 4096)
    return network(family, dtype, 0, config, 100 + seed, eps, gpu.DEVICE).to(dtype)


def _draft(arguments: Any, target: Any, temperature: float, goal: float) -> Any:
    """A draft whose distributions are that near the target's on the target's own texts."""
    texts = pairs.texts(target, pairs.NEW, temperature > 0, seed=0)
    near = pairs.alpha if temperature else pairs.agreement

    def measured(eps: float) -> float:
        draft = _network(arguments, arguments.draft_params, eps, 1)
        return near(texts.distributions, texts.seen_by(draft))

    eps, reached = pairs.bisect(measured, goal)
    print(f"T = {temperature:g}: a draft of eps {eps:.3g} has alpha {reached:.3f}", flush=True)
    return _network(arguments, arguments.draft_params, eps, 1)


def _rows(
    arguments: Any, target: Any, draft: Any, batch: int, temperature: float
) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(batch)
    prompts = torch.randint(3, arguments.vocab, (batch, PROMPT), generator=dice).tolist()
    facts = {"batch": batch, "temperature": temperature}
    rows = [
        facts | row
        for runtime in arguments.runtimes
        for row in _ours(arguments, target, draft, runtime, prompts, temperature)
    ]
    for row in rows:
        row["speedup"] = row["speed"] / rows[0]["speed"]
    for name, run in _peers(target, draft, prompts, arguments, temperature).items():
        rows.append(facts | {"way": name} | _peer(run, batch * arguments.tokens, arguments.repeats))
        print(rows[-1], flush=True)
    return rows


def _ours(
    arguments: Any,
    target: Any,
    draft: Any,
    runtime: str,
    prompts: list[list[int]],
    temperature: float,
) -> list[dict[str, Any]]:
    """A row for each gamma; "load": seconds until its first text is done, loading included."""
    start, batch = perf_counter(), len(prompts)
    spec = foretoken.load(target, draft, device=gpu.DEVICE, runtime=runtime)
    options = {"max_new_tokens": arguments.tokens, "temperature": temperature, "seed": 0}
    rows: list[dict[str, Any]] = []
    for gamma in (0, *arguments.gammas, None):
        spec.generate(prompts, gamma=gamma, **options)  # all is recorded
        waited = perf_counter() - start
        texts: list[Any] = []

        def ours(gamma: int | None = gamma, texts: list[Any] = texts) -> None:
            texts[:] = spec.generate(prompts, gamma=gamma, **options)

        speed = batch * arguments.tokens / _seconds(ours, arguments.repeats)
        overlaps = [o for text in texts for step in text.steps for o in step.overlaps]
        alpha = fmean(overlaps) if overlaps else None
        row: dict[str, Any] = {"way": f"{runtime}, gamma {'auto' if gamma is None else gamma}"}
        row |= {"speed": speed, "runtime": texts[0].stats.runtime, "alpha": alpha, "load": waited}
        if gamma:
            row["formula"] = _formula(spec, alpha or 0.0, gamma, batch)
        if gamma is not None:
            row["waits"] = _waits(spec, prompts, gamma, options)
        rows.append(row)
        print(batch, temperature, row, flush=True)  # the machine may be gone before the end
        start = perf_counter()
    return rows


def _seconds(run: Callable[[], object], repeats: int) -> float:
    """The median of the host's clock, prefill included, until the GPU is idle again."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return median(times)


@torch.inference_mode()
def _formula(spec: Any, alpha: float, gamma: int, batch: int) -> float:
    """Theorem 3.8 with v: what the passes' times allow at that alpha."""
    one, block = (_pass(spec.target, n, batch) for n in (1, gamma + 1))
    draft_token = _pass(spec.drafter.model, 1, batch)
    return theory.walltime_factor(alpha, gamma, draft_token / one, v=lambda n: block / one)


def _pass(model: Model, n: int, batch: int) -> float:
    block = torch.ones(batch, n, dtype=torch.long, device=gpu.DEVICE)
    prompt = [1] * PROMPT
    if model.encoder_decoder:
        model.start([[1]] * batch, [prompt] * batch)
    else:
        model.start([prompt] * batch)
    length = 1 if model.encoder_decoder else PROMPT
    try:

        def run() -> None:
            model.score(block, [n] * batch)
            model.set_lengths([length] * batch)

        return gpu.seconds(run)
    finally:
        model.leave(list(range(batch)))


def _waits(spec: Any, prompts: list[list[int]], gamma: int, options: dict[str, Any]) -> float:
    """How often the host waits for the GPU, a step; the prefill's count as well, so 1 and a bit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            texts = spec.generate(prompts, gamma=gamma, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(one.message) for one in caught)
    return waits / max(len(text.steps) for text in texts)


def _peers(
    target: Any, draft: Any, prompts: list[list[int]], arguments: Any, temperature: float
) -> dict[str, Callable[[], object]]:
    """transformers' generate over a dynamic and a compiled static cache, and assisted."""
    ids = torch.tensor(prompts, device=gpu.DEVICE)
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": arguments.tokens}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    options |= {"top_k": 0, "temperature": 1.0} if temperature else {}
    peers: dict[str, Callable[[], object]] = {
        "transformers": lambda: target.generate(ids, **options)
    }
    if len(prompts) == arguments.batches[0]:
        static = options | {"cache_implementation": "static"}
        peers["transformers static"] = lambda: target.generate(ids, **static)
    if len(prompts) == 1:  # it serves no more
        for gamma in arguments.gammas:
            peers[f"transformers assisted {gamma}"] = _assisted(target, draft, ids, gamma, options)
    return peers


def _assisted(
    target: Any, draft: Any, ids: torch.Tensor, gamma: int, options: dict[str, Any]
) -> Callable[[], object]:
    def run() -> object:
        settings = draft.generation_config
        settings.num_assistant_tokens = gamma
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        return target.generate(ids, assistant_model=draft, **options)

    return run


def _peer(run: Callable[[], object], tokens: int, repeats: int) -> dict[str, Any]:
    try:
        for _ in range(2):
            run()
        return {"speed": tokens / _seconds(run, repeats)}
    except Exception as error:  # another's fault is no reason to lose our figures
        return {"speed": None, "error": f"{type(error).__name__}: {error}"[:300]}


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    main()
