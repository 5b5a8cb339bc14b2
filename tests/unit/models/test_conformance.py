"""What every model must do, by whatever it runs: each row's logits are what they are alone, however
rows join, move, go back and leave; and what its capabilities promise.

A backend is an entry of `CASES`. Families, kernels and caches have tests of their own.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybrids
import pairs
import tiny
import tiny_families
from census import build
from foretoken.certificate.planted_bugs import OffByOneModel
from foretoken.errors import InputError
from foretoken.media.inputs import Media
from foretoken.models.base import Model, TokenChoice
from foretoken.models.graphs import GraphModel
from foretoken.models.guidance import GuidedModel
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeTargetCopy
from foretoken.models.rewindable_states import MAX_REWIND_TOKENS
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.rowwise import RowwiseModel
from foretoken.models.vocabularies.translated import TranslatedModel
from foretoken.models.vocabularies.vocabulary import Vocabulary, VocabularyMap
from oracle import random_model
from pairdrafts import states_of, tapped
from table import TableModel

SICK = 63  # behind this id logits are NaN, where a case says so
HEADS = [[5, 17, 33, 2, 9], [8], [3 + 7 * i * i % 59 for i in range(20)]]
SOURCES = [[5, 6, 7], [9], [4 + i for i in range(12)]]
WORDS = {id: bytes([97 + id]) for id in range(10)}


@cache
def llama() -> Any:
    return tiny.llama(64, 128, head_dim=16, intermediate_size=64)


@cache
def narrow() -> Any:
    """Of states that are no whole vectors."""
    return tiny.llama(64, 128, hidden_size=40, head_dim=16, intermediate_size=64)


@cache
def gpt2() -> Any:
    """It has no embedding for a position beyond its context, of padding either."""
    return tiny_families.build("GPT-2")


@cache
def t5() -> Any:
    return tiny.t5(64, tie_word_embeddings=False)


@cache
def hybrid(name: str = "Qwen3_5") -> Any:
    return hybrids.random(f"{name}ForCausalLM", 0)


@cache
def experts() -> Any:
    return tiny_families.build("Mixtral")


@cache
def rwkv() -> Any:
    return build("RwkvForCausalLM")


def native(dtype: str = "float32") -> Callable[[Any], Model]:
    def make(network: Any) -> Model:
        return NativeConversion(None, dtype, lambda: network.float()).load_model()

    return make


def translated(_: Any) -> Model:
    words = VocabularyMap(Vocabulary(WORDS, eos_id=10), Vocabulary(WORDS, eos_id=10))
    return TranslatedModel(TableModel(random_model(2, 12), 12), words, 64)


class OverTarget(OffByOneModel):
    """A copy of a model over its rows, with the target's own work: it reads what rows join with."""

    def __init__(self, copied: NativeTargetCopy) -> None:
        super().__init__(copied)
        self.capabilities = copied.capabilities

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        for model in (self.model.target, self.model):
            model.start(prompts, sources)

    def score(self, blocks: Any, need: list[int]) -> Tensor:
        return self.model.score(blocks, need)

    def chain(self, *given: Any) -> Any:
        return self.model.chain(*given)

    def permute(self, rows: list[int]) -> None:
        for model in (self.model.target, self.model):
            model.permute(rows)

    def leave(self, rows: list[int]) -> None:
        for model in (self.model.target, self.model):
            model.leave(rows)


def companion(network: Any) -> Model:
    conversion = NativeConversion(None, "int4", lambda: copy.deepcopy(network))
    return OverTarget(conversion.build_target_copy(native()(network)))


@dataclass(frozen=True)
class Case:
    """A way to make a model, and what is due of it.

    network: What it runs, if it is one of transformers'. within: how far its logits may be off, 0:
    no bit. exact: they are the network's own. ids: those that it is given. double: it runs in
    float64, where tests run on a GPU there. proof: it is one of many of a kind, for `make prove`.
    """

    make: Callable[[Any], Model]
    network: Callable[[], Any] | None = llama
    within: float = 0.0
    exact: bool = False
    ids: int = 62
    double: bool = False
    proof: bool = False

    def model(self, change: Callable[[Any], None] = lambda network: None) -> Model:
        if self.network is None:
            return self.make(None)
        network = copy.deepcopy(self.network())
        change(network)
        return self.make(network.double().to(pairs.DEVICE) if self.double else network)


CASES = {
    "torch": Case(CausalModel, within=1e-9, exact=True, double=True),
    "torch, learned positions": Case(CausalModel, gpt2, 1e-9, exact=True, double=True),
    "torch, encoder": Case(Seq2SeqModel, t5, 1e-9, exact=True, double=True),
    "torch, states": Case(CausalModel, hybrid, 1e-4, exact=True),
    "graphs": Case(GraphModel, within=1e-9, exact=True, double=True),
    "graphs, encoder": Case(GraphModel, t5, 1e-9, exact=True, double=True),
    "row by row": Case(RowwiseModel, within=1e-9, exact=True, double=True),
    "row by row, encoder": Case(RowwiseModel, t5, 1e-9, exact=True, double=True),
    "row by row, states": Case(RowwiseModel, rwkv, 1e-4, exact=True),
    "native": Case(native(), exact=True),
    **{f"native, {x}": Case(native(x)) for x in ("bfloat16", "int8", "int4")},
    "native, experts": Case(native("int8"), experts),
    "native, encoder": Case(native(), t5, exact=True),
    **{f"native, encoder, {x}": Case(native(x), t5) for x in ("int8", "int4")},
    "native, narrow": Case(native("int8"), narrow),
    "native, states": Case(native(), hybrid, exact=True),
    **{
        f"{form}, states of {name}": Case(make, partial(hybrid, name), within, True, proof=True)
        for name in ("GraniteMoeHybrid", "Lfm2", "FalconH1", "KimiLinear")
        for form, make, within in (("torch", CausalModel, 1e-4), ("native", native(), 0.0))
        if (form, name) != ("native", "KimiLinear")
    },
    "copy over rows": Case(companion),
    "guided": Case(
        lambda x: GuidedModel(CausalModel(x), 1.8, [9, 4, 17]), within=1e-9, double=True
    ),
    "guided by the last token": Case(lambda x: GuidedModel(native()(x), 0.5), within=1e-5),
    "another vocabulary": Case(translated, None, 1e-9, ids=10),
    "table": Case(lambda x: TableModel(random_model(1, 64), 64), None, 1e-9),
}
FORMS = (
    "torch",
    "torch, learned positions",
    "graphs",
    "row by row",
    "native",
    "native, bfloat16",
    "copy over rows",
)


SHARING = ("copy over rows", "another vocabulary")  # models that need no memory of their own
PROVED = {  # ability -> cases by which a test below proves it
    "memory": ("torch", "torch, encoder", "native", "native, encoder", *SHARING),
    "prefix_cache": ("native", "native, int4", "native, states"),
    "hidden": (
        "torch",
        "torch, encoder",
        "graphs",
        "graphs, encoder",
        "native",
        "native, encoder",
    ),
    "tensors": ("graphs", "graphs, encoder"),
    "chain": tuple(name for name in CASES if name.startswith(("native", "copy", "graphs"))),
    "mixed_chain": tuple(name for name in CASES if name.startswith("graphs")),
    "taps": ("torch", "torch, encoder", "graphs", "graphs, encoder", "native", "native, encoder"),
}


def cases(*names: str, where: Callable[[Case], bool] = lambda case: True) -> Any:
    """These, or all; those in float64 run on a GPU too."""
    chosen = [name for name in names or CASES if where(CASES[name])]

    def marks(case: Case) -> list[Any]:
        proof = [pytest.mark.prove] if case.proof else []
        return proof if case.double else [*proof, pytest.mark.cpu_only]

    return [pytest.param(name, marks=marks(CASES[name])) for name in chosen]


@cache
def made(name: str) -> tuple[Model, Model]:
    """A model for all tests, and one like it that has one row at a time."""
    return CASES[name].model(), CASES[name].model()


def emptied(model: Model) -> Model:
    model.set_prefix_caching(False)
    model.clear()
    return model


def alone(model: Model, head: list[int], rest: list[int], source: list[int] | None) -> Tensor:
    """Logits of `rest` behind `head`, in one pass of one row."""
    emptied(model).set_prompt_lengths([len(head) + 1])
    model.start([head], None if source is None else [source])
    return model.score([rest], [len(rest)])[0].clone()


@dataclass
class Row:
    head: list[int]  # what it joined with: its prompt but for the last token
    source: list[int] | None
    rest: list[int] = field(default_factory=list[int])


class Rows:
    """Rows of a model; each of their logits is compared with those of the row alone."""

    def __init__(self, case: Case, model: Model, other: Model) -> None:
        self.case, self.model, self.other = case, emptied(model), other
        self.rows: list[Row] = []

    def join(self, *heads: list[int]) -> None:
        heads_in = [[id % self.case.ids for id in head] for head in heads]
        sources = [SOURCES[(len(self.rows) + i) % 3] for i in range(len(heads))]
        given = sources if self.model.encoder_decoder else None
        self.model.set_prompt_lengths([len(head) + 1 for head in heads_in])
        self.model.start(heads_in, given)
        self.rows += [Row(h, given and s) for h, s in zip(heads_in, sources, strict=True)]

    def score(self, *blocks: list[int], need: list[int] | None = None) -> Tensor:
        new = [[id % self.case.ids for id in block] for block in blocks]
        need = [len(block) for block in new] if need is None else need
        logits = self.model.score(new, need)
        assert logits.shape == (len(new), max(need), self.model.vocab_size)
        for b, (row, block, n) in enumerate(zip(self.rows, new, need, strict=True)):
            row.rest += block
            assert logits[b, n:].isfinite().all()
            if n:
                self.compare(logits[b, :n], row, n)
        return logits

    def compare(self, logits: Tensor, row: Row, n: int) -> None:
        expected = alone(self.other, row.head, row.rest, row.source)[-n:]
        if not self.case.within:
            assert torch.equal(logits, expected)
        else:
            finite = expected.isfinite()
            assert torch.equal(logits.isfinite(), finite)
            difference = (logits - expected)[finite].abs().max()
            assert difference <= self.case.within * expected[finite].abs().max()

    def back(self, *counts: int) -> None:
        for row, count in zip(self.rows, counts, strict=True):
            del row.rest[len(row.rest) - count :]
        self.model.set_lengths([len(row.head) + len(row.rest) for row in self.rows])

    def permute(self, *order: int) -> None:
        self.model.permute([*order])
        self.rows = [replace(self.rows[b], rest=[*self.rows[b].rest]) for b in order]

    def leave(self, *gone: int) -> None:
        self.model.leave([*gone])
        self.rows = [row for b, row in enumerate(self.rows) if b not in gone]


@pytest.fixture(params=cases())
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows(CASES[request.param], *made(request.param))


def test_ragged_rows(rows: Rows) -> None:
    """Blocks of any lengths, of which some logits are needed, or none."""
    rows.join(*HEADS)
    rows.score([4], [7, 8, 9], [1, 2])
    rows.score([5, 6], [3], [8, 8, 8, 2, 1], need=[1, 1, 3])
    rows.score([4, 2, 1], [], [9], need=[0, 0, 1])
    rows.score([7], [6], [5])


def test_going_back(rows: Rows) -> None:
    """Draft tokens that were rejected leave no trace, however often."""
    rows.join(*HEADS[:2])
    for turn in range(4):
        rows.score([4, turn, 6, 7, 8], [3 + turn, 9])
        rows.back(4 - turn % 2, 1)
    rows.score([2], [3, 1, 4])
    rows.back(0, 0)
    rows.score([11, 12], [13])


def test_joining_and_leaving(rows: Rows) -> None:
    rows.join(HEADS[2])
    rows.score([4, 5])
    rows.join(HEADS[0], [])
    rows.score([6], [7, 8], [9, 2, 3])
    rows.leave(0)
    rows.score([1], [4, 4])
    rows.join(HEADS[1])
    rows.leave(0, 1)
    rows.score([1, 2, 3])
    rows.leave(0)
    rows.join([7, 8])
    rows.score([9])


def test_changing_places(rows: Rows) -> None:
    """Rows move, are there twice, and go on apart."""
    rows.join(HEADS[0], HEADS[1], HEADS[2])
    rows.score([4, 5], [6], [7, 8, 9])
    for order in ([2, 0, 1], [1, 1, 0, 1], [3, 0], [1, 0, 0]):
        rows.permute(*order)
        rows.score(*([3 + b, 2 * b] for b in range(len(order))))
        rows.back(*(b % 2 for b in range(len(order))))
    rows.score([1], [2], [3])


def test_pieces(rows: Rows) -> None:
    """A text is the same in pieces of any size, beside rows that go on or rest."""
    text = [(7 * i * i + 3 * i) % 61 + 2 for i in range(60)]
    for width in (1, 7, 33):
        rows.join(HEADS[1], HEADS[0])
        for at in range(0, len(text), width):
            block = text[at : at + width]
            beside = [[4, 5][: at % 3]]
            rows.score(block, *beside, need=[min(2, len(block)), len(beside[0])])
        rows.leave(0, 1)


def play(rows: Rows, turns: int) -> None:
    """Rows join, read, go back, move, repeat and leave in random order."""
    dice = random.Random(turns)

    def ids(*sizes: int) -> list[int]:
        return [dice.randrange(2, 60) for _ in range(dice.choice(sizes))]

    for _ in range(turns):
        count = len(rows.rows)
        act = dice.choice(["join", "leave", "permute", "score", "score", "score"])
        if not count or (act == "join" and count < 5):
            rows.join(*(ids(0, 1, 2, 3, 9, 70) for _ in range(2)))
        elif act == "leave":
            rows.leave(dice.randrange(count))
        elif act == "permute":
            rows.permute(*(dice.randrange(count) for _ in range(count)))
        else:
            blocks = [ids(0, 1, 1, 5, 12) if len(x.rest) < 30 else [] for x in rows.rows]
            rows.score(*blocks, need=[dice.randint(0, len(block)) for block in blocks])
            rows.back(*(dice.randint(0, len(block)) for block in blocks))


@pytest.mark.parametrize("turns", [15, pytest.param(100, marks=pytest.mark.prove)])
def test_any_course(rows: Rows, turns: int) -> None:
    if turns > 15 and isinstance(rows.model, OverTarget):
        pytest.skip("draft tokens over the target's rows do not outlive a step")
    play(rows, turns)


class WatchedRows(Rows):
    """Rows whose hidden states are taken at times; those of one forward are due."""

    def __init__(self, case: Case, model: Model) -> None:
        super().__init__(case, model, model)
        self.states: list[Tensor] = []  # [n, W] of each row
        model.expose_hidden_states(lambda text: 0)

    def compare(self, logits: Tensor, row: Row, n: int) -> None:
        if len(row.rest) % 3 == 0:
            self.take()

    def take(self) -> None:
        """Others may have been taken back since: each part says where it begins."""
        for b, known in enumerate(self.model.take_hidden_states()):
            if known is not None:
                assert known.first <= len(self.states[b]), "states are missing"
                self.states[b] = torch.cat([self.states[b][: known.first], known.states])

    def join(self, *heads: list[int]) -> None:
        super().join(*heads)
        self.states += [torch.empty(0) for _ in heads]

    def permute(self, *order: int) -> None:
        self.take()  # a row that is there twice shows its states twice
        super().permute(*order)
        self.states = [self.states[b] for b in order]

    def leave(self, *gone: int) -> None:
        super().leave(*gone)
        self.states = [x for b, x in enumerate(self.states) if b not in gone]


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("torch", 1e-12),
        ("torch, encoder", 1e-12),
        ("torch, states", 1e-3),
        ("graphs", 1e-12),
        ("graphs, encoder", 1e-12),
        ("native", 1e-4),
        ("native, encoder", 1e-4),
        ("native, states", 1e-3),
    ],
)
def test_states_that_are_shown_are_those_of_one_forward(name: str, within: float) -> None:
    case = CASES[name]
    network = copy.deepcopy(case.network())
    network = network.double() if case.double else network.float()
    count = network.config.num_hidden_layers
    taps = 0, count // 2, count, FINAL_TAP
    conversion = NativeConversion(None, "float32", lambda: network, taps=taps)
    stock = partial(tapped, network, taps, case.make)
    rows = WatchedRows(case, conversion.load_model() if "native" in name else stock())
    play(rows, 60)
    rows.take()
    assert rows.rows
    for row, states in zip(rows.rows, rows.states, strict=True):
        if text := [*row.head, *row.rest]:
            expected = states_of(network, text, taps, row.source)
            assert states[: len(text)].shape == expected.shape
            assert (states[: len(text)] - expected).abs().max() < within * expected.abs().max()


@pytest.mark.parametrize("ability", PROVED)
def test_every_kind_of_model_proves_what_it_claims(ability: str) -> None:
    """Media, text and shared keys and values have tests of their own."""
    models = {name: made(name)[0] for name, case in CASES.items() if not case.proof}
    claiming = {type(x) for x in models.values() if getattr(x.capabilities, ability)}
    assert claiming == {type(models[name]) for name in PROVED[ability] if name in models}


def test_nothing_to_run(rows: Rows) -> None:
    model = rows.model
    model.start([], [] if model.encoder_decoder else None)
    rows.join([3, 4], [])
    for blocks, shape in (([[], []], (2, 0)), ([[7], []], (2, 0))):
        assert model.score(blocks, [0, 0]).shape[:2] == shape
    rows.rows[0].rest = [7]
    rows.score([6], [8, 9])
    model.clear()
    rows.rows = []
    rows.join([1])
    rows.score([2])


@pytest.mark.parametrize("name", cases(where=lambda case: case.exact))
def test_logits_are_those_of_one_forward(name: str) -> None:
    case, (model, _) = CASES[name], made(name)
    network = copy.deepcopy(case.network())
    network = network.double().to(pairs.DEVICE) if case.double else network.float()
    for head, source in zip(HEADS, SOURCES, strict=True):
        source = source if model.encoder_decoder else None
        logits = alone(model, head, [4, 5, 6], source)
        expected = pairs.scores(network, [*head, 4, 5, 6], source)[-3:]
        assert (logits.cpu() - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", cases(*FORMS))
def test_limits(name: str) -> None:
    """What does not fit is refused by its numbers, and changes nothing."""
    rows = Rows(CASES[name], *made(name))
    assert rows.model.context is not None and rows.model.max_context == rows.model.context
    limit = rows.model.context
    rows.join([3] * (limit - 2), [4])
    with pytest.raises(InputError, match=rf"{limit + 1} tokens.*{limit}"):
        rows.model.start([[3] * (limit + 1)])
    rows.score([5, 6], [7])  # padding may be beyond the limit
    with pytest.raises(InputError, match="tokens, but the context"):
        rows.model.score([[7], []], [1, 0])


@pytest.mark.parametrize("name", cases(*FORMS))
def test_lengths_only_go_back(name: str) -> None:
    rows = Rows(CASES[name], *made(name))
    rows.join([1, 2], [3])
    with pytest.raises(InputError, match="at most the present"):
        rows.model.set_lengths([2, 2])
    with pytest.raises(InputError, match="one block each"):
        rows.model.score([[1]], [1])


@pytest.mark.parametrize("name", cases("torch, states", "native, states"))
def test_states_go_back_so_far_or_to_their_beginning(name: str) -> None:
    rows = Rows(CASES[name], *made(name))
    rows.join([(7 * i * i + 3 * i) % 59 + 2 for i in range(200)], [5, 6])
    rows.score([7], [8])
    with pytest.raises(InputError, match=f"from 201 to 60 tokens, .* below {MAX_REWIND_TOKENS}"):
        rows.model.set_lengths([60, 3])
    assert rows.model.lengths == [201, 3] and rows.model.max_rewind == MAX_REWIND_TOKENS
    rows.score([3] * MAX_REWIND_TOKENS, [9])
    rows.back(MAX_REWIND_TOKENS, 1)
    rows.model.set_lengths([201, 0])
    rows.rows[1] = Row([], None)
    rows.score([9], [5, 6, 8])


@pytest.mark.parametrize("name", cases(where=lambda case: case.network is t5))
def test_sources_are_needed(name: str) -> None:
    model = emptied(made(name)[0])
    for sources in (None, [[]]):
        with pytest.raises(InputError, match="non-empty source"):
            model.start([[2]], sources)
    rows = Rows(CASES[name], *made(name))
    rows.join([4])
    rows.score([5])


@pytest.mark.cpu_only
@pytest.mark.parametrize("form", [Seq2SeqModel, GraphModel, RowwiseModel, native()])
def test_sources_have_a_limit_of_their_own(form: Callable[[Any], Model]) -> None:
    model = form(tiny_families.build("BART"))
    assert (model.context, model.source_context, model.source_vocab_size) == (128, 128, 64)
    with pytest.raises(InputError, match="129 tokens, .* context is 128"):
        model.start([[2]], [[5] * 129])


@pytest.mark.parametrize("name", cases(where=lambda case: case.network is not None))
def test_invalid_numbers_stay_in_their_row(name: str) -> None:
    """NaN survives a mask, and is gone with its row, whose place others take."""

    def sicken(network: Any) -> None:
        head, embeddings = network.get_output_embeddings(), network.get_input_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())  # else those of a token are NaN
        embeddings.weight.data[SICK] = torch.nan

    case = CASES[name]
    rows = Rows(case, case.model(sicken), case.model(sicken))
    rows.join([5] * 9, HEADS[0], HEADS[1])
    given = rows.model.score([[SICK, 2], [3], [4, 5]], [2, 1, 2])
    assert given[0].isnan().all() and given[1, :1].isfinite().all() and given[2].isfinite().all()
    rows.rows[1].rest, rows.rows[2].rest = [3], [4, 5]
    rows.leave(0)
    rows.score([6], [7])
    rows.join([5] * 12)
    rows.score([6, 1], [7], [8, 9], need=[2, 0, 1])
    rows.leave(0, 1, 2)
    rows.join(HEADS[2])
    rows.score([4, 5])


def test_what_it_lacks_it_does_not_do(rows: Rows) -> None:
    """Methods of what a model cannot do are harmless, or their caller's error."""
    model, can = rows.model, rows.model.capabilities
    rows.join(HEADS[0])
    if not can.prefix_cache:
        assert model.count_cached_tokens(HEADS[0]) == 0
    if not can.memory:
        assert model.compute_cache_bytes([3], [3]) == 0
    if not can.taps:
        assert model.taps == () and model.expose_hidden_states(None) is None
    if not can.media:
        assert model.find_media_problem(Media([], {})) == "it reads ids only"
    if not can.text:
        assert not model.drafts_from_text(greedy=True)
    if not can.chain:
        with pytest.raises(NotImplementedError):
            model.chain([[4]], [1], TokenChoice(model.vocab_size))
    rows.score([4])


@pytest.mark.parametrize("name", cases(*PROVED["memory"]))
def test_memory_grows_with_what_rows_hold(name: str) -> None:
    rows = Rows(CASES[name], *made(name))
    model = rows.model
    assert model.capabilities.memory
    few, more = model.compute_cache_bytes([3], [3]), model.compute_cache_bytes([3, 40], [3, 3])
    if name in SHARING:
        assert few == more == 0
        return
    assert 0 < few < more < model.compute_cache_bytes([90, 40], [3, 3])
    if model.encoder_decoder:
        assert more < model.compute_cache_bytes([3, 40], [3, 99])
    rows.join(*HEADS)
    assert model.compute_cache_bytes(model.lengths, [3, 1, 12]) > few


@pytest.mark.parametrize("name", cases(*PROVED["prefix_cache"]))
def test_a_prefix_serves_others_of_the_same_salt(name: str) -> None:
    rows = Rows(CASES[name], *made(name))
    model, text = rows.model, [(7 * i * i + 3 * i) % 59 + 2 for i in range(100)]
    model.set_prefix_caching(True)
    rows.join(text[:80])
    assert model.num_cached_tokens == [0]
    if name != "native, states":
        assert model.count_cached_tokens([*text[:50], 1]) == 50  # of a row that is still there
    rows.score([5])
    rows.back(1)
    rows.leave(0)
    assert (
        model.count_cached_tokens(text) == 80 and model.count_cached_tokens(text[:15]) == 0
    )  # too short to share
    model.set_salt("other")
    assert model.count_cached_tokens(text) == 0
    rows.join(text[:90])
    assert model.num_cached_tokens == [0]
    model.set_salt("")
    rows.join(text, [9] * 20)
    assert model.num_cached_tokens == [80, 0]
    rows.score([1], [2, 3], [4])
    model.set_prefix_caching(False)
    model.clear()
    assert model.count_cached_tokens(text) == 0


@pytest.mark.parametrize("name", cases(*PROVED["hidden"]))
def test_hidden_states_are_what_the_output_layer_reads(name: str) -> None:
    model = Rows(CASES[name], *made(name)).model
    network = copy.deepcopy(CASES[name].network())
    network = network.double().to(pairs.DEVICE) if CASES[name].double else network.float()
    output = network.get_output_embeddings()
    model.start(HEADS, SOURCES if model.encoder_decoder else None)
    for blocks, need in (
        ([[5, 6, 7], [8], [9, 10]], [3, 1, 1]),
        ([[5], [], [6, 7]], [1, 0, 2]),
        ([[5, 6], [8, 9], [9, 10]], [2, 2, 2]),
    ):
        logits = model.score(blocks, need)
        assert model.hidden.shape == (3, max(need), output.in_features)
        for b, n in enumerate(need):
            with torch.inference_mode():
                outputs = output(model.hidden[b, :n].to(output.weight.dtype))
            assert torch.allclose(outputs, logits[b, :n].to(outputs.dtype), atol=1e-4)
    model.leave([1])
    model.score([[5, 6], [8]], [1, 1])
    assert model.hidden.shape == (2, 1, output.in_features)


@pytest.mark.parametrize("name", cases("torch", *PROVED["tensors"]))
def test_blocks_as_tensors_are_their_rows_first_ids(name: str) -> None:
    """What is behind need[b] counts for nothing."""
    rows = Rows(CASES[name], *made(name))
    rows.join(*HEADS)
    dice = torch.Generator().manual_seed(5)
    for need in ([1, 1, 1], [3, 0, 5], [4, 4, 4], [1, 2, 1]):
        ids = torch.randint(rows.case.ids, (3, max(need) + 1), generator=dice).to(pairs.DEVICE)
        logits = rows.model.score(ids, need)
        for row, new, n, own in zip(rows.rows, ids.tolist(), need, logits, strict=True):
            row.rest += new[:n]
            if n:
                rows.compare(own[:n], row, n)
        rows.back(*(min(1, n) for n in need))


@pytest.mark.parametrize("name", PROVED["mixed_chain"])
def test_rows_of_a_chain_may_differ_in_their_filters(name: str) -> None:
    """One samples from the likeliest token alone, one from all."""
    model, V = Rows(CASES[name], *made(name)).model, CASES[name].ids + 2
    model.start(HEADS[:2], SOURCES[:2] if model.encoder_decoder else None)
    numbers = torch.full((2, 2), 0.999, dtype=torch.float64)
    filters = [(1.0, 1, 1.0, 0.0), (50.0, 0, 1.0, 0.0)]
    q = model.chain([[4], [5]], [2, 2], TokenChoice(V, None, filters, numbers)).q
    assert q is not None and q.shape == (2, 2, V)
    assert (q[0] > 0).sum(-1).tolist() == [1, 1] and (q[1] > 0).all()
    assert (q.sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", PROVED["chain"])
def test_a_chain_is_the_likeliest_tokens_one_by_one(name: str) -> None:
    rows = Rows(CASES[name], *made(name))
    rows.join(*HEADS)
    budget, blocks = [3, 0, 2], [[4, 5], [], [6]]
    made_at_once = rows.model.chain(blocks, budget, TokenChoice(rows.model.vocab_size)).tokens
    for row, block, n, found in zip(rows.rows, blocks, budget, made_at_once.tolist(), strict=True):
        row.rest = [*block]
        for token in found[:n]:
            logits = alone(rows.other, row.head, row.rest, row.source)[-1]
            assert int(logits.argmax()) == token
            row.rest.append(token)
        row.rest = row.rest[: len(row.rest) - (n > 0)]
    rows.back(0, 0, 0)
    rows.score([1], [2], [3])
