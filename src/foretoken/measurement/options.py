"""Options of a benchmark. They are checked when created, before models are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.errors import InputError
from foretoken.sampling.checks import SEED
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.speculation import SpeculationOptions

MIN_QUARTILE_ROUNDS = 3  # fewer rounds give no quartiles


def format_gamma(gamma: int | None) -> str:
    """Return the name of a gamma (None: automatic; 0: plain decoding) for tables."""
    return "automatic" if gamma is None else f"gamma {gamma}" if gamma else "plain"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark. A file of results is resumed only by a benchmark with equal
    options."""

    target: str
    drafts: list[str | None]  # None: the default draft
    gammas: list[int]  # in rising order
    batch: list[int]  # batch sizes, in rising order
    prompts: int  # number of prompts
    prompts_sha256: str
    loading: dict[str, Any]  # keywords of `foretoken.load` that differ from its defaults
    max_new_tokens: int
    repeats: int  # rounds to time, after a warm-up round
    temperature: float
    top_k: int
    top_p: float
    seed: int
    rule: str

    def __post_init__(self) -> None:
        """Raise InputError for invalid options."""
        assert self.params  # raises InputError
        for gamma in self.gammas:
            SpeculationOptions(gamma, self.rule)
        SEED("seed", self.seed)
        if self.repeats < 1:
            raise InputError(f"repeats is {self.repeats}; give 1 or more")
        if self.max_new_tokens < self.gammas[-1] + 2:
            raise InputError(
                f"max_new_tokens is {self.max_new_tokens}, too few to time gamma "
                f"{self.gammas[-1]}; give {self.gammas[-1] + 2} or more"
            )
        if len(set(self.drafts)) < len(self.drafts):
            raise InputError("--draft names a draft twice; give each draft once")
        if self.batch[0] < 1:
            raise InputError(f"batch is {self.batch}; give numbers from 1")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            self.temperature, self.top_k, self.top_p, max_new_tokens=self.max_new_tokens
        )
