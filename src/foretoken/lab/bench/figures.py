"""The figures of a race: medians and quartiles over rounds, ratios within a round, shares of time,
what section 3 predicts from the measured alpha, c and v, and tokens a second of several texts at
once; also as pictures (SVG), which need matplotlib (the extra `plot`).

Padding and occupancy are of the target's passes that advance rows, by this package's step records.
Knows neither clocks nor models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken import theory
from foretoken.lab.bench.race import OWN, Gamma, Key, RaceRun, RaceTask, Round
from foretoken.lab.estimate import Spread, spread
from foretoken.records import StepRecord

PLAIN: Key = (OWN, 0)
AUTOMATIC: Key = (OWN, None)


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of the steps' time, without the prefill; they sum to 1."""

    draft: float
    target: float
    verify: float  # distributions, the rule, commit and rollback
    rest: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """Theorem 3.8 with the measured alpha, c and v: of costs the models' passes alone."""

    alpha: float
    c: float
    v: float  # a target pass over gamma + 1 tokens against one over one
    speedup: float


@dataclass(frozen=True, slots=True)
class RaceAgreement:
    """With the greedy text of this package's plain decoding."""

    share: float  # of tokens before the first difference
    first_difference: int | None  # its earliest place in any run


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one contestant. Times per token leave out the first tokens."""

    name: str
    gamma: Gamma
    first_seconds: Spread
    seconds_per_token: Spread
    tokens_per_second: float
    speedup: float  # over this package's plain decoding
    tokens_per_call: float | None
    shares: TimeShares | None
    predicted: Predicted | None
    agreement: RaceAgreement | None

    @property
    def key(self) -> Key:
        return (self.name, self.gamma)

    @property
    def measured_over_predicted(self) -> float | None:
        return self.predicted and self.speedup / self.predicted.speedup


@dataclass(frozen=True, slots=True)
class Duel:
    """The speed of this package over that of a peer; `best`: each at its best fixed gamma."""

    name: str
    plain: float
    gamma: int
    peer_gamma: int
    best: float
    automatic: float | None


def label(gamma: int | None) -> str:
    """The name of a gamma."""
    return "automatic" if gamma is None else "plain" if gamma == 0 else f"gamma {gamma}"


def figures(rounds: list[Round], key: Key, *, greedy: bool) -> Figures:
    """The figures of one contestant, over one round or more."""
    runs = [run for turns in rounds for run in turns[key]]
    steps = _steps(runs)
    times = spread([per_token(turns[key]) for turns in rounds])
    first = spread([fmean(run.first_seconds for run in turns[key]) for turns in rounds])
    assert times and first
    return Figures(
        name=key[0],
        gamma=key[1],
        first_seconds=first,
        seconds_per_token=times,
        tokens_per_second=1 / times.median,
        speedup=faster(rounds, key, PLAIN),
        tokens_per_call=sum(len(step.kept) for step in steps) / len(steps) if steps else None,
        shares=shares(runs) if steps else None,
        predicted=predict(rounds, key) if steps else None,
        agreement=agreement(rounds, key) if greedy else None,
    )


def per_token(runs: list[RaceRun]) -> float:
    """Seconds a token of a turn, without its first tokens unless there are no others."""
    others = sum(len(run.tokens) - run.first_tokens for run in runs)
    if others:
        return sum(run.seconds - run.first_seconds for run in runs) / others
    return sum(run.seconds for run in runs) / sum(len(run.tokens) for run in runs)


def faster(rounds: list[Round], one: Key, other: Key) -> float:
    """Return how many times as fast one is as the other: the median of the rounds' ratios."""
    return median(per_token(turns[other]) / per_token(turns[one]) for turns in rounds)


def shares(runs: list[RaceRun]) -> TimeShares:
    """Where the time of the steps went."""
    total = sum(run.loop_seconds for run in runs)
    steps = _steps(runs)
    draft = sum(step.draft_seconds for step in steps) / total
    target = sum(step.score_seconds for step in steps) / total
    verify = sum(step.verify_seconds for step in steps) / total
    return TimeShares(draft, target, verify, 1 - draft - target - verify)


def predict(rounds: list[Round], key: Key) -> Predicted | None:
    """Predict a fixed gamma; each number is the median over rounds. None for plain decoding, and
    where a round has no step with all draft tokens."""
    if not key[1]:
        return None
    by_round = [_predict(_steps(turns[PLAIN]), turns[key], key[1]) for turns in rounds]
    predicted = [astuple(one) for one in by_round if one]
    if len(predicted) < len(rounds):
        return None
    return Predicted(*map(median, zip(*predicted, strict=True)))


def _predict(plain: list[StepRecord], runs: list[RaceRun], gamma: int) -> Predicted | None:
    """Theorem 3.8 with v, for the draft tokens that the steps made. From means, as the measured
    speed-up is; c and v are over the steps that made all their draft tokens."""
    steps = _steps(runs)
    full = [step for step in steps if step.drafted == gamma]
    if not full:
        return None
    T_p = fmean(step.score_seconds for step in plain)
    c = fmean(step.draft_seconds for step in full) / gamma / T_p
    v = fmean(step.score_seconds for step in full) / T_p
    alpha = min(1.0, fmean(overlap for step in steps for overlap in step.overlaps))
    made = Counter(step.drafted for step in steps)
    speedup = theory.steps_factor(alpha, made, c, v=lambda n: 1 + (v - 1) * (n - 1) / gamma)
    return Predicted(alpha, c, v, speedup)


def _steps(runs: list[RaceRun]) -> list[StepRecord]:
    return [step for run in runs for step in run.steps]


def agreement(rounds: list[Round], key: Key) -> RaceAgreement:
    """Token by token against plain decoding of the same round."""
    pairs = [
        (run.tokens, plain.tokens)
        for turns in rounds
        for run, plain in zip(turns[key], turns[PLAIN], strict=True)
    ]
    equal = [_equal(text, plain) for text, plain in pairs]
    places = [n for n, (text, plain) in zip(equal, pairs, strict=True) if text != plain]
    tokens = sum(max(len(text), len(plain)) for text, plain in pairs)
    return RaceAgreement(sum(equal) / tokens, min(places, default=None))


def best(rounds: list[Round], name: str) -> Key:
    """The fastest fixed gamma of one library, 0 included."""
    keys = [key for key in rounds[0] if key[0] == name and key[1] is not None]
    return min(keys, key=lambda key: median(per_token(turns[key]) for turns in rounds))


def duel(rounds: list[Round], peer: str) -> Duel:
    """This package against a peer."""
    mine, theirs = best(rounds, OWN), best(rounds, peer)
    assert mine[1] is not None and theirs[1] is not None
    automatic = faster(rounds, AUTOMATIC, theirs) if AUTOMATIC in rounds[0] else None
    return Duel(
        name=peer,
        plain=faster(rounds, PLAIN, (peer, 0)),
        gamma=mine[1],
        peer_gamma=theirs[1],
        best=faster(rounds, mine, theirs),
        automatic=automatic,
    )


def _equal(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughput of one contestant, over turns of the same number of texts. Figures from step
    records are None for a peer."""

    name: str
    gamma: Gamma
    tokens_per_second: Spread
    speedup: float  # over this package's plain decoding
    ahead: dict[str, float]  # how many times as fast this package is, by its gamma; of a peer only
    tokens_per_call: float | None  # of a row
    occupancy: float | None  # rows that a pass advances, as a share of the texts
    padding: float | None  # positions computed for no row, as a share of all computed
    reading: float | None  # share of the time before the first step
    shares: TimeShares | None
    agreement: RaceAgreement | None


def of_batch(tasks: list[RaceTask], texts: int) -> list[RaceTask]:
    """So many tasks: the given ones over and over, each with the seed that follows the last."""
    seed = tasks[0].seed
    return [replace(tasks[i % len(tasks)], seed=seed + i) for i in range(texts)]


def throughput(rounds: list[Round], key: Key, *, greedy: bool) -> Throughput:
    """The figures of one contestant, over one round or more."""
    runs = [run for turns in rounds for run in turns[key]]
    steps = [step for run in runs for step in run.steps]
    rates = spread([rate(turns[key]) for turns in rounds])
    assert rates
    own = [mine for mine in rounds[0] if mine[0] == OWN and key[0] != OWN]
    return Throughput(
        name=key[0],
        gamma=key[1],
        tokens_per_second=rates,
        speedup=faster_together(rounds, key, PLAIN),
        ahead={label(mine[1]): faster_together(rounds, mine, key) for mine in own},
        tokens_per_call=sum(len(step.kept) for step in steps) / len(steps) if steps else None,
        occupancy=occupancy(steps, len(rounds[0][key])) if steps else None,
        padding=padding(steps) if steps else None,
        reading=median(reading(turns[key]) for turns in rounds) if steps else None,
        shares=shares(runs) if steps else None,
        agreement=agreement(rounds, key) if greedy else None,
    )


def rate(runs: list[RaceRun]) -> float:
    """Tokens a second of a turn, until its last text is there."""
    return sum(len(run.tokens) for run in runs) / max(run.seconds for run in runs)


def faster_together(rounds: list[Round], one: Key, other: Key) -> float:
    """Return how many times as fast one is as the other: the median of the rounds' ratios."""
    return median(rate(turns[one]) / rate(turns[other]) for turns in rounds)


def occupancy(steps: list[StepRecord], texts: int) -> float:
    """Return the mean share of the batch that was filled: k rows that share a forward leave k
    records, so each counts 1 / k."""
    return len(steps) / sum(1 / step.rows for step in steps) / texts


def padding(steps: list[StepRecord]) -> float:
    """A row's own positions are its last token and its draft tokens."""
    vain = sum(step.padding / step.rows for step in steps)
    return vain / (vain + sum(1 + step.drafted for step in steps))


def reading(runs: list[RaceRun]) -> float:
    """Return the share of a turn's time outside the steps: the prompts, and the call itself."""
    return 1 - max(run.loop_seconds for run in runs) / max(run.seconds for run in runs)


PARTS = {"draft": "#4c9f70", "target": "#33658a", "verify": "#f6ae2d", "rest": "#bbbbbb"}


def draw(table: list[Figures], folder: Path, title: str) -> list[Path]:
    """Write both pictures; returns their paths."""
    kinds = (("time-per-token", _times), ("shares", _shares))
    return [_picture(folder / f"{name}.svg", title, partial(fill, table)) for name, fill in kinds]


def draw_batches(table: dict[int, list[Throughput]], folder: Path, title: str) -> Path:
    """Write the picture; returns its path."""
    return _picture(folder / "throughput.svg", title, partial(_rates, table))


def _picture(path: Path, title: str, fill: Callable[[Axes], None]) -> Path:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    fill(axes)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _times(table: list[Figures], axes: Axes) -> None:
    """Medians with their quartiles; automatic gamma as a line across."""
    for i, name in enumerate(dict.fromkeys(one.name for one in table)):
        rows = [one for one in table if one.name == name and one.gamma is not None]
        times = [one.seconds_per_token for one in rows]
        middle = [time.median * 1e3 for time in times]
        low = [(time.median - time.q1) * 1e3 for time in times]
        high = [(time.q3 - time.median) * 1e3 for time in times]
        places = [float(one.gamma or 0) for one in rows]
        style = {"marker": "o", "capsize": 3, "color": f"C{i}"}
        axes.errorbar(places, middle, yerr=[low, high], label=name, **style)
    for one in table:
        if one.gamma is None:
            height = one.seconds_per_token.median * 1e3
            axes.axhline(height, color="C0", linestyle="--", label=f"{OWN}, automatic")
    axes.set_xticks(sorted({one.gamma for one in table if one.gamma is not None}))
    axes.set_xlabel("gamma, guesses per target call (0: plain decoding)")
    axes.set_ylabel("ms per token")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _shares(table: list[Figures], axes: Axes) -> None:
    """A stacked bar for each gamma of this package: its height is the time per token."""
    rows = [one for one in table if one.shares]
    bottom = [0.0] * len(rows)
    for part, colour in PARTS.items():
        heights = [getattr(one.shares, part) * one.seconds_per_token.median * 1e3 for one in rows]
        names = [label(one.gamma) for one in rows]
        axes.bar(names, heights, bottom=bottom, color=colour, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_ylabel("ms per token")
    axes.legend(frameon=False)


def _rates(table: dict[int, list[Throughput]], axes: Axes) -> None:
    """A line for each contestant, medians with their quartiles."""
    lines: dict[Key, dict[int, Spread]] = {}
    for texts, rows in table.items():
        for row in rows:
            lines.setdefault((row.name, row.gamma), {})[texts] = row.tokens_per_second
    names = list(dict.fromkeys(name for name, _ in lines))
    for i, ((name, gamma), rates) in enumerate(lines.items()):
        low = [rate.median - rate.q1 for rate in rates.values()]
        high = [rate.q3 - rate.median for rate in rates.values()]
        style = {"marker": "o", "capsize": 3, "color": f"C{i}"}
        style["linestyle"] = ("-", "--", ":", "-.")[names.index(name) % 4]
        middle = [rate.median for rate in rates.values()]
        title = f"{name}, {label(gamma)}"
        axes.errorbar(list(rates), middle, yerr=[low, high], label=title, **style)
    axes.set_xticks(list(table))
    axes.set_xlabel("texts at once")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
