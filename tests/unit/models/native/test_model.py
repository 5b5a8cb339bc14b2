"""Decoders on the native kernels: what transformers computes, and of each token the same bits in
any blocks, any company and on every instruction set, with nothing lost where a pass is broken off.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import foretoken
import tiny
from foretoken.errors import RefusedError
from foretoken.models import store
from foretoken.models.native import pages, passes
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel
from foretoken.models.native.position_tables import RotaryTable
from interrupts import interrupted

pytestmark = [pytest.mark.cpu_only, pytest.mark.daily]
WHERE = ("native/model.py", "native/pages.py", "native/passes.py", "native/positions.py")
WHERE += ("models/prefixes.py",)
TEXT = [(7 * i * i + 3 * i) % 61 + 2 for i in range(300)]


@cache
def network() -> PreTrainedModel:
    return tiny.llama(64, 1024, head_dim=16, intermediate_size=64)


@cache
def converted(dtype: str = "float32") -> NativeModel:
    return NativeConversion(None, dtype, lambda: copy.deepcopy(network())).load_model()


@cache
def expected(dtype: str) -> torch.Tensor:
    """Logits of TEXT read at once, in two passes."""
    model = NativeConversion(None, dtype, lambda: copy.deepcopy(network())).load_model()
    model.start([[]])
    return model.score([TEXT], [len(TEXT)])[0].clone()


def emptied(model: NativeModel) -> NativeModel:
    model.set_prefix_caching(False)
    model.permute([])
    return model


@pytest.fixture
def model() -> NativeModel:
    return emptied(converted())


def require_same(model: NativeModel, b: int, dtype: str = "float32") -> None:
    """Row b, which holds the beginning of TEXT, goes on with the expected logits."""
    rows, at = range(len(model.lengths)), model.lengths[b]
    blocks = [TEXT[at : at + 3] if i == b else [] for i in rows]
    logits = model.score(blocks, [3 * (i == b) for i in rows])[b].clone()
    model.set_lengths([n - 3 * (i == b) for i, n in enumerate(model.lengths)])
    assert torch.equal(logits, expected(dtype)[at : at + 3])


@pytest.mark.daily(2)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    model = NativeConversion(None, "int4", lambda: copy.deepcopy(network())).load_model()
    model.passes.threads = threads
    model.start([[]])
    assert torch.equal(model.score([TEXT], [len(TEXT)])[0], expected("int4"))
    model.set_lengths([200])
    require_same(model, 0, "int4")


def test_cached_prefixes_give_way_to_rows(model: NativeModel) -> None:
    """The oldest first, once there are as many pages as were reserved; rows may have more."""
    model.set_prefix_caching(True)
    model.reserve(model.compute_cache_bytes([96], [0]))  # six pages
    for first in (2, 3, 4):
        model.start([[first] * 40])
        model.leave([0])
    assert [model.count_cached_tokens([first] * 40) for first in (2, 3, 4)] == [0, 40, 40]
    model.start([[9] * 200])
    assert model.count_cached_tokens([4] * 40) == 0 and model.pool.num_used == 13
    model.leave([0])
    model.start([[8] * 16])
    assert model.count_cached_tokens([9] * 40) == 0 and model.pool.num_used == 1
    model.reserve(pages.DEFAULT_CACHE_BYTES)


def test_shared_pages_count_once(model: NativeModel) -> None:
    model.set_prefix_caching(True)
    model.start([TEXT[:64], [*TEXT[:64], 5]])
    assert model.pool.num_used == 5
    model.permute([0, 0, 1])
    assert model.pool.num_used == 5
    model.score([[1], [2], [3]], [1, 1, 1])
    assert model.pool.num_used == 7
    model.permute([])
    assert model.pool.num_used == 0


def test_memory_of_unused_pages_is_freed(model: NativeModel) -> None:
    """All but some spare pages, slab by slab; what no row has any more is spare again."""
    pool = pages.PagePool(model.pool.layout)
    rows = [pages.PagedSequence(pool) for _ in range(8)]
    for row in rows:
        row.reserve(0, pages.PAGE_POSITIONS * pages.SLAB_PAGES)
    assert len(pool.slabs) == 8 and not pool.spare_pages
    for row in rows[1:]:
        row.release()
    assert pages.MIN_SPARE_PAGES <= len(pool.spare_pages) < pages.MIN_SPARE_PAGES + pages.SLAB_PAGES
    assert len(pool.slabs) * pages.SLAB_PAGES == len(pool.spare_pages) + pool.num_used
    pool.recount()  # as if rows[0] had been lost
    assert pool.num_used == 0 and len(pool.spare_pages) == len(pool.slabs) * pages.SLAB_PAGES
    addresses = [page.address for slab in pool.slabs for page in slab.pages]
    assert len(set(addresses)) == len(addresses) and not any(
        a % pages.CACHE_LINE_BYTES for a in addresses
    )


def test_layers_of_any_shape_have_places_of_their_own() -> None:
    """No two numbers of a slab lie at one place, whether heads are alike or not."""
    for heads in ([(2, 16), (1, 16)], [(2, 16), (1, 32)]):
        layout = pages.compute_page_layout(heads)
        slab = pages.Slab(layout, np.dtype("float32"))
        first, seen = slab.pages[0].address, set[int]()
        for page in slab.pages:
            for (count, width), place in zip(heads, layout.layers, strict=True):
                for head in range(count):
                    for start in (place.keys, place.keys + place.values):
                        at = (page.address - first) // 4 + start + head * place.step
                        seen.update(range(at, at + pages.PAGE_POSITIONS * width))
        numbers = sum(2 * pages.PAGE_POSITIONS * count * width for count, width in heads)
        assert seen == set(range(pages.SLAB_PAGES * numbers))


def test_a_pass_without_memory_leaves_rows_as_they_were(
    model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.start([TEXT[:40], TEXT[:60]])

    def full() -> pages.Page:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.pool, "allocate_page", full)
        with pytest.raises(MemoryError):
            model.score([TEXT[40:60], TEXT[60:90]], [1, 1])
    assert model.lengths == [40, 60] and model.token_ids == [TEXT[:40], TEXT[:60]]
    for b in (0, 1):
        require_same(model, b)


def test_ctrl_c_where_arrays_grow_leaves_no_pointer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation of a pass in turn is the last thing before the signal."""
    expected, text = converted(), TEXT * 8
    for target, name, nth in ((torch, "empty", 1), (torch, "empty", 2), (np, "concatenate", 2)):
        model = NativeConversion(None, "float32", lambda: copy.deepcopy(network())).load_model()
        model.context = model._max_context = 4096
        model.start([[]])
        model.score([TEXT[:9]], [9])
        own, left = getattr(target, name), [*range(nth)]

        def then_ctrl_c(*given: Any, own: Any = own, left: Any = left, **named: Any) -> Any:
            made = own(*given, **named)
            if not left.pop():
                raise KeyboardInterrupt
            return made

        with monkeypatch.context() as patch:
            patch.setattr(target, name, then_ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                model.score([text[:1200]], [1200])
        model.leave([0])
        for count in (9, 1100):
            model.start([[]])
            logits = model.score([text[:count]], [count])[0].clone()
            model.leave([0])
            fresh = emptied(expected)
            fresh.context = fresh._max_context = 4096
            fresh.start([[]])
            assert torch.equal(logits, fresh.score([text[:count]], [count])[0])
            emptied(fresh)
    expected.context = expected._max_context = network().config.max_position_embeddings


def test_invalid_numbers_stay_in_their_row() -> None:
    sick: Any = copy.deepcopy(network())
    with torch.no_grad():
        sick.get_input_embeddings().weight[63] = torch.nan
    model = NativeConversion(None, "float32", lambda: sick).load_model()
    model.set_prefix_caching(True)
    model.start([[5] * 40, [*TEXT[:20], 63]])
    logits = model.score([[6], [7]], [1, 1]).clone()
    assert logits[0].isfinite().all() and logits[1].isnan().any()
    model.leave([0, 1])
    model.start([[*TEXT[:20], 6]])  # on the page that holds NaN
    assert model.num_cached_tokens == [20] and model.score([[7]], [1]).isfinite().all()


@pytest.mark.prove
def test_a_ctrl_c_anywhere_leaves_rows_that_can_go(model: NativeModel) -> None:
    came, nth = True, 0

    def use() -> None:
        model.start([TEXT[:40], [3] * 5])
        model.permute([0, 0, 1])
        model.score([[4], [5, 6], [7] * 40], [1, 1, 1])
        model.leave([1])
        model.start([TEXT[:36]])

    while came:
        nth += 1
        model.set_prefix_caching(True)
        came = interrupted(use, nth, WHERE)
        model.leave(list(range(len(model.lengths))))
        assert model.lengths == model.token_ids == model.salts == []
        model.start([TEXT[:40]])
        require_same(model, 0)
        model.permute([])
        model.set_prefix_caching(False)
        model.permute([])
        assert model.pool.num_used == 0, f"line {nth}"
    assert nth > 100


@pytest.mark.native
def test_a_folder_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    network().save_pretrained(tmp_path / "model")
    asked: dict[str, Any] = {"runtime": "native", "dtype": "int8"}
    first = foretoken.load(tmp_path / "model", "none", **asked)
    assert first.target.runtime == "native" and first.target.compute_dtype == "int8"
    (entry,) = store.list_entries()
    assert entry.dtype == "int8 (native)"
    assert {each.name for each in entry.folder.iterdir()} == {"weights.bin", "facts.json"}
    monkeypatch.setattr("foretoken.models.native.description.describe", None)  # not made again
    again = foretoken.load(tmp_path / "model", "none", **asked)
    how: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}
    (one,), (two,) = (spec.generate([[5, 6, 7]], **how) for spec in (first, again))
    assert one.tokens == two.tokens


def test_a_model_is_not_pickled(model: NativeModel) -> None:
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RefusedError, match="cannot be copied or pickled; load it again"):
            copied(model)


def test_a_table_of_rotary_positions_grows_without_a_trace() -> None:
    rope = {
        "frequencies": [1.0, 0.3],
        "scale": 1.5,
        "growth": None,
        "long": {"frequencies": [0.5, 0], "scale": 2},
    }
    grown, whole = RotaryTable(rope), RotaryTable(rope)
    for n in (1, 1024, 1025, 3000, 9000):
        table = grown.table
        grown.reserve(n)
        assert grown.capacity >= n and (grown.table is table) == (n == 1024)
    whole.reserve(grown.capacity)
    assert np.array_equal(grown.table, whole.table)
    places = np.arange(grown.capacity, dtype=np.float32)[:, None]
    angles = (places * np.array([1, 0.3], np.float32)).astype(np.float64)
    assert np.abs(grown.table[0, :, :2] - 1.5 * np.cos(angles)).max() < 2e-7
    assert np.abs(grown.table[0, :, 2:] - 1.5 * np.sin(angles)).max() < 2e-7


@pytest.mark.parametrize("kind", ["model", "copy"])
@pytest.mark.parametrize("most", [256, 2])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.3}, {"temperature": 0.8, "top_p": 0.9}])
def test_a_draft_in_one_call_is_that_of_a_call_for_each_token(
    options: dict[str, Any], most: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and distributions, to the bit, in rows of their own numbers of tokens, of
    which one outgrows the draft's context; also of more rows than a pass takes."""
    monkeypatch.setattr(passes, "MAX_PASS_TOKENS", most)

    def model(seed: int, context: int = 128) -> NativeModel:
        return NativeConversion(None, "int8", lambda: tiny.llama(64, context, seed)).load_model()

    def drafting(target: NativeModel) -> Any:
        if kind == "model":
            return model(1, 40)
        return NativeConversion(None, "int4", lambda: tiny.llama(64, 128, 0)).build_target_copy(
            target
        )

    made: list[Any] = []
    for chains in (True, False):
        target = model(0)
        draft: Any = drafting(target)
        draft.capabilities = replace(draft.capabilities, chain=chains)
        spec = foretoken.Speculator(target, foretoken.LMDrafter(draft))
        with foretoken.Engine(spec) as engine:
            for n in range(6):
                prompt = [(n * i * i + 3 * i) % 59 + 2 for i in range(3 + 6 * n)]
                engine.add(prompt, max_new_tokens=20, gamma=n % 4, seed=n, **options)
            ended = [e.completion for _ in range(40) for e in engine.step() if e.completion]
        steps = [step for text in ended for step in text.steps]
        facts = [
            (s.draft_tokens, s.accepted, s.new_tokens, s.overlaps, s.draft_calls) for s in steps
        ]
        made.append(([text.tokens for text in ended], facts))
    assert len(ended) == 6 and made[0] == made[1]
    assert sum(len(fact[0]) for fact in made[0][1]) > 30
