"""The translation ladder: a T5 target of 4.4M parameters and drafts of about 1/4, 1/12 and 1/40 of
it, from pairs of texts, with the unigram and the bigram of the target language.

    python -m foretoken_lab.standins.translation --train PAIRS ... --test PAIRS ... \\
        --out runs/translation

PAIRS is a .tsv or .jsonl file, or the common head of two files of lines: `corpus/train` for
corpus/train.en and corpus/train.de, packed (.gz) or not. Each stage goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from foretoken_lab.standins import commands
from foretoken_lab.standins.commands import (
    T5_DRAFTS,
    Sizes,
    distill,
    positive,
    seq2seq,
    tables,
    told,
)

LENGTH = 128  # tokens of a target
WORDS, RATIO = 120, 3.0  # a longer text, or a pair of more different lengths, is left out
SHAPES: dict[str, Sizes] = {
    "target": {
        "encoder_layers": 3,
        "decoder_layers": 4,
        "hidden": 192,
        "feed_forward": 480,
        "heads": 4,
    },
    **T5_DRAFTS,
    "draft-40": {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "hidden": 24,
        "feed_forward": 48,
        "heads": 2,
    },
}
DRAFTS = [name for name in SHAPES if name != "target"]
STAGES = ("prepare", "target", "drafts", "distill", "tables", "choose", "score")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", nargs="+", default=[], metavar="PAIRS")
    parser.add_argument("--test", nargs="+", default=[], metavar="PAIRS", help="never trained on")
    parser.add_argument("--keys", nargs=2, default=("en", "de"), metavar=("SOURCE", "TARGET"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=DRAFTS)
    parser.add_argument("--steps", type=positive, default=20_000, help="of the target, at most")
    parser.add_argument("--draft-steps", type=positive, default=6000, help="of a draft, at most")
    parser.add_argument("--distill-steps", type=positive, default=600)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the target")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in it: see train seq2seq")
    parser.add_argument("--limit", type=positive, help="sentences of a test set; left out: all")
    arguments = parser.parse_args()
    if "prepare" in arguments.stages and not arguments.train:
        parser.error("--train is missing; give pairs, or --stages without prepare")
    return arguments


def main() -> None:
    arguments = parsed()
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "target"
    data = arguments.out / "pairs.jsonl"
    common: dict[str, object] = {"patience": 10, "bfloat16": arguments.bfloat16}
    if "prepare" in arguments.stages:
        prepare(arguments)
    if "target" in arguments.stages:
        lesson = {"steps": arguments.steps, "dropout": arguments.dropout, **common}
        train(data, target, "target", lesson)
    for name in arguments.drafts:
        tokenizer = {"tokenizer": target / "tokenizer"}
        if "drafts" in arguments.stages:
            lesson = {"steps": arguments.draft_steps, **common, **tokenizer}
            train(data, arguments.out / name, name, lesson)
        if "distill" in arguments.stages:
            lesson = {"length": LENGTH, "steps": arguments.distill_steps, "batch": 64}
            distill(data, arguments.out, name, {**lesson, "held_out": 64, "save_every": 100})
    if "tables" in arguments.stages:
        tables(arguments.out, data, target / "tokenizer")
    if "choose" in arguments.stages:
        alphas = commands.chosen(arguments.out, arguments.drafts, data, LENGTH)
        commands.record(arguments.out, "alphas", alphas)
    if "score" in arguments.stages:
        score(arguments.out, arguments.drafts[0], arguments.test, arguments.limit)


def prepare(arguments: argparse.Namespace) -> None:
    """OUT/pairs.jsonl, and a file of each test set."""
    pairs = [pair for name in arguments.train for pair in commands.read(name, arguments.keys)]
    tests = {name: commands.read(name, arguments.keys) for name in arguments.test}
    banned = [source for test in tests.values() for source, _ in test]
    commands.write(arguments.out / "pairs.jsonl", filter(alike, commands.cleaned(pairs, banned)))
    for name, test in tests.items():
        commands.write(test_file(arguments.out, name), test)


def test_file(out: Path, name: str) -> Path:
    """Where a test set lies, by the last two parts of its name."""
    return out / f"test-{'-'.join(Path(name).parts[-2:])}.jsonl"


def alike(pair: commands.Pair) -> bool:
    """Tell whether a pair may be a translation: neither side long, nor much longer than the
    other."""
    shorter, longer = sorted(len(text.split()) for text in pair)
    return longer <= min(WORDS, RATIO * shorter + 2)


def train(data: Path, out: Path, name: str, lesson: dict[str, object]) -> None:
    common = {"vocab_size": 4096, "length": LENGTH, "save_every": 200}
    seq2seq(data, out, {**SHAPES[name], **common, **lesson})


def score(out: Path, draft: str, tests: list[str], limit: int | None) -> None:
    """BLEU and chrF of the target without and with a draft, beside the look-up's."""
    from foretoken_lab.quality import LookUp, translation

    pairs = commands.read(str(out / "pairs.jsonl"), ("source", "target"))
    look_up = LookUp(pairs)
    for name in tests:
        test = commands.read(str(test_file(out, name)), ("source", "target"))[:limit]
        start = time.perf_counter()
        scores = commands.scores(
            out, draft, test, translation, LENGTH, partial(_looked_up, look_up)
        )
        scores["seconds"] = time.perf_counter() - start
        commands.record(out, test_file(out, name).stem, scores)


def _looked_up(look_up: Callable[[str], str], sources: list[str]) -> list[str]:
    return [look_up(source) for source in sources]


if __name__ == "__main__":
    told(main)
