"""Rates of speculation over all requests, as /v1/speculation returns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple

from foretoken.records import StepRecord
from foretoken.sampling.params import GREEDY_BELOW, SamplingParams
from foretoken.server.process.messages import GenerateRequest, Pace

DECAY = 0.98  # of the mean, with each step of a sequence
# Controls that decide when an output ends, and do not change the cost of a step
ENDS = {"max_new_tokens", "min_new_tokens", "stop_strings", "stop_token_ids", "ignore_eos"}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}


class Conditions(NamedTuple):
    """Conditions that the time of a token depends on: only outputs of the same are compared."""

    controls: tuple[str, ...]  # those in force: "temperature", penalties, a grammar, logprobs
    length: int  # that prompt and text may have, as the number of its bits
    rows: int  # that shared its steps, likewise


class Texts(NamedTuple):
    """Sums over some outputs, without their first steps."""

    number: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def plus(self, number: int, tokens: int, seconds: float) -> Texts:
        return Texts(self.number + number, self.tokens + tokens, self.seconds + seconds)


class SpecDecodeStats:
    """Sums since the server began, and a recent mean."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0
        self.kept_at: Counter[int] = Counter()  # accepted draft tokens, by place
        self.made_at: Counter[int] = Counter()  # draft tokens, by place
        self.alpha: float | None = None  # recent
        # steps of a draft's, by how many draft tokens they made
        self.made: Counter[int] = Counter()
        self.plain: dict[Conditions, Texts] = {}
        self.speculative: dict[Conditions, Texts] = {}

    def note(self, steps: Iterable[StepRecord], *, plain: bool) -> None:
        """Count new steps of an output; `plain`: it was asked for without draft tokens."""
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
                self.alpha = DECAY * earlier + (1 - DECAY) * overlap

    def compare(self, request: GenerateRequest, pace: Pace) -> None:
        """Count an output on its side of the comparison, unless it has another rule."""
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
        """Return the seconds that outputs would have taken without draft tokens, at the speed of
        those in the same conditions that had none, over the seconds they took; and the numbers of
        outputs of either kind."""
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
