"""A recipe over table models, whose figures can be computed by hand, and rows as if measured."""

from __future__ import annotations

from typing import Any

from foretoken.drafters.lm import LMDrafter
from foretoken.measurement.machine import Machine
from foretoken.speculator import Speculator
from oracle import random_model
from reproduction.experiments.experiment import ResultRow
from reproduction.pairs import Pairs
from reproduction.recipe import Prompts, Recipe, RecipeDraft, RecipePrompt
from table import TableModel

V = 6
P, Q = random_model(1, V), random_model(2, V)
MACHINE = Machine("a processor", 2, 2, None, {"foretoken": "0"})
DRAFTS = [
    RecipeDraft(label="small", paper="T5-small", c=0.02),
    RecipeDraft(label="large", draft="a/large", paper="T5-large", c=0.11),
    RecipeDraft(label="bigram", order=2, paper="Bigram", c=0.0),
]


def recipe(**changed: Any) -> Recipe:
    """Three short prompts, and little of everything."""
    settings: dict[str, Any] = {
        "name": "tables",
        "title": "Tables <of> laws",
        "drafts": DRAFTS,
        "paper": "EnDe",
        "prompts": Prompts(file="none.txt"),
        "temperatures": [0.0, 1.0],
        "gammas": [2, 3],
        "max_new_tokens": 12,
        "tokens": 100,
        "timed": 2,
        "repeats": 1,
    }
    return Recipe(**(settings | changed))


class TablePairs(Pairs):
    """Every draft is the same table model."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tasks = [RecipePrompt([1, 2]), RecipePrompt([3, 1]), RecipePrompt([2, 2, 4])]
        self._loaded = None
        self._written, self._tables = {}, {}
        self._spec = Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V))

    def _load(self, draft: str | None) -> Speculator:
        return self._spec


def estimated(value: float, error: float = 0.01) -> dict[str, float]:
    """An estimate as it stands in a row."""
    return {"value": value, "low": value - error, "high": value + error}


def agreed(
    draft: str, temperature: float, alpha: float, parameters: int | None = None
) -> ResultRow:
    """A row of `acceptance`."""
    result = {"alpha": estimated(alpha), "tokens": 100, "texts": 9, "parameters": parameters}
    return ResultRow({"draft": draft, "temperature": temperature}, 1.0, result)


def timed(
    draft: str, temperature: float, gamma: int, speed: float, *, alpha: float = 0.6, c: float = 0.1
) -> ResultRow:
    """A row of `walltime` or `bigram`."""
    result = {
        "speedup": estimated(speed),
        "slowest": speed,
        "seconds_per_token": 0.001,
        "plain_seconds_per_token": 0.001 * speed,
        "alpha": alpha,
        "c": c,
        "v": 1.3,
        "predicted": speed,
        "others": 0.0,
    }
    return ResultRow({"draft": draft, "temperature": temperature, "gamma": gamma}, 2.0, result)


def found() -> dict[str, list[ResultRow]]:
    """Rows of tables 2 to 4."""
    alphas = {"small": (0.7, 0.6), "large": (0.8, 0.75), "bigram": (0.2, 0.25)}
    sizes = {"small": 10, "large": 100, "bigram": None}
    rows = [agreed(draft, T, alphas[draft][T], sizes[draft]) for draft in alphas for T in (0, 1)]
    speeds = {"small": 2.0, "large": 1.5, "bigram": 1.1}
    times = [
        timed(draft, T, gamma, speeds[draft] - 0.1 * T - 0.05 * gamma)
        for draft in speeds
        for T in (0, 1)
        for gamma in (2, 3)
    ]
    return {"acceptance": rows, "walltime": times, "bigram": [timed("bigram", 1, 3, 1.1)]}
