"""Quality of texts beside references: BLEU and chrF of translations (sacrebleu, Post, arXiv
1804.08771), ROUGE of summaries (rouge-score), and simple baselines. Speculation must change none of
it, and `with_and_without` says whether it did.

Needs the extra `report`. Knows no recipes, and trains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any

import numpy as np

from foretoken.errors import InputError
from foretoken.lab.estimate import Estimate, ratio
from foretoken.request import Completion, uninterrupted
from foretoken.speculator import Speculator

ROUGE = ("rouge1", "rouge2", "rougeL")
ORDERS = range(1, 6)  # of the n-grams that the look-up counts
SENTENCE = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')\]])\s+""")  # also behind a closing quote

Scores = dict[str, float]  # by name, of 100


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Return the BLEU of a corpus, one reference a text, of 100 (sacrebleu's own tokens)."""
    _require_alike(texts, references)
    return _library("sacrebleu").corpus_bleu(list(texts), [list(references)]).score


def chrf(texts: Sequence[str], references: Sequence[str]) -> float:
    """chrF2 of a corpus, one reference a text, of 100."""
    _require_alike(texts, references)
    return _library("sacrebleu").corpus_chrf(list(texts), [list(references)]).score


def rouge(texts: Sequence[str], references: Sequence[str]) -> Scores:
    """Mean F1 of ROUGE-1, -2 and -L over texts, of 100, on word stems."""
    _require_alike(texts, references)
    scorer = _library("rouge_score.rouge_scorer").RougeScorer(list(ROUGE), use_stemmer=True)
    scored = [scorer.score(r, t) for t, r in zip(texts, references, strict=True)]
    return {name: 100 * float(np.mean([s[name].fmeasure for s in scored])) for name in ROUGE}


def translation(texts: Sequence[str], references: Sequence[str]) -> Scores:
    """BLEU and chrF by name."""
    return {"bleu": bleu(texts, references), "chrf": chrf(texts, references)}


def sentences(text: str) -> list[str]:
    """The sentences of a text, cut behind full stops, question and exclamation marks."""
    return [part for part in SENTENCE.split(text.strip()) if part]


def lead(article: str, count: int = 3) -> str:
    """The first sentences of an article, the baseline of summaries."""
    return " ".join(sentences(article)[:count])


class LookUp:
    """The baseline of translations: the target of the known pair whose source shares most different
    n-grams of 1 to 5 words with the source given; of equals the shortest, then the first."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        """`pairs`: sources and targets. InputError where there is none."""
        if not pairs:
            raise InputError("there is no pair to look up; give one or more")
        self.targets = [target for _, target in pairs]
        grams = [_grams(source) for source, _ in pairs]
        self.sizes = np.array([len(row) for row in grams])
        hashes = np.fromiter(chain.from_iterable(grams), np.int64, int(self.sizes.sum()))
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.owners = np.repeat(np.arange(len(pairs)), self.sizes)[order]

    def __call__(self, source: str) -> str:
        """Its best pair's target."""
        hashes = np.fromiter(_grams(source), np.int64)
        begins, ends = (np.searchsorted(self.hashes, hashes, side) for side in ("left", "right"))
        spans = [self.owners[a:b] for a, b in zip(begins, ends, strict=True)]
        matches = np.concatenate([np.empty(0, dtype=np.int64), *spans])
        shared = np.bincount(matches, minlength=len(self.targets))
        return self.targets[int(np.argmax(shared * (self.sizes.max() + 1) - self.sizes))]


def _grams(text: str) -> set[int]:
    """Its different n-grams, as hashes."""
    terms = text.lower().split()
    return {hash(tuple(terms[i : i + n])) for n in ORDERS for i in range(len(terms) - n + 1)}


@dataclass(frozen=True, slots=True)
class Compared:
    """The same prompts' texts without draft tokens and with them."""

    plain: Scores
    speculative: Scores
    same: float  # share of texts that are equal


def with_and_without(
    spec: Speculator,
    prompts: Sequence[str],
    references: Sequence[str],
    score: Callable[[Sequence[str], Sequence[str]], Scores],
    *,
    gamma: int,
    max_new_tokens: int,
) -> Compared:
    """Greedy texts by plain decoding and with gamma draft tokens a step, scored. In exact
    arithmetic they are equal; float32 may tip a near-tie."""
    plain, drafted = (
        greedy(spec, prompts, gamma=draft_tokens, max_new_tokens=max_new_tokens)
        for draft_tokens in (0, gamma)
    )
    same = float(np.mean([a == b for a, b in zip(plain, drafted, strict=True)]))
    return Compared(score(plain, references), score(drafted, references), same)


def greedy(
    spec: Speculator, prompts: Sequence[str], *, gamma: int | None, max_new_tokens: int
) -> list[str]:
    """The texts at temperature 0, in order. InputError for a target without a tokenizer."""
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so its texts cannot be scored; give one")
    options = {"temperature": 0.0, "gamma": gamma, "max_new_tokens": max_new_tokens}
    completions = uninterrupted(spec.generate(list(prompts), **options))
    return [(one.text or "").strip() for one in completions]


def nats(completions: Sequence[Completion]) -> Estimate:
    """The target's loss on texts of its own: nats a token, with its 95 % interval over texts, of
    completions that were made with `logprobs`."""
    likelihoods = [completion.logprobs for completion in completions if completion.logprobs]
    losses = [-sum(token.logprob for token in text) for text in likelihoods]
    estimate = ratio(losses, [len(text) for text in likelihoods], 0.0)
    if estimate is None:
        raise InputError(
            f"{len(likelihoods)} texts have logprobs; generate two or more with logprobs=0"
        )
    return estimate


def _require_alike(texts: Sequence[str], references: Sequence[str]) -> None:
    if not texts or len(texts) != len(references):
        raise InputError(
            f"there are {len(texts)} texts and {len(references)} references; give one for each"
        )


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0].replace("_", "-")
        raise InputError(f"{package} is missing; pip install 'foretoken[lab]'") from None
