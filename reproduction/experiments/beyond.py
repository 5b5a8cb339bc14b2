"""Questions that the paper leaves open: block verification against Algorithm 1, automatic gamma
against the best fixed one and the oracle's bound (section 3.5), and cascades (Discussion).

Ways of writing the same texts are timed in turn, so that other load on the machine meets them all.
Times are of decoding, without the prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from foretoken.costing import costs
from foretoken.inputs import Prompt
from foretoken.request import Completion, require_uninterrupted
from foretoken.speculator import Speculator
from reproduction.experiments.experiment import (
    ABOUT,
    Case,
    Columns,
    Experiment,
    Found,
    ResultRow,
    Section,
    done,
    rounded,
    spanned,
    tabulated,
)
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe
from reproduction.theory import oracle_factor

WARM = 8  # new tokens of the runs that do not count: first calls are slow
RULES = ("speculative", "block")
PLAIN, AUTOMATIC, ALONE, CASCADE = "plain", "automatic", "alone", "cascade"

Way = tuple[Speculator, dict[str, Any]]  # with options of `generate`
Runs = list[list[Completion]]  # of one way: at each repeat, the text of each prompt


def in_turn(
    ways: Mapping[str, Way], prompts: Sequence[Prompt], *, repeats: int, tokens: int, seed: int = 0
) -> dict[str, Runs]:
    """Every way on every prompt, one after another, first in short runs that do not count.

    At every second text their order is reversed. Repeat r has seed + r. Raises KeyboardInterrupt
    where a run was interrupted.
    """

    def written(name: str, prompt: Prompt, tokens: int, seed: int) -> Completion:
        spec, options = ways[name]
        texts = spec.generate([prompt], max_new_tokens=tokens, seed=seed, **options)
        return require_uninterrupted(texts)[0]

    runs: dict[str, Runs] = {name: [[] for _ in range(repeats)] for name in ways}
    for prompt in prompts:
        for name in ways:
            written(name, prompt, min(WARM, tokens), seed)
    for repeat in range(repeats):
        for i, prompt in enumerate(prompts):
            for name in list(ways)[:: 1 if (repeat + i) % 2 == 0 else -1]:
                runs[name][repeat].append(written(name, prompt, tokens, seed + repeat))
    return runs


def seconds_per_token(runs: Runs) -> float:
    """Return the seconds per token of all texts of a repeat together; the median over repeats."""
    steady = [[text.steady for text in texts] for texts in runs]
    return median(
        sum(each.seconds for each in texts) / sum(each.tokens for each in texts) for texts in steady
    )


def tokens_per_call(runs: Runs) -> float:
    """New tokens over calls of the target."""
    texts = [text for repeat in runs for text in repeat]
    return sum(len(text.tokens) for text in texts) / sum(text.stats.target_calls for text in texts)


def cases(recipe: Recipe) -> list[Case]:
    """Return the cases of every draft that is a model, or the first of them: acceptance methods
    where text is sampled, automatic gamma at every temperature, and cascades over the draft listed
    before, or else a look-up."""
    drafts = [draft for draft in recipe.drafts if draft.is_model][: recipe.beyond_models]
    chosen: list[Case] = []
    for i, draft in enumerate(drafts):
        before = [other.label for other in drafts[:i][-1:] if draft.draft and other.draft]
        inner = {"inner": before[0] if before else None}
        kinds = [
            *({"what": "rules", "gamma": gamma} for gamma in recipe.gammas),
            {"what": "automatic"},
            {"what": "cascade", **inner},
        ]
        chosen += [
            {"what": kind["what"], "draft": draft.label, "temperature": temperature, **kind}
            for kind in kinds
            for temperature in recipe.temperatures
            if temperature > 0 or kind["what"] != "rules"
        ]
    return chosen


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Ways of writing the same prompts' texts, run in turn: figures of each, by its name; of
    automatic gamma also alpha and c of all runs, and the oracle's bound."""
    recipe, spec = pairs.recipe, pairs.spec(case["draft"])
    if case["what"] == "rules":
        options = [{"gamma": case["gamma"], "rule": rule} for rule in RULES]
        ways = {name: (spec, own) for name, own in zip(RULES, options, strict=True)}
    elif case["what"] == "automatic":
        ways = {f"gamma {gamma}": (spec, {"gamma": gamma}) for gamma in recipe.gammas}
        ways = {PLAIN: (spec, {"gamma": 0}), **ways, AUTOMATIC: (spec, {})}
    else:
        inner = pairs.cascade(case["draft"], case["inner"])
        ways = {ALONE: (pairs.spec(case["draft"]), {}), CASCADE: (inner, {})}
    sampled = {"temperature": case["temperature"]}
    runs = in_turn(
        {name: (own, options | sampled) for name, (own, options) in ways.items()},
        pairs.timed,
        repeats=recipe.repeats,
        tokens=recipe.max_new_tokens,
        seed=recipe.seed,
    )
    figures = {
        name: {"seconds_per_token": seconds_per_token(own), "tokens_per_call": tokens_per_call(own)}
        for name, own in runs.items()
    }
    return {"ways": figures} | (_oracle(runs) if case["what"] == "automatic" else {})


def _oracle(runs: Mapping[str, Runs]) -> dict[str, float | None]:
    texts = [text for repeats in runs.values() for repeat in repeats for text in repeat]
    steps = [step for text in texts for step in text.steady.steps]
    overlaps = [overlap for step in steps for overlap in step.overlaps]
    alpha, c = fmean(overlaps) if overlaps else None, costs.costs_from_steps(steps).c
    bound = None if alpha is None else oracle_factor(alpha, c)
    return {"alpha": alpha, "c": c, "oracle": bound}


class ComparedWays(NamedTuple):
    """Two ways of a case: how many times as fast the first is as the second."""

    row: ResultRow
    way: str
    other: str

    @property
    def speed(self) -> float:
        ways = self.row.result["ways"]
        return ways[self.other]["seconds_per_token"] / ways[self.way]["seconds_per_token"]

    @property
    def gain(self) -> float:
        """Tokens a call over those of the second."""
        ways = self.row.result["ways"]
        return ways[self.way]["tokens_per_call"] / ways[self.other]["tokens_per_call"]

    def kept(self, way: str) -> str:
        return f"{self.row.result['ways'][way]['tokens_per_call']:.2f}"


def _compared(row: ResultRow) -> list[ComparedWays]:
    if row.case["what"] == "rules":
        return [ComparedWays(row, *reversed(RULES))]
    if row.case["what"] == "cascade":
        return [ComparedWays(row, CASCADE, ALONE)]
    fixed = [name for name in row.result["ways"] if name not in (PLAIN, AUTOMATIC)]
    best = min((ComparedWays(row, AUTOMATIC, name) for name in fixed), key=lambda one: one.speed)
    return [ComparedWays(row, AUTOMATIC, PLAIN), ComparedWays(row, best.other, PLAIN), best]


def section(recipe: Recipe, results: Found) -> Section | None:
    """A table of all comparisons, and a paragraph for each kind."""
    every = [comparison for row in done(results, "beyond") for comparison in _compared(row)]
    if not every:
        return None
    columns: Columns[ComparedWays] = {
        "draft": lambda one: one.row.draft,
        "T": lambda one: ABOUT["T"](one.row),
        "way": _way,
        "tokens a call": lambda one: one.kept(one.way),
        "against": lambda one: one.other,
        "its tokens a call": lambda one: one.kept(one.other),
        "times its tokens": lambda one: f"{one.gain:.3f}",
        "times its speed": lambda one: f"{one.speed:.2f}",
        "alpha": lambda one: rounded(one.row.result.get("alpha"), 3),
        "c": lambda one: rounded(one.row.result.get("c"), 3),
        "oracle's bound": lambda one: rounded(one.row.result.get("oracle")),
    }
    return Section(
        "Beyond the paper: rules, automatic gamma, cascades",
        _said(every),
        [tabulated("Ways of writing the same texts", every, columns)],
    )


EXPERIMENT = Experiment(section, cases, measure)


def _way(one: ComparedWays) -> str:
    if one.way == CASCADE:
        return f"{CASCADE} < {one.row.case['inner'] or 'lookup'}"
    return f"{one.way}, gamma {one.row.case['gamma']}" if "gamma" in one.row.case else one.way


def _said(every: list[ComparedWays]) -> list[str]:
    blocks, cascades = ([one for one in every if one.way == way] for way in (RULES[1], CASCADE))
    automatic = [one for one in every if one.way == AUTOMATIC]
    of_plain = [one for one in automatic if one.other == PLAIN]
    of_best = [one for one in automatic if one.other != PLAIN]
    said: list[str] = []
    if blocks:
        said.append(
            "Block verification (Sun et al., arXiv 2403.10444) has the same distribution as "
            f"Algorithm 1 and gives {spanned([one.gain for one in blocks], 3)} times its tokens a "
            f"call, which makes it {_speeds(blocks)} times as fast; in expectation it never gives "
            "fewer, so that values below 1 are chance."
        )
    if of_plain:
        said.append(
            f"Automatic gamma runs at {_speeds(of_best)} times the speed of the best fixed gamma "
            "of each line, which is known only afterwards, and at "
            f"{_speeds(of_plain)} times plain decoding. The oracle of section 3.5 knows which "
            "draft tokens will be accepted; its bound, 1 / (1 - alpha + c alpha), takes a longer "
            "forward pass to cost nothing more, so it is not reached."
        )
    if cascades:
        said.append(
            f"A draft with a draft of its own runs at {_speeds(cascades)} times its speed alone, "
            f"and gains in {sum(one.speed > 1 for one in cascades)} of {len(cascades)} cases. It "
            "gains where its own forward passes cost much more than those of the inner draft, "
            "which those of small drafts hardly do."
        )
    return said


def _speeds(compared: list[ComparedWays]) -> str:
    return spanned([one.speed for one in compared])
