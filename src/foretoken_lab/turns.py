"""Ways of writing the same texts, timed in turn, so that other load on the machine meets them all.

Times are of decoding, without the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from foretoken.lab.uninterrupted import uninterrupted
from foretoken.options import Prompt
from foretoken.request import Completion
from foretoken.speculator import Speculator

WARM = 8  # new tokens of the runs that do not count: first calls are slow

Name = TypeVar("Name", bound=Hashable)
Way = Callable[[Prompt, int, int], Completion]  # prompt, seed, number of tokens
Runs = list[list[Completion]]  # of one way: at each repeat, the text of each prompt


def way(spec: Speculator, **options: Any) -> Way:
    """One prompt at a time; options are `generate`'s."""

    def write(prompt: Prompt, seed: int, tokens: int) -> Completion:
        (one,) = spec.generate([prompt], max_new_tokens=tokens, seed=seed, **options)
        return one

    return write


def in_turn(
    ways: Mapping[Name, Way],
    prompts: Sequence[Prompt],
    *,
    repeats: int,
    tokens: int,
    seed: int = 0,
) -> dict[Name, Runs]:
    """Every way on every prompt, one after another, first in short runs that do not count.

    At every second text their order is reversed. Repeat r has seed + r. Raises KeyboardInterrupt
    where a run was interrupted.
    """
    runs: dict[Name, Runs] = {name: [[] for _ in range(repeats)] for name in ways}
    order = list(ways)
    for prompt in prompts:
        for name in order:
            uninterrupted([ways[name](prompt, seed, min(WARM, tokens))])
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for name in order if (repeat + i) % 2 == 0 else order[::-1]:
                (one,) = uninterrupted([ways[name](prompt, seed + repeat, tokens)])
                runs[name][repeat].append(one)
    return runs


def seconds_per_token(runs: Runs) -> float:
    """Of all texts of a repeat together; the median over repeats."""
    steady = [[text.steady for text in texts] for texts in runs]
    return median(
        sum(each.seconds for each in texts) / sum(each.tokens for each in texts) for texts in steady
    )


def by_prompt(runs: Runs) -> list[list[float]]:
    """Seconds a token of each prompt's text, at each repeat."""
    steady = [[text.steady for text in texts] for texts in zip(*runs, strict=True)]
    return [[each.seconds / each.tokens for each in texts] for texts in steady]


def tokens_per_call(runs: Runs) -> float:
    """New tokens over calls of the target."""
    texts = [text for repeat in runs for text in repeat]
    return sum(len(text.tokens) for text in texts) / sum(text.stats.target_calls for text in texts)
