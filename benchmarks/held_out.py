"""Held-out bits per byte: a model of the default pair against n-gram tables on the same text.

Expected: an order-5 modified Kneser-Ney table near 2.0 bits a byte, the target well below.

    python benchmarks/held_out.py --data FOLDER_OF_NOVELS
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, LlamaForCausalLM

import foretoken
import machine
from foretoken.drafters.ngram import Level, NGram
from foretoken.train import corpus
from foretoken.train.ngram import _flatten, fit
from foretoken_lab.train import held_out_loss

ASSETS = Path(foretoken.__file__).parent / "assets"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--orders", type=int, nargs="*", default=[1, 2, 3, 5])
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target", trust_remote_code=False)
    books = corpus.build(corpus.read_texts(arguments.data), tokenizer)
    per_byte = len(books.held_out) / books.held_out_bytes
    bits: dict[str, float] = {}
    for order in arguments.orders:
        end = tokenizer.eos_token_id
        ngram = fit(books.train, len(tokenizer), order, separator=end)
        bits[f"{order}-gram"] = per_byte * bits_per_token(ngram, books.held_out, separator=end)
    for name in ("draft", "target"):
        model = LlamaForCausalLM.from_pretrained(ASSETS / name)
        nats = held_out_loss(model, books.held_out, model.config.max_position_embeddings)
        bits[name] = per_byte * nats / math.log(2)
    table = Table("model", "held-out bits per byte")
    for name, value in bits.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    facts = {"train_tokens": len(books.train), "held_out_bytes": books.held_out_bytes}
    print(machine.save("held-out", {**facts, "bits_per_byte": bits}))


def bits_per_token(table: NGram, ids: np.ndarray, *, separator: int) -> float:
    """Mean -log2 of the table's distribution at every id, given those before it."""
    tokens, room = _flatten(ids, separator, table.vocab_size)
    p, node = table.unigram[tokens].astype(np.float64), tokens
    for k, level in enumerate(table.levels, 2):
        at = np.flatnonzero((room >= k) & (node >= 0))
        context, token = node[at], tokens[at + k - 1]
        node = np.full(len(tokens), -1)
        node[at] = _numbers(level, context, token, table.vocab_size)
        weight = np.where(node[at] >= 0, level.weights[node[at]] if len(level.weights) else 0, 0)
        p[at + k - 1] = weight + level.backoff[context] * p[at + k - 1]
    with np.errstate(divide="ignore"):
        return float(-np.log2(p).mean())


def _numbers(level: Level, context: np.ndarray, token: np.ndarray, V: int) -> np.ndarray:
    """The numbers of these k-grams in the level, -1 for those that it lacks."""
    grams = context * V + token
    spans = np.diff(level.starts.astype(np.int64))
    keys = np.repeat(np.arange(len(spans)), spans) * V + level.tokens
    numbers = np.searchsorted(keys, grams)
    return np.where(np.append(keys, -1)[numbers] == grams, numbers, -1)


if __name__ == "__main__":
    main()
