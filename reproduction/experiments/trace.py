"""Figures 1 and 5 of one text: what became of every draft token, and when which model ran."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from foretoken.cli import token_styles
from foretoken.request import require_uninterrupted
from foretoken.sampling.params import SamplingParams
from reproduction import view
from reproduction.experiments import paper
from reproduction.experiments.experiment import (
    BLANK,
    Case,
    Columns,
    Experiment,
    Found,
    Plot,
    Section,
    Trace,
    done,
    tabulated,
)
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe
from reproduction.view import ModelCall

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
    (request,) = spec.inputs.make_requests([prompt], params, seed)
    (one,) = require_uninterrupted(spec.generate([prompt], params, gamma=case["gamma"], seed=seed))
    arguments = request.prompt, one.steps, spec.tokenizer
    return {
        "prompt": prompt if isinstance(prompt, str) else " ".join(map(str, prompt)),
        "html": view.html(*arguments),
        "lines": [line.plain for line in token_styles.format_steps(*arguments, marks=True)],
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
        _, one = (
            require_uninterrupted(spec.generate(pairs.prompts[0], **how))[0] for _ in range(2)
        )
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
    """The picture, and the calls counted."""
    for own in done(results, "timeline"):
        runs = [TimedRun(**row) for row in own.result["rows"]]
        columns: Columns[TimedRun] = {
            "": lambda run: run.name,
            "tokens": lambda run: str(run.tokens),
            "target calls": lambda run: str(run.target_calls),
            "draft calls": lambda run: str(run.draft_calls),
            "ms": lambda run: f"{run.end * 1e3:.1f}",
            "ms of target": lambda run: _milliseconds(run, "target"),
            "its encoder": lambda run: _milliseconds(run, "target encoder"),
            "ms of draft": lambda run: _milliseconds(run, "draft"),
            "encoder of the draft": lambda run: _milliseconds(run, "draft encoder"),
        }
        caption = "A block a call; gaps are the verdict"
        plot = Plot("timeline", caption, partial(_draw, runs), (7.5, 2.6))
        encoders = _said_of_encoders(runs[0], encoder_decoder=own.result["encoder_decoder"])
        return Section(
            "Figure 5: when which model ran",
            [encoders, *_said_of_calls(runs)],
            [tabulated("The same text three times", runs, columns)],
            [plot],
        )
    return None


TIMELINE = Experiment(timeline_section, timeline_cases, timeline_measure)


@dataclass(frozen=True, slots=True)
class TimedRun:
    """The calls of one run of the text; gamma 0: plain decoding."""

    gamma: int
    tokens: int
    target_calls: int
    draft_calls: int
    calls: list[list[Any]]

    @property
    def name(self) -> str:
        return f"gamma {self.gamma}" if self.gamma else "plain"

    @property
    def model_calls(self) -> list[ModelCall]:
        return [ModelCall(*call) for call in self.calls]

    @property
    def end(self) -> float:
        """Seconds until the last call was over."""
        last = self.model_calls[-1]
        return last.at + last.seconds


def _milliseconds(run: TimedRun, part: str) -> str:
    """Sum the calls whose names begin so."""
    spent = [call.seconds for call in run.model_calls if call.part.startswith(part)]
    return f"{sum(spent) * 1e3:.1f}" if spent else BLANK


def _said_of_encoders(run: TimedRun, *, encoder_decoder: bool) -> str:
    if not encoder_decoder:
        return "The target has no encoder, unlike the paper's: its decoder reads the prompt."
    encoders = [
        f"{spent} ms of the {model}'s"
        for model in ("target", "draft")
        if (spent := _milliseconds(run, f"{model} encoder")) != BLANK
    ]
    if not encoders:
        return "The target is an encoder-decoder, as the paper's; its encoder was not timed apart."
    return (
        "The target is an encoder-decoder, as the paper's. An encoder runs once, before the first "
        f"step: {' and '.join(encoders)}, of {run.end * 1e3:.1f} ms with {run.name}."
    )


def _said_of_calls(runs: list[TimedRun]) -> list[str]:
    """Compare counts and times with the paper's diagram."""
    plain = next(run for run in runs if not run.gamma)
    drafted = [run for run in runs if run.gamma]
    counts = ", ".join(f"{run.target_calls} with {run.name}" for run in drafted)
    before = " and ".join(f"{run.draft_calls / run.target_calls:.1f}" for run in drafted)
    said = [
        f"Plain decoding calls the target {plain.target_calls} times for {plain.tokens} tokens, "
        f"speculation {counts}. Before a target call the draft is called {before} times on "
        f"average, in the diagram {' and '.join(str(run.gamma) for run in drafted)}: fewer where "
        "the text ends, and where a draft stops."
    ]
    if not any(run.draft_calls for run in drafted):
        return said
    share = " and ".join(f"{run.end / plain.end:.2f}" for run in drafted)
    return [
        *said,
        "The diagram is simplified and has no times. Here a call of the draft takes "
        f"{_mean(drafted, 'draft') / _mean(drafted, 'target'):.2f} of the target's, and the text "
        f"takes {share} of the time of plain decoding, the reading of the prompt included.",
    ]


def _mean(runs: list[TimedRun], part: str) -> float:
    """Return the mean seconds of a call."""
    return fmean(call.seconds for run in runs for call in run.model_calls if call.part == part)


def _draw(runs: list[TimedRun], figure: Figure) -> None:
    view.blocks(figure, {run.name: run.model_calls for run in runs})
