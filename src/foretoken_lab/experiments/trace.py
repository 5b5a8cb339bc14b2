"""Figures 1 and 5 of one text: what became of every guess, and when which model ran."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.lab import view
from foretoken.lab.view import ModelCall
from foretoken.request import uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken_lab.experiments import paper
from foretoken_lab.experiments.experiment import (
    Case,
    Experiment,
    Found,
    Plot,
    ResultRow,
    Section,
    Trace,
    done,
)
from foretoken_lab.pairs import Pairs
from foretoken_lab.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAMMA = 5  # of figure 1
MOST = 64  # tokens: more would be blocks too small to see


def cases(recipe: Recipe) -> list[Case]:
    """The first prompt with the first draft that is a model, at the highest temperature."""
    models = [draft.label for draft in recipe.drafts if draft.is_model][:1]
    temperature = max(recipe.temperatures)
    return [{"draft": label, "temperature": temperature, "gamma": GAMMA} for label in models]


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """The text, as HTML and as lines with marks."""
    spec, prompt, seed = pairs.spec(case["draft"]), pairs.prompts[0], pairs.recipe.seed
    length = min(MOST, pairs.recipe.max_new_tokens)
    params = SamplingParams(case["temperature"], max_new_tokens=length)
    (request,) = spec.inputs.requests([prompt], params, seed)
    (one,) = uninterrupted(spec.generate([prompt], params, gamma=case["gamma"], seed=seed))
    arguments = request.prompt, one.steps, spec.tokenizer
    return {
        "prompt": prompt if isinstance(prompt, str) else " ".join(map(str, prompt)),
        "html": view.html(*arguments),
        "lines": [line.plain for line in view.trace(*arguments, marks=True)],
        "tokens": len(one.tokens),
        "calls": one.stats.target_calls,
    }


def section(recipe: Recipe, results: Found) -> Section | None:
    """The text, and how many tokens a run gave."""
    for row in done(results, "trace"):
        result = row.result
        theirs = paper.FIGURE_1_TOKENS / paper.FIGURE_1_RUNS
        paragraph = (
            f"{result['tokens']} tokens in {result['calls']} runs of the target, "
            f"{result['tokens'] / result['calls']:.2f} a run; the paper's example has "
            f"{paper.FIGURE_1_TOKENS} in {paper.FIGURE_1_RUNS}, {theirs:.2f} a run. One text is an "
            "example and no measurement; table 3 has the rates."
        )
        trace = Trace(f"Prompt: {result['prompt']}", result["html"], result["lines"])
        return Section("Figure 1: draft tokens, by outcome", [paragraph], traces=[trace])
    return None


TRACE = Experiment(section, cases, measure)


def timeline_cases(recipe: Recipe) -> list[Case]:
    """One text with the first draft that is a model."""
    return [{"draft": case["draft"]} for case in cases(recipe)]


def timeline_measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """The calls of three runs of the first prompt, each after one that warms up."""
    spec, recipe = pairs.spec(case["draft"]), pairs.recipe
    length = min(MOST, recipe.max_new_tokens)
    rows: list[dict[str, Any]] = []
    for gamma in paper.FIGURE_5_GAMMAS:
        how: dict[str, Any] = {"gamma": gamma, "max_new_tokens": length}
        _, one = (uninterrupted(spec.generate(pairs.prompts[0], **how))[0] for _ in range(2))
        rows.append(
            {
                "gamma": gamma,
                "tokens": len(one.tokens),
                "target_calls": one.stats.target_calls,
                "draft_calls": one.stats.draft_calls,
                "calls": [list(call) for call in view.timeline(one)],
            }
        )
    return {"rows": rows, "encoder_decoder": spec.target.encoder_decoder}


def timeline_section(recipe: Recipe, results: Found) -> Section | None:
    """The picture."""
    paragraph = (
        "An encoder runs once, before the first step; a target without one reads the prompt with "
        "its decoder. In the diagram the draft is called gamma times before each call of the "
        "target; here fewer times where the text ends, and where a draft stops. The diagram is "
        "simplified and has no times: here they hold the reading of the prompt too."
    )
    for own in done(results, "timeline"):
        caption = "The same text three times: a block a call; gaps are the verdict"
        plot = Plot("timeline", caption, partial(_draw, own), (7.5, 2.6))
        return Section("Figure 5: when which model ran", [paragraph], plots=[plot])
    return None


TIMELINE = Experiment(timeline_section, timeline_cases, timeline_measure)


def _draw(own: ResultRow, figure: Figure) -> None:
    rows = {
        f"gamma {row['gamma']}" if row["gamma"] else "plain": [ModelCall(*c) for c in row["calls"]]
        for row in own.result["rows"]
    }
    view.blocks(figure, rows)
