"""Rows that come and go are what they are alone, whatever else happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.costing.gamma import NO_OTHER_WORK, FixedGamma, ForcedTokensOnly, OtherWork
from foretoken.drafters.base import Drafter
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.choice import DrafterChoice
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine import batch, prefill_budget
from foretoken.engine.batch import Batch
from foretoken.engine.core import EngineCore
from foretoken.engine.scheduler import MAX_DEFERRED_STEPS, SequenceTask
from foretoken.errors import InputError, NumericsError, RefusedError
from foretoken.generation_config import EndTokens
from foretoken.models.base import Capabilities
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verifier import COUPLED_VERIFIER, make_verifier
from foretoken.speculator import Speculator
from interrupts import interrupted
from oracle import random_model
from running import running
from table import TableModel

V = 6
P, Q, R = (random_model(seed, V) for seed in (1, 2, 3))
BLOCK = make_verifier(block)


def drafters() -> dict[str, Drafter]:
    small = TableModel(Q, V, context=11)
    return {
        "lm": LMDrafter(small, V),
        "unlimited": LMDrafter(TableModel(Q, V), V),
        "lookup": LookupDrafter(),
        "cascade": CascadeDrafter(TableModel(R, V), LMDrafter(TableModel(Q, V), V), 2),
        "mixture": MixtureDrafter([(LookupDrafter(), 2), (LMDrafter(TableModel(Q, V), V), None)]),
    }


def new_core(drafter: Drafter | None = None, most: int = 3, target: Any = P) -> EngineCore:
    return EngineCore(TableModel(target, V), drafter or drafters()["lm"], most)


def alone(row: SequenceState, gamma: int, drafter: str = "lm") -> list[int]:
    fresh = SequenceState.from_request(row.request)
    batch = Batch(TableModel(P, V), drafters()[drafter])
    for _ in running(batch, [fresh], BLOCK, FixedGamma(gamma), behind=True):
        pass
    return fresh.new_tokens


@pytest.fixture(autouse=True)
def _few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prompts of a few tokens are long."""
    monkeypatch.setattr(prefill_budget, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(prefill_budget, "FIRST_CHUNK_TOKENS", 4)
    monkeypatch.setattr(prefill_budget, "MAX_CHUNK_TOKENS", 3)
    monkeypatch.setattr(prefill_budget, "UNNOTICED_STEP_SECONDS", 0.0)
    yield


ARRIVALS = st.lists(
    st.tuples(
        st.lists(st.integers(0, V - 1), min_size=1, max_size=12),  # prompt
        st.integers(1, 9),  # limit
        st.integers(0, 4),  # gamma
        st.sampled_from([0.0, 1.0]),  # temperature
        st.integers(0, 12),  # the step before which it comes
        st.integers(1, 40),  # the step before which it is aborted, if it still runs then
    ),
    min_size=1,
    max_size=8,
)


class Sized(TableModel):
    """A token is a byte."""

    capabilities = Capabilities(memory=True)

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        return sum(lengths)


@given(arrivals=ARRIVALS, spare=st.integers(0, 30))
def test_rows_that_make_room_for_others_are_what_they_are_alone(
    arrivals: list[tuple[list[int], int, int, float, int, int]], spare: int
) -> None:
    """In memory for the longest of them and a few tokens; never is more in the caches."""
    target, small = Sized(P, V), Sized(Q, V)
    core = EngineCore(target, LMDrafter(small, V), 3)
    total = 2 * max(len(prompt) + limit for prompt, limit, *_ in arrivals) + spare
    core.configure(3, total, cache_prefixes=False)
    rows = [
        SequenceState.from_request(
            Request(prompt, limit, SequenceKey(5, i), params=SamplingParams(temperature))
        )
        for i, (prompt, limit, _, temperature, _, _) in enumerate(arrivals)
    ]
    held: list[int] = []
    for model in (target, small):
        watched(model, lambda: held.append(sum(map(len, target._texts + small._texts))))
    core.add(
        [
            SequenceTask(row, BLOCK, FixedGamma(gamma), priority)
            for row, (_, _, gamma, _, priority, _) in zip(rows, arrivals, strict=True)
        ]
    )
    for _ in range(400):
        if not core.step():
            break
    assert max(held) <= total
    for row, (_, _, gamma, _, _, _) in zip(rows, arrivals, strict=True):
        assert row.finish_reason == "length" and row.new_tokens == alone(row, gamma, "unlimited")
    with pytest.raises(InputError, match="take"):
        core.add(
            [
                SequenceTask(
                    SequenceState.from_request(Request([0], total, SequenceKey(0, 0))),
                    BLOCK,
                    FixedGamma(0),
                )
            ]
        )
    assert not core.scheduler.waiting


def watched(model: Any, look: Any) -> None:
    """`look` after every pass."""
    score = model.score

    def scored(*args: Any) -> Any:
        logits = score(*args)
        look()
        return logits

    model.score = scored


def test_the_youngest_makes_room_and_comes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.engine.scheduler.LOOKAHEAD_TOKENS", 0)
    core = EngineCore(Sized(P, V), NoDrafter(), 3)
    core.configure(3, 24, cache_prefixes=False)
    rows = [SequenceState.from_request(Request([1] * 4, 12, SequenceKey(0, i))) for i in range(4)]
    core.add([SequenceTask(row, BLOCK, FixedGamma(0)) for row in rows])
    ran: list[list[int]] = []
    while core.step():
        running = [task.seq for task in core.scheduler.running]
        ran.append([i for i, row in enumerate(rows) if row in running])
    assert ran[0] == [0, 1, 2] and [0, 1] in ran  # 24 bytes: 8 tokens for each of three
    assert core.scheduler.preempted >= 1 and all(row.finish_reason == "length" for row in rows)
    ends = [max(i for i, running in enumerate(ran) if n in running) for n in range(4)]
    assert ends == sorted(ends)


def test_a_greater_priority_goes_first_and_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.engine.scheduler.LOOKAHEAD_TOKENS", 0)
    core = EngineCore(Sized(P, V), NoDrafter(), 2)
    core.configure(2, 20, cache_prefixes=False)
    rows = [SequenceState.from_request(Request([1] * 4, 12, SequenceKey(0, i))) for i in range(4)]
    priorities = (0, 0, 5, 0)
    core.add(
        [SequenceTask(r, BLOCK, FixedGamma(0), n) for r, n in zip(rows, priorities, strict=True)]
    )
    ended: list[int] = []
    while core.step():
        ended += [i for i, row in enumerate(rows) if row.finish_reason and i not in ended]
    assert ended == [2, 0, 1, 3] and core.scheduler.preempted


def test_no_place_is_left_free_for_long() -> None:
    """More wait than there is room for, and that is less than a quarter of the batch."""
    core = new_core(most=8)
    long = [SequenceState.from_request(Request([1], 60, SequenceKey(0, i))) for i in range(7)]
    core.add([SequenceTask(row, BLOCK, FixedGamma(0)) for row in long])
    core.step()
    short = [SequenceState.from_request(Request([1], 2, SequenceKey(1, i))) for i in range(3)]
    core.add([SequenceTask(row, BLOCK, FixedGamma(0)) for row in short])
    steps = 0
    while short[-1].finish_reason is None:
        core.step()
        steps += 1
    assert steps <= 3 * (MAX_DEFERRED_STEPS + 2)


def test_a_long_prompt_is_read_beside_rows_that_go_on() -> None:
    widths: list[int] = []

    class Watched(TableModel):
        def score(self, blocks: Any, need: list[int]) -> torch.Tensor:
            widths.append(max(map(len, blocks)))
            return super().score(blocks, need)

    even = map(float, count())  # every step takes as long
    core = EngineCore(Watched(P, V), LookupDrafter(), 4, clock=even.__next__)
    first = SequenceState.from_request(Request([1, 2], 40, SequenceKey(0, 0)))
    core.add([SequenceTask(first, BLOCK, FixedGamma(0))])
    core.step()
    long = SequenceState.from_request(
        Request([3, 4] * 30, 5, SequenceKey(0, 1), params=SamplingParams(1.0))
    )
    core.add([SequenceTask(long, BLOCK, FixedGamma(2))])
    grown: list[int] = []
    while not long.records:
        before = len(first.tokens)
        core.step()
        grown.append(len(first.tokens) - before)
    # four at most before steps are measured, and two draft tokens with the last of them
    assert min(grown) == 1 and len(grown) >= 15 and max(widths) <= 4 + 2
    while core.scheduler.running:
        core.step()
    assert long.new_tokens == alone(long, 2, "lookup")


@pytest.mark.parametrize(("limit", "told"), [(None, 3), (3, 3), (2, 0)])
def test_a_policy_is_told_what_is_read_beside_its_rows(limit: int | None, told: int) -> None:
    """In all, and of that the tokens of prompts alone, whose time is not that of its steps; but
    not what the target runs in a pass of its own."""
    seen: list[OtherWork] = []

    class Watching(ForcedTokensOnly):
        def choose_gammas(
            self, rows: list[SequenceState], beside: OtherWork = NO_OTHER_WORK
        ) -> list[int]:
            seen.append(beside)
            return super().choose_gammas(rows, beside)

    even = map(float, count())  # every step takes as long
    target = TableModel(P, V)
    target.max_shared_width = limit
    core = EngineCore(target, LookupDrafter(), 3, clock=even.__next__)
    first = SequenceState.from_request(Request([1, 2], 40, SequenceKey(0, 0)))
    core.add([SequenceTask(first, BLOCK, Watching())])
    for _ in range(2):
        core.step()
    core.add(
        [
            SequenceTask(
                SequenceState.from_request(Request([3, 4] * 30, 5, SequenceKey(0, 1))),
                BLOCK,
                FixedGamma(0),
            )
        ]
    )
    before = len(seen)
    core.step()
    assert seen[before - 1] == NO_OTHER_WORK
    assert seen[before].prefill_positions == seen[before].positions == told
    assert seen[before].width == max(1, told)
    core.abort([task.seq for task in [*core.scheduler.running, *core.scheduler.waiting]])


def test_short_prompts_that_come_together_are_no_more_than_a_long_one() -> None:
    read: list[int] = []

    class Watched(TableModel):
        def score(self, blocks: Any, need: list[int]) -> torch.Tensor:
            read[-1] += sum(len(block) for block in blocks if len(block) > 1)
            return super().score(blocks, need)

        def start(self, prompts: list[list[int]], sources: Any = None) -> None:
            read[-1] += sum(map(len, prompts))
            super().start(prompts, sources)

    core = EngineCore(Watched(P, V), LookupDrafter(), 6)
    first, *short = [
        SequenceState.from_request(Request([1, 2, 0, 1], 40, SequenceKey(0, i))) for i in range(6)
    ]
    core.add([SequenceTask(first, BLOCK, FixedGamma(0))])
    read.append(0)
    core.step()
    core.add([SequenceTask(row, BLOCK, FixedGamma(0)) for row in short])
    while not short[-1].records:
        read.append(0)
        core.step()
    # of four at most, the first one's three when it joins, and one that always goes on
    assert max(read) <= 4 and len(read) >= 5


def test_a_prompt_whose_logprobs_are_asked_for_stalls_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read by a few positions a step, also behind a step that was broken off and a row that
    had to wait again."""
    monkeypatch.setattr(batch, "PROMPT_LOGPROBS_CHUNK_TOKENS", 4)
    core = new_core()
    first = SequenceState.from_request(Request([1, 2], 60, SequenceKey(0, 0)))
    core.add([SequenceTask(first, BLOCK, FixedGamma(2))])
    core.step()
    sampling = SamplingParams(1.0, prompt_logprobs=1, logprobs=0)
    request = Request([3, 4, 5] * 9, 5, SequenceKey(0, 1), params=sampling)
    long, whole = SequenceState.from_request(request), SequenceState.from_request(request)
    told = Batch(TableModel(P, V), drafters()["lm"])
    for _ in running(told, [whole], BLOCK, FixedGamma(2), behind=True):
        pass
    core.add([SequenceTask(long, BLOCK, FixedGamma(2))])
    parts: list[int] = []
    while not long.finish_reason:
        before = len(first.tokens)
        if len(parts) == 3:
            core.preempt()
        core.step()
        assert len(first.tokens) > before
        parts.append(len(long.prompt_logprobs))
    assert parts[:3] == [4, 8, 12] and parts[3:6] == [4, 8, 12]  # from the beginning again
    assert len(long.prompt_logprobs) == 26 and long.prompt_logprobs == whole.prompt_logprobs
    assert long.new_tokens == whole.new_tokens and long.logprobs == whole.logprobs
    while core.step():
        pass


def test_a_copy_of_the_prompt_goes_on_after_a_preemption() -> None:
    """The draft tokens are those of a sequence that was not preempted."""
    drafted: list[list[int]] = []
    for preempted in ([], [2, 4, 7]):
        core = new_core(DrafterChoice([CopyDrafter(), LookupDrafter()]))
        prompts = [1], [1, 2, 0, 3, 1, 4, 5, 2]
        rows = [
            SequenceState.from_request(Request(prompt, 30, SequenceKey(0, i)))
            for i, prompt in enumerate(prompts)
        ]
        core.add([SequenceTask(row, BLOCK, FixedGamma(3)) for row in rows])
        while not rows[1].finish_reason:
            if len(rows[1].records) in preempted:
                preempted.remove(len(rows[1].records))
                core.preempt()
            core.step()
        assert core.scheduler.preempted == 3 * len(drafted)
        drafted.append([step.drafted for step in rows[1].records])
    assert drafted[0] == drafted[1] and sum(drafted[0]) > 0


def test_another_verifier_waits_until_those_before_are_done() -> None:
    core = new_core()
    rows = [
        SequenceState.from_request(Request([1], 6, SequenceKey(0, i), params=SamplingParams(1.0)))
        for i in range(3)
    ]
    for row, verifier in zip(rows, (BLOCK, COUPLED_VERIFIER, BLOCK), strict=True):
        core.add([SequenceTask(row, verifier, FixedGamma(2))])
    seen: list[list[int]] = []
    while core.scheduler.running or core.scheduler.waiting:
        core.step()
        seen.append([rows.index(row) for row in core.scheduler.suspects])
    assert sorted(map(tuple, seen)) == [tuple(x) for x in seen] and {(0,), (1,), (2,)} == {
        tuple(x) for x in seen
    }


@pytest.mark.parametrize("broken", ["target", "draft", "middle"])
def test_a_row_of_invalid_logits_fails_alone(broken: str) -> None:
    def poisoned(distribution: Any) -> Any:
        return lambda text: (
            [float("nan")] * V if list(text[:2]) == [5, 5] and len(text) > 4 else distribution(text)
        )

    target = TableModel(poisoned(P) if broken == "target" else P, V)
    draft = LMDrafter(TableModel(poisoned(Q) if broken == "draft" else Q, V), V)
    middle = CascadeDrafter(TableModel(poisoned(R), V), LMDrafter(TableModel(Q, V), V), 2)
    core = EngineCore(target, middle if broken == "middle" else draft, 4)
    sampled = SamplingParams(1.0)
    rows = [
        SequenceState.from_request(Request(prompt, 8, SequenceKey(0, i), params=sampled))
        for i, prompt in enumerate(([1, 2], [5, 5], [3]))
    ]
    core.add([SequenceTask(row, BLOCK, FixedGamma(3)) for row in rows])
    while core.scheduler.running or core.scheduler.waiting:
        core.step()
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert isinstance(rows[1].error, NumericsError)
    kind = "cascade" if broken == "middle" else "unlimited"
    for row in (rows[0], rows[2]):
        assert row.new_tokens == alone(row, 3, kind)


def test_what_breaks_a_step_off_is_told_and_the_rows_go_on() -> None:
    core = new_core()
    rows = [
        SequenceState.from_request(
            Request([1, i], 8, SequenceKey(0, i), params=SamplingParams(1.0))
        )
        for i in range(3)
    ]
    core.add([SequenceTask(row, BLOCK, FixedGamma(2)) for row in rows])
    core.step()
    target: Any = core.batch.target
    score, target.score = target.score, None
    with pytest.raises(TypeError):
        core.step()
    assert not core.scheduler.running and [task.seq for task in core.scheduler.waiting] == rows
    target.score = score
    while core.scheduler.running or core.scheduler.waiting:
        core.step()
    assert [row.new_tokens for row in rows] == [alone(row, 2) for row in rows]


@pytest.mark.prove
def test_a_ctrl_c_anywhere_in_a_step_loses_no_row_of_another_thread() -> None:
    """It comes to the thread that takes the step, whosever rows these are."""
    came, nth = True, 0
    while came:
        nth += 3
        core = new_core(most=2)
        rows = [SequenceState.from_request(Request([1, i], 3, SequenceKey(0, i))) for i in range(3)]
        core.add([SequenceTask(row, BLOCK, FixedGamma(i)) for i, row in enumerate(rows)])
        came = interrupted(lambda core=core: (core.step(), core.step()), nth, ("engine/",))
        for _ in range(20):
            core.step()
        assert [row.new_tokens for row in rows] == [
            alone(row, gamma) for gamma, row in enumerate(rows)
        ], f"line {nth}"
    assert nth > 60


def test_threads_generate_at_once() -> None:
    spec = Speculator(TableModel(P, V), drafters()["lm"], ends=EndTokens())
    sampling = SamplingParams(1.0, max_new_tokens=25)
    expected = [
        spec.generate([[1, i], [2]], sampling, gamma=i % 3, seed=i)[0].tokens for i in range(6)
    ]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = spec.generate([[1, i], [2]], sampling, gamma=i % 3, seed=i)[0].tokens

    threads = [Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[i] for i in range(6)] == expected


def test_a_processor_that_generates_with_its_own_model_is_refused() -> None:
    spec = Speculator(TableModel(P, V), drafters()["lm"], ends=EndTokens())

    def inner(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        spec.generate([1], max_new_tokens=2, gamma=0)
        return scores

    with pytest.raises(RefusedError, match="a logits processor or stopping criterion generates"):
        spec.generate([1], max_new_tokens=4, gamma=0, processors=inner)
    assert spec.generate([1], replace(SamplingParams(), max_new_tokens=3), gamma=0)
