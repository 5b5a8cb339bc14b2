"""MTP layers on the native decoder draw from what the same layers on torch compute in float64, read
anew for each draft token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import census
import hybrids
import pairs
from foretoken import Engine, Speculator
from foretoken.drafters.mtp_stacks import MtpStackDrafter
from foretoken.drafters.pairs import PairsDrafter
from foretoken.engine import prefill_budget
from foretoken.engine.engine import Event
from foretoken.kernels import library
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.native import passes
from foretoken.models.native.conversion import NativeConversion, SharedHead
from foretoken.models.native.model import NativeHiddenStateDraft, NativeMtpStack
from foretoken.models.stock import pair_files
from foretoken.models.stock.mtp_stacks import MtpStackNetwork
from foretoken.models.stock.pair_files import PairsDraft
from foretoken.models.stock.pairs import PairsNetwork
from pairdrafts import (
    filed,
    mtp_draft,
    mtp_layer,
    mtp_stack,
    noted,
    on_native,
    require_true,
    states_of,
    wide,
)

pytestmark = pytest.mark.native
PROMPTS = [[5, 17, 33], [60, 12, 7, 9, 44, 31, 2, 18, 50, 41, 23, 6], [3, 58]]
HOT: dict[str, Any] = {"max_new_tokens": 24, "gamma": 3, "temperature": 2.0, "seed": 1}
FAMILIES = [
    "Qwen3_5ForCausalLM",  # gated attention
    "Qwen3NextForCausalLM",  # with experts
    "Qwen3_5MoeForCausalLM",
    "DeepseekV3ForCausalLM",  # latents
    "Glm4MoeForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Qwen2ForCausalLM",  # MiMo's layers
    "MistralForCausalLM",
    "ExaoneMoeForCausalLM",
    "MellumForCausalLM",
]


def network_of(name: str) -> PreTrainedModel:
    if name in hybrids.FAMILIES:
        return copy.deepcopy(hybrids.random(name, 0)).float()
    made = census.build(name)
    return pairs.lively(type(made), made.config).float()


@dataclass
class TorchLaw:
    """The logits `[G, V]` of a draft's layers on torch, in float64: of a single layer for all draft
    tokens, or of layer k for draft token k."""

    network: PreTrainedModel
    layers: PairsNetwork
    seen: Tensor = field(default_factory=lambda: torch.empty(0))  # the last inputs of the head

    def __post_init__(self) -> None:
        self.layers.head.register_forward_pre_hook(self._see)

    def _see(self, _: Any, args: tuple[Tensor]) -> None:
        (self.seen,) = args

    @torch.no_grad()
    def __call__(self, text: list[int], guesses: list[int]) -> Tensor:
        states, tokens, made = states_of(self.network, text[:-1], (FINAL_TAP,)), text[1:], []
        states, stack = states.double(), isinstance(self.layers, MtpStackNetwork)
        embed: Any = self.network.get_input_embeddings()
        for k, guess in enumerate(guesses):
            inputs = torch.cat([embed(torch.tensor(tokens)).double(), states], -1)[None]
            places = torch.arange(len(tokens))[None]
            more = {"layers": range(k, k + 1)} if stack else {}
            logits: Any = self.layers(inputs, places, **more).logits
            made.append(logits[0, -1])
            states = self.seen[0] if stack else torch.cat([states, self.seen[0, -1:]])
            tokens = [*tokens[stack:], guess]
        return wide(torch.stack(made), None, len(embed.weight))


def law(network: PreTrainedModel, draft: PairsDraft) -> TorchLaw:
    layers = copy.deepcopy(draft.network).double()
    layers.set_experts_implementation("eager")  # the grouped product knows no float64
    return TorchLaw(network, layers)


def require_course(drafter: PairsDrafter, expected: Callable[..., Tensor]) -> None:
    """Sampled hot in a ragged batch, so that some draft tokens are kept and some are not."""
    notes = noted(drafter)
    found = Speculator(drafter.target, drafter).generate(PROMPTS, **HOT)
    kept, made = (sum(getattr(text.stats, n) for text in found) for n in ("accepted", "drafted"))
    assert 0 < kept < made
    require_true(notes, expected, 1e-4)


@pytest.mark.daily("Qwen3_5ForCausalLM", "DeepseekV3ForCausalLM")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_draws_from_its_law(name: str) -> None:
    network = network_of(name)
    draft = mtp_draft(network, filed(mtp_layer(network), "mtp"))
    drafter = on_native(network, draft)
    assert isinstance(drafter.decoder, NativeHiddenStateDraft)
    require_course(drafter, law(network, draft))


@pytest.mark.daily
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_a_stack_draws_from_its_law(name: str, count: int) -> None:
    network = network_of(name)
    draft = mtp_draft(network, mtp_stack(network, count)[1])
    drafter = on_native(network, draft)
    assert isinstance(drafter.decoder, NativeMtpStack)
    require_course(drafter, law(network, draft))


@pytest.mark.parametrize("count", [1, 2])
def test_layers_with_sliding_windows_draw_from_their_law(count: int) -> None:
    """As Mellum's, with a window shorter than the prompts."""
    made: Any = census.build("MellumForCausalLM")
    config = copy.deepcopy(made.config)
    config.sliding_window, config.mtp_layer_types = 4, ["sliding_attention"] * count
    config.mtp_mlp_layer_types = config.mlp_layer_types[-1:] * count
    network = pairs.lively(type(made), config).float()
    draft = mtp_draft(network, mtp_stack(network, count)[1])
    assert draft.network.layer_types == ["sliding_attention"] * count
    require_course(on_native(network, draft), law(network, draft))


def drafts_of(name: str) -> dict[str, tuple[PreTrainedModel, PairsDraft]]:
    """A single layer, and a stack of two, of one network."""
    network = network_of(name)
    stack = mtp_draft(network, mtp_stack(network, 2)[1])
    return {
        "layer": (network, mtp_draft(network, filed(mtp_layer(network), "mtp"))),
        "stack": (network, stack),
    }


@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_turns_of_a_conversation_share_pages_with_the_turns_before(kind: str) -> None:
    network, draft = drafts_of("Glm4MoeForCausalLM")[kind]
    drafter = on_native(network, draft)
    notes, text = noted(drafter), [(7 * i * i + i) % 64 for i in range(100)]
    with Engine(Speculator(drafter.target, drafter), prefix_cache=True) as engine:
        for turn in range(4):
            engine.add(text, max_new_tokens=9, gamma=3, temperature=2.0)
            # another text with the same beginning, but the last token
            engine.add([*text[:-1], 5], max_new_tokens=5, gamma=2, temperature=2.0)
            events = [event for _ in range(14) for event in engine.step()]
            done = [event.completion for event in events if event.completion is not None]
            cached = min(each.stats.cached_tokens for each in done)
            assert len(done) == 2 and cached >= (len(text) - 48 if turn else 0)
            text = [*text, *done[0].tokens, 9, 40 + turn]
    require_true(notes, law(network, draft), 1e-4)


@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_an_aborted_request_changes_no_other(kind: str) -> None:
    network, draft = drafts_of("DeepseekV3ForCausalLM")[kind]
    drafter = on_native(network, draft)
    notes = noted(drafter)
    with Engine(Speculator(drafter.target, drafter)) as engine:
        keys = [
            engine.add(prompt, max_new_tokens=16, gamma=n + 1, temperature=2.0, seed=n)
            for n, prompt in enumerate(PROMPTS)
        ]
        for _ in range(3):
            engine.step()
        engine.abort(keys[1])
        ended = [e for _ in range(40) for e in engine.step() if e.completion is not None]
    assert len(ended) >= 2
    require_true(notes, law(network, draft), 1e-4)


@pytest.mark.parametrize("chunk", [1024, 3])
@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_a_sequence_that_joins_again_drafts_at_once(
    kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of its whole text are there, from the sequence that was the same before, or it is
    read in pieces."""
    for name in ("MIN_CHUNK_TOKENS", "FIRST_CHUNK_TOKENS", "MAX_CHUNK_TOKENS"):
        monkeypatch.setattr(prefill_budget, name, chunk)
    monkeypatch.setattr(prefill_budget, "UNNOTICED_STEP_SECONDS", 0.0)
    drafter = on_native(*drafts_of("Glm4MoeForCausalLM")[kind])
    spec = Speculator(drafter.target, drafter)
    options: dict[str, Any] = {**HOT, "max_new_tokens": 40}
    drafted: list[list[list[int]]] = []
    with Engine(spec, prefix_cache=chunk > 3) as engine:
        for preempted in (False, True):
            engine.add(PROMPTS[0], **options)
            engine.add(PROMPTS[1], **options)
            events: list[Event] = []
            while engine.running or engine.waiting:
                events += engine.step()
                tokens = sum(len(event.tokens) for event in events)
                if preempted and engine.running == 2 and engine.stats().preempted < tokens // 12:
                    spec.core.preempt()
            done = [event.completion for event in events if event.completion is not None]
            assert (engine.stats().preempted > 1) == preempted
            drafted.append(sorted([step.drafted for step in each.steps] for each in done))
    assert drafted[0] == drafted[1] and min(sum(each) for each in drafted[0]) > 20


def test_draft_tokens_of_one_call_are_those_of_a_call_for_each() -> None:
    network, draft = drafts_of("Qwen3MoeForCausalLM")["layer"]
    made: list[Any] = []
    for at_once in (True, False):
        drafter: Any = on_native(network, draft)
        assert drafter._table is not None and drafter._can_chain
        drafter._can_chain = at_once
        found = Speculator(drafter.target, drafter).generate(PROMPTS, **HOT)
        made.append([(text.tokens, [step.draft_tokens for step in text.steps]) for text in found])
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_a_head_may_be_the_first_outputs_of_the_target_s(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_files, "MAX_HEAD_ROWS", 20)
    network, draft = drafts_of("Glm4MoeForCausalLM")[kind]
    target: Any = on_native(network, draft).target

    def load() -> PairsNetwork:
        layers: Any = copy.deepcopy(draft.network)
        layers.head = None
        return layers

    head = SharedHead(target.passes, 20)
    decoder: Any = NativeConversion(None, "float32", load, shared_head=head).load_model()
    drafter = MtpStackDrafter if kind == "stack" else PairsDrafter
    embed: Any = network.get_input_embeddings()
    require_course(drafter(target, decoder, embed, draft.ids), law(network, draft))


@pytest.mark.daily
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_rounded_weights_draft_alike(kind: str, dtype: str) -> None:
    """The same logits but for the rounding, which is coarse in such small layers."""
    network, draft = drafts_of("Glm4MoeForCausalLM")[kind]
    drafter = on_native(network, draft)
    decoder = NativeConversion(None, dtype, lambda: copy.deepcopy(draft.network)).load_model()
    rounded = type(drafter)(drafter.target, decoder, drafter.embedding, draft.ids)
    notes = noted(rounded)
    found = Speculator(rounded.target, rounded).generate(PROMPTS, **HOT)
    assert sum(text.stats.accepted for text in found) > 0
    require_true(notes, law(network, draft), 0.3)


@pytest.mark.daily
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["layer", "stack"])
def test_every_instruction_set_has_the_same_bits(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of 70 pairs, whose states are shared by the threads."""
    _, draft = drafts_of("Glm4MoeForCausalLM")[kind]
    width, made = draft.network.width, list[Tensor]()
    numbers = torch.randn(2 * 70, 4 * width, generator=torch.Generator().manual_seed(0))
    for name, threads in product(library.list_instruction_sets(), (1, 3)):
        monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, name)
        monkeypatch.setattr(passes, "count_threads", lambda count=threads: count)
        load: Any = partial(copy.deepcopy, draft.network)
        decoder: Any = NativeConversion(None, dtype, load).load_model()
        decoder.start([[], []])
        for first, last in ((0, 70), (70, 72)):
            rows = last - first
            if kind == "stack":
                decoder.set_next_layers(range(2))
            columns = (3 if kind == "stack" else 2) * width
            decoder.set_next_pairs(numbers[first:last, :columns].repeat(2, 1), [rows, rows])
            logits = decoder.score([[*range(first, last)]] * 2, [2, 1])
            made += [logits.clone(), decoder.hidden.clone()]
    assert all(torch.equal(x, y) for x, y in zip(made, made[4:], strict=False)) and len(made) > 4
