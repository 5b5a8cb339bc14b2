"""Reads training data as token ids and holds out a part of it. The data are text files, or files of
examples: prompts with or without a reference output.

For a decoder-only model, documents are cut into windows. In a file of examples, each line holds a
prompt (called source), or a prompt and its reference output (called target), in JSON or separated
by a tab. Does not depend on models.
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

Item = TypeVar("Item")
PROMPT_TOKENS = 16  # prompt tokens of a window
HELD_OUT_EVERY = 16  # one document in sixteen is never trained on


def read_texts(folder: Path) -> list[str]:
    """Return the contents of all .txt and .txt.gz files in `folder` and its subfolders, sorted by
    path; `folder` may also be a single such file. Line ends and blank lines are normalized. Raises
    InputError if there is no such file, or if a file cannot be read."""
    if not folder.exists():
        raise InputError(f"there is no {folder}; give a .txt file, or a folder of .txt files")
    candidates = [folder] if folder.is_file() else folder.rglob("*")
    paths = sorted(p for p in candidates if p.name.endswith((".txt", ".txt.gz")))
    if not paths:
        raise InputError(
            f"there is no .txt or .txt.gz file in {folder}; give such a file, or a folder of such "
            "files"
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
            f"{path} is not UTF-8 (byte {error.start}); convert the file, for instance with "
            "iconv -f latin1"
        ) from None


def _normalize_lines(text: str) -> str:
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join(line for i, line in enumerate(lines) if line or (i and lines[i - 1])).strip()


def split_texts(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the documents to train on and the held-out documents. If there is only one document,
    its last sixteenth is held out."""
    if len(texts) < 2:
        cut = len(texts[0]) - len(texts[0]) // HELD_OUT_EVERY
        return [texts[0][:cut]], [texts[0][cut:]]
    return hold_out(texts, min(HELD_OUT_EVERY, len(texts)) - 1)


def hold_out(items: Sequence[Item], first: int = 0) -> tuple[list[Item], list[Item]]:
    """Return the items to train on and the held-out items. From index `first` on, one item in
    HELD_OUT_EVERY is held out."""
    train = [item for i, item in enumerate(items) if i % HELD_OUT_EVERY != first]
    return train, list(items[first::HELD_OUT_EVERY])


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return all documents as one array of ids, with an end-of-text token before each document and
    after the last one. Raises InputError if the tokenizer has no such token."""
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(
            "the tokenizer has no end-of-text token; give a tokenizer with an eos_token"
        )
    ids = [end]
    for text in texts:
        # line by line: tokenized in parallel, and in time linear in the length
        lines = text.splitlines(keepends=True) or [""]
        for piece in tokenizer(lines, add_special_tokens=False, verbose=False).input_ids:
            ids.extend(piece)
        ids.append(end)
    return np.asarray(ids, dtype=np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


TokenIds = Sequence[int] | np.ndarray  # an array takes less memory, for a large corpus
PAIR_SUFFIXES = (".jsonl", ".tsv")


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a prompt and its reference output, which is empty if the data have none."""

    prompt: TokenIds  # for an encoder-decoder: the encoder's input
    reference: TokenIds


@dataclass(frozen=True, slots=True)
class Examples:
    """Training examples, held-out examples, and a digest of their data."""

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
    """Return the training and held-out examples, with references of up to `length` tokens.

    A .jsonl file has {"source": ..., "target": ...} on each line, with an optional target; a .tsv
    file has source, tab, target. Other files have one source per line for an encoder-decoder. For a
    decoder-only model, other data are documents, which are cut into windows: a .txt or .txt.gz
    file, or a folder of such files. Raises InputError for unreadable or insufficient data.
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
            f"{path} gives {len(train)} examples for training and {len(held_out)} held out; "
            "give more data, or a smaller length"
        )
    return Examples(train, held_out, digest.hexdigest()[:16])


def read_lines(path: Path) -> dict[int, ExampleLine]:
    """Return the nonempty lines of a file of examples, by line number. Raises InputError, with the
    line number, for a line that cannot be parsed or has an empty source."""
    _require_exists(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    parsed = {n: _parse_line(path, n, text) for n, text in enumerate(lines, 1) if text.strip()}
    for number, line in parsed.items():
        if not line.source:
            raise InputError(f"{path}, line {number}: the source is empty; give a nonempty source")
    return parsed


def _require_exists(path: Path) -> None:
    if not path.exists():
        raise InputError(f"there is no {path}; give a file of documents or of sources")


def _cut_windows(ids: np.ndarray, length: int) -> list[Example]:
    """Cut ids into consecutive examples: PROMPT_TOKENS of prompt, then `length` of reference."""
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
            f'{path}, line {number}: {reason}; give {{"source": text}}, optionally with "target": '
            "text"
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
            raise InputError(f"{path}, line {number}: the source is empty; give a nonempty source")
    targets = [line.target for line in numbered_lines.values() if line.target is not None]
    references = iter(_encode_references(targets, tokenizer, encoder_decoder))
    return [
        Example(prompt, [] if line.target is None else next(references)[:length])
        for line, prompt in zip(numbered_lines.values(), prompts, strict=True)
    ]


def _encode_references(
    targets: list[str], tokenizer: PreTrainedTokenizerBase, encoder_decoder: bool
) -> list[list[int]]:
    """Return the ids of the targets, each with an end token: the one that the tokenizer adds for an
    encoder-decoder, or the tokenizer's eos_token for a decoder-only model."""
    if not targets:
        return []
    if encoder_decoder:
        return tokenizer(text_target=targets, verbose=False).input_ids
    end = [] if tokenizer.eos_token_id is None else [cast(int, tokenizer.eos_token_id)]
    encoded = tokenizer(targets, add_special_tokens=False, verbose=False).input_ids
    return [[*ids, *end] for ids in encoded]
