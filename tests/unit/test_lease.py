"""One run at a time over a model or drafter, whoever shares it; a run that is broken off anywhere
leaves nothing that another would meet."""

from __future__ import annotations

import copy
import gc
from threading import Event, Thread

import pytest

from foretoken.certificate.greedy_identity import measure_shape_noise, replay
from foretoken.costing.gamma import FixedGamma
from foretoken.costing.pair_costs import PROBE_KEY
from foretoken.costing.probe import PROBE_TOKENS
from foretoken.drafters.base import Draft, iter_parts, pack
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import Batch
from foretoken.errors import InputError, RefusedError
from foretoken.lease import find_lease_record
from foretoken.measurement.agreement import compute_overlaps
from foretoken.request import Request, SequenceState
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.verifier import GreedyVerifier
from foretoken.speculator import Speculator
from interrupts import interrupted
from oracle import random_model
from running import running
from table import TableModel

V = 6
P, M, Q = (random_model(seed, V) for seed in (1, 3, 2))
OPEN = "a stream of this target or draft is still open; first exhaust or close that stream"


def three() -> tuple[Speculator, Speculator]:
    """A middle model with its draft, and a large one for which both draft."""
    mid = Speculator(TableModel(M, V), LMDrafter(TableModel(Q, V), V))
    big = Speculator(TableModel(P, V), CascadeDrafter(mid.target, mid.drafter))
    return mid, big


def nobody_has(*specs: Speculator) -> bool:
    parts = [
        part for spec in specs for part in (*iter_parts(spec.target), *iter_parts(spec.drafter))
    ]
    return all(find_lease_record(part) is None for part in parts)


def text(spec: Speculator, tokens: int = 12) -> list[int]:
    return spec.generate([[0, 1]], max_new_tokens=tokens, gamma=3)[0].tokens


def test_a_stream_of_a_shared_model_goes_on_and_others_are_refused() -> None:
    mid, big = three()
    expected, large = text(mid), text(big)
    pieces = mid.stream([0, 1], max_new_tokens=12, gamma=3)
    tokens = list(next(pieces).tokens)
    with pytest.raises(RefusedError, match=OPEN):
        big.generate([[0, 1]], max_new_tokens=12, gamma=3)
    assert text(mid) == expected  # beside its own stream
    assert tokens + [token for piece in pieces for token in piece.tokens] == expected
    assert text(big) == large and text(mid) == expected and nobody_has(mid, big)


def test_a_copy_of_a_part_in_use_is_free() -> None:
    mid, _ = three()
    pieces = mid.stream([0, 1], max_new_tokens=8, gamma=2)
    next(pieces)
    copied = copy.copy(mid.target)
    assert find_lease_record(mid.target) is not None and find_lease_record(copied) is None
    pieces.close()


def test_a_drafter_without_attributes_of_its_own_runs() -> None:
    """A user's class with slots cannot be marked as in use."""

    class Silent:
        __slots__ = ()

        def start(self, rows: list[int], prompts: list[list[int]], sources: None) -> None: ...
        def propose(self, gamma: list[int], draw: object) -> Draft:
            return pack([[] for _ in gamma])

        def commit(self, tokens: list[list[int]]) -> None: ...
        def leave(self, rows: list[int]) -> None: ...

    drafter, target = Silent(), TableModel(P, V)
    for _ in range(2):
        assert text(Speculator(target, drafter)) == text(Speculator(target, NoDrafter()))


def test_another_thread_is_told_who_runs() -> None:
    mid, big = three()
    begun, done = Event(), Event()

    def work() -> None:
        pieces = mid.stream([0, 1], max_new_tokens=12, gamma=3)
        next(pieces)
        begun.set()
        done.wait(60)
        pieces.close()

    thread = Thread(target=work, name="the other")
    thread.start()
    begun.wait(60)
    try:
        with pytest.raises(RefusedError, match="^thread 'the other' is generating with this"):
            text(big)
    finally:
        done.set()
        thread.join()
    assert text(big)


def test_measuring_beside_a_stream_is_refused() -> None:
    """What reads a target by itself would end the stream's row, too."""
    mid, _ = three()
    expected, request = (
        text(mid),
        mid.inputs.make_requests([[0, 1]], SamplingParams(max_new_tokens=4), 0)[0],
    )
    pieces = mid.stream([0, 1], max_new_tokens=12, gamma=3)
    tokens = list(next(pieces).tokens)
    target, drafter, params = mid.target, mid.drafter, SamplingParams(1.0)
    for call in (
        lambda: compute_overlaps(target, drafter, request, [2, 3], params),
        lambda: list(replay(target, drafter, [request], [[2, 3]], params)),
        lambda: measure_shape_noise(target, [request], [[2, 3]], 2),
    ):
        with pytest.raises(RefusedError, match=OPEN):
            call()
    assert tokens + [token for piece in pieces for token in piece.tokens] == expected


def test_a_stream_that_nobody_holds_is_over() -> None:
    mid, _ = three()
    expected = text(mid)
    pieces = mid.stream([0, 1], max_new_tokens=12, gamma=3)
    next(pieces)
    loop = [pieces]
    loop.append(loop)  # only the collector finds it
    del pieces, loop
    gc.collect()
    assert text(mid) == expected


LEASE = ("foretoken/engine/batch.py", "foretoken/lease.py", "contextlib.py")
INSIDE = ("foretoken/step.py", "foretoken/drafters", "foretoken/models")


@pytest.mark.prove
@pytest.mark.parametrize(
    ("files", "stride", "queued"),
    [
        (LEASE, 2, False),
        (INSIDE, 17, False),
        (("foretoken/engine", "foretoken/lease.py"), 3, True),
        (INSIDE, 17, True),
    ],
    ids=[
        "lines of a lease",
        "lines of what it runs",
        "lines of a queue",
        "what that runs",
    ],
)
def test_a_ctrl_c_anywhere_leaves_both_usable(
    files: tuple[str, ...], stride: int, queued: bool
) -> None:
    mid, big = three()
    expected, large = text(mid, 4), text(big, 4)
    nth = 1
    while interrupted(lambda: (run_queued if queued else run)(big), nth, files):
        assert text(big, 4) == large, f"line {nth}"
        assert text(mid, 4) == expected, f"line {nth}"
        nth += stride
    assert nth > 50 * stride and nobody_has(mid, big)


def run(spec: Speculator) -> None:
    """As `generate` does, which would take the Ctrl-C for the end of its texts."""
    rows = [
        SequenceState.from_request(Request([0, 1], limit, SequenceKey(0, 0))) for limit in (1, 3)
    ]
    for _ in running(Batch(spec.target, spec.drafter), rows, GreedyVerifier(), FixedGamma(3)):
        pass


def run_queued(spec: Speculator) -> None:
    """Through the queue that `generate` and `stream` share."""
    rows = [
        SequenceState.from_request(Request([0, 1], limit, SequenceKey(0, 0))) for limit in (1, 3)
    ]
    for _ in spec.core.run(rows, GreedyVerifier(), FixedGamma(3)):
        pass


def test_a_drafter_whose_end_fails_is_told_once() -> None:
    class Sick(LookupDrafter):
        def leave(self, rows: list[int]) -> None:
            raise OSError("sick")

    spec = Speculator(TableModel(P, V), Sick())
    for _ in range(2):
        with pytest.raises(OSError, match="sick"):
            text(spec)
    assert nobody_has(spec)


@pytest.mark.real_costs
def test_the_probe_has_a_key_that_no_row_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else gamma's prior would follow from the very numbers that the default seed's text meets."""
    mid, _ = three()
    with pytest.raises(InputError, match="seed"):
        mid.generate([[0]], seed=PROBE_KEY.seed)
    asked: list[Request] = []
    original = SequenceState.from_request
    monkeypatch.setattr(
        SequenceState, "from_request", lambda request: asked.append(request) or original(request)
    )
    mid.costing.get_step_costs(SamplingParams(1.0))
    assert {request.key for request in asked if request.limit > PROBE_TOKENS // 2} == {PROBE_KEY}
