"""Figure 1: a text line by line, a line for each run of the target, its tokens coloured by fate."""

from __future__ import annotations

from typing import Any

from foretoken.lab import view
from foretoken.request import uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken_lab.experiments import paper
from foretoken_lab.experiments.experiment import Case, Found, Section, Trace, done
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe

MOST, GAMMA = 64, 5  # new tokens; guesses a run


def cases(recipe: Recipe) -> list[Case]:
    """The first prompt with the first draft that is a model, at the highest temperature."""
    drafts = [draft.label for draft in recipe.drafts if draft.is_model]
    temperature = max(recipe.temperatures)
    return [{"draft": drafts[0], "temperature": temperature, "gamma": GAMMA}] if drafts else []


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
    rows = done(results, "trace")
    if not rows:
        return None
    result = rows[0].result
    theirs = paper.FIGURE_1_TOKENS / paper.FIGURE_1_RUNS
    ours = result["tokens"] / result["calls"]
    paragraph = (
        f"{result['tokens']} tokens in {result['calls']} runs of the target, {ours:.2f} a run; the "
        f"paper's example has {paper.FIGURE_1_TOKENS} in {paper.FIGURE_1_RUNS}, {theirs:.2f} a run."
        " One text is an example and no measurement; table 3 has the rates."
    )
    return Section(
        "Figure 1: what became of the guesses",
        [paragraph],
        traces=[Trace(f"Prompt: {result['prompt']}", result["html"], result["lines"])],
    )
