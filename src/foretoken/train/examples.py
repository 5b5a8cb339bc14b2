"""What a draft is taught on: prompts and, where the data have them, what follows.

A decoder's text is cut into windows; a line of a file is a source, or a source and its target in
JSON. Knows tokenizers, no models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedTokenizerBase

from foretoken.errors import InputError
from foretoken.train import corpus
from foretoken.train.samples import PROMPT

Ids = Sequence[int] | np.ndarray  # an array is smaller, for a large corpus


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids; `reference` is empty where the data do not say what follows."""

    prompt: Ids  # what a decoder continues, or an encoder reads
    reference: Ids


@dataclass(frozen=True, slots=True)
class Examples:
    """Those to learn from, those held out, and a digest of their text."""

    train: list[Example]
    held_out: list[Example]
    digest: str


class Line(BaseModel):
    """A line of a .jsonl file; other keys are an error."""

    model_config = ConfigDict(extra="forbid", strict=True)
    source: str
    target: str | None = None


def read(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, *, encoder_decoder: bool
) -> Examples:
    """Examples with up to `length` tokens behind the prompt, one in sixteen held out.

    A .jsonl file has {"source": ..., "target": ...} on each line; the target may be left out.
    Other files give an encoder-decoder one source a line, and a decoder windows of text (.txt and
    .txt.gz, a file or a folder of them). Raises InputError for unreadable data and too little.
    """
    if not path.exists():
        raise InputError(f"there is no {path}; give text, or lines of sources")
    pairs = path.suffix == ".jsonl"
    if not pairs and not encoder_decoder:
        texts = corpus.read_texts(path)
        train, held_out = (
            _windows(corpus.encode(part, tokenizer), length) for part in corpus.split(texts)
        )
    else:
        texts = _lines(path)
        examples: list[Example] = []
        for number, text in enumerate(texts, 1):
            if not text.strip():
                continue
            line = _parsed(path, number, text) if pairs else Line(source=text)
            examples.append(_example(line, tokenizer, length, encoder_decoder))
            if not (line.source and examples[-1].prompt):
                raise InputError(f"{path}, line {number}: the source is empty; give text")
        train, held_out = corpus.hold_out(examples)
    if not train or not held_out:
        raise InputError(
            f"{path} gives {len(train)} examples to learn from and {len(held_out)} held out; "
            "give more text, or a smaller length"
        )
    return Examples(train, held_out, hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16])


def _windows(ids: np.ndarray, length: int) -> list[Example]:
    """Consecutive pieces: a prompt of PROMPT tokens and `length` behind it."""
    size = PROMPT + length
    starts = range(0, len(ids) - size + 1, size)
    return [Example(ids[s : s + PROMPT], ids[s + PROMPT : s + size]) for s in starts]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _parsed(path: Path, number: int, text: str) -> Line:
    try:
        return Line.model_validate_json(text)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise InputError(
            f'{path}, line {number}: {reason}; give {{"source": text, "target": text}}'
        ) from None


def _example(
    line: Line, tokenizer: PreTrainedTokenizerBase, length: int, encoder_decoder: bool
) -> Example:
    prompt = tokenizer(line.source, verbose=False).input_ids
    if line.target is None:
        return Example(prompt, [])
    if encoder_decoder:
        return Example(prompt, tokenizer(text_target=line.target, verbose=False).input_ids[:length])
    ids = tokenizer(line.target, add_special_tokens=False, verbose=False).input_ids
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Example(prompt, [*ids, *end][:length])
