"""Quality that speculation must leave alone: scores of greedy texts against references, BLEU and
chrF of translations (sacrebleu, Post, arXiv 1804.08771) or ROUGE of summaries (rouge-score), and
the target's loss on texts that are sampled; with a draft, and plainly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np

from foretoken.errors import InputError
from foretoken.measurement.estimate import Estimate, estimate_ratio
from foretoken.request import Completion, require_uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from reproduction.experiments.experiment import (
    Case,
    Columns,
    Experiment,
    Found,
    ResultRow,
    Section,
    Table,
    done,
    estimate,
    plus_minus,
    tabulated,
)
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe, read_prompts

ROUGE = ("rouge1", "rouge2", "rougeL")
SENTENCE = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')\]])\s+""")  # also after a closing quote
Scores = dict[str, float]  # by name, of 100


def translation(texts: Sequence[str], references: Sequence[str]) -> Scores:
    """BLEU and chrF2 of a corpus, one reference a text (sacrebleu's own tokens)."""
    library, listed = _library("sacrebleu"), [list(references)]
    return {
        "bleu": library.corpus_bleu(list(texts), listed).score,
        "chrf": library.corpus_chrf(list(texts), listed).score,
    }


def rouge(texts: Sequence[str], references: Sequence[str]) -> Scores:
    """Mean F1 of ROUGE-1, -2 and -L over texts, of 100, on word stems."""
    scorer = _library("rouge_score.rouge_scorer").RougeScorer(list(ROUGE), use_stemmer=True)
    scored = [scorer.score(r, t) for t, r in zip(texts, references, strict=True)]
    return {name: 100 * fmean(one[name].fmeasure for one in scored) for name in ROUGE}


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0].replace("_", "-")
        raise InputError(f"{package} is missing; pip install 'foretoken[reproduction]'") from None


SCORES = {"translation": translation, "summarization": rouge}  # by task


def lead(article: str, count: int = 3) -> str:
    """Return the first sentences of an article, the baseline of summaries."""
    return " ".join(SENTENCE.split(article.strip())[:count])


def looked_up(known: Sequence[tuple[str, str]], sources: Iterable[str]) -> list[str]:
    """Return the baseline of translations: for each source the target of the known pair whose
    source shares most different n-grams of 1 to 5 words, the shortest, then the first of equals."""
    if not known:
        raise InputError("there is no pair to look up; give one or more")
    grams = [_grams(source) for source, _ in known]
    sizes = np.array([len(row) for row in grams])
    hashes = np.fromiter(chain.from_iterable(grams), np.int64, int(sizes.sum()))
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], np.repeat(np.arange(len(known)), sizes)[order]

    def best(source: str) -> str:
        wanted = np.fromiter(_grams(source), np.int64)
        begins, ends = (np.searchsorted(hashes, wanted, side) for side in ("left", "right"))
        spans = [owners[a:b] for a, b in zip(begins, ends, strict=True)]
        shared = np.bincount(np.concatenate([owners[:0], *spans]), minlength=len(known))
        return known[int(np.argmax(shared * (sizes.max() + 1) - sizes))][1]

    return [best(source) for source in sources]


def _grams(text: str) -> set[int]:
    """Return the different n-grams of a text, as hashes."""
    words = text.lower().split()
    return {hash(tuple(words[i : i + n])) for n in range(1, 6) for i in range(len(words) - n + 1)}


def with_and_without(
    spec: Speculator,
    prompts: Sequence[str],
    references: Sequence[str],
    score: Callable[[Sequence[str], Sequence[str]], Scores],
    *,
    gamma: int,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Scores of greedy texts by plain decoding ("plain") and with gamma draft tokens a step
    ("speculative"), and the share that is the "same". In exact arithmetic all are; float32 may tip
    a near-tie. InputError for a target without a tokenizer."""
    if spec.tokenizer is None:
        raise InputError("the target has no tokenizer, so its texts cannot be scored; give one")
    options = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    plain, drafted = (
        [
            (one.text or "").strip()
            for one in require_uninterrupted(spec.generate(list(prompts), gamma=guesses, **options))
        ]
        for guesses in (0, gamma)
    )
    same = fmean(a == b for a, b in zip(plain, drafted, strict=True))
    scores = {"plain": score(plain, references), "speculative": score(drafted, references)}
    return scores | {"same": same}


def nats(completions: Sequence[Completion]) -> Estimate:
    """The target's loss on texts of its own: nats a token, with its 95 % interval over texts, of
    completions that were made with `logprobs`."""
    likelihoods = [completion.logprobs for completion in completions if completion.logprobs]
    losses = [-sum(token.logprob for token in text) for text in likelihoods]
    loss = estimate_ratio(losses, [len(text) for text in likelihoods], 0.0)
    if loss is None:
        raise InputError(
            f"{len(likelihoods)} texts have logprobs; generate two or more with logprobs=0"
        )
    return loss


def cases(recipe: Recipe) -> list[Case]:
    """Every draft that is a model: the scores where the task has them and the file references,
    and the loss."""
    referenced = all(task.reference is not None for task in read_prompts(recipe.prompts))
    kinds = ["scores"] if recipe.task in SCORES and referenced else []
    return [
        {"draft": draft.label, "what": kind, "gamma": recipe.gammas[-1]}
        for draft in recipe.drafts
        if draft.is_model
        for kind in [*kinds, "loss"]
    ]


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Scores of both greedy texts and the share that is equal; or nats a token of both."""
    spec, recipe, gamma = pairs.spec(case["draft"]), pairs.recipe, case["gamma"]
    if case["what"] == "scores":
        references = (task.reference for task in pairs.tasks)
        tasks = list(zip(pairs.prompts, references, strict=True))
        texts = [(a, b) for a, b in tasks if isinstance(a, str) and b is not None]
        if len(texts) < len(tasks):
            raise InputError("scores need prompts that are text, with references; give both")
        sources, references = zip(*texts, strict=True)
        length = recipe.max_new_tokens
        score = SCORES[recipe.task]
        compared = with_and_without(
            spec, sources, references, score, gamma=gamma, max_new_tokens=length
        )
        return compared | {"texts": len(texts)}
    params = SamplingParams(1.0, max_new_tokens=recipe.max_new_tokens, logprobs=0)
    # seeds of their own, so that the two are independent
    sampled = (
        spec.generate(pairs.prompts, params, gamma=guesses, seed=recipe.seed + i)
        for i, guesses in enumerate((0, gamma))
    )
    plain, drafted = (asdict(nats(require_uninterrupted(texts))) for texts in sampled)
    return {"plain": plain, "speculative": drafted, "texts": len(pairs.prompts)}


def section(recipe: Recipe, results: Found) -> Section | None:
    """Both tables, and whether the two are equal within noise."""
    rows = done(results, "quality")
    scores = [row for row in rows if row.case["what"] == "scores"]
    losses = [row for row in rows if row.case["what"] == "loss"]
    if not rows:
        return None
    said = [*([_said_of_scores(recipe, scores)] if scores else [])]
    said += [_said_of_losses(losses)] if losses else []
    tables = [*([_scores(scores)] if scores else []), *([_losses(losses)] if losses else [])]
    return Section("Quality: the same with and without speculation", said, tables)


EXPERIMENT = Experiment(section, cases, measure)


def _scores(rows: list[ResultRow]) -> Table:
    def score(kind: str, name: str) -> Callable[[ResultRow], str]:
        return lambda row: f"{row.result[kind][name]:.2f}"

    columns: Columns[ResultRow] = {
        "draft": lambda row: row.draft,
        **{
            f"{name}, {kind}": score(kind, name)
            for name in rows[0].result["plain"]
            for kind in ("plain", "speculative")
        },
        "equal texts": lambda row: f"{row.result['same']:.1%}",
    }
    return tabulated("Greedy texts against references", rows, columns)


def _losses(rows: list[ResultRow]) -> Table:
    columns: Columns[ResultRow] = {
        "draft": lambda row: row.draft,
        "nats a token, plain": lambda row: plus_minus(estimate(row.result["plain"])),
        "speculative": lambda row: plus_minus(estimate(row.result["speculative"])),
        "texts": lambda row: str(row.result["texts"]),
    }
    caption = "The target's loss on texts sampled at T=1, 95 % intervals over texts"
    return tabulated(caption, rows, columns)


def _said_of_scores(recipe: Recipe, rows: list[ResultRow]) -> str:
    gaps = {
        name: max(abs(row.result["speculative"][name] - row.result["plain"][name]) for row in rows)
        for name in rows[0].result["plain"]
    }
    same = min(row.result["same"] for row in rows)
    sentence = f"Greedy texts with a draft are those without it: {same:.1%} or more are equal"
    if max(gaps.values()) == 0:
        return f"{sentence}, and all scores are the same to the last digit."
    listing = ", ".join(f"{name} by {gap:.2f} at most" for name, gap in gaps.items())
    return (
        f"{sentence}; scores differ ({listing}). Rounding in {recipe.dtype} can tip a near-tie "
        "between two tokens: foretoken certify tells that from a mistake, and docs/exactness.md "
        "has the mode without it."
    )


def _said_of_losses(rows: list[ResultRow]) -> str:
    pairs = [
        (row.draft, *(estimate(row.result[k]) for k in ("plain", "speculative"))) for row in rows
    ]
    apart = [draft for draft, one, other in pairs if one.is_above(other) or other.is_above(one)]
    if not apart:
        return (
            "Sampled texts cost the target the same with and without a draft: the intervals "
            f"overlap in {len(rows)} of {len(rows)} cases."
        )
    return (
        f"The intervals of the loss are apart with {', '.join(apart)}, in {len(apart)} of "
        f"{len(rows)} cases; about one in two hundred would be by chance."
    )
