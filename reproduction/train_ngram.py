"""Fit an n-gram table to token ids: interpolated modified Kneser-Ney (Chen and Goodman 1998).

The highest order discounts counts, the lower ones the number of different tokens seen in front;
every distribution sums to 1. All passes are over whole arrays: a k-gram is a pair, the number of
its first k-1 tokens (its context) and its last token. Knows ids, not models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from foretoken.errors import InputError
from foretoken.train import corpus
from foretoken.train.corpus import PAIR_SUFFIXES
from reproduction.ngram import Level, NGram, fingerprint

Ids = np.ndarray | Iterable[Sequence[int] | np.ndarray]


def fit(
    ids: Ids,
    vocab_size: int,
    order: int,
    *,
    separator: int | None = None,
    fingerprint: str | None = None,
) -> NGram:
    """The table of that order (1: unigram) for V = `vocab_size` from sequences of ids.

    `ids`: sequences, or one array. No n-gram reaches across the end of a sequence, nor across a
    `separator`, which may only be its first or last token. `fingerprint`: the tokenizer's.
    Raises InputError for ids outside the vocabulary and for no ids at all.
    """
    if order < 1:
        raise InputError(f"order is {order}; give 1 (unigram) or more")
    tokens, room = _flatten(ids, separator, vocab_size)
    contexts, lasts = np.zeros(vocab_size, dtype=np.int64), np.arange(vocab_size)
    size, node, levels = 1, tokens, []
    for k in range(2, order + 1):
        grams, first, longer = _extend(tokens, room, node, k, vocab_size)
        counts = _continuations(node, room, first, k, len(lasts))
        levels.append(_level(contexts, lasts, counts, size))
        size, node = len(lasts), longer
        contexts, lasts = np.divmod(grams, vocab_size)
    counts = np.bincount(node[node >= 0], minlength=len(lasts))
    levels.append(_level(contexts, lasts, counts, size))
    unigram = levels[0].weights + levels[0].backoff / vocab_size
    return NGram(unigram.astype(np.float32), levels[1:], fingerprint)


def fit_from_text(path: Path, tokenizer: PreTrainedTokenizerBase, order: int) -> NGram:
    """Fit to a .txt or .txt.gz file, or a folder of them, or to the targets in a .jsonl or .tsv
    file of pairs."""
    vocabulary = tokenizer.get_vocab()
    V, mark = max(vocabulary.values()) + 1, fingerprint(vocabulary)  # ids may have gaps
    if path.suffix in PAIR_SUFFIXES:
        return fit(_targets(path, tokenizer, order), V, order, fingerprint=mark)
    ids = corpus.encode(corpus.read_texts(path), tokenizer)
    # encode begins with the end-of-text token
    return fit(ids, V, order, separator=int(ids[0]), fingerprint=mark)


def held_out_bits_of_text(
    path: Path, tokenizer: PreTrainedTokenizerBase, order: int
) -> float | None:
    """Return the bits a token of text or targets that are held out, under a table of the others;
    None where there is too little to hold out."""
    V = max(tokenizer.get_vocab().values()) + 1
    if path.suffix in PAIR_SUFFIXES:
        start = len(_start(tokenizer, order))
        return held_out_bits(_targets(path, tokenizer, order), V, order, start)
    train, unseen = corpus.split_texts(corpus.read_texts(path))
    if not any(unseen):
        return None
    ids = corpus.encode(train, tokenizer)
    table = fit(ids, V, order, separator=int(ids[0]))
    return bits_per_token(table, corpus.encode(unseen, tokenizer), separator=int(ids[0]))


def held_out_bits(
    sequences: Sequence[Sequence[int]], V: int, order: int, given: int = 0
) -> float | None:
    """Return the same of sequences, without the first `given` tokens of each."""
    train, unseen = corpus.hold_out(sequences)
    if not (any(train) and any(unseen)):
        return None
    return bits_per_token(fit(train, V, order), unseen, given=given)


def bits_per_token(
    table: NGram, ids: Ids, *, separator: int | None = None, given: int = 0
) -> float:
    """Return the mean of -log2 of the table's distribution at every id; `ids` as for `fit`, the
    first `given` of every sequence not counted."""
    parts = _parts(ids)
    tokens, room = _flatten(parts, separator, table.vocab_size)
    counted = np.concatenate([np.arange(len(part)) >= given for part in parts])
    p, node = table.unigram[tokens].astype(np.float64), tokens
    for k, level in enumerate(table.levels, 2):
        at = np.flatnonzero((room >= k) & (node >= 0))
        context, token = node[at], tokens[at + k - 1]
        number = _numbers(level, context, token, table.vocab_size)
        weight = np.where(number >= 0, np.append(level.weights, 0)[number], 0)
        p[at + k - 1] = weight + level.backoff[context] * p[at + k - 1]
        node = np.full(len(tokens), -1)
        node[at] = number
    with np.errstate(divide="ignore"):
        return float(-np.log2(p[counted]).mean())


def _numbers(level: Level, context: np.ndarray, token: np.ndarray, V: int) -> np.ndarray:
    """Return the numbers of these k-grams in the level, -1 for those that it lacks."""
    grams = context * V + token
    spans = np.diff(level.starts.astype(np.int64))
    keys = np.repeat(np.arange(len(spans)), spans) * V + level.tokens
    numbers = np.searchsorted(keys, grams)
    return np.where(np.append(keys, -1)[numbers] == grams, numbers, -1)


def _targets(path: Path, tokenizer: PreTrainedTokenizerBase, order: int) -> list[list[int]]:
    """The targets of pairs, from a decoder's start to the end that the tokenizer puts there."""
    targets = [line.target for line in corpus.read_lines(path).values() if line.target]
    if not targets:
        raise InputError(f"{path} has no targets; give pairs, or text in a .txt file")
    ids = tokenizer(text_target=targets, verbose=False).input_ids
    return [[*_start(tokenizer, order), *row] for row in ids]


def _start(tokenizer: PreTrainedTokenizerBase, order: int) -> list[int]:
    """Return the beginning of a decoder of T5's kind, for a table that looks back at it."""
    padding = cast(int | None, tokenizer.pad_token_id)
    return [] if order == 1 or padding is None else [padding]


def _flatten(ids: Ids, separator: int | None, V: int) -> tuple[np.ndarray, np.ndarray]:
    """All ids in a row, and how many tokens an n-gram may have that begins at each, int64."""
    parts = _parts(ids)
    if not any(len(part) for part in parts):
        raise InputError("there are no ids; give text or samples")
    tokens = np.concatenate([part.astype(np.int64) for part in parts])
    if tokens.min() < 0 or tokens.max() >= V:
        raise InputError(
            f"ids run from {tokens.min()} to {tokens.max()}; give a vocab_size above, not {V}"
        )
    last = np.zeros(len(tokens), dtype=bool)  # an n-gram may end here but not go on
    last[np.cumsum([len(part) for part in parts if len(part)]) - 1] = True
    ends = np.flatnonzero(last if separator is None else last | (tokens == separator))
    places = np.arange(len(tokens))
    beyond = np.where(last, places, places + 1)  # a separator may also begin an n-gram
    return tokens, ends[np.searchsorted(ends, beyond)] - places + 1


def _parts(ids: Ids) -> list[np.ndarray]:
    return [np.asarray(s) for s in (np.atleast_2d(ids) if isinstance(ids, np.ndarray) else ids)]


def _extend(
    tokens: np.ndarray, room: np.ndarray, node: np.ndarray, k: int, V: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different k-grams (context * V + token) in order, where each first begins, and the
    number of the one that begins at every place, -1 for none."""
    at = np.flatnonzero(room >= k)
    grams, first, number = np.unique(
        node[at] * V + tokens[at + k - 1], return_index=True, return_inverse=True
    )
    longer = np.full(len(tokens), -1)
    longer[at] = number
    return grams, at[first], longer


def _continuations(
    node: np.ndarray, room: np.ndarray, first: np.ndarray, k: int, size: int
) -> np.ndarray:
    """Count the different tokens that were seen in front of each (k-1)-gram; a start counts as
    one."""
    counts = np.bincount(node[first + 1], minlength=size)
    begins = (room >= k - 1) & (np.concatenate([[0], room[:-1]]) < k)
    counts[np.unique(node[begins])] += 1
    return counts


def _level(contexts: np.ndarray, lasts: np.ndarray, counts: np.ndarray, size: int) -> Level:
    """One order: (c - D(c)) / total to each k-gram, the sum of D / total to the order below."""
    cut = _discounts(counts)[np.minimum(counts, 3)]
    total = np.bincount(contexts, counts, size)
    divisor = np.maximum(total, 1)
    backoff = np.where(total > 0, np.bincount(contexts, cut, size) / divisor, 1)
    return Level(
        np.searchsorted(contexts, np.arange(size + 1)).astype(np.uint32),
        lasts.astype(np.uint32),
        ((counts - cut) / divisor[contexts]).astype(np.float32),
        backoff.astype(np.float32),
    )


def _discounts(counts: np.ndarray) -> np.ndarray:
    """D(0), D(1), D(2), D(3 and more) from the counts of counts; 0.5 where one of these is 0."""
    n1, n2, n3, n4 = (int((counts == c).sum()) for c in (1, 2, 3, 4))
    if not (n1 and n2 and n3 and n4):
        return np.array([0, 0.5, 0.5, 0.5])
    y = n1 / (n1 + 2 * n2)
    D = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
    return np.array([0, *np.clip(D, 0.1, [1, 2, 3])])
