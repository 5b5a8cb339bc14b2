"""Texts sampled from a target, to train a model on or to count n-grams in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foretoken.errors import InputError, RefusedError
from foretoken.request import require_uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import MAX_BATCH_SIZE, Speculator
from foretoken.train.corpus import PROMPT_TOKENS

LENGTH = 240  # tokens of a sample, behind its prompt


def samples(
    spec: Speculator, tokens: int, *, prompts: np.ndarray | None, temperature: float, seed: int
) -> Iterator[list[int]]:
    """Sequences that the target writes, `tokens` in all or a few more, without their prompts, which
    are cut from `prompts`; None: behind an end-of-text token.

    Raises InputError for less than a token, RefusedError for a target that cannot be sampled.
    """
    if spec.target.encoder_decoder:
        raise RefusedError("an encoder-decoder has no text of its own; give a decoder")
    if tokens < 1:
        raise InputError(f"tokens is {tokens}; give 1 or more")
    if prompts is not None and len(prompts) <= PROMPT_TOKENS:
        raise InputError(f"the text gives {len(prompts)} tokens; give more than {PROMPT_TOKENS}")
    SamplingParams(temperature)  # raises for one that is invalid, before the work
    context = spec.target.context or PROMPT_TOKENS + LENGTH
    if context <= PROMPT_TOKENS:
        raise RefusedError(f"the target's context of {context} leaves no room to sample in")
    return _sampled(spec, tokens, min(LENGTH, context - PROMPT_TOKENS), prompts, temperature, seed)


def _sampled(
    spec: Speculator,
    tokens: int,
    length: int,
    prompts: np.ndarray | None,
    temperature: float,
    seed: int,
) -> Iterator[list[int]]:
    random = np.random.default_rng(seed)
    text = np.array([min(spec.ends.eos, default=0)]) if prompts is None else prompts
    written = 0
    while written < tokens:
        rows = min(MAX_BATCH_SIZE, -(-(tokens - written) // length))
        starts = random.integers(0, max(1, len(text) - PROMPT_TOKENS), size=rows).tolist()
        batch = [[int(token) for token in text[at : at + PROMPT_TOKENS]] for at in starts]
        keys = [(seed, written + b) for b in range(rows)]
        options = {"temperature": temperature, "gamma": 0, "seed": keys}
        texts = spec.generate(list(batch), max_new_tokens=length, **options)
        for completion in require_uninterrupted(texts):
            written += len(completion.tokens)
            yield completion.tokens
