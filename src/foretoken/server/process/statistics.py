"""Rates of speculation over all requests, as /v1/speculation tells them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from operator import add
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.sampling.params import GREEDY_BELOW, SamplingParams
from foretoken.server.process.messages import GenerateRequest

if TYPE_CHECKING:
    from foretoken.request import Completion
    from foretoken.serving.engine import Event
    from foretoken.speculator import Speculator

RECENT = 0.98  # the weight of what was known, with each step of a row
# Controls that say when a text ends, and not what a step of it costs
ENDS = {"max_new_tokens", "min_new_tokens", "stop_strings", "stop_token_ids", "ignore_eos"}


class Kind(NamedTuple):
    """Conditions that the time of a plain token depends on: only texts of one kind are compared."""

    controls: tuple[str, ...]  # those in force: "temperature", penalties, a grammar, logprobs
    length: int  # that prompt and text may have, as the number of its bits
    rows: int  # that shared its steps, likewise


class Texts(NamedTuple):
    """Sums over some texts, without their first steps, which read the prompts."""

    number: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RequestProfile:
    """A request, as far as its time can be compared with that of others."""

    plain: bool  # asked for without draft tokens, which is more than that it had none
    controls: tuple[str, ...]
    length: int
    mixed: bool  # not comparable: begun in another engine, waits for drafts, or has its own rule

    @classmethod
    def of(cls, request: GenerateRequest, length: int) -> RequestProfile:
        """Return the profile of a request whose prompt and text have at most so many tokens."""
        off: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
        names = {name for name, value in request.controls.items() if value != off.get(name)}
        if request.controls.get("temperature", 0.0) < GREEDY_BELOW:
            names -= {"temperature"}
        own_rule = request.rule not in (None, "block") or request.lenience not in (None, 1.0)
        mixed = request.begun is not None or own_rule
        controls = tuple(sorted(names - ENDS))
        return cls(request.gamma == 0, controls, length.bit_length(), mixed)


class SpecDecodeStats:
    """Sums since the process began, and a mean of late."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0
        self.kept_at: Counter[int] = Counter()  # accepted draft tokens, by place
        self.made_at: Counter[int] = Counter()  # guesses, by place
        self.alpha: float | None = None  # of late
        # steps of a draft's, by how many draft tokens they made
        self.made: Counter[int] = Counter()
        self.plain: dict[Kind, Texts] = {}
        self.speculative: dict[Kind, Texts] = {}

    def note(self, event: Event, asked: RequestProfile) -> None:
        """One event of the engine, and the request that it is of."""
        for step in event.steps:
            self.steps += 1
            self.tokens += len(step.kept)
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.made_at.update(range(step.drafted))
            self.kept_at.update(range(step.accepted))
            if step.predicted:
                continue  # alpha is the draft's
            self.made[step.drafted] += not asked.plain
            for overlap in step.overlaps:
                earlier = overlap if self.alpha is None else self.alpha
                self.alpha = RECENT * earlier + (1 - RECENT) * overlap
        if event.completion is not None and not asked.mixed:
            self._compare(event.completion, asked)

    def _compare(self, completion: Completion, asked: RequestProfile) -> None:
        """A text on its side of the comparison; one of a single step has no time without its
        prompt's."""
        if len(completion.steps) < 2:
            return
        tokens, seconds, steps = completion.steady
        rows = int(median(step.rows for step in steps))
        kind = Kind(asked.controls, asked.length, rows.bit_length())
        side = self.plain if asked.plain else self.speculative
        side[kind] = _sum(side.get(kind, Texts()), Texts(1, tokens, seconds))

    def report(self, spec: Speculator) -> dict[str, Any]:
        """Rates; None where nothing is known yet."""
        costs = spec.costing.known()
        return self.rates() | {
            "c": None if costs is None else costs.c,
            "v": None if costs is None else [[n, costs.v(n)] for n, _ in costs.score],
            "predicted_speedup": None if costs is None else self._predicted(costs),
        }

    def rates(self) -> dict[str, Any]:
        """Return the rates that follow from the steps alone."""
        return {
            "active": self.drafted > 0 if self.steps else None,
            "alpha": self.alpha,
            **self._measured(),
            "tokens_per_call": self.tokens / self.steps if self.steps else None,
            "acceptance_by_position": self.by_position(),
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": self.tokens,
        }

    def add(self, other: SpecDecodeStats) -> None:
        """Add another engine's steps."""
        rates = [(each.alpha, each.drafted) for each in (self, other) if each.alpha is not None]
        weight = sum(drafted for _, drafted in rates)
        self.alpha = sum(a * drafted for a, drafted in rates) / weight if weight else None
        for name in ("steps", "drafted", "accepted", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kept_at += other.kept_at
        self.made_at += other.made_at
        self.made += other.made
        for mine, others in ((self.plain, other.plain), (self.speculative, other.speculative)):
            for kind, texts in others.items():
                mine[kind] = _sum(mine.get(kind, Texts()), texts)

    def by_position(self) -> list[float]:
        """Return the share of the draft tokens made at each position that was accepted."""
        return [self.kept_at[i] / drafted for i, drafted in sorted(self.made_at.items())]

    def _predicted(self, costs: Any) -> float | None:
        """Return the predicted speed-up of one row that makes as many draft tokens as were made, at
        their costs alone."""
        from foretoken.theory import steps_factor

        if self.alpha is None or not any(self.made.values()):
            return None
        return steps_factor(min(1.0, self.alpha), self.made, costs.c, v=costs.v)

    def _measured(self) -> dict[str, Any]:
        """Return how long texts would have taken plainly, at the speed of those of their kind that
        were asked to be plain, over how long they took; and how many texts of either sort say
        so."""
        plain, speculative, plainly = Texts(), Texts(), 0.0
        for kind in self.plain.keys() & self.speculative.keys():
            alone, drafted = self.plain[kind], self.speculative[kind]
            plain, speculative = _sum(plain, alone), _sum(speculative, drafted)
            plainly += drafted.tokens * alone.seconds / alone.tokens
        known = speculative.number > 0
        return {
            "measured_speedup": plainly / speculative.seconds if known else None,
            "measured_texts": {"speculative": speculative.number, "plain": plain.number},
        }


def together(reports: list[tuple[SpecDecodeStats, dict[str, Any]]]) -> dict[str, Any]:
    """One report of several engines': what follows from the steps from all of them, the costs,
    which they share, from the first, and of what these predict the mean by tokens."""
    sums = SpecDecodeStats()
    for ledger, _ in reports:
        sums.add(ledger)
    speedups = [(r["predicted_speedup"], ledger.tokens) for ledger, r in reports]
    speedups = [(factor, tokens) for factor, tokens in speedups if factor is not None]
    weight = sum(tokens for _, tokens in speedups)
    mean = sum(factor * tokens for factor, tokens in speedups) / weight if weight else None
    return reports[0][1] | sums.rates() | {"predicted_speedup": mean}


def _sum(one: Texts, other: Texts) -> Texts:
    number, tokens, seconds = map(add, one, other)
    return Texts(int(number), int(tokens), seconds)
