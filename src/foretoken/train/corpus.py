"""Text in, token ids out: books from a folder, a byte-level BPE tokenizer, a split into training
and held-out text.

Knows nothing about models.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foretoken.errors import InputError, one_line
from foretoken.storage import files

T = TypeVar("T")
END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"
HELD_OUT_EVERY = 16  # one text in sixteen, whole, never trained on


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of the training texts and of the held-out ones, and the bytes that the held-out
    ids stand for."""

    train: np.ndarray  # uint16 or uint32
    held_out: np.ndarray
    held_out_bytes: int


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
    return [_uniform(_text(path)) for path in paths]


def _text(path: Path) -> str:
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


def _uniform(text: str) -> str:
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join(line for i, line in enumerate(lines) if line or (i and lines[i - 1])).strip()


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out texts; a single text is cut, its last sixteenth held out."""
    if len(texts) < 2:
        cut = len(texts[0]) - len(texts[0]) // HELD_OUT_EVERY
        return [texts[0][:cut]], [texts[0][cut:]]
    return hold_out(texts, min(HELD_OUT_EVERY, len(texts)) - 1)


def hold_out(items: Sequence[T], first: int = 0) -> tuple[list[T], list[T]]:
    """Return the items to train on, and one in HELD_OUT_EVERY, from number `first` on, held out."""
    train = [item for i, item in enumerate(items) if i % HELD_OUT_EVERY != first]
    return train, list(items[first::HELD_OUT_EVERY])


def train_tokenizer(texts: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text has ids and every id sequence a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(texts, vocab_size, [END_OF_TEXT]),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def train_pair_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """The same for sources and targets of an encoder-decoder: a text's ids end with the end of
    text, and there is a padding token."""
    tokenizer = _byte_level(texts, vocab_size, [PADDING, END_OF_TEXT])
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PADDING,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _byte_level(texts: list[str], vocab_size: int, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_of_run(
    out: Path, tokenizer_folder: Path | None, make: Callable[[], PreTrainedTokenizerFast]
) -> PreTrainedTokenizerFast:
    """The tokenizer in the folder given, or else the run's own, made where it has none yet."""
    folder = tokenizer_folder or out / "tokenizer"
    if tokenizer_folder is None and not folder.exists():
        fresh = make()
        with files.folder(folder) as part:
            fresh.save_pretrained(part)
    return read_tokenizer(folder)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's folder; code in it is not run. InputError where none can be
    read."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        reason = one_line(error)
        raise InputError(f"{folder} holds no tokenizer that can be read: {reason}") from None


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


def build(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Encode a list of texts with the split above."""
    train, held_out = split(texts)
    return Corpus(
        encode(train, tokenizer),
        encode(held_out, tokenizer),
        sum(len(t.encode()) for t in held_out),
    )
