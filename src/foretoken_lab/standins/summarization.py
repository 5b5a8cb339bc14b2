"""The summarization stand-in: a T5 target and two drafts that learn to find the sentence that says
most of a text (gap sentences, as in PEGASUS, arXiv 1912.08777), then to summarize articles.

    python -m foretoken_lab.standins.summarization --articles cnndm.jsonl.gz \\
        --texts novels/*.txt.gz --out runs/summarization

With a few hundred articles it is a stand-in and no more: it copies, and it makes things up.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from foretoken.train import corpus
from foretoken_lab.quality import lead, rouge, sentences
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

WORDS, LENGTH = 250, 96  # words of a source, tokens of a target
PIECE = 12  # sentences of a text that one is missing of
LEAST = 6  # words of a sentence that is worth finding
SHAPES: dict[str, Sizes] = {
    "target": {
        "encoder_layers": 4,
        "decoder_layers": 4,
        "hidden": 192,
        "feed_forward": 512,
        "heads": 4,
    },
    **T5_DRAFTS,
}
DRAFTS = list(T5_DRAFTS)
STAGES = ("prepare", "train", "distill", "tables", "choose", "score")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--articles", nargs="+", required=True, help=".jsonl, packed or not")
    parser.add_argument("--keys", nargs=2, default=("article", "highlights"))
    parser.add_argument("--texts", nargs="*", default=[], type=Path, help=".txt, packed or not")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--steps", type=positive, default=8000, help="on gap sentences, at most")
    parser.add_argument("--article-steps", type=positive, default=2000, help="on articles, at most")
    parser.add_argument("--distill-steps", type=positive, default=400)
    parser.add_argument("--bfloat16", action="store_true", help="multiply in it: see train seq2seq")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    gaps, articles = out / "gaps.jsonl", out / "pairs.jsonl"
    if "prepare" in arguments.stages:
        prepare(arguments, gaps, articles)
    for name in SHAPES:
        if "train" in arguments.stages:
            common: dict[str, object] = {"bfloat16": arguments.bfloat16}
            own = {} if name == "target" else {"tokenizer": out / "target-gaps" / "tokenizer"}
            train(
                gaps,
                out / f"{name}-gaps",
                {**SHAPES[name], **own, **common, "steps": arguments.steps},
            )
            common |= {"dropout": 0.1, "steps": arguments.article_steps}
            learnt = {"init": out / f"{name}-gaps" / "model", "learning_rate": 1e-3}
            train(articles, out / name, {**learnt, **common})
        if "distill" in arguments.stages and name != "target":
            # On texts of the target: there are few summaries
            options = {"length": LENGTH, "steps": arguments.distill_steps, "batch": 16}
            distill(articles, out, name, {**options, "target_generated": 0.5})
    if "tables" in arguments.stages:
        tables(out, articles, out / "target" / "model")
    if "choose" in arguments.stages:
        commands.record(out, "alphas", commands.chosen(out, DRAFTS, articles, LENGTH))
    if "score" in arguments.stages:
        pairs = commands.read(str(articles), ("source", "target"))
        _, held_out = corpus.hold_out(pairs)
        scores = commands.scores(out, DRAFTS[0], held_out, rouge, LENGTH, leads)
        commands.record(out, "held-out articles", scores)


def leads(articles: list[str]) -> list[str]:
    return [lead(article) for article in articles]


def prepare(arguments: argparse.Namespace, gaps: Path, articles: Path) -> None:
    """Pairs of texts and their missing sentences, and of articles and their summaries. The gaps are
    not those of articles that are held out."""
    pairs = [pair for name in arguments.articles for pair in commands.read(name, arguments.keys)]
    pairs = [(cut(article), summary) for article, summary in commands.cleaned(pairs, ())]
    commands.write(articles, pairs)
    learnt, held_out = corpus.hold_out(pairs)
    commands.write(arguments.out / "held-out.jsonl", held_out)  # for the recipe
    texts = [article for article, _ in learnt]
    texts += ["\n".join(commands.lines(path)) for path in arguments.texts]
    drawn = (pair for text in texts for pair in gap_pairs(text))
    commands.write(gaps, commands.cleaned(drawn, ()))


def cut(text: str) -> str:
    """Its first WORDS words."""
    return " ".join(text.split()[:WORDS])


def gap_pairs(text: str) -> Iterator[commands.Pair]:
    """Every piece of a text without its most telling sentence, and that sentence."""
    parts = sentences(" ".join(text.split()))
    for start in range(0, len(parts) - 2, PIECE):
        piece = parts[start : start + PIECE]
        best = most_telling(piece)
        if best is not None:
            yield cut(" ".join(piece[:best] + piece[best + 1 :])), piece[best]


def most_telling(piece: list[str]) -> int | None:
    """The sentence that shares most words with the others (F1 of different words, as PEGASUS's
    principal sentences); None where all are short."""
    terms = [set(re.findall(r"\w+", sentence.lower())) for sentence in piece]

    def told(i: int) -> float:
        rest = set[str]().union(*terms[:i], *terms[i + 1 :])
        return 2 * len(terms[i] & rest) / max(1, len(terms[i]) + len(rest))

    long = [i for i, sentence in enumerate(piece) if len(sentence.split()) >= LEAST]
    return max(long, key=told, default=None)


def train(data: Path, out: Path, options: dict[str, object]) -> None:
    lesson = {"vocab_size": 4096, "length": LENGTH, "patience": 8, "save_every": 100, **options}
    seq2seq(data, out, lesson)


if __name__ == "__main__":
    told(main)
