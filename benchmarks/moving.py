"""A batch that rows join and leave: how long others wait while a long prompt is read, and how much
is read again in a conversation.

Expected: the longest gap of a running row at most 2.5 median steps while a prompt of a whole
context is read; in a turn of a conversation at most 64 tokens beside the new ones, by target and
draft, where the runtime keeps what it has read.

    python benchmarks/moving.py --target T --draft D [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

from foretoken import Engine, Speculator, load
from foretoken.drafters.base import list_parts
from foretoken.generation_config import EndTokens
from machine import save

ROWS, SHORT, WARM, PLAIN = 8, 64, 10, 20  # running rows, their prompts, steps before it and alone
MEMORY = 2_000_000_000  # bytes for keys and values
TURNS, SAID = 10, 32  # of a conversation; tokens of a question and of an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    pair = load(arguments.target, arguments.draft, dtype=arguments.dtype, runtime=arguments.runtime)
    spec = replace(
        pair, ends=EndTokens(decoder_start=pair.ends.decoder_start)
    )  # no text ends early
    gaps = [gap(spec, arguments.gamma, seed) for seed in range(arguments.repeats)]
    for each in gaps:
        print(each, file=sys.stderr)
    turns = list(conversation(spec, arguments.gamma))
    print(turns, file=sys.stderr)
    result = {
        "arguments": vars(arguments),
        "longest_over_median": median(each["longest"] / each["median"] for each in gaps),
        "gaps": gaps,
        "turns": turns,
    }
    print(save(f"moving-{spec.target.runtime}-{arguments.dtype}", result))


def ids(dice: random.Random, spec: Speculator, n: int) -> list[int]:
    return [dice.randrange(100, spec.target.vocab_size) for _ in range(n)]


def gap(spec: Speculator, gamma: int, seed: int) -> dict[str, Any]:
    """Seconds of steps of `ROWS` rows: the median of those alone, and the longest while a prompt
    as long as the context is read beside them."""
    dice, context = random.Random(seed), spec.target.context or 4096
    options = {"temperature": 1.0, "gamma": gamma}
    # stated up front: a pool that grows copies itself, which would be the longest step
    with Engine(spec, kv_memory=MEMORY) as engine:
        for i in range(ROWS):
            engine.add(ids(dice, spec, SHORT), max_new_tokens=1000, seed=(seed, i), **options)
        alone = [stepped(engine)[0] for _ in range(WARM + PLAIN)][WARM:]
        long = ids(dice, spec, context - 8)
        start, name = perf_counter(), engine.add(long, max_new_tokens=4, **options)
        beside: list[float] = []
        for _ in count():
            seconds, events = stepped(engine)
            beside.append(seconds)
            if any(event.id == name for event in events):
                break
        first = perf_counter() - start
    return {
        "median": median(alone),
        "longest_alone": max(alone),
        "longest": max(beside),
        "mean": sum(beside) / len(beside),
        "steps": len(beside),
        "slowest_step": max(range(len(beside)), key=beside.__getitem__),
        "prompt": len(long),
        "first_token": first,
    }


def stepped(engine: Engine) -> tuple[float, list[Any]]:
    start = perf_counter()
    events = engine.step()
    return perf_counter() - start, events


def conversation(spec: Speculator, gamma: int) -> Iterator[dict[str, Any]]:
    """Tokens that a model reads in the prompts of a turn: those of the prompts, less what it knew.
    Of target and draft, in turn."""
    dice, context = random.Random(0), spec.target.context or 4096
    models = [
        part for part in list_parts(spec.target, spec.drafter) if part.capabilities.prefix_cache
    ]
    history = ids(dice, spec, context - 2 * (TURNS + 1) * SAID)
    with Engine(spec) as engine:
        for turn in range(TURNS + 1):
            history += ids(dice, spec, SAID)
            read = [len(history) - model.count_cached_tokens(history) for model in models]
            engine.add(history, max_new_tokens=SAID, gamma=gamma)
            seconds, completion = 0.0, None
            while completion is None:
                took, events = stepped(engine)
                seconds += took
                completion = next((event.completion for event in events if event.completion), None)
            yield {"turn": turn, "history": len(history), "read": read, "seconds": seconds}
            history += completion.tokens


if __name__ == "__main__":
    main()
