"""Byte-level BPE tokenizers, trained with the models that they are for; text encoded by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foretoken.errors import InputError, to_one_line
from foretoken.storage import files
from foretoken.train.corpus import encode, split_texts

END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"


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
        with files.replace_folder(folder) as part:
            fresh.save_pretrained(part)
    return read_tokenizer(folder)


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's folder; code in it is not run. InputError where none can be
    read."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds
        reason = to_one_line(error)
        raise InputError(f"{folder} holds no tokenizer that can be read: {reason}") from None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of the training texts and of the held-out ones, and the bytes that the held-out
    ids stand for."""

    train: np.ndarray  # uint16 or uint32
    held_out: np.ndarray
    held_out_bytes: int


def build(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Encode a list of texts with the split above."""
    train, held_out = split_texts(texts)
    return Corpus(
        encode(train, tokenizer),
        encode(held_out, tokenizer),
        sum(len(t.encode()) for t in held_out),
    )
