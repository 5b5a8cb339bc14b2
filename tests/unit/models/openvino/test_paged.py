"""Decoders over paged attention: what the torch path computes, from pages that rows share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from foretoken import Speculator
from foretoken.costing.gamma import Fixed
from foretoken.drafters.lm import LMDrafter, token_by_token
from foretoken.drafters.lookup import LookupDrafter
from foretoken.engine.scheduler import Scheduler, Task
from foretoken.errors import InputError, RefusedError
from foretoken.models.openvino import conversion
from foretoken.models.openvino.export_paged import export_paged
from foretoken.models.openvino.paged import CHUNK, PagedModel, passes
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import small_copy, stir
from foretoken.request import Request, Row
from foretoken.sampling.keys import RowKey
from foretoken.sampling.verifier import choose
from foretoken.sampling.verify import block
from interrupts import interrupted
from pairs import BrokenOff
from tiny_families import build

pytestmark = pytest.mark.cpu_only
WHERE = ("openvino/paged.py", "openvino/pages.py")  # to interrupt


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    torch.manual_seed(0)
    twin = build("Mistral")  # with a window of 8
    stir(twin)
    return twin


@pytest.fixture(scope="module")
def model(network: PreTrainedModel) -> PagedModel:
    exported = conversion.PAGED.run(network)
    assert isinstance(exported, PagedModel)
    return exported


@pytest.fixture(autouse=True)
def emptied(model: PagedModel) -> None:
    model.leave(list(range(len(model.lengths))))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-5, rtol=1e-4)


def test_a_pass_is_padded_where_that_costs_less_than_a_change(model: PagedModel) -> None:
    model.start([[5, 6], [7]])
    model.score([[1, 2, 3], [4]], [1, 1])
    model.score([[1], [4]], [1, 1])
    assert model.padding == 0  # nobody has said what passes cost
    model.set_lengths([2, 1])
    model.price(float, 5.0, single=True)
    model.score([[1, 2, 3], [4]], [1, 1])
    model.score([[1], [4]], [1, 1])
    assert model.padding == 2
    model.set_lengths([4, 2])
    for _ in range(3):
        model.score([[1], []], [1, 0])
    assert model.padding == 0  # what is needed again and again is the new size
    model.price(None, 0.0, single=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("counts", [[9, 0, 9, 9], [1, 12, 3, 3], [0, 0, 5, 0], [0, 0, 0, 6]])
@pytest.mark.parametrize("blocks", [[[9, 8], [7], [3], [2]], [[9], [7], [3], [2, 8]]])
def test_it_goes_on_as_it_would_token_by_token(
    model: PagedModel, blocks: list[list[int]], counts: list[int], padded: bool
) -> None:
    """Rows within a page and over its end, alone and beside others, with passes that are padded:
    also to the size of a block that was read before."""
    prompts, V = [[5, 6, 7], list(range(2, 30)), list(range(3, 34)), list(range(4, 37))], 50
    blocks = [block if n else [] for block, n in zip(blocks, counts, strict=True)]
    model.start(prompts)
    model.price(float if padded else None, 30.0, single=True)
    stepwise = token_by_token(model, blocks, counts, V)
    lengths, texts = list(model.lengths), [list(text) for text in model.texts]
    assert [len(ids) for ids in stepwise.ids] == counts
    model.set_lengths(list(map(len, prompts)))
    made = model.go_on(blocks, counts, V)
    assert made.ids == stepwise.ids and max(x for ids in made.ids for x in ids) < V
    for tops, wanted in zip(made.tops, stepwise.tops, strict=True):
        assert tops == pytest.approx(wanted, abs=1e-4)
    assert model.lengths == lengths and model.texts == texts
    behind = model.score([[1]] * 4, [1] * 4).clone()
    model.set_lengths(lengths)
    model.price(None, 0.0, single=True)
    model.leave([0, 1, 2, 3])
    model.start(texts)
    assert same(model.score([[1]] * 4, [1] * 4), behind)


def test_logits_stay_where_they_are_read_as_passes_grow(
    model: PagedModel, network: PreTrainedModel
) -> None:
    stock = CausalModel(network)
    for runner in (model, stock):
        runner.start([[5, 6], [7]])
    for blocks, need in (
        ([[1], [2]], [1, 1]),
        ([[3] * 20, [4]], [20, 1]),  # more than there was room for
        ([[1], [2]], [1, 1]),
        ([[8] * 3, [9]], [0, 0]),
        ([[1] * 2, [2] * 2], [2, 2]),
    ):
        logits, wanted = (runner.score(blocks, need) for runner in (model, stock))
        assert logits.shape[:2] == wanted.shape[:2]
        for row, other, n in zip(logits, wanted, need, strict=True):
            assert same(row[:n], other[:n])


def test_ragged_blocks_score_as_on_torch(model: PagedModel, network: PreTrainedModel) -> None:
    stock = CausalModel(network)
    prompts = [[5, 6, 7], [], list(range(2, 42))]
    for runner in (model, stock):
        runner.start(prompts)
    for blocks, need, back in (
        ([[9], [3, 4], [8, 8, 8]], [1, 2, 1], [4, 1, 43]),
        ([[1, 2, 3], [], [7]], [3, 0, 1], [5, 1, 44]),
        ([[], [11] * 40, []], [0, 4, 0], [5, 3, 40]),
    ):
        ours, theirs = model.score(blocks, need), stock.score(blocks, need)
        assert ours.shape == theirs.shape
        for b, n in enumerate(need):
            assert same(ours[b, :n], theirs[b, :n])
        for runner in (model, stock):
            runner.set_lengths(back)


def test_copies_share_pages_until_one_of_them_writes(
    model: PagedModel, network: PreTrainedModel
) -> None:
    stock = CausalModel(network)
    text = list(range(2, 50))
    for runner in (model, stock):
        runner.start([text, [3]])
        runner.permute([0, 0, 1, 0])
    assert model.pages[0] == model.pages[1] == model.pages[3]
    blocks = [[5], [6], [7], [8]]
    assert same(model.score(blocks, [1] * 4), stock.score(blocks, [1] * 4))
    assert model.pages[0][0] == model.pages[1][0]  # the full first page is still shared
    assert len({row[1] for row in (model.pages[i] for i in (0, 1, 3))}) == 3
    assert same(model.score(blocks, [1] * 4), stock.score(blocks, [1] * 4))


def test_pages_come_back(model: PagedModel) -> None:
    free = len(model.pool.free)
    model.start([[1] * 70, [2] * 40])
    model.permute([1, 0, 1])
    model.score([[3], [4], [5]], [1, 1, 1])
    model.leave([0, 1, 2])
    assert model.pool.size - len(model.pool.free) == 0 or len(model.pool.free) >= free
    assert len(model.pool.free) == model.pool.size
    assert not any(model.pool.holders)


def test_a_long_prompt_goes_in_by_parts(network: PreTrainedModel) -> None:
    config = build("Llama").config
    config.max_position_embeddings = 2 * CHUNK
    torch.manual_seed(1)
    long = type(build("Llama"))(config).eval()
    stir(long)
    text = torch.randint(2, 64, (CHUNK + 70,)).tolist()
    scores = []
    for runner in (conversion.PAGED.run(long), CausalModel(long)):
        runner.start([text])
        scores.append(runner.score([[5, 6]], [2]))
    assert same(*scores)


def test_prompts_that_join_together_share_passes() -> None:
    texts = [(0, [1] * 3), (1, []), (2, [2] * (CHUNK + 5)), (3, [3] * 4)]
    first, second = passes(texts)
    assert first == [(0, [1] * 3), (2, [2] * (CHUNK - 3))]
    assert second == [(2, [2] * 8), (3, [3] * 4)]
    assert list(passes([(0, []), (1, [])])) == []


def test_what_does_not_fit_is_said(model: PagedModel) -> None:
    assert model.context == 128
    with pytest.raises(InputError, match="row 0 would hold 129 tokens, the model 128"):
        model.start([[1] * 129])
    model.start([[1] * 5])
    with pytest.raises(InputError):
        model.set_lengths([6])
    with pytest.raises(InputError, match="2 blocks for 1 rows"):
        model.score([[1], [2]], [1, 1])


def test_soft_caps_have_no_paged_form() -> None:
    with pytest.raises(RefusedError, match="softcap"):
        export_paged(small_copy(type(build("Gemma 2")), build("Gemma 2").config))


def test_an_export_leaves_the_model_as_it_was(network: PreTrainedModel) -> None:
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        before = network(ids).logits
    implementation = network.config._attn_implementation
    exported = export_paged(network)
    assert network.config._attn_implementation == implementation
    with torch.no_grad():
        assert torch.equal(network(ids).logits, before)
    assert exported.facts["windows"] == [8, 8]


def test_hidden_states_are_there_beside_the_logits(
    model: PagedModel, network: PreTrainedModel
) -> None:
    model.start([[4, 5]])
    logits = model.score([[6, 7, 8]], [2])
    hidden = torch.from_numpy(model.flat.request.get_tensor("hidden").data.copy())
    with torch.no_grad():
        assert same(network.lm_head(hidden)[0, :2], logits[0])


def broken_off(model: PagedModel, prompts: list[list[int]], part: str, n: int, late: bool) -> None:
    """Ctrl-C at the n-th new input of a start, as `part` of the model sets them; all rows leave."""
    broken: Any = BrokenOff(model.flat.request, n, late=late)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if part == "flat":
            patch.setattr(model.flat, "request", broken)
        else:
            patch.setattr(model.pool, "readers", [(lambda: broken, model.pool.readers[0][1])])
        model.start(prompts)
    model.leave(list(range(len(model.lengths))))


@pytest.mark.parametrize("late", [False, True])
def test_nothing_stale_is_read_behind_a_pass_that_was_broken_off(
    model: PagedModel, network: PreTrainedModel, late: bool
) -> None:
    stock = CausalModel(network)
    stock.start([[5, 6, 7], [8]])
    expected = stock.score([[9, 1], [3, 4]], [2, 2])
    for part, n in [*(("flat", n) for n in range(1, 4)), *(("pool", n) for n in range(1, 5))]:
        model.start([[5, 6, 7], [8]])
        model.score([[9, 1], [3, 4]], [2, 2])
        model.leave([0, 1])
        more_than_fit = [[2] * 9] * (model.pool.size + 1)  # the first changes the inputs' sizes
        broken_off(model, more_than_fit, part, n, late)
        model.start([[5, 6, 7], [8]])
        assert same(model.score([[9, 1], [3, 4]], [2, 2]), expected)
        model.leave([0, 1])


@pytest.mark.prove
def test_a_ctrl_c_anywhere_gives_no_page_away(model: PagedModel) -> None:
    """Wherever it comes, a page that a row holds is not free, and one that two rows hold is known
    to be shared; once all rows have left, all pages are free."""
    pool = model.pool

    def use() -> None:
        model.start([[2] * 40, [3] * 5])
        model.permute([0, 0, 1])  # the first row twice, over the same pages
        model.score([[4], [5, 6], [7] * 30], [1, 1, 1])
        model.leave([1])

    use()
    model.permute([])
    nth = 1
    while interrupted(use, nth, WHERE):
        held = Counter(page for pages in model.pages for page in pages)
        assert not set(held) & set(pool.free), f"line {nth}"
        assert all(pool.holders[page] >= count for page, count in held.items()), f"line {nth}"
        model.leave(list(range(len(model.lengths))))
        assert sorted(pool.free) == list(range(pool.size)) and not any(pool.holders), f"line {nth}"
        nth += 1
    assert nth > 50


def test_a_ctrl_c_while_the_pool_grows_makes_no_page_twice(
    model: PagedModel, network: PreTrainedModel
) -> None:
    compiled, facts = model.flat.request.get_compiled_model(), export_paged(network).facts
    came, nth = True, 0
    while came:
        nth += 1
        fresh = PagedModel(compiled, facts)
        came = interrupted(fresh.pool.grow, nth, WHERE)
        fresh.start([[2] * 40, [3] * 40])
        pages = [page for row in fresh.pages for page in row]
        assert len(set(pages)) == 4 and sorted(pages + fresh.pool.free) == [*range(16)]
    assert nth > 20


def test_what_breaks_off_the_first_pass_is_told_and_the_next_call_is_right(
    network: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the draft has rows to leave that never joined."""
    models = [conversion.PAGED.run(network) for _ in range(2)]
    spec = Speculator(models[0], LMDrafter(models[1], models[1].vocab_size))
    expected = [text.tokens for text in spec.generate([[5, 6, 7], [8]], max_new_tokens=8, gamma=2)]
    target: Any = spec.target

    def broken(*args: Any) -> None:
        raise MemoryError("told")

    with monkeypatch.context() as patch:
        patch.setattr(target.flat, "run", broken)
        with pytest.raises(MemoryError, match="told"):
            spec.generate([[5, 6, 7], [8]], max_new_tokens=8, gamma=2)
    again = spec.generate([[5, 6, 7], [8]], max_new_tokens=8, gamma=2)
    assert [text.tokens for text in again] == expected


@pytest.fixture
def remembering(model: PagedModel) -> Iterator[PagedModel]:
    model.remember(True)
    yield model
    model.leave(list(range(len(model.lengths))))
    model.remember(False)


def test_what_was_read_serves_texts_that_begin_alike(
    remembering: PagedModel, network: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt beside one that runs, and a conversation that goes on, draft tokens taken back."""
    model, stock = remembering, CausalModel(network)
    run, read = model.scored, list[int]()

    def watched(*args: Any) -> torch.Tensor:
        read.extend(map(len, args[2]))
        return run(*args)

    monkeypatch.setattr(model, "scored", watched)
    system = [(7 * i + 3) % 40 + 2 for i in range(70)]
    model.start([system])
    assert sum(read) == 70
    read.clear()
    assert model.known([*system, 5]) == 64 and model.known([9, *system]) == 0
    model.start([[*system, 5, 6]])
    assert sum(read) == 8
    text = [(5 * i + 1) % 40 + 2 for i in range(40)]
    model.score([[], text], [0, 40])
    model.set_lengths([70, 100])  # 12 of them were wrong draft tokens
    model.leave([1])
    read.clear()
    turn = [*system, 5, 6, *text[:28], 8, 9]
    model.start([turn])
    assert sum(read) == len(turn) - 96
    stock.start([turn])
    assert same(model.score([[], [11]], [0, 1])[1:], stock.score([[11]], [1]))


def test_texts_that_join_together_share_what_they_begin_with(
    remembering: PagedModel, network: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, sizes, run = CausalModel(network), list[list[int]](), remembering.scored

    def watched(*args: Any) -> torch.Tensor:
        sizes.append([len(tokens) for tokens in args[2] if tokens])
        return run(*args)

    monkeypatch.setattr(remembering, "scored", watched)
    system = [(11 * i + 3) % 40 + 2 for i in range(70)]
    prompts = [[*system, 5], [9, 8], [*system, 6], [*system, 7, 8]]
    for model in (remembering, stock):
        model.start(prompts)
    assert sizes == [[71, 2], [7, 8]] and remembering.recalled == [0, 0, 64, 64]
    blocks = [[4], [5], [6], [7]]
    assert same(remembering.score(blocks, [1] * 4), stock.score(blocks, [1] * 4))


def test_other_salts_share_nothing(remembering: PagedModel) -> None:
    prompt = [i % 40 + 2 for i in range(78)]
    remembering.salted("mine")
    remembering.start([prompt])
    remembering.salted("yours")
    assert remembering.known(prompt) == 0
    remembering.salted("mine")
    assert remembering.known(prompt) == 64
    remembering.salted("")


def test_what_is_kept_never_makes_the_pool_grow(remembering: PagedModel) -> None:
    """The page that was left first is written anew first; no page is lost."""
    model, sizes = remembering, list[int]()
    for i in range(40):
        model.start([[i % 7 + 2, *[3] * 68], [i + 2] * 40])
        model.score([[3] * 30, [4]], [1, 1])
        model.leave([0, 1])
        sizes.append(model.pool.size)
        assert sorted(model.pool.free) == list(range(model.pool.size))
    assert sizes[9] == sizes[-1]


def test_what_is_reserved_is_enough(network: PreTrainedModel) -> None:
    """Rows that are let in by `memory` alone never make the pool grow."""
    exported = conversion.PAGED.run(network)
    assert isinstance(exported, PagedModel)
    with pytest.raises(InputError, match="kv_memory is 100 bytes, one token takes"):
        Scheduler(exported, LookupDrafter(), 4).engage(4, 100, keep=False)
    scheduler = Scheduler(exported, LookupDrafter(), 4)
    scheduler.engage(4, 9 * exported.memory([1], []), keep=False)
    assert exported.pool.size == 9
    rows = [Row.of(Request([i + 1] * (20 + i), 60, RowKey(0, i))) for i in range(6)]
    scheduler.submit([Task(row, choose(block), Fixed(i % 5)) for i, row in enumerate(rows)])
    most = 0
    while scheduler.step():
        most = max(most, len(exported.lengths))
        assert exported.pool.size == 9
    assert all(row.finish_reason == "length" for row in rows)
    assert most > 1 and len(exported.pool.free) == 9
