"""What the requests of a load come to, under the names that vLLM's results have.

Failed requests count as failed only: no figure of time or tokens includes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from foretoken.errors import InputError
from foretoken.lab.load.trace import Trace

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
LIMITED = ("ttft", "tpot", "e2el")  # a request has one of each, so a goodput may bound them


@dataclass(frozen=True, slots=True)
class Latency:
    """In milliseconds; `percentiles` by their numbers."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """`duration`: from the first request's sending to the last one's end, in seconds."""

    duration: float
    completed: int
    failed: int
    failures: dict[str, tuple[int, str]]  # by status: how many, and the first message
    input_tokens: int
    output_tokens: int
    late: tuple[float, float]  # how long after they were due requests were sent: mean and most
    good: int | None  # requests within all limits; None where there are none
    by_tokens: bool  # whether gaps are between tokens; else between chunks
    latencies: dict[str, Latency | None]  # None where no request has one

    def a_second(self, number: int) -> float:
        return number / self.duration if self.duration else 0.0

    @property
    def document(self) -> dict[str, Any]:
        """As vLLM's JSON."""
        document: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "failures": {
                status: {"requests": count, "first": reason}
                for status, (count, reason) in self.failures.items()
            },
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.a_second(self.completed),
            "request_goodput": None if self.good is None else self.a_second(self.good),
            "output_throughput": self.a_second(self.output_tokens),
            "total_token_throughput": self.a_second(self.input_tokens + self.output_tokens),
            "mean_sent_late_ms": 1e3 * self.late[0],
            "max_sent_late_ms": 1e3 * self.late[1],
            "itl_between": "tokens" if self.by_tokens else "chunks",
        }
        for name, latency in self.latencies.items():
            if latency is not None:
                for kind in ("mean", "median", "std"):
                    document[f"{kind}_{name}_ms"] = getattr(latency, kind)
                document |= {f"p{p:g}_{name}_ms": v for p, v in latency.percentiles.items()}
        return document


def figures(
    traces: Sequence[Trace],
    duration: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    limits: Mapping[str, float],
) -> Figures:
    """Of all requests that ended. `limits`: of a good request, in seconds, by the metric's name."""
    successes = [trace for trace in traces if trace.failure is None]
    late = [trace.late for trace in traces]
    by_tokens = all(trace.counted for trace in successes if trace.arrivals)
    values: dict[str, list[float | None]] = {
        "ttft": [trace.ttft for trace in successes],
        "tpot": [trace.tpot for trace in successes],
        "itl": [gap for trace in successes for gap in trace.gaps(counted=by_tokens)],
        "e2el": [trace.end for trace in successes],
    }
    return Figures(
        duration=duration,
        completed=len(successes),
        failed=len(traces) - len(successes),
        failures=_failures(traces),
        input_tokens=sum(trace.prompt_tokens for trace in successes),
        output_tokens=sum(trace.tokens or 0 for trace in successes),
        late=(fmean(late), max(late)) if late else (0.0, 0.0),
        good=sum(good(trace, limits) for trace in successes) if limits else None,
        by_tokens=by_tokens,
        latencies={name: latency(values[name], percentiles) for name in metrics},
    )


def latency(seconds: Sequence[float | None], percentiles: Sequence[float]) -> Latency | None:
    """Percentiles lie between neighbours in proportion. None where there are no values."""
    ms = np.array([1e3 * value for value in seconds if value is not None])
    if not len(ms):
        return None
    values_ms = np.percentile(ms, percentiles).tolist()
    return Latency(
        mean=float(ms.mean()),
        median=float(np.median(ms)),
        std=float(ms.std()),
        percentiles=dict(zip(percentiles, values_ms, strict=True)),
    )


def good(trace: Trace, limits: Mapping[str, float]) -> bool:
    """Whether a request stays within all limits; a text of one token has no time a token, which is
    within any, one without tokens has no first one, which is within none."""
    values = {"ttft": trace.ttft, "tpot": trace.tpot or 0.0, "e2el": trace.end}
    limited = {name: values[name] for name in limits}
    return all(value is not None and value <= limits[name] for name, value in limited.items())


def limits(texts: Sequence[str]) -> dict[str, float]:
    """Seconds by the metric's name, of such as "ttft:200 e2el:3000"; InputError otherwise."""
    by_name: dict[str, float] = {}
    for part in " ".join(texts).split():
        name, _, value = part.partition(":")
        if name not in LIMITED or name in by_name:
            raise InputError(
                f"goodput holds {part[:40]!r}; give {', '.join(LIMITED)}, each once at most, with "
                "milliseconds, as in ttft:200 e2el:3000"
            )
        by_name[name] = _milliseconds(part, value) / 1e3
    return by_name


def _milliseconds(part: str, value: str) -> float:
    try:
        if 0 < (ms := float(value)) < float("inf"):
            return ms
    except ValueError:
        pass
    raise InputError(f"goodput holds {part[:40]!r}; give milliseconds above 0, as in ttft:200")


def _failures(traces: Sequence[Trace]) -> dict[str, tuple[int, str]]:
    failed = [trace.failure for trace in traces if trace.failure is not None]
    counts = Counter(status for status, _ in failed)
    first = dict(reversed(failed))
    return {status: (count, first[status]) for status, count in counts.most_common()}
