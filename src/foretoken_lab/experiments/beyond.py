"""Questions that the paper leaves open: block verification against Algorithm 1, automatic gamma
against the best fixed one and the oracle's bound (section 3.5), and cascades (Discussion).

Ways of writing the same texts are timed in turn, so that other load on the machine meets them all.
Times are of decoding, without the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeVar

from foretoken import theory
from foretoken.costing import costs
from foretoken.options import Prompt
from foretoken.request import Completion, uninterrupted
from foretoken.speculator import Speculator
from foretoken_lab.experiments.experiment import (
    BLANK,
    Case,
    Found,
    ResultRow,
    Section,
    Table,
    done,
    rounded,
    spanned,
)
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe, RecipeDraft

WARM = 8  # new tokens of the runs that do not count: first calls are slow

Name = TypeVar("Name", bound=Hashable)
Way = Callable[[Prompt, int, int], Completion]  # prompt, seed, number of tokens
Runs = list[list[Completion]]  # of one way: at each repeat, the text of each prompt


def way(spec: Speculator, **options: Any) -> Way:
    """One prompt at a time; options are `generate`'s."""

    def write(prompt: Prompt, seed: int, tokens: int) -> Completion:
        (one,) = spec.generate([prompt], max_new_tokens=tokens, seed=seed, **options)
        return one

    return write


def in_turn(
    ways: Mapping[Name, Way],
    prompts: Sequence[Prompt],
    *,
    repeats: int,
    tokens: int,
    seed: int = 0,
) -> dict[Name, Runs]:
    """Every way on every prompt, one after another, first in short runs that do not count.

    At every second text their order is reversed. Repeat r has seed + r. Raises KeyboardInterrupt
    where a run was interrupted.
    """
    runs: dict[Name, Runs] = {name: [[] for _ in range(repeats)] for name in ways}
    order = list(ways)
    for prompt in prompts:
        for name in order:
            uninterrupted([ways[name](prompt, seed, min(WARM, tokens))])
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for name in order if (repeat + i) % 2 == 0 else order[::-1]:
                (one,) = uninterrupted([ways[name](prompt, seed + repeat, tokens)])
                runs[name][repeat].append(one)
    return runs


def seconds_per_token(runs: Runs) -> float:
    """Return the seconds per token of all texts of a repeat together; the median over repeats."""
    steady = [[text.steady for text in texts] for texts in runs]
    return median(
        sum(each.seconds for each in texts) / sum(each.tokens for each in texts) for texts in steady
    )


def by_prompt(runs: Runs) -> list[list[float]]:
    """Seconds a token of each prompt's text, at each repeat."""
    steady = [[text.steady for text in texts] for texts in zip(*runs, strict=True)]
    return [[each.seconds / each.tokens for each in texts] for texts in steady]


def tokens_per_call(runs: Runs) -> float:
    """New tokens over calls of the target."""
    texts = [text for repeat in runs for text in repeat]
    return sum(len(text.tokens) for text in texts) / sum(text.stats.target_calls for text in texts)


RULES = ("speculative", "block")

Options = dict[str, Any]  # of `generate`
Turns = dict[str, Runs]  # by way


def cases(recipe: Recipe) -> list[Case]:
    """Return the cases of every draft that is a model, or the first of them: acceptance methods
    where text is sampled, automatic gamma at every temperature, and cascades over the draft listed
    before, or else a look-up."""
    drafts = [draft for draft in recipe.drafts if draft.is_model][: recipe.beyond_models]
    sampled = [temperature for temperature in recipe.temperatures if temperature > 0]
    cases_chosen: list[Case] = []
    for i, draft in enumerate(drafts):
        for temperature in sampled:
            for gamma in recipe.gammas:
                cases_chosen.append(_case("rules", draft, temperature, gamma=gamma))
        for temperature in recipe.temperatures:
            cases_chosen.append(_case("automatic", draft, temperature))
        smaller = [other.label for other in drafts[:i][-1:] if draft.draft and other.draft]
        for temperature in recipe.temperatures:
            for inner in smaller or [None]:
                cases_chosen.append(_case("cascade", draft, temperature, inner=inner))
    return cases_chosen


def _case(topic: str, draft: RecipeDraft, temperature: float, **more: Any) -> Case:
    return {"what": topic, "draft": draft.label, "temperature": temperature, **more}


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Ways of writing the same prompts' texts, run in turn: figures of each, by its name."""
    return {"rules": _rules, "automatic": _automatic, "cascade": _cascade}[case["what"]](
        pairs, case
    )


def _rules(pairs: Pairs, case: Case) -> dict[str, Any]:
    spec, gamma = pairs.spec(case["draft"]), case["gamma"]
    ways = {rule: (spec, {"gamma": gamma, "rule": rule}) for rule in RULES}
    return {"ways": _figures(_in_turn(pairs, case, ways))}


def _automatic(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Against every fixed gamma and plain decoding; alpha and c of the runs for the oracle."""
    spec = pairs.spec(case["draft"])
    gammas = [0, *pairs.recipe.gammas, None]
    runs = _in_turn(pairs, case, {_named(gamma): (spec, {"gamma": gamma}) for gamma in gammas})
    texts = [text for repeats in runs.values() for repeat in repeats for text in repeat]
    steps = [step for text in texts for step in text.steady.steps]
    overlaps = [overlap for step in steps for overlap in step.overlaps]
    alpha = fmean(overlaps) if overlaps else None
    c = costs.of(steps).c
    oracle = None if alpha is None else theory.oracle_factor(alpha, c)
    return {"ways": _figures(runs), "alpha": alpha, "c": c, "oracle": oracle}


def _cascade(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Against the draft alone, both with automatic gamma."""
    cascade = pairs.cascade(case["draft"], case["inner"])
    ways = {"alone": (pairs.spec(case["draft"]), {}), "cascade": (cascade, {})}
    return {"ways": _figures(_in_turn(pairs, case, ways))}


def _in_turn(pairs: Pairs, case: Case, specs: dict[str, tuple[Speculator, Options]]) -> Turns:
    """Each way, with options of its own, on the prompts that are timed."""
    recipe, temperature = pairs.recipe, case["temperature"]
    ways = {
        name: way(spec, temperature=temperature, **options)
        for name, (spec, options) in specs.items()
    }
    settings = {"tokens": recipe.max_new_tokens, "seed": recipe.seed}
    return in_turn(ways, pairs.timed, repeats=recipe.repeats, **settings)


def _figures(runs_of: Turns) -> dict[str, dict[str, float]]:
    return {
        name: {
            "seconds_per_token": seconds_per_token(runs),
            "tokens_per_call": tokens_per_call(runs),
        }
        for name, runs in runs_of.items()
    }


def section(recipe: Recipe, results: Found) -> Section | None:
    """A table and a paragraph for each of the three."""
    rows = done(results, "beyond")
    if not rows:
        return None
    paragraphs: list[str] = []
    tables: list[Table] = []
    parts = ("rules", _show_rules), ("automatic", _show_automatic), ("cascade", _show_cascade)
    for topic, show in parts:
        group = [row for row in rows if row.case["what"] == topic]
        if group:
            paragraph, table = show(group)
            paragraphs.append(paragraph)
            tables.append(table)
    return Section("Beyond the paper: rules, automatic gamma, cascades", paragraphs, tables)


def _show_rules(rows: list[ResultRow]) -> tuple[str, Table]:
    lines: list[tuple[str, ...]] = []
    gains, faster = [], []
    for row in rows:
        one, other = (row.result["ways"][rule] for rule in RULES)
        gains.append(other["tokens_per_call"] / one["tokens_per_call"])
        faster.append(one["seconds_per_token"] / other["seconds_per_token"])
        lines.append(
            (
                row.case["draft"],
                f"{row.case['temperature']:g}",
                str(row.case["gamma"]),
                *(f"{each['tokens_per_call']:.2f}" for each in (one, other)),
                f"{gains[-1]:.3f}",
                f"{faster[-1]:.2f}",
            )
        )
    head = (
        "draft",
        "T",
        "gamma",
        "tokens a call: Algorithm 1",
        "block",
        "ratio",
        "times its speed",
    )
    paragraph = (
        f"Block verification (Sun et al., arXiv 2403.10444) has the same law as Algorithm 1 and "
        f"keeps {spanned(gains, 3)} times its tokens a call, which makes it {spanned(faster)} "
        "times as fast; in expectation it never keeps less, so that values below 1 are chance."
    )
    return paragraph, Table("Block verification against Algorithm 1", head, lines)


def _show_automatic(rows: list[ResultRow]) -> tuple[str, Table]:
    lines: list[tuple[str, ...]] = []
    shares, of_plain = [], []
    for row in rows:
        ways, oracle = row.result["ways"], row.result["oracle"]
        seconds = {name: way["seconds_per_token"] for name, way in ways.items()}
        own, plain = seconds[_named(None)], seconds[_named(0)]
        fixed = {n: s for n, s in seconds.items() if n not in (_named(None), _named(0))}
        best = min(fixed, key=lambda name: fixed[name])
        shares.append(fixed[best] / own)
        of_plain.append(plain / own)
        lines.append(
            (
                row.case["draft"],
                f"{row.case['temperature']:g}",
                f"{of_plain[-1]:.2f}x",
                f"{plain / fixed[best]:.2f}x ({best})",
                f"{shares[-1]:.3f}",
                rounded(row.result["alpha"], 3),
                rounded(row.result["c"], 3),
                BLANK if oracle is None else f"{oracle:.2f}x",
            )
        )
    head = ("draft", "T", "automatic", "best fixed", "ratio", "alpha", "c", "oracle's bound")
    paragraph = (
        f"Automatic gamma runs at {spanned(shares)} times the speed of the best fixed gamma of "
        f"each line, which is known only afterwards, and at {spanned(of_plain)} times plain "
        "decoding. The oracle of section 3.5 knows which guesses will be kept; its bound, 1 / (1 - "
        "alpha + c alpha), takes a longer pass to cost nothing more, so it is not reached."
    )
    return paragraph, Table(
        "Automatic gamma, the best fixed one and the oracle's bound", head, lines
    )


def _show_cascade(rows: list[ResultRow]) -> tuple[str, Table]:
    lines: list[tuple[str, ...]] = []
    faster = []
    for row in rows:
        alone, cascade = (row.result["ways"][name] for name in ("alone", "cascade"))
        faster.append(alone["seconds_per_token"] / cascade["seconds_per_token"])
        lines.append(
            (
                f"{row.case['draft']} < {row.case['inner'] or 'lookup'}",
                f"{row.case['temperature']:g}",
                *(f"{each['tokens_per_call']:.2f}" for each in (alone, cascade)),
                f"{faster[-1]:.2f}",
            )
        )
    head = (
        "draft < its own draft",
        "T",
        "tokens a call: alone",
        "cascade",
        "times the draft's speed",
    )
    paragraph = (
        f"A draft with a draft of its own runs at {spanned(faster)} times its speed alone. It "
        "gains where its own forward passes cost much more than those of the inner draft, which "
        "those of small drafts hardly do."
    )
    return paragraph, Table("Cascades, both with automatic gamma", head, lines)


def _named(gamma: int | None) -> str:
    if gamma is None:
        return "automatic"
    return f"gamma {gamma}" if gamma else "plain"
