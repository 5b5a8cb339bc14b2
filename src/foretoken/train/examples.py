"""Examples that a model is taught on: prompts and, where the data have them, what follows.

A decoder's text is cut into windows; a line of a file is a source, or a source and its target in
JSON or on both sides of a tab; or the target writes the text itself, sampled in batches behind
short pieces of real text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedTokenizerBase

from foretoken.errors import InputError, RefusedError, mismatch
from foretoken.request import Completion
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import BATCH, Speculator
from foretoken.train import corpus

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


Ids = Sequence[int] | np.ndarray  # an array is smaller, for a large corpus
PAIRS = (".jsonl", ".tsv")


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids; `reference` is empty where the data do not say what follows."""

    prompt: Ids  # what a decoder continues, or an encoder reads
    reference: Ids


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples to learn from, those held out, and a digest of their text."""

    train: list[Example]
    held_out: list[Example]
    digest: str


class ExampleLine(BaseModel):
    """A line of a .jsonl file; other keys are an error."""

    model_config = ConfigDict(extra="forbid", strict=True)
    source: str
    target: str | None = None


def read(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, *, encoder_decoder: bool
) -> Examples:
    """Examples with up to `length` tokens behind the prompt, one in sixteen held out.

    A .jsonl file has {"source": ..., "target": ...} on each line, whose target may be left out, a
    .tsv file source, tab, target. Other files give an encoder-decoder one source a line, and a
    decoder windows of text (.txt and .txt.gz, a file or a folder of them). Raises InputError for
    unreadable data and too little.
    """
    if path.suffix not in PAIRS and not encoder_decoder:
        _require(path)
        texts = corpus.read_texts(path)
        train, held_out = (
            _windows(corpus.encode(part, tokenizer), length) for part in corpus.split(texts)
        )
        digest = hashlib.sha256("\n".join(texts).encode())
    else:
        numbered = lines(path)
        examples = _examples(path, numbered, tokenizer, length, encoder_decoder)
        train, held_out = corpus.hold_out(examples)
        digest = hashlib.sha256(path.read_bytes())
    if not train or not held_out:
        raise InputError(
            f"{path} gives {len(train)} examples to learn from and {len(held_out)} held out; "
            "give more text, or a smaller length"
        )
    return Examples(train, held_out, digest.hexdigest()[:16])


def lines(path: Path) -> dict[int, ExampleLine]:
    """The lines of a file of sources or pairs by their numbers, without empty ones. Raises
    InputError for one that cannot be read, with its number."""
    _require(path)
    try:
        texts = path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    parsed = {n: _parsed(path, n, text) for n, text in enumerate(texts, 1) if text.strip()}
    for number, line in parsed.items():
        if not line.source:
            raise InputError(f"{path}, line {number}: the source is empty; give text")
    return parsed


def _require(path: Path) -> None:
    if not path.exists():
        raise InputError(f"there is no {path}; give text, or lines of sources")


def _windows(ids: np.ndarray, length: int) -> list[Example]:
    """Consecutive pieces: a prompt of PROMPT tokens and `length` behind it."""
    size = PROMPT + length
    starts = range(0, len(ids) - size + 1, size)
    return [Example(ids[s : s + PROMPT], ids[s + PROMPT : s + size]) for s in starts]


def _parsed(path: Path, number: int, text: str) -> ExampleLine:
    if path.suffix == ".tsv":
        columns = text.split("\t")
        if len(columns) != 2:
            raise InputError(
                f"{path}, line {number}: {len(columns)} columns; give source, tab, target"
            )
        return ExampleLine(source=columns[0].strip(), target=columns[1].strip())
    if path.suffix != ".jsonl":
        return ExampleLine(source=text)
    try:
        return ExampleLine.model_validate_json(text)
    except ValidationError as error:
        reason = mismatch(error.errors()[0])
        raise InputError(
            f'{path}, line {number}: {reason}; give {{"source": text, "target": text}}'
        ) from None


def _examples(
    path: Path,
    parsed: dict[int, ExampleLine],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    encoder_decoder: bool,
) -> list[Example]:
    if not parsed:
        return []
    prompts = tokenizer([line.source for line in parsed.values()], verbose=False).input_ids
    for number, prompt in zip(parsed, prompts, strict=True):
        if not prompt:
            raise InputError(f"{path}, line {number}: the source is empty; give text")
    targets = [line.target for line in parsed.values() if line.target is not None]
    references = iter(_references(targets, tokenizer, encoder_decoder))
    return [
        Example(prompt, [] if line.target is None else next(references)[:length])
        for line, prompt in zip(parsed.values(), prompts, strict=True)
    ]


def _references(
    targets: list[str], tokenizer: PreTrainedTokenizerBase, encoder_decoder: bool
) -> list[list[int]]:
    """Ids of the targets, with the end that the tokenizer puts there or, for a decoder, its own."""
    if not targets:
        return []
    if encoder_decoder:
        return tokenizer(text_target=targets, verbose=False).input_ids
    end = [] if tokenizer.eos_token_id is None else [cast(int, tokenizer.eos_token_id)]
    encoded = tokenizer(targets, add_special_tokens=False, verbose=False).input_ids
    return [[*ids, *end] for ids in encoded]
