"""The engine: rows together are what they are alone, and an end of any kind leaves it usable."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest
import torch

from foretoken.costing.gamma import FixedGamma
from foretoken.drafters.base import Drafter, pack
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import Batch, retain_freed_memory
from foretoken.errors import RefusedError
from foretoken.models.base import Capabilities
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS as PASS
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import GreedyVerifier, SampledVerifier, make_verifier
from oracle import random_model
from running import running
from table import TableModel

pytestmark = pytest.mark.daily

V = 6
P, Q = random_model(1, V), random_model(2, V)
SAMPLED = SamplingParams(temperature=1.0)
REQUESTS = [
    Request([0], 12, SequenceKey(4, 0), frozenset({5})),
    Request([1, 2, 3, 1, 2], 3, SequenceKey(4, 1)),
    Request([2], 1, SequenceKey(4, 2)),
    Request([3, 3], 20, SequenceKey(4, 3), frozenset({0, 1})),
    Request([0], 12, SequenceKey(5, 0), frozenset({5})),
]


def engine(target=P, draft=Q) -> Batch:
    return Batch(TableModel(target, V), LMDrafter(TableModel(draft, V, context=9), V))


def fresh(requests: list[Request], params=SAMPLED) -> list[SequenceState]:
    return [SequenceState.from_request(replace(request, params=params)) for request in requests]


def run(engine: Batch, requests: list[Request], gamma=3, params=SAMPLED, rule=speculative):
    rows = fresh(requests, params)
    for _ in running(engine, rows, make_verifier(rule), FixedGamma(gamma)):
        pass
    return rows


def texts(rows: list[SequenceState]) -> list[tuple[list[int], str | None]]:
    return [(row.new_tokens, row.finish_reason) for row in rows]


def test_gamma_is_trimmed_near_the_end():
    """No guess is made that the limit would cut off."""
    for row in run(engine(), REQUESTS, gamma=8):
        limit = row.request.limit
        for record in row.records:
            assert record.gamma == min(8, limit - 1)
            limit -= len(record.new_tokens)


def test_an_open_stream_is_refused_and_a_closed_one_is_not():
    e = engine()
    stream = running(e, fresh(REQUESTS), SampledVerifier(speculative), FixedGamma(2))
    next(stream)
    next(stream)
    with pytest.raises(RefusedError, match="a stream of this target or draft is still open"):
        run(e, REQUESTS)
    stream.close()
    assert texts(run(e, REQUESTS)) == texts(run(engine(), REQUESTS))


def test_a_drafter_may_keep_and_change_the_lists_it_is_given():
    class Keeper(Drafter):
        def start(self, rows, prompts, sources):
            self.texts = prompts

        def propose(self, gamma, draw):
            asked = gamma.pop()
            return pack([[0] * min(1, asked)])

        def commit(self, tokens):
            self.texts[0].extend(tokens[0])
            tokens[0].clear()

        def leave(self, rows):
            pass

    engine = Batch(TableModel(lambda text: [0.5, 0.5], 2), Keeper())
    row = SequenceState.from_request(Request([1], 7, SequenceKey(0, 0)))
    for _ in running(engine, [row], SampledVerifier(speculative), FixedGamma(1)):
        pass
    assert len(row.new_tokens) == 7 and row.request.prompt == [1]
    assert [token for step in row.records for token in step.new_tokens] == row.new_tokens


def test_torch_runs_on_one_thread_beside_the_native_decoder_and_is_the_callers_in_between() -> None:
    seen: list[int] = []

    class Elsewhere(TableModel):
        runtime = "native"

        def score(self, blocks: list[list[int]], need: list[int]) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return super().score(blocks, need)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        row = SequenceState.from_request(Request([1], 3, SequenceKey(0, 0)))
        batch = Batch(Elsewhere(P, V), NoDrafter())
        for _ in running(batch, [row], GreedyVerifier(), FixedGamma(0)):
            assert torch.get_num_threads() == 3
        assert seen == [1, 1, 1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries keep what they like")
def test_memory_that_a_step_frees_is_not_faulted_in_again() -> None:
    resource = pytest.importorskip("resource")
    retain_freed_memory()
    pages = 8 * 2**22 // resource.getpagesize()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        distributions = [torch.ones(2**20) for _ in range(8)]
        del distributions
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()  # the heap grows once
    assert min(faults() for _ in range(3)) < pages / 10


class Tensors(TableModel):
    """Takes blocks as a tensor, as models on a device do."""

    capabilities = Capabilities(tensors=True)

    def score(self, blocks, need):
        if isinstance(blocks, torch.Tensor):
            blocks = [row[:n] for row, n in zip(blocks.tolist(), need, strict=True)]
        return super().score(blocks, need)


def test_a_row_whose_prompt_was_just_told_waits_for_the_next_step() -> None:
    """Its last token is unread as other rows' are, but this pass does not advance it."""
    sampling = SamplingParams(temperature=1.0, prompt_logprobs=0)
    request = replace(REQUESTS[1], params=sampling)
    expected = [run(Batch(TableModel(P, V), NoDrafter()), [each])[0] for each in REQUESTS[:2]]
    rows = [
        SequenceState.from_request(replace(REQUESTS[0], params=SAMPLED)),
        SequenceState.from_request(request),
    ]
    for _ in running(
        Batch(Tensors(P, V), NoDrafter()), rows, make_verifier(speculative), FixedGamma(0)
    ):
        pass
    assert texts(rows) == texts(expected) and len(rows[1].prompt_logprobs) == 4


class Passes(TableModel):
    """Notes how many tokens each pass has, those of a start among them."""

    def __init__(self) -> None:
        super().__init__(P, V)
        self.sizes: list[list[int]] = []

    def start(self, prompts, sources=None):
        self.sizes.append([len(prompt) for prompt in prompts])
        super().start(prompts, sources)

    def score(self, blocks, need):
        self.sizes.append([len(block) for block in blocks])
        return super().score(blocks, need)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (1, [0, 1]),
        (40, [0, 40]),
        (PASS + 1, [PASS, 1]),
        (PASS + 9, [PASS, 9]),
    ],
)
@pytest.mark.parametrize("behind", [True, False], ids=["alone", "with draft tokens"])
def test_the_end_of_a_prompt_and_the_first_token_are_one_pass(length, sizes, behind):
    target = Passes()
    row = SequenceState.from_request(Request([1] * length, 8, SequenceKey(4, 0), params=SAMPLED))
    batch = Batch(target, LMDrafter(TableModel(Q, V)))
    steps = running(batch, [row], SampledVerifier(speculative), FixedGamma(2), behind=behind)
    next(steps), next(steps)
    assert [size for (size,) in target.sizes] == [sizes[0], sizes[1] + 2 * (not behind)]
    assert row.prefill_end_seconds == row.first_seconds == row.seconds > row.prefill_seconds > 0
    next(steps)
    if behind:
        assert row.prefill_end_seconds >= row.first_seconds + row.draft_prefill_seconds
    else:  # that is part of the time before the first token
        assert row.prefill_end_seconds == row.first_seconds > row.draft_prefill_seconds
    steps.close()
