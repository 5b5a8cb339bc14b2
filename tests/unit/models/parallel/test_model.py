"""A target over two processes is the same target: its logits, an engine's texts and laws.

One pair of processes serves this file.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from foretoken import Completion, Engine, InputError, LostError, SamplingParams, Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.models.parallel import ranks as module
from foretoken.models.parallel.model import ParallelModel, on_ranks
from foretoken.models.parallel.ranks import Ranks, start
from foretoken.models.stock.causal import CausalModel
from foretoken.models.stock.selfcheck import deviation
from tiny import llama

V, CONTEXT, ALIKE = 64, 160, 1e-12
GREEDY = SamplingParams(max_new_tokens=20, logprobs=4)
SAMPLED = SamplingParams(1.0, max_new_tokens=20, logprobs=4)
# (before which step, prompt, wishes, gamma, seed): they join a batch of three rows as others leave
ARRIVALS = [
    (0, [5, 6, 7], GREEDY, 3, 1),
    (0, [9] * 30, SAMPLED, 4, 2),
    (2, [11, 12], SAMPLED, 0, 3),
    (3, [5, 6, 7, 8, 9, 10], GREEDY, 2, 4),
    (5, [20, 21, 20, 21], SAMPLED, 1, 5),
    (9, [30], GREEDY, None, 6),
]
ABORTED = {4: 1, 8: 3}  # before which step, which arrival


def network(seed: int = 0, *, tied: bool = False) -> PreTrainedModel:
    twin = llama(V, CONTEXT, seed, eos_token_id=None, tie_word_embeddings=tied)
    return twin.double().requires_grad_(False)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        started = start(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def spread(ranks: Ranks) -> ParallelModel:
    target = on_ranks(ranks).run(network())
    assert isinstance(target, ParallelModel)
    return target


def test_logits_are_those_of_one_process(spread: ParallelModel) -> None:
    """Ragged blocks, rollbacks, joins, leaves and copies, against full forwards of each row."""
    try:
        assert deviation(network(), spread) < ALIKE
    finally:
        spread.permute([])
    assert spread.lengths == []


def moved(target: CausalModel | ParallelModel) -> list[tuple[list[int], Completion | None]]:
    """What came of each arrival, while others come, go and are aborted."""
    draft = copy.deepcopy(network())  # which is right now and then
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    spec = Speculator(target, LMDrafter(CausalModel(draft), V))
    completions: dict[int, Completion | None] = {}
    texts: dict[int, list[int]] = {}
    ids: list[int] = []
    with Engine(spec, 3) as engine:
        for step in range(200):
            for at, prompt, params, gamma, seed in ARRIVALS:
                if at == step:
                    ids.append(engine.add(prompt, params, gamma=gamma or 2, seed=seed))
            if step in ABORTED:
                engine.abort(ids[ABORTED[step]])
            if len(ids) == len(ARRIVALS) and not engine.running and not engine.waiting:
                break
            for event in engine.step():
                texts.setdefault(event.id, []).extend(event.tokens)
                completions[event.id] = event.completion
    return [(texts.get(id, []), completions.get(id)) for id in ids]


def test_an_engine_writes_the_same_texts_by_the_same_laws(spread: ParallelModel) -> None:
    alone, together = moved(CausalModel(network())), moved(spread)
    assert [text for text, _ in together] == [text for text, _ in alone]
    ended = [own for _, own in alone]
    assert [own is None or not own.tokens for own in ended].count(False) >= len(ARRIVALS) - 2
    for (_, own), (_, other) in zip(alone, together, strict=True):
        assert (own is None) == (other is None)
        if own is None or other is None:
            continue
        assert [s.kept for s in own.steps] == [s.kept for s in other.steps]
        for a, b in zip(own.logprobs or [], other.logprobs or [], strict=True):
            assert [id for id, _ in a.top] == [id for id, _ in b.top] and len(a.top) == 4
            for (_, x), (_, y) in zip(a.top, b.top, strict=True):
                assert abs(torch.tensor(x).exp() - torch.tensor(y).exp()) < ALIKE
    records = [step for own in ended if own for step in own.steps]
    assert sum(s.accepted for s in records) and sum(s.drafted - s.accepted for s in records)
    assert spread.lengths == []


def test_each_rank_keeps_its_share(spread: ParallelModel) -> None:
    """Of the weights, and of keys and values."""
    whole = CausalModel(network())
    assert spread.memory([10], [0]) == whole.memory([10], [0])
    assert 2 * spread._mine.memory([10], [0]) == whole.memory([10], [0])
    weights = [getattr(w, "to_local", lambda w=w: w)() for w in spread._mine.model.parameters()]
    held = sum(w.untyped_storage().nbytes() for w in weights)
    assert held < 0.55 * sum(w.nbytes for w in whole.model.parameters())


def test_what_is_asked_wrongly_is_told_and_changes_nothing(spread: ParallelModel) -> None:
    spread.start([[5, 6, 7]])
    with pytest.raises(InputError, match="a row can only go back"):
        spread.set_lengths([9])
    with pytest.raises(InputError, match="give one per row"):
        spread.score([[1], [2]], [1, 1])
    expected = CausalModel(network())
    expected.start([[5, 6, 7]])
    assert torch.allclose(spread.score([[8]], [1]), expected.score([[8]], [1]), 0, ALIKE)
    spread.permute([])


def test_a_call_that_is_interrupted_is_made_by_all(
    spread: ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C while rank 0 waits for it."""
    spread.start([[5, 6, 7]])

    def interrupted(*args: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spread.score([[8]], [1])
    assert spread.score([[9]], [1]).shape == (1, 1, V) and spread.lengths == [5]
    spread.permute([])


def test_another_model_on_the_same_ranks_until_it_is_collected(
    ranks: Ranks, spread: ParallelModel
) -> None:
    """One whose output layer is its embeddings, which are kept once."""
    another = on_ranks(ranks).run(network(1, tied=True))
    assert isinstance(another, ParallelModel) and set(ranks.part.models) == {0, 1}
    own = another._mine.model
    assert own.get_output_embeddings().weight is own.get_input_embeddings().weight
    assert deviation(network(1, tied=True), another) < ALIKE
    del another, own
    gc.collect()
    spread.permute([])
    assert set(ranks.part.models) == {0}


def test_a_rank_that_has_ended_is_told_at_once(ranks: Ranks, spread: ParallelModel) -> None:
    """The last test here: nothing runs afterwards."""
    next(iter(ranks._others._running.values())).kill()
    for _ in range(2):
        with pytest.raises(LostError, match=r"^rank 1 of 2 has ended \(SIGKILL\)"):
            spread.start([[1]])
