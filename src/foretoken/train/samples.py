"""A target's own text, to fit drafts to: sampled in batches behind short pieces of real text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from foretoken.errors import InputError, RefusedError
from foretoken.request import Completion
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import BATCH, Speculator

PROMPT, LENGTH = 16, 240  # tokens of a prompt, and of the target's continuation


def samples(
    spec: Speculator, tokens: int, *, prompts: np.ndarray | None, temperature: float, seed: int
) -> Iterator[list[int]]:
    """Sequences that the target writes, `tokens` in all or a few more, without their prompts.

    `prompts`: ids to cut prompts from; None starts every sequence from an end-of-sequence token.
    Raises InputError for less than a token, RefusedError for a target that cannot be sampled.
    """
    if spec.target.encoder_decoder:
        raise RefusedError("an encoder-decoder has no text of its own; fit to text instead")
    if tokens < 1:
        raise InputError(f"tokens is {tokens}; give 1 or more")
    if prompts is not None and len(prompts) <= PROMPT:
        raise InputError(f"the text gives {len(prompts)} tokens; give more than {PROMPT}")
    SamplingParams(temperature)  # raises for one that is invalid, before the work
    context = spec.target.context or PROMPT + LENGTH
    if context <= PROMPT:
        raise RefusedError(f"the target's context of {context} leaves no room to sample in")
    return _sampled(spec, tokens, min(LENGTH, context - PROMPT), prompts, temperature, seed)


def completed(spec: Speculator, prompts: list[list[int]], **options: Any) -> list[Completion]:
    """`generate`, but Ctrl-C is raised again instead of ending a text."""
    completions = spec.generate(list(prompts), **options)
    if any(completion.finish_reason == "interrupted" for completion in completions):
        raise KeyboardInterrupt
    return completions


def _sampled(
    spec: Speculator,
    tokens: int,
    length: int,
    prompts: np.ndarray | None,
    temperature: float,
    seed: int,
) -> Iterator[list[int]]:
    random = np.random.default_rng(seed)
    written = 0
    while written < tokens:
        rows = min(BATCH, -(-(tokens - written) // length))
        batch = [_prompt(spec, prompts, random) for _ in range(rows)]
        keys = [(seed, written + b) for b in range(rows)]
        options = {"temperature": temperature, "gamma": 0, "seed": keys}
        for completion in completed(spec, batch, max_new_tokens=length, **options):
            written += len(completion.tokens)
            yield completion.tokens


def _prompt(spec: Speculator, ids: np.ndarray | None, random: np.random.Generator) -> list[int]:
    if ids is None:
        return [min(spec.ends.eos, default=0)]
    start = int(random.integers(0, max(1, len(ids) - PROMPT)))
    return [int(token) for token in ids[start : start + PROMPT]]
