"""Held-out bits per byte of the pair that ships and of n-gram tables, on the same text; as JSON.

Expected: an order-5 modified Kneser-Ney table near 2.0 bits a byte, the target well below.

    python -m reproduction.held_out --data FOLDER_OF_NOVELS
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from transformers import AutoTokenizer, LlamaForCausalLM

import foretoken
from foretoken.train import corpus
from reproduction.new_tokenizer import build
from reproduction.train import held_out_loss
from reproduction.train_ngram import bits_per_token, fit

ASSETS = Path(foretoken.__file__).parent / "assets"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--orders", type=int, nargs="*", default=[1, 2, 3, 5])
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target", trust_remote_code=False)
    books = build(corpus.read_texts(arguments.data), tokenizer)
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
    facts = {"train_tokens": len(books.train), "held_out_bytes": books.held_out_bytes}
    print(json.dumps({**facts, "bits_per_byte": bits}, indent=2))


if __name__ == "__main__":
    main()
