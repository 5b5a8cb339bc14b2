"""A measurement as its JSON file has it, written by hand: costs in round numbers of seconds."""

from __future__ import annotations

from typing import Any


def spread(seconds: float, error: float = 0.0) -> dict[str, Any]:
    return {"median": seconds, "q1": seconds - error / 2, "q3": seconds + error / 2, "n": 9}


def interval(value: float, error: float = 0.0) -> dict[str, float]:
    return {"value": value, "low": value - error, "high": value + error}


def footprint(name: str, runtime: str = "transformers", operations: int = 100) -> dict[str, Any]:
    facts = {"name": name, "runtime": runtime, "dtype": "float32", "encoder_decoder": False}
    sizes = {"parameters": 50, "weight_bytes": 200, "pass_bytes": 200, "cache_bytes": 8}
    return {**facts, **sizes, "operations": operations}


def observed(passes: list[float], gamma: int, beside: float) -> dict[str, Any]:
    """One plain step, and one in the loop."""

    def run(drafted: int, seconds: float) -> dict[str, Any]:
        step = [drafted, drafted, drafted, 0, 1, 0.5, 0.0, seconds]
        return {"tokens": 1, "seconds": seconds, "steps": [step]}

    return {
        "prompt_tokens": 4,
        "overlaps": [0.5],
        "plain": run(0, passes[0]),
        "loop": run(gamma, beside * passes[gamma]),
        "context": 64,
        "passes": [[seconds] for seconds in passes],
    }


def document(
    kept: list[float],
    draft_token: float,
    *,
    passes: int | list[float] = 16,
    tokens: int = 64,
    alpha: float | None = None,
    error: float = 0.0,
    offered: float = 1.0,
    overhead: tuple[float, float] = (0.0, 0.0),
    speedup: float = 1.5,
    beside: float = 1.0,
    draft: str = "draft",
    **options: Any,
) -> dict[str, Any]:
    """kept: how likely draft token 1, 2, .. is kept once those before it were; speedup: measured at
    gamma len(kept); beside: how many times as slow a pass is beside drafts."""
    positions, reached_count = [], 10**6
    for rate in kept:
        count = round(reached_count * rate)
        counts = {
            "asked": reached_count,
            "judged": reached_count,
            "kept": count,
            "rate": None,
            "offered": offered,
        }
        positions.append(counts)
        reached_count = count
    alpha = kept[0] if alpha is None else alpha
    passes = [1.0] * passes if isinstance(passes, int) else passes
    asked_for = {"target": "target", "draft": draft, "prompts": "p.txt", "prompts_sha256": "0"}
    cpu = {"cpu": "a cpu", "cores": 2, "threads": 2, "gpu": None, "versions": {"torch": "2"}}
    return {
        "format": "foretoken.measurement",
        "version": 1,
        "date": "2026-11-01T00:00:00+00:00",
        "options": {**asked_for, "gamma": len(kept), "max_new_tokens": tokens, **options},
        "machine": cpu,
        "target": footprint("target"),
        "draft": footprint(draft, "python" if draft == "lookup" else "transformers", 2),
        "alpha": interval(alpha, error),
        "alpha_in_loop": interval(alpha),
        "silent": 0.0,
        "positions": positions,
        "tokens": float(tokens),
        "tokens_per_call": interval(2.0),
        "draft_seconds": spread(draft_token),
        "context": 64,
        "passes": [spread(seconds) for seconds in passes],
        "plain_overhead": spread(overhead[0]),
        "loop_overhead": spread(overhead[1]),
        "speedup": interval(speedup),
        "read_bytes": 1000,
        "read": spread(1.0),
        "peak_bytes": 10**9,
        "prompts": [observed(passes, len(kept), beside)],
    }
