"""Text in, token ids out: books from a folder, a split into training and held-out text; and
examples that a model is taught on, prompts and what follows.

A decoder's text is cut into windows; a line of a file is a source, or a source and its target in
JSON or on both sides of a tab. Knows nothing about models.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from transformers import PreTrainedTokenizerBase

from foretoken.errors import InputError, describe_mismatch

T = TypeVar("T")
PROMPT_TOKENS = 16  # tokens of a prompt
HELD_OUT_EVERY = 16  # one text in sixteen, whole, never trained on


def read_texts(folder: Path) -> list[str]:
    """Every .txt and .txt.gz below `folder` (or that one file), sorted by path, with line ends and
    blank lines made uniform."""
    if not folder.exists():
        raise InputError(f"there is no {folder}; give a text file, or a folder of text")
    candidates = [folder] if folder.is_file() else folder.rglob("*")
    paths = sorted(p for p in candidates if p.name.endswith((".txt", ".txt.gz")))
    if not paths:
        raise InputError(
            f"no .txt or .txt.gz file in {folder}; give a text file named so, or a folder of them"
        )
    return [_normalize_lines(_read_text(path)) for path in paths]


def _read_text(path: Path) -> str:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, such as by iconv -f latin1"
        ) from None


def _normalize_lines(text: str) -> str:
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join(line for i, line in enumerate(lines) if line or (i and lines[i - 1])).strip()


def split_texts(texts: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out texts; a single text is cut, its last sixteenth held out."""
    if len(texts) < 2:
        cut = len(texts[0]) - len(texts[0]) // HELD_OUT_EVERY
        return [texts[0][:cut]], [texts[0][cut:]]
    return hold_out(texts, min(HELD_OUT_EVERY, len(texts)) - 1)


def hold_out(items: Sequence[T], first: int = 0) -> tuple[list[T], list[T]]:
    """Return the items to train on, and one in HELD_OUT_EVERY, from number `first` on, held out."""
    train = [item for i, item in enumerate(items) if i % HELD_OUT_EVERY != first]
    return train, list(items[first::HELD_OUT_EVERY])


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All texts as one row of ids, an end-of-text token before each and after the last."""
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(
            "the tokenizer has no end-of-text token; give one that names it (eos_token)"
        )
    ids = [end]
    for text in texts:
        # short pieces: in parallel, and time stays linear
        lines = text.splitlines(keepends=True) or [""]
        for piece in tokenizer(lines, add_special_tokens=False, verbose=False).input_ids:
            ids.extend(piece)
        ids.append(end)
    return np.asarray(ids, dtype=np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


TokenIds = Sequence[int] | np.ndarray  # an array is smaller, for a large corpus
PAIR_SUFFIXES = (".jsonl", ".tsv")


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids; `reference` is empty where the data do not say what follows."""

    prompt: TokenIds  # what a decoder continues, or an encoder reads
    reference: TokenIds


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


def read_examples(
    path: Path, tokenizer: PreTrainedTokenizerBase, length: int, *, encoder_decoder: bool
) -> Examples:
    """Examples with up to `length` tokens behind the prompt, one in sixteen held out.

    A .jsonl file has {"source": ..., "target": ...} on each line, whose target may be left out, a
    .tsv file source, tab, target. Other files give an encoder-decoder one source a line, and a
    decoder windows of text (.txt and .txt.gz, a file or a folder of them). Raises InputError for
    unreadable data and too little.
    """
    if path.suffix not in PAIR_SUFFIXES and not encoder_decoder:
        _require_exists(path)
        texts = read_texts(path)
        train, held_out = (
            _cut_windows(encode(part, tokenizer), length) for part in split_texts(texts)
        )
        digest = hashlib.sha256("\n".join(texts).encode())
    else:
        numbered_lines = read_lines(path)
        examples = _make_examples(path, numbered_lines, tokenizer, length, encoder_decoder)
        train, held_out = hold_out(examples)
        digest = hashlib.sha256(path.read_bytes())
    if not train or not held_out:
        raise InputError(
            f"{path} gives {len(train)} examples to learn from and {len(held_out)} held out; "
            "give more text, or a smaller length"
        )
    return Examples(train, held_out, digest.hexdigest()[:16])


def read_lines(path: Path) -> dict[int, ExampleLine]:
    """The lines of a file of sources or pairs by their numbers, without empty ones. Raises
    InputError for one that cannot be read, with its number."""
    _require_exists(path)
    try:
        texts = path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    parsed = {n: _parse_line(path, n, text) for n, text in enumerate(texts, 1) if text.strip()}
    for number, line in parsed.items():
        if not line.source:
            raise InputError(f"{path}, line {number}: the source is empty; give text")
    return parsed


def _require_exists(path: Path) -> None:
    if not path.exists():
        raise InputError(f"there is no {path}; give text, or lines of sources")


def _cut_windows(ids: np.ndarray, length: int) -> list[Example]:
    """Consecutive pieces: a prompt of PROMPT tokens and `length` behind it."""
    size = PROMPT_TOKENS + length
    starts = range(0, len(ids) - size + 1, size)
    return [Example(ids[s : s + PROMPT_TOKENS], ids[s + PROMPT_TOKENS : s + size]) for s in starts]


def _parse_line(path: Path, number: int, text: str) -> ExampleLine:
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
        first = error.errors()[0]
        reason = ": ".join([*map(str, first["loc"]), describe_mismatch(first)])
        raise InputError(
            f'{path}, line {number}: {reason}; give {{"source": text}}, and "target": text if any'
        ) from None


def _make_examples(
    path: Path,
    numbered_lines: dict[int, ExampleLine],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    encoder_decoder: bool,
) -> list[Example]:
    if not numbered_lines:
        return []
    prompts = tokenizer([line.source for line in numbered_lines.values()], verbose=False).input_ids
    for number, prompt in zip(numbered_lines, prompts, strict=True):
        if not prompt:
            raise InputError(f"{path}, line {number}: the source is empty; give text")
    targets = [line.target for line in numbered_lines.values() if line.target is not None]
    references = iter(_encode_references(targets, tokenizer, encoder_decoder))
    return [
        Example(prompt, [] if line.target is None else next(references)[:length])
        for line, prompt in zip(numbered_lines.values(), prompts, strict=True)
    ]


def _encode_references(
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
