"""An engine's rows where something is the matter with one of them, over long runs, and over what
was read before."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import moving
from foretoken import Completion, Engine, SamplingParams
from foretoken.engine import memory, scheduler
from moving import (
    DRAFT_SICK,
    RUNTIMES,
    SICK,
    SOUND,
    V,
    require_accounted,
    require_empty,
)

SAMPLED = SamplingParams(1.0, max_new_tokens=12, suppress_tokens=[SICK, DRAFT_SICK])


def drained(engine: Engine) -> dict[int, Completion]:
    completions: dict[int, Completion] = {}
    for _ in range(2000):
        if not engine.running and not engine.waiting:
            return completions
        completions |= {e.id: e.completion for e in engine.step() if e.completion is not None}
    raise AssertionError("the engine never ends")


# --- one bad row ---


def writes(sick: int, place: int) -> Callable[[Any, Any], Any]:
    """A processor of one's own: the new token at that place is `sick`."""

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        here = ids.shape[1] == 3 + place
        if here:
            scores[:] = -torch.inf
        scores[:, [SICK, DRAFT_SICK]] = -torch.inf
        scores[:, sick] = 0.0 if here else -torch.inf
        return scores

    return processor


MATES = [([5, 6], 2), ([7], 0), ([40, 41, 42, 40, 41], 4)]


@pytest.mark.daily
@pytest.mark.parametrize("runtime", ["table", "torch", "graphs", "native"])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_a_row_that_turns_invalid_fails_alone(runtime: str, whose: str) -> None:
    """Behind its `place`-th new token; other rows' texts are as without it, also those that come
    into the cache where it stood."""
    sick = SICK if whose == "target" else DRAFT_SICK
    spec = moving.shared(runtime, "lm")
    expected = [
        spec.generate([prompt], SAMPLED, gamma=gamma, seed=[(3, b)])[0].tokens
        for b, (prompt, gamma) in enumerate(MATES)
    ]
    how: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12, "gamma": 3, "seed": (3, 9)}
    for place in (0, 1, 6):
        with Engine(spec, 3) as engine:
            bad = engine.add([9, 9, 9], processors=writes(sick, place), **how)
            ids = [
                engine.add(prompt, SAMPLED, gamma=gamma, seed=(3, b))
                for b, (prompt, gamma) in enumerate(MATES)
            ]
            completions = drained(engine)
        assert completions[bad].finish_reason == "error"
        assert f"the {whose}'s logits hold NaN" in str(completions[bad].error)
        assert len(completions[bad].tokens) <= place + 4
        assert [completions[id].tokens for id in ids] == expected
        assert [completions[id].finish_reason for id in ids] == ["length"] * 3
        require_empty(spec)


@pytest.mark.parametrize("runtime", ["torch", "native"])
def test_a_sick_row_that_wants_no_draft_token_costs_its_others_nothing(runtime: str) -> None:
    """The draft cannot read it, and need not."""
    with Engine(moving.shared(runtime, "lm")) as engine:
        engine.add([DRAFT_SICK, 5, 6], SAMPLED, gamma=0)
        engine.add([7, 8], SAMPLED, gamma=3)
        assert [done.finish_reason for done in drained(engine).values()] == ["length"] * 2


# --- to the bit ---


def differing(tokens: int, rule: str, own: str = "") -> Counter[str]:
    """Count tokens made by an engine of random arrivals, which share prefixes and wait again where
    memory runs short, those that differ from plain decoding of the row alone, draft tokens that
    were kept, and tokens of prompts that were cached. own: " self" for drafts over the target's
    rows."""
    chance, counts = random.Random(rule), Counter[str]()
    spec, plain = (RUNTIMES[f"native{own}"].speculator("lm", SOUND) for _ in range(2))
    assert spec.exact == "bitwise"
    heads = [[chance.randrange(1, 300) for _ in range(60)] for _ in range(2)]
    room = spec.target.compute_cache_bytes([260], [0]) * (1 if own else 2)  # pyright: ignore
    with Engine(spec, 6, rule=rule, kv_memory=room) as engine:
        sampling_of: dict[int, tuple[list[int], SamplingParams, int]] = {}
        while counts["made"] < tokens or sampling_of:
            if counts["made"] < tokens and len(sampling_of) < 9 and chance.random() < 0.5:
                prompt = [chance.randrange(1, 300) for _ in range(chance.choice([1, 5, 40, 80]))]
                prompt = [*chance.choice([[], *heads]), *prompt]
                params = SamplingParams(
                    1.0 if rule == "coupled" else 0.0, max_new_tokens=chance.randrange(1, 110)
                )
                seed = chance.randrange(2**60)
                id = engine.add(prompt, params, gamma=chance.choice([0, 1, 3, 7]), seed=(seed, 0))
                sampling_of[id] = prompt, params, seed
            for event in engine.step():
                if event.completion is not None:
                    prompt, params, seed = sampling_of.pop(event.id)
                    (alone,) = plain.generate(
                        [prompt], params, gamma=0, seed=[(seed, 0)], rule=rule
                    )
                    ids = event.completion.tokens
                    assert len(ids) == len(alone.tokens)
                    counts["made"] += len(ids)
                    counts["kept"] += event.completion.stats.accepted
                    counts["cached"] += event.completion.stats.cached_tokens
                    pairs = zip(ids, alone.tokens, strict=True)
                    counts["different"] += sum(a != b for a, b in pairs)
        counts["preempted"] = engine.stats().preempted
    require_empty(spec)
    return counts


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs short soon: rows join without room for what they may gain."""
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 4)


@pytest.mark.native
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("tokens", "rule", "own"),
    [
        (300, "coupled", ""),
        (300, "coupled", " self"),
        pytest.param(10_000, "block", "", marks=pytest.mark.prove),
        pytest.param(10_000, "coupled", "", marks=pytest.mark.prove),
    ],
)
def test_a_moving_batch_changes_no_bit(tokens: int, rule: str, own: str) -> None:
    counts = differing(tokens, rule, own)
    assert not counts["different"] and counts["made"] >= tokens, counts
    assert counts["kept"] > tokens / 60 and counts["cached"] > 60 and counts["preempted"], counts


# --- many requests ---


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def sampling(chance: random.Random) -> dict[str, Any]:
    """Controls of any kind; some leave no token."""
    some: dict[str, Any] = {
        "temperature": chance.choice([0.0, 0.7, 1.0]),
        "top_k": chance.choice([0, 0, 5]),
        "top_p": chance.choice([1.0, 0.9]),
        "max_new_tokens": chance.randrange(1, 7),
        "repetition_penalty": chance.choice([None, 1.3]),
        "logprobs": chance.choice([None, None, 1]),
    }
    rare: list[dict[str, Any]] = [
        {"stop_strings": ["e", " "]},
        {"stop_token_ids": list(range(1, 320, 5)), "include_stop_string": True},
        {"stop_token_ids": list(range(1, 320, 5))},
        {"suppress_tokens": range(V)},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5, 6], [7]]},
        {"logit_bias": {9: 4.0}},
        {"prompt_logprobs": 0},
    ]
    return some | (chance.choice(rare) if chance.random() < 0.5 else {})


def served(engine: Engine, requests: int) -> Iterator[int]:
    """Random requests, lengths and aborts, one by one; yields how many are over."""
    chance, running, over = random.Random(0), list[int](), Counter[str]()
    added = 0
    while over.total() < requests:
        while added < requests and len(running) < 24:
            head = [*range(1, 70)] if chance.random() < 0.2 else []
            prompt = [*head, *(chance.randrange(1, 300) for _ in range(chance.randrange(1, 9)))]
            gamma, salt = chance.choice([0, 1, 3]), f"user {added}"
            how = sampling(chance)
            running.append(engine.add(prompt, gamma=gamma, seed=added, cache_salt=salt, **how))
            added += 1
        for event in engine.step():
            if event.completion is not None:
                over[event.completion.finish_reason] += 1
                running.remove(event.id)
                yield over.total()
        if running and chance.random() < 0.4:
            engine.abort(running.pop(chance.randrange(len(running))))
            over["aborted"] += 1
            yield over.total()
    stats = engine.stats()
    assert stats.aborted == over["aborted"] and not stats.running + stats.waiting
    assert stats.finished == requests - over["aborted"]
    assert min(over[end] for end in ("stop", "length", "error", "aborted")) > requests / 100, over


@pytest.mark.prove
@pytest.mark.parametrize("runtime", ["torch", "native"])
def test_proof_ten_thousand_requests_take_no_memory(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        memory, "DEFAULT_PREFIX_CACHE_BYTES", 4_000_000
    )  # full after a few hundred texts
    spec, seen = RUNTIMES[runtime].speculator("lm", SOUND), list[int]()
    with Engine(spec) as engine:
        seen = [resident() for over in served(engine, 10_000) if over % 1000 == 0]
    require_empty(spec)
    # MB a thousand, after a thousand to warm up; medians, as the allocator keeps what it likes
    grown = (median(seen[-3:]) - median(seen[1:4])) / 6 / 2**20
    print(f"{runtime}: {[round(size / 2**20, 1) for size in seen]} MB, {grown:.2f} MB a thousand")
    assert grown < 1.0


# --- what was read before ---


def test_talks_in_turns_find_what_was_read() -> None:
    """Twelve talks at two rows: far more than the rows alone need pages for. All whole pages of the
    turn before are found; the last token that it wrote has not been read."""
    spec = moving.shared("native", "lm", number=-2, before=SOUND)
    histories = [[(k * i) % 290 + 1 for i in range(70)] for k in range(1, 13)]
    with Engine(spec, 2) as engine:
        for turn in range(4):
            before = [len(history) for history in histories]
            for k, history in enumerate(histories):
                history += [(7 * i + turn + k) % 290 + 1 for i in range(9)]
            ids = [engine.add(history, max_new_tokens=4, gamma=2) for history in histories]
            completions = drained(engine)
            for id, history, read in zip(ids, histories, before, strict=True):
                assert not turn or completions[id].stats.cached_tokens >= (read - 1) // 32 * 32
                history += completions[id].tokens
        assert (
            spec.target.pool.num_used * spec.target.pool.page_bytes
            <= memory.DEFAULT_PREFIX_CACHE_BYTES
        )  # pyright: ignore
    require_empty(spec)


TEXTS = st.tuples(
    st.sampled_from(["", "mine", "yours"]),
    st.integers(0, 3),  # which beginning
    st.integers(1, 150),  # how much of it
    st.lists(st.integers(1, 3), max_size=2),  # where it forks
    st.booleans(),  # whether it is aborted
)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(arrivals=st.lists(TEXTS, min_size=4, max_size=25), rows=st.integers(1, 4))
def test_forks_aborts_and_evictions_lose_no_page(arrivals: list[Any], rows: int) -> None:
    """Every page ends free or is that of a stored prefix; nothing is read from another salt's.
    Nothing is set apart for texts that have left, so they give way soon."""
    spec = moving.shared("native", "lm", number=-1, before=SOUND)
    shown: dict[str, list[list[int]]] = {}  # what each salt has asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "DEFAULT_PREFIX_CACHE_BYTES", 0)
        engine = Engine(spec, rows)
    with engine:
        running: dict[int, tuple[str, list[int]]] = {}
        for salt, which, length, fork, aborted in arrivals:
            prompt = [*((i * (which + 3)) % 290 + 1 for i in range(length)), *fork, 9]
            id = engine.add(prompt, max_new_tokens=3, gamma=2, cache_salt=salt)
            running[id] = salt, prompt
            shown.setdefault(salt, []).append(prompt)
            require_accounted(spec)
            for event in engine.step():
                if event.completion is not None:
                    salt, prompt = running.pop(event.id)
                    cached = event.completion.stats.cached_tokens
                    mates = [text for text in shown[salt] if text is not prompt]
                    assert cached <= len(prompt)
                    assert not cached or any(text[:cached] == prompt[:cached] for text in mates)
            if aborted and running:
                engine.abort(running.popitem()[0])
        drained(engine)
        require_empty(spec)
        models: Any = spec.target, spec.drafter.model
        for model in models:
            stored = {page.address for row in model.pool.prefix_cache or () for page in row.pages}
            assert model.pool.num_used == len(stored)
    assert spec.target.pool.num_used == 0  # pyright: ignore


def test_what_a_row_has_read_itself_is_not_cached() -> None:
    """`cached_tokens` counts tokens of the prompt that had been read for other texts."""
    spec = moving.shared("native", "lm", before=SOUND)
    with Engine(spec) as engine:
        id = engine.add([*range(5, 75)], max_new_tokens=9, gamma=0, cache_salt="nobody else's")
        engine.step()
        with spec.core.release_models():  # as for a measurement
            pass
        assert drained(engine)[id].stats.cached_tokens == 0
