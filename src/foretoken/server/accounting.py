"""Prometheus metrics, under foretoken's and vLLM's names, and one log line per request. Metrics and
log lines contain no prompts or outputs."""

from __future__ import annotations

import logging
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.access import AccessPolicy
from foretoken.server.api import answers
from foretoken.server.api.errors import ApiError
from foretoken.server.process.fleet import AnyEngine
from foretoken.server.process.generation import Generation

LATENCY_BUCKETS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_LATENCY_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
COUNTERS = {  # name: (description, vLLM's name)
    "prompt_tokens": ("Prompt tokens.", "prompt_tokens"),
    "generation_tokens": ("Generated tokens.", "generation_tokens"),
    "cached_tokens": ("Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    "target_calls": ("Target calls per sequence: a call for 8 sequences counts 8 times.", None),
    "drafts": ("Target calls with draft tokens, per sequence.", "spec_decode_num_drafts"),
    "drafted_tokens": ("Draft tokens.", "spec_decode_num_draft_tokens"),
    "accepted_tokens": ("Accepted draft tokens.", "spec_decode_num_accepted_tokens"),
    "preemptions": ("Sequences preempted for lack of memory.", "num_preemptions"),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Seconds to the first token.", LATENCY_BUCKETS_SECONDS),
    "inter_token_latency_seconds": (
        "Seconds between two tokens of a sequence, averaged over each step.",
        TOKEN_LATENCY_BUCKETS_SECONDS,
    ),
    "e2e_request_latency_seconds": ("Seconds of a whole request.", LATENCY_BUCKETS_SECONDS),
}
GAUGES = {
    "num_requests_running": "Sequences being generated.",
    "num_requests_waiting": "Sequences waiting.",
}


log = logging.getLogger("foretoken.requests")


class AccountingMiddleware:
    """ASGI middleware that gives every request an id and checks its API key. When a request ends,
    the middleware updates the metrics and writes the request's log line.

    The app stores `generation` in the request's state if the request generates text. For a stream
    it also stores the final `status`, which may be an error although status 200 was sent first.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        is_known_path: Callable[[str], bool],
        access: AccessPolicy,
    ) -> None:
        self.app, self.metrics, self.is_known_path, self.access = (
            app,
            metrics,
            is_known_path,
            access,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, state = perf_counter(), scope["state"]
        id = state["id"] = Headers(scope=scope).get("x-request-id", "")[:128] or uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.setdefault("status", message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode("latin-1"))]
            await send(message)

        try:
            self.access.require(scope)
            await self.app(scope, self.access.limit_body(receive, scope["path"]), send_with_id)
        except ApiError as error:  # from `access`; the app handles its own errors
            answer = JSONResponse(error.body, error.status, error.headers)
            await answer(scope, receive, send_with_id)
        finally:
            self._record_request(scope, perf_counter() - start)

    def _record_request(self, scope: Scope, seconds: float) -> None:
        path, state = scope["path"], scope["state"]
        status, generation = state.get("status", 500), state.get("generation")
        # A request that is refused before its model is known counts for the base model
        model = state.get("model", self.metrics.base)
        self.metrics.count(path if self.is_known_path(path) else "other", status, model)
        if generation is not None:
            self.metrics.observe(generation, seconds, model)
        if scope["method"] == "POST":
            write_log_entry(
                build_log_entry(state["id"], path[:200], model, status, seconds, generation)
            )


class Metrics:
    """All metrics, labelled by model and named "foretoken_..."; with `vllm`, also "vllm:..."."""

    def __init__(self, base: str, *, vllm: bool) -> None:
        self.base, self.registry = base, CollectorRegistry()
        names = ["model_name"]
        common: dict[str, Any] = {"registry": self.registry, "labelnames": names}

        def register_metrics(
            kind: Any, name: str, help: str, other: str | None, **more: Any
        ) -> list[Any]:
            labelled = common | {"labelnames": [*names, *more.pop("labels", [])]} | more
            metric = [kind(f"foretoken_{name}", help, **labelled)]
            return metric + ([kind(f"vllm:{other}", help, **labelled)] if vllm and other else [])

        self.counters = {
            name: register_metrics(Counter, name, *texts) for name, texts in COUNTERS.items()
        }
        self.histograms = {
            name: register_metrics(Histogram, name, help, name, buckets=buckets)
            for name, (help, buckets) in HISTOGRAMS.items()
        }
        self.gauges = {
            name: register_metrics(Gauge, name, help, name) for name, help in GAUGES.items()
        }
        self.accepted_by_position = register_metrics(
            Counter,
            "accepted_tokens_per_position",
            "Accepted draft tokens, by their position in the draft.",
            "spec_decode_num_accepted_tokens_per_pos",
            labels=["position"],
        )
        self.requests = register_metrics(
            Counter,
            "requests",
            "Requests, by endpoint and status.",
            "http_requests",
            labels=["endpoint", "status"],
        )
        self._preempted = Counts[str]()  # preemptions at the last `render`
        self.ready = Gauge("foretoken_engines_ready", "Engines that accept requests.", **common)
        self.restarts = Gauge("foretoken_engine_restarts", "Restarts of dead engines.", **common)

    def count(self, endpoint: str, status: int, model: str) -> None:
        """Count one request to an endpoint by the status of its answer."""
        for counter in self.requests:
            counter.labels(endpoint=endpoint, status=str(status), model_name=model).inc()

    def observe(self, generation: Generation, seconds: float, model: str) -> None:
        """Add the tokens, steps and latencies of a request to the metrics, also if the request was
        aborted or failed. `seconds`: duration of the whole request."""
        usage = answers.compute_usage(generation)
        steps = [step for output in generation.outputs for step in output.steps]
        sums = {
            "prompt_tokens": usage["prompt_tokens"],
            "generation_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "target_calls": len(steps),
            "drafts": sum(step.drafted > 0 for step in steps),
            "drafted_tokens": sum(step.drafted for step in steps),
            "accepted_tokens": sum(step.accepted for step in steps),
        }
        for name, value in sums.items():
            self._count(name, value, model)
        accepted_positions = Counts(place for step in steps for place in range(step.accepted))
        for place, count in accepted_positions.items():
            for counter in self.accepted_by_position:
                counter.labels(position=str(place), model_name=model).inc(count)
        self._observe("e2e_request_latency_seconds", seconds, model)
        if generation.first_token_seconds is not None:
            self._observe("time_to_first_token_seconds", generation.first_token_seconds, model)
        for gap in generation.inter_token_seconds:
            self._observe("inter_token_latency_seconds", gap, model)

    def render(self, engines: Mapping[str, AnyEngine]) -> bytes:
        """Return all metrics in Prometheus' text format, after updating the gauges from `engines`,
        which maps each model's name to its engine."""
        for model, engine in engines.items():
            values = {"running": engine.running, "waiting": engine.waiting}
            for name, value in values.items():
                for gauge in self.gauges[f"num_requests_{name}"]:
                    gauge.labels(model).set(value)
            self.ready.labels(model).set(engine.states.get("ready", 0))
            self.restarts.labels(model).set(engine.restarts)
            self._count("preemptions", engine.preempted - self._preempted[model], model)
            self._preempted[model] = engine.preempted
        return generate_latest(self.registry)

    def _count(self, name: str, value: float, model: str) -> None:
        for counter in self.counters[name]:
            counter.labels(model).inc(value)

    def _observe(self, name: str, value: float, model: str) -> None:
        for histogram in self.histograms[name]:
            histogram.labels(model).observe(value)


def build_log_entry(
    id: str,
    endpoint: str,
    model: str,
    status: int,
    seconds: float,
    generation: Generation | None,
) -> dict[str, Any]:
    """Return the fields of a request's log line."""
    entry: dict[str, Any] = {"id": id, "endpoint": endpoint, "model": model, "status": status}
    entry |= {"seconds": seconds}
    if generation is None:
        return entry
    rates, usage = answers.compute_rates(generation.outputs), answers.compute_usage(generation)
    entry |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    entry |= {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}
    entry |= {name: rates[name] for name in ("drafted", "accepted", "tokens_per_call")}
    return entry | {"first_token_seconds": generation.first_token_seconds}


def write_log_entry(entry: dict[str, Any]) -> None:
    """Write a request's log line."""
    log.info(
        "%s", " ".join(f"{k}={_format_value(v)}" for k, v in entry.items()), extra={"fields": entry}
    )


def _format_value(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
