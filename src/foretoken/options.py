"""What a caller may ask for, whatever the model: prompts, seeds, numbers and rules, checked."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import randbits
from typing import cast

from foretoken import checked
from foretoken.comparators import COMPARATORS
from foretoken.distributions import SamplingParams
from foretoken.errors import InputError, RefusedError, whole
from foretoken.judge import Coupled, Greedy, Judge, choose
from foretoken.keys import RowKey
from foretoken.verify import RULES, Rule

NAMED = {**RULES, **COMPARATORS}
WIDER = 4  # draft beams per beam: at fewer, one of a target's beams is soon missing
COUPLED = "coupled"  # no rule: what it keeps follows from noise, not from p and q alone

Prompt = str | list[int]
Seed = int | Sequence[int | tuple[int, int]] | None


def check(
    params: SamplingParams,
    max_new_tokens: int,
    gamma: int | None,
    rule: str | Rule,
    lenience: float,
) -> Judge:
    """Who judges the guesses, or an error for an option that no model could honour."""
    for name, value in (("max_new_tokens", max_new_tokens), ("gamma", gamma)):
        if not whole(value) and not (name == "gamma" and value is None):
            raise InputError(f"{name} is {value!r:.60}; give a whole number")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    if gamma is not None and gamma < 0:
        raise InputError(f"gamma is {gamma}; give 0 (plain decoding) or more, or None")
    checked.lenience(lenience)
    if rule == COUPLED:
        if lenience != 1:
            raise RefusedError(
                f"lenience={lenience} has no meaning for rule='coupled', which keeps the target's "
                "own tokens and no others; leave it at 1.0"
            )
        return Greedy() if params.greedy else Coupled()
    found = NAMED.get(rule) if isinstance(rule, str) else rule
    if found is None or not callable(found):
        known = ", ".join([*NAMED, COUPLED])
        raise InputError(f"rule is {rule!r:.60}; give one of {known}, or a function")
    return choose(found, params, float(lenience))


def check_beams(max_new_tokens: int, gamma: int, num_beams: int, draft_beams: int | None) -> int:
    """The draft's width, by itself `WIDER * num_beams`; InputError for what nobody can do."""
    width = WIDER * num_beams if draft_beams is None else draft_beams
    for name, value in (
        ("max_new_tokens", max_new_tokens),
        ("gamma", gamma),
        ("draft_beams", width),
    ):
        if not whole(value):
            raise InputError(f"{name} is {value!r:.60}; give a whole number")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    if gamma < 0:
        raise InputError(f"gamma is {gamma}; give 0 (plain beam search) or more")
    if width < num_beams:
        raise InputError(f"draft_beams is {width}; give num_beams={num_beams} or more")
    return width


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt (a str, or a list of ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InputError(
            f"prompts is a {type(prompts).__name__}; give a str, ids, or a list of them"
        )
    if prompts and all(_is_id(p) for p in prompts):
        return [cast(list[int], list(prompts))]
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list | tuple) and all(_is_id(token) for token in prompt)
        ):
            raise InputError(f"prompt {i} is {prompt!r:.60}; give a str or a list of ids")
    return [p if isinstance(p, str) else list(p) for p in cast(Sequence[Prompt], prompts)]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def keys_of(seed: Seed, count: int) -> list[RowKey]:
    """A key for each of `count` rows; None draws a seed for all of them."""
    if seed is None:
        seed = randbits(63)
    if isinstance(seed, int):
        return [RowKey(_seed(seed), row) for row in range(count)]
    if not isinstance(seed, list | tuple):
        raise InputError(f"seed is {seed!r:.60}; give an integer, or one for each prompt")
    if len(seed) != count:
        raise InputError(f"seed has {len(seed)} entries for {count} prompts; give one for each")
    pairs = [s if isinstance(s, list | tuple) else (s, 0) for s in seed]
    for pair in pairs:
        if len(pair) != 2:
            raise InputError(f"seed holds {pair!r:.60}; give integers, or pairs of them")
    return [RowKey(_seed(s), _seed(row)) for s, row in pairs]


def _seed(value: int) -> int:
    if not _is_id(value) or not 0 <= value < 2**63:
        raise InputError(f"seed is {value!r:.60}; give an integer in [0, 2**63)")
    return value
