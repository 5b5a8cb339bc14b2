"""Hybrid models on OpenVINO: states beside pages are those of the texts, after any passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import foretoken
from census import build
from foretoken.drafters.lm import token_by_token
from foretoken.errors import InputError, RefusedError
from foretoken.models.openvino import conversion
from foretoken.models.openvino.conversion import PAGED
from foretoken.models.openvino.export_paged import export_paged
from foretoken.models.openvino.paged import PagedModel
from foretoken.models.states import PASS, REWIND, by_halves
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import small_copy, stir
from interrupts import interrupted

pytestmark = pytest.mark.cpu_only
WHERE = ("openvino/paged.py", "openvino/states.py", "models/states.py", "models/rows.py")
FAMILIES = ["Lfm3ForCausalLM", "Qwen3_5ForCausalLM", "BambaForCausalLM"]
OTHERS = ["Lfm2ForCausalLM", "OlmoHybridForCausalLM", "FalconH1ForCausalLM"]
OTHERS += ["Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2MoeForCausalLM"]
SLOW = [pytest.param(name, marks=pytest.mark.prove) for name in OTHERS]


def small(name: str) -> Any:
    model: Any = build(name)
    torch.manual_seed(0)
    made = small_copy(type(model), model.config)
    stir(made)
    return made


@pytest.fixture(scope="module", params=[*FAMILIES, *SLOW])
def pair(request: pytest.FixtureRequest) -> tuple[PagedModel, CausalModel]:
    network = small(request.param)
    model = PAGED.run(network)
    assert isinstance(model, PagedModel)
    return model, CausalModel(network)


def ids(n: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, 60) for _ in range(n)]


def same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-4 * b.std())


def test_rows_that_join_move_go_back_and_leave_score_as_on_torch(
    pair: tuple[PagedModel, CausalModel],
) -> None:
    dice = random.Random(0)
    lengths: list[int] = []

    def both(act: Callable[[Any], Any]) -> list[Any]:
        return [act(model) for model in pair]

    for model in pair:
        model.leave(list(range(len(model.lengths))))
    for step in range(40):
        act = dice.choice(["score", "score", "score", "join", "leave", "move", "again"])
        if act == "join" and len(lengths) < 5 or not lengths:
            prompts = [ids(dice.choice([0, 1, 2, 3, 9, PASS, 130]), step + i) for i in range(2)]
            both(lambda model: model.start(prompts))  # noqa: B023
            lengths += map(len, prompts)
        elif act in ("leave", "move"):
            rows = dice.sample(range(len(lengths)), max(1, len(lengths) - (act == "leave")))
            rows = [dice.choice(rows) for _ in rows] if dice.random() < 0.3 else rows
            both(lambda model: model.permute(rows))  # noqa: B023
            lengths = [lengths[b] for b in rows]
        elif act == "again":
            b = dice.randrange(len(lengths))
            lengths[b] = 0
            both(lambda model: model.set_lengths(list(lengths)))  # noqa: B023
        else:
            counts = [dice.choice([0, 1, 1, 5, 12, REWIND]) for _ in lengths]
            counts[dice.randrange(len(counts))] = dice.choice([1, 5, PASS, PASS + 9])
            blocks = [ids(n, 100 * step + b) for b, n in enumerate(counts)]
            need = [min(n, dice.choice([0, 1, 5])) for n in counts]
            ours, theirs = both(lambda model: model.score(blocks, need))  # noqa: B023
            for b, n in enumerate(need):
                assert not n or same(ours[b, :n], theirs[b, :n]), f"step {step}, row {b}"
            back = [dice.randint(0, min(n, REWIND)) for n in counts]
            lengths = [
                length + n - some for length, n, some in zip(lengths, counts, back, strict=True)
            ]
            both(lambda model: model.set_lengths(list(lengths)))  # noqa: B023


def test_a_text_that_begins_alike_continues_where_states_are_kept(
    pair: tuple[PagedModel, CausalModel],
) -> None:
    """Pages are shared up to where a text differs, states up to where some were kept: the last
    whole page of a text, and where a text left a known one."""
    model, torch_model = pair
    model.leave(list(range(len(model.lengths))))
    torch_model.leave(list(range(len(torch_model.lengths))))
    model.remember(True)
    page, text = model.pool.page, ids(200, 1)
    texts: list[tuple[list[int], int]] = [
        (text[: page + 8], 0),
        (text[: page + 8] + [3, 4, 5], page),
        (text[: page - 12] + [3] * 30, 0),
        (text, page),
        (text[: 3 * page] + [4] * 9, page),  # its pages serve three times as many
        (text[: 3 * page] + [5] * 9, 3 * page),
    ]
    for prompt, recalled in texts:
        assert model.known(prompt) == recalled
        for each in pair:
            each.start([prompt])
        assert model.recalled == [recalled]
        ours, theirs = (each.score([[5, 6, 7]], [3]).clone() for each in pair)
        assert same(ours, theirs)
        for each in pair:
            each.leave([0])
    model.remember(False)
    assert model.known(text) == 0


def test_a_row_goes_back_no_further_than_its_states() -> None:
    model: Any = PAGED.run(small("BambaForCausalLM"))
    model.start([ids(200, 1)])
    with pytest.raises(InputError, match=f"give a gamma below {REWIND}"):
        model.set_lengths([60])
    model.set_lengths([200 - REWIND])
    model.set_lengths([0])
    model.score([[5]], [1])


def test_a_row_with_invalid_states_stays_alone() -> None:
    """Beside others, and once another has its place."""
    network = small("Qwen3_5ForCausalLM")
    network.get_input_embeddings().weight.data[60] = torch.nan
    model, torch_model = PAGED.run(network), CausalModel(network)
    assert isinstance(model, PagedModel)
    torch_model.start([[5, 6, 7]])
    expected = torch_model.score([[8, 9]], [2])
    model.start([[60], [5, 6, 7]])
    made = model.score([[60, 3, 3, 3, 3], [8, 9]], [1, 2])
    assert made[0, 0].isnan().all() and same(made[1], expected[0])
    model.leave([0, 1])
    model.start([[5, 6, 7], [5, 6, 7]])
    assert same(model.score([[8, 9], [8, 9]], [2, 2]), expected.expand(2, -1, -1))
    model.score([[60, 60, 4], [4]], [1, 1])  # draft tokens that are rejected
    model.set_lengths([5, 5])
    again = torch_model.score([[12]], [1])
    assert same(model.score([[12], [12]], [1, 1]), again.expand(2, -1, -1))


def test_an_invalid_token_leaves_what_is_before_it_to_others() -> None:
    """It is read in one pass with a page before it, whose states another text continues."""
    network, text = small("Qwen3_5ForCausalLM"), ids(40, 1)
    network.get_input_embeddings().weight.data[60] = torch.nan
    model, torch_model = PAGED.run(network), CausalModel(network)
    assert isinstance(model, PagedModel)
    model.remember(True)
    model.start([[*text, 60, 5]])
    model.leave([0])
    for each in (model, torch_model):
        each.start([text])
    assert model.recalled == [32]
    assert same(model.score([[5, 6]], [2]), torch_model.score([[5, 6]], [2]))


@pytest.mark.prove
def test_a_ctrl_c_anywhere_leaves_no_wrong_state() -> None:
    """Whatever it breaks off, texts that come later are read right, also where they begin alike."""
    network: Any = small("Qwen3_5ForCausalLM")
    model: Any = PAGED.run(network)
    torch_model, text = CausalModel(network), ids(120, 1)
    torch_model.start([text])
    expected = torch_model.score([[5, 6]], [2])
    model.remember(True)

    def use() -> None:
        model.start([text, text[:50]])
        model.permute([0, 0, 1])
        model.score([[4], [5, 6], [7] * 30], [1, 1, 1])
        model.set_lengths([120, 122, 60])
        model.leave([1])

    nth = 1
    while interrupted(use, nth, WHERE):
        model.leave(list(range(len(model.lengths))))
        model.start([text])
        assert same(model.score([[5, 6]], [2]), expected), f"line {nth}"
        model.leave([0])
        nth += 23
    assert nth > 500


@pytest.mark.prove  # every day: tests/e2e/test_hybrids.py
def test_texts_are_those_of_generate() -> None:
    network: Any = small("Qwen3_5ForCausalLM")
    spec = foretoken.load(network, "lookup", runtime="openvino")
    assert spec.target.runtime == "openvino"
    prompts = [[3, 7, 11, 5, 9, 3, 7, 11], [4], [5 + i % 7 for i in range(PASS + 9)]]
    whole = [
        network.generate(torch.tensor([p]), max_new_tokens=24, do_sample=False)[0].tolist()
        for p in prompts
    ]
    for gamma in (0, 1, 4):
        made = spec.generate(prompts, max_new_tokens=24, gamma=gamma)
        assert [[*p, *c.tokens] for p, c in zip(prompts, made, strict=True)] == whole


def test_states_are_computed_in_float32_whatever_the_weights_are() -> None:
    network = small("Qwen3_5ForCausalLM").bfloat16()
    model: Any = conversion.compiled(PAGED.export(network.float()), "bfloat16")
    assert model.computed == "float32"
    model.start([ids(40, 1)])
    arrays = [x for part in model.states.parts() for x in part.arrays.values()]
    assert {x.dtype for x in arrays} == {torch.float32, torch.float64}
    torch_model = CausalModel(network)
    torch_model.start([ids(40, 1)])
    assert same(model.score([[5, 6]], [2]), torch_model.score([[5, 6]], [2]))


def test_what_grew_within_inference_mode_is_used_outside_of_it() -> None:
    with torch.inference_mode():
        model: Any = PAGED.run(small("BambaForCausalLM"))
        model.start([ids(9, 1)])
        expected = model.score([[5, 6]], [2]).clone()
    model.leave([0])
    model.start([ids(9, 1), ids(9, 1)])
    assert same(model.score([[5, 6], [5, 6]], [2, 2])[1], expected[0])


@pytest.mark.parametrize(
    ("name", "reason"),
    [("KimiLinearForCausalLM", "by channel"), ("Mamba2ForCausalLM", "no keys and values")],
)
def test_what_has_no_form_there_is_refused(name: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        export_paged(build(name).float())


@pytest.mark.parametrize("W", [1, 2, 3, 8, 13, PASS])
def test_a_triangle_is_solved_by_halves(W: int) -> None:
    A = torch.ones(1, 2, W, W)  # keys that repeat, whose powers would grow
    y = torch.randn(1, 2, W, 3, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.solve_triangular(A.double(), y.double(), upper=False, unitriangular=True)
    assert (by_halves(A, y) - exact).abs().max() < 1e-5


def test_it_goes_on_as_it_would_token_by_token(pair: tuple[PagedModel, CausalModel]) -> None:
    """Behind a block that is read in parts, too."""
    model, stock = pair
    for blocks, counts in (([[9, 8], [7]], [6, 3]), ([ids(PASS + 5, 2), [3]], [4, 0])):
        made: list[Any] = []
        for runner in pair:
            runner.permute([])
        for runner, go_on in ((model, model.go_on), (stock, partial(token_by_token, stock))):
            runner.start([ids(20, 0), ids(31, 1)])
            made.append(go_on(blocks, counts, None).ids)
            made.append(runner.score([[5], [6]], [1, 1]).clone())
        assert made[0] == made[2] and same(made[1], made[3])
