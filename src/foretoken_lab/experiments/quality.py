"""Quality that speculation must leave alone: scores of greedy texts against references (BLEU, chrF,
ROUGE), and the target's loss on texts that are sampled; with a draft, and plainly."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from foretoken.errors import InputError
from foretoken.request import uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken_lab import quality
from foretoken_lab.experiments.experiment import (
    Case,
    Found,
    ResultRow,
    Section,
    Table,
    done,
    estimate,
    plus_minus,
)
from foretoken_lab.recipes import prompts
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe

SCORES = {"translation": quality.translation, "summarization": quality.rouge}  # by task


def cases(recipe: Recipe) -> list[Case]:
    """Every draft that is a model: the scores where the task has them and the file references,
    and the loss."""
    referenced = all(task.reference is not None for task in prompts.read(recipe.prompts))
    kinds = ["scores"] if recipe.task in SCORES and referenced else []
    return [
        {"draft": draft.label, "what": kind, "gamma": recipe.gammas[-1]}
        for draft in recipe.drafts
        if draft.is_model
        for kind in [*kinds, "loss"]
    ]


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Scores of both greedy texts and the share that is equal; or nats a token of both."""
    if case["what"] == "scores":
        return _scores(pairs, case)
    return _losses(pairs, case)


def _scores(pairs: Pairs, case: Case) -> dict[str, Any]:
    recipe = pairs.recipe
    tasks = [(task.prompt, task.reference) for task in pairs.tasks]
    texts = [(a, b) for a, b in tasks if isinstance(a, str) and b is not None]
    if len(texts) < len(tasks):
        raise InputError("scores need prompts that are text, with references; give both")
    compared = quality.with_and_without(
        pairs.spec(case["draft"]),
        [prompt for prompt, _ in texts],
        [reference for _, reference in texts],
        SCORES[recipe.task],
        gamma=case["gamma"],
        max_new_tokens=recipe.max_new_tokens,
    )
    return asdict(compared) | {"texts": len(texts)}


def _losses(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Sampled with seeds of their own, so that the two are independent."""
    spec, recipe = pairs.spec(case["draft"]), pairs.recipe
    params = SamplingParams(1.0, max_new_tokens=recipe.max_new_tokens, logprobs=0)
    losses = {}
    for i, (name, gamma) in enumerate((("plain", 0), ("speculative", case["gamma"]))):
        texts = spec.generate(pairs.prompts, params, gamma=gamma, seed=recipe.seed + i)
        losses[name] = asdict(quality.nats(uninterrupted(texts)))
    return losses | {"texts": len(pairs.prompts)}


def section(recipe: Recipe, results: Found) -> Section | None:
    """Return both tables."""
    rows = done(results, "quality")
    scores = [row for row in rows if row.case["what"] == "scores"]
    losses = [row for row in rows if row.case["what"] == "loss"]
    if not rows:
        return None
    tables = [_score_table(scores)] if scores else []
    tables += [_loss_table(losses)] if losses else []
    return Section(
        "Quality: the same with and without speculation",
        [_said(recipe)],
        tables,
    )


def _score_table(rows: list[ResultRow]) -> Table:
    names = list(rows[0].result["plain"])
    head = ("draft", *(f"{name}, {kind}" for name in names for kind in ("plain", "speculative")))
    lines = [
        (
            row.case["draft"],
            *(
                f"{row.result[kind][name]:.2f}"
                for name in names
                for kind in ("plain", "speculative")
            ),
            f"{row.result['same']:.1%}",
        )
        for row in rows
    ]
    return Table("Greedy texts against references", (*head, "equal texts"), lines)


def _loss_table(rows: list[ResultRow]) -> Table:
    lines = [
        (
            row.case["draft"],
            *(plus_minus(estimate(row.result[kind])) for kind in ("plain", "speculative")),
            f"{row.result['texts']}",
        )
        for row in rows
    ]
    head = ("draft", "nats a token, plain", "speculative", "texts")
    return Table(
        "The target's loss on texts sampled at T=1, 95 % intervals over texts", head, lines
    )


def _said(recipe: Recipe) -> str:
    return (
        f"Greedy texts with a draft are those without it, but for rounding: in {recipe.dtype} it "
        "can tip a near-tie between two tokens. foretoken certify tells that from a mistake, and "
        "docs/exact.md has the mode without it. Sampled texts cost the target the same with and "
        "without a draft; the intervals of two such losses are apart in about one of two hundred "
        "cases by chance."
    )
