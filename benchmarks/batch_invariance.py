"""Greedy texts of a real model on the native decoder, with draft tokens alone and in a batch of
random arrivals, against plain decoding alone: the same to the bit, over 10,000 tokens of each?

Gamma is fixed or automatic; half of the prompts begin alike, so that the batch shares their pages,
and running sequences are preempted now and then.

Expected: no token differs where `spec.exact` is "bitwise".

    python benchmarks/batch_invariance.py FILE.gguf --draft smollm2 --dtypes int8,int4
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import foretoken
import machine
from foretoken import Engine, SamplingParams, Speculator

TASKS = (
    "Explain how a bicycle stays upright.",
    "Write a function that reverses a list, and say how it works.",
    "List five facts about the sea, each in one sentence.",
    "What is 17 times 23? Show every step.",
    "Write a letter to a friend about a journey by train.",
    "Summarize the plot of a story about a lost dog.",
    "Translate 'the house is old and large' into French, and repeat it three times.",
    "Why is the sky blue? Answer for a child.",
)
SYSTEM = "You are an assistant who answers every question in plain words, step by step. " * 8
LENGTH, ROWS, PREEMPTED = 160, 6, 0.02
GAMMAS = (None, 1, 2, 3, 4, 5, 6, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--dtypes", default="int8,int4")
    parser.add_argument("--tokens", type=int, default=10_000)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype in asked.dtypes.split(","):
        spec = foretoken.load(asked.target, asked.draft, dtype=dtype, runtime="native")
        rows.append({"dtype": dtype, "exact": spec.exact, **compared(spec, asked.tokens)})
        print(rows[-1], flush=True)
    print(machine.save("batch-invariance", {"target": Path(asked.target).name, "rows": rows}))


def compared(spec: Speculator, tokens: int) -> dict[str, Any]:
    """Make so many tokens plainly, and again in both ways; count those that differ."""
    plain: list[tuple[list[int], SamplingParams, tuple[int, ...]]] = []
    dice = random.Random(0)
    while sum(len(text) for *_, text in plain) < tokens:
        turns = [{"role": "user", "content": f"{dice.choice(TASKS)} ({dice.randrange(10**6)})"}]
        if len(plain) % 2:
            turns.insert(0, {"role": "system", "content": SYSTEM})
        told = spec.tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        prompt = list(told["input_ids"])
        params = SamplingParams(0.0, max_new_tokens=dice.randrange(20, LENGTH), ignore_eos=True)
        (own,) = spec.generate([prompt], params, gamma=0)
        plain.append((prompt, params, own.tokens))
    alone = [
        spec.generate([prompt], params, gamma=GAMMAS[i % len(GAMMAS)])[0].tokens
        for i, (prompt, params, _) in enumerate(plain)
    ]
    moved, events = moving(spec, plain, dice)
    return {
        "texts": len(plain),
        "tokens": sum(len(text) for *_, text in plain),
        "differ_alone": differing(plain, alone),
        "differ_in_a_moving_batch": differing(plain, moved),
        **events,
    }


def moving(
    spec: Speculator, asked: list[Any], dice: random.Random
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """The same texts by an engine whose rows come and go at random; with how often a row was
    preempted, and the prompts' tokens that others' pages had."""
    texts: dict[int, tuple[int, ...]] = {}
    left, places, cached = list(enumerate(asked)), dict[int, int](), 0
    with Engine(spec, ROWS) as engine:
        while left or len(texts) < len(asked):
            if left and len(places) - len(texts) < ROWS + 2 and dice.random() < 0.3:
                i, (prompt, params, _) = left.pop(0)
                places[engine.add(prompt, params, gamma=dice.choice([None, 0, 1, 3, 7]))] = i
            if spec.core.scheduler.running and dice.random() < PREEMPTED:
                spec.core.preempt()
            for event in engine.step():
                if event.completion is not None:
                    texts[places[event.id]] = event.completion.tokens
                    cached += event.completion.stats.cached_tokens
        preempted = engine.stats().preempted
    events = {"preempted": preempted, "cached_prompt_tokens": cached}
    return [texts[i] for i in range(len(asked))], events


def differing(asked: list[Any], made: list[tuple[int, ...]]) -> int:
    """Tokens at which a text is another than the plain one."""
    pairs = zip((text for *_, text in asked), made, strict=True)
    return sum(a != b for one, two in pairs for a, b in zip(one, two, strict=True))


if __name__ == "__main__":
    main()
