"""Rates of speculation over all requests, as /v1/speculation tells them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple

from foretoken.records import StepRecord
from foretoken.sampling.params import GREEDY_BELOW, SamplingParams
from foretoken.server.process.messages import GenerateRequest, Pace

RECENT = 0.98  # the weight of what was known, with each step of a row
# Controls that say when a text ends, and not what a step of it costs
ENDS = {"max_new_tokens", "min_new_tokens", "stop_strings", "stop_token_ids", "ignore_eos"}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}


class Conditions(NamedTuple):
    """Conditions that the time of a token depends on: only texts of the same are compared."""

    controls: tuple[str, ...]  # those in force: "temperature", penalties, a grammar, logprobs
    length: int  # that prompt and text may have, as the number of its bits
    rows: int  # that shared its steps, likewise


class Texts(NamedTuple):
    """Sums over some texts, without their first steps."""

    number: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def plus(self, number: int, tokens: int, seconds: float) -> Texts:
        return Texts(self.number + number, self.tokens + tokens, self.seconds + seconds)


class SpecDecodeStats:
    """Sums since the server began, and a mean of late."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0
        self.kept_at: Counter[int] = Counter()  # accepted draft tokens, by place
        self.made_at: Counter[int] = Counter()  # guesses, by place
        self.alpha: float | None = None  # of late
        # steps of a draft's, by how many draft tokens they made
        self.made: Counter[int] = Counter()
        self.plain: dict[Conditions, Texts] = {}
        self.speculative: dict[Conditions, Texts] = {}

    def note(self, steps: Iterable[StepRecord], *, plain: bool) -> None:
        """New steps of a text; `plain`: it was asked for without draft tokens."""
        for step in steps:
            self.steps += 1
            self.tokens += len(step.kept)
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.made_at.update(range(step.drafted))
            self.kept_at.update(range(step.accepted))
            if step.predicted:
                continue  # alpha is the draft's
            self.made[step.drafted] += not plain
            for overlap in step.overlaps:
                earlier = overlap if self.alpha is None else self.alpha
                self.alpha = RECENT * earlier + (1 - RECENT) * overlap

    def compare(self, request: GenerateRequest, pace: Pace) -> None:
        """A text on its side of the comparison, if another rule of its own does not forbid it."""
        if request.rule not in (None, "block") or request.lenience not in (None, 1.0):
            return
        controls: dict[str, Any] = {**request.controls}
        names = {name for name, value in controls.items() if value != DEFAULTS.get(name)} - ENDS
        if controls.get("temperature", 0.0) < GREEDY_BELOW:
            names -= {"temperature"}
        conditions = Conditions(
            tuple(sorted(names)), pace.length.bit_length(), pace.rows.bit_length()
        )
        side = self.plain if request.gamma == 0 else self.speculative
        side[conditions] = side.get(conditions, Texts()).plus(1, pace.tokens, pace.seconds)

    def measured(self) -> dict[str, Any]:
        """Return how long texts would have taken plainly, at the speed of those in their conditions
        that were asked to be plain, over how long they took; and how many texts of either sort say
        so."""
        plain, speculative, plainly = Texts(), Texts(), 0.0
        for conditions in self.plain.keys() & self.speculative.keys():
            alone, drafted = self.plain[conditions], self.speculative[conditions]
            plain, speculative = plain.plus(*alone), speculative.plus(*drafted)
            plainly += drafted.tokens * alone.seconds / alone.tokens
        return {
            "measured_speedup": plainly / speculative.seconds if speculative.number else None,
            "measured_texts": {"speculative": speculative.number, "plain": plain.number},
        }

    def rates(self) -> dict[str, Any]:
        """Return the rates; None where nothing is known yet."""
        return {
            "active": self.drafted > 0 if self.steps else None,
            "alpha": self.alpha,
            "tokens_per_call": self.tokens / self.steps if self.steps else None,
            "acceptance_by_position": [
                self.kept_at[i] / drafted for i, drafted in sorted(self.made_at.items())
            ],
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": self.tokens,
            **self.measured(),
        }
