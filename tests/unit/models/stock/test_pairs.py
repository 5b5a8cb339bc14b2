"""Drafts over pairs draw from what their files say: every draft token's q is that of a fresh read
of the text with the target's true states, by an independent forward, after any verification."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

import census
import hybrids
import pairs
import tiny
from foretoken import Engine, Speculator
from foretoken.drafters import pairs as drafting
from foretoken.drafters.mtp_stacks import MtpStackDrafter
from foretoken.drafters.pairs import PairsDrafter
from foretoken.errors import RefusedError
from foretoken.models.graph_pairs import GraphPairModel
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock import pair_files
from foretoken.models.stock.sizes import get_context_limit
from foretoken.models.stock.small_copy import randomize_weights
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from pairdrafts import (
    LAYER,
    WITHIN,
    EagleFile,
    EagleLaw,
    Tensors,
    attended,
    eagle_file,
    filed,
    gated,
    mtp_draft,
    mtp_layer,
    mtp_stack,
    noted,
    on_graphs,
    on_native,
    pairs_drafter,
    part,
    require_true,
    rms,
    states_of,
    turned,
    wide,
)

V, TAPS = 64, (1, 2, 3)
KEPT = [3, 4, 9, *range(12, 40, 2), *range(41, 64)]
TARGET = tiny.llama(V, context=256, num_hidden_layers=4).double()
PROMPTS = [[5, 17, 33], [60, 12, 7, 9, 44, 31, 2, 18, 50, 41, 23, 6], [3, 58]]
# Hot enough that many draft tokens of a random draft are kept, and many are not
HOT: dict[str, Any] = {"max_new_tokens": 14, "gamma": 3, "temperature": 2.0, "seed": 1}
EAGLES = {
    "all tokens": eagle_file(V, TAPS),
    "some tokens": eagle_file(V, TAPS, KEPT),
    "own embeddings": eagle_file(V, TAPS, KEPT).with_tensors(
        embed_tokens__weight=torch.randn(V, 32, generator=torch.Generator().manual_seed(7))
    ),
    "norm before residual": eagle_file(V, TAPS, KEPT, norm_before_residual=True),
    "norm of the output": eagle_file(V, TAPS, KEPT, norm_output=True),
    "norm before fc": eagle_file(V, TAPS, KEPT, norm_before_fc=True),
    "norms of the states": eagle_file(V, TAPS, KEPT, fc_norm=True),
    "three layers": eagle_file(V, TAPS, KEPT, 3, norm_output=True, norm_before_residual=True),
    "two taps, from the end": eagle_file(V, (1, 4), KEPT, 2).with_config(
        eagle_aux_hidden_state_layer_ids=[1, -1]
    ),
}


def law(file: EagleFile) -> EagleLaw:
    ids = file.config["eagle_aux_hidden_state_layer_ids"]
    return EagleLaw(TARGET, file, tuple(i % 5 for i in ids))


def speculator(drafter: Any) -> Speculator:
    return Speculator(drafter.target, drafter)


def require_course(drafter: Any, expected: Any, within: float = WITHIN) -> None:
    """Sampled hot in a ragged batch, so that some draft tokens are kept and some are not."""
    notes = noted(drafter)
    texts = speculator(drafter).generate(PROMPTS, **HOT)
    kept, made = (sum(getattr(t.stats, n) for t in texts) for n in ("accepted", "drafted"))
    assert 0 < kept < made
    require_true(notes, expected, within)


@pytest.mark.daily("some tokens", "three layers", "two taps, from the end")
@pytest.mark.parametrize(
    "backend", ["torch", "graphs", pytest.param("native", marks=pytest.mark.native)]
)
@pytest.mark.parametrize("name", EAGLES)
def test_eagle_draws_from_its_law(name: str, backend: str) -> None:
    file = EAGLES[name]
    if backend != "native":
        make = on_graphs if backend == "graphs" else pairs_drafter
        require_course(make(TARGET, file.read(TARGET)), law(file))
        return
    target = copy.deepcopy(TARGET).float()
    draft = file.read(target)
    if "fc" in name or "norms" in name:
        with pytest.raises(RefusedError, match="hidden states normed before their projection"):
            on_native(target, draft)
        return
    require_course(on_native(target, draft), law(file), 1e-4)


@pytest.mark.parametrize("name", ["some tokens", "own embeddings", "norm before residual"])
def test_both_layouts_are_one_draft(name: str) -> None:
    file = EAGLES[name]
    made = [each.read(TARGET) for each in (file, file.original())]
    weights = [draft.network.state_dict() for draft in made]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    texts = [
        speculator(pairs_drafter(TARGET, draft)).generate(PROMPTS, **HOT)
        for draft in (made[0], made[1]._replace(taps=made[0].taps))
    ]
    for a, b in zip(*texts, strict=True):
        assert a.tokens == b.tokens and a.stats.accepted == b.stats.accepted


@pytest.mark.parametrize(
    ("ids", "original", "taps", "others"),
    [
        ([0, 2, 3], False, (0, 2, 3), (1, 3, 4)),
        ([1, 2, 3], False, (1, 2, 3), (2, 3, 4)),
        ([1, 2, 3], True, (2, 3, 4), (1, 2, 3)),  # SpecForge's first is 1
        ([0, 2, 3], True, (0, 2, 3), (1, 3, 4)),
        ([1, 2, 4], True, (1, 2, 4), ()),  # behind the last layer: no layer's output
        ([1, 2, -1], False, (1, 2, 4), ()),
        (None, True, (2, 2, 1), ()),  # of four layers
    ],
)
def test_ids_of_layers_have_two_senses(ids: Any, original: bool, taps: Any, others: Any) -> None:
    file = EAGLES["some tokens"].with_config(eagle_aux_hidden_state_layer_ids=ids)
    draft = (file.original() if original else file).read(TARGET)
    assert (draft.taps, draft.other_taps) == (taps, others)


def replaced(drafter: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> list[int]:
    """Tokens in each of its passes, of which none is to have more than `chunk`."""
    sizes: list[int] = []
    score = drafter.decoder.score
    monkeypatch.setattr(drafting, "PREFILL_CHUNK_TOKENS", chunk)

    def counted(blocks: Any, need: Any) -> Any:
        sizes.append(sum(map(len, blocks)))
        return score(blocks, need)

    drafter.decoder.score = counted
    return sizes


def test_long_texts_are_read_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    file = EAGLES["norm of the output"]
    drafter = pairs_drafter(TARGET, file.read(TARGET))
    sizes, notes = replaced(drafter, monkeypatch, 8), noted(drafter)
    prompts = [[(7 * i * i + i) % V for i in range(n)] for n in (40, 3, 21)]
    speculator(drafter).generate(prompts, **HOT)
    require_true(notes, law(file))
    assert max(sizes) <= 8 < sum(sizes) / 4


def test_a_text_that_drafts_nothing_is_read_meanwhile() -> None:
    """So that its first draft does not read all of it."""
    file = EAGLES["some tokens"]
    drafter = pairs_drafter(TARGET, file.read(TARGET))
    target, text = drafter.target, [5, 17, 33]
    target.expose_hidden_states(drafter.count_cached_tokens)
    target.start([text[:-1]])
    drafter.start([0], [text], None)
    draw = Draw([SequenceKey(0, 0)], [3], [SamplingParams(temperature=1.0)])
    notes = noted(drafter)
    for token in range(70):
        assert not drafter.propose([0], draw).lengths.any()
        target.score([text[-1:]], [1])
        drafter.commit([[token % V]])
        text = [*text, token % V]
        assert len(text) - drafter.decoder.lengths[0] < 40
    assert drafter.propose([3], draw).lengths.tolist() == [3]
    require_true(notes, law(file))


def test_a_text_that_outgrows_the_draft_goes_on_without() -> None:
    """Beside a mate that does not; and one that is longer from the start."""
    drafter = pairs_drafter(TARGET, SOME.read(TARGET))
    drafter.decoder.context = 24
    prompts = [[5] * 20, [60, 12, 7], [9] * 40]
    spec = Speculator(drafter.target, drafter)
    texts = spec.generate(prompts, max_new_tokens=12, gamma=3)
    for text, prompt in zip(texts, prompts, strict=True):
        pairs.assert_greedy(text, TARGET, prompt, 12)
    assert texts[1].stats.drafted > texts[0].stats.drafted > 0 == texts[2].stats.drafted


def test_pairs_that_nobody_gives_are_read_as_nothing() -> None:
    """As where costs are measured, or a prefix was dropped since it was found."""
    drafter: Any = on_native(copy.deepcopy(TARGET).float(), EAGLES["all tokens"].read(TARGET))
    drafter.decoder.start([[5, 6, 7]])
    assert drafter.decoder.score([[8, 9]], [1]).isfinite().all()
    drafter.decoder.leave([0])


@pytest.mark.daily("some tokens")
@pytest.mark.parametrize("name", ["all tokens", "some tokens", "own embeddings"])
def test_a_draft_in_one_call_is_that_of_a_call_for_each_token(name: str) -> None:
    """The same tokens and distributions, to the bit, in rows of their own numbers of tokens."""
    file, target = EAGLES[name], copy.deepcopy(TARGET).float()
    made: list[Any] = []
    for at_once in (True, False):
        drafter: Any = on_native(target, file.read(target))
        assert drafter._table is not None
        drafter._table = drafter._table if at_once else None
        for options in ({}, {"temperature": 1.3}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}):
            with Engine(speculator(drafter)) as engine:
                for n, prompt in enumerate(PROMPTS):
                    engine.add(prompt, max_new_tokens=20, gamma=n % 4, seed=n, **options)
                ended = [e.completion for _ in range(40) for e in engine.step() if e.completion]
            assert len(ended) == len(PROMPTS)
            steps = [step for text in ended for step in text.steps]
            facts = [
                (s.draft_tokens, s.accepted, s.new_tokens, s.overlaps, s.draft_calls) for s in steps
            ]
            made.append(([text.tokens for text in ended], facts))
    assert made[:3] == made[3:]
    assert sum(fact[1] for _, facts in made for fact in facts) > 10


def test_texts_that_are_known_draft_at_once() -> None:
    """Turns of a conversation, whose beginnings are not read again, by target and draft: all but
    two pages, as the states behind the first one are to be shown."""
    file = EAGLES["some tokens"]
    target = copy.deepcopy(TARGET).float()
    drafter: Any = on_native(target, file.read(target))
    notes, text = noted(drafter), [(7 * i * i + i) % V for i in range(100)]
    with Engine(speculator(drafter), prefix_cache=True) as engine:
        for turn in range(5):
            before = len(notes)
            engine.add(text, max_new_tokens=9, gamma=3, temperature=2.0)
            events = [event for _ in range(12) for event in engine.step()]
            (done,) = (event.completion for event in events if event.completion is not None)
            assert done.stats.cached_tokens >= (len(text) - 48 if turn else 0)
            assert len(notes[before].text) <= len(text) + 1
            text = [*text, *done.tokens, 9, 40 + turn]
    require_true(notes, law(file), 1e-4)


@dataclass
class LayerLaw:
    """As `EagleLaw`, of one layer: `forward` makes states `[n, H]` of those before the pairs and
    the tokens in them."""

    network: PreTrainedModel
    forward: Callable[[Tensor, list[int]], Tensor]
    rows: int | None = None  # of the output layer

    @torch.no_grad()
    def __call__(self, text: list[int], guesses: list[int]) -> Tensor:
        states, tokens, made = states_of(self.network, text[:-1], (FINAL_TAP,)), text[1:], []
        head: Any = self.network.get_output_embeddings()
        for guess in guesses:
            out = self.forward(states, tokens)
            made.append(out[-1] @ head.weight[: self.rows].T.to(out.dtype))
            states, tokens = torch.cat([states, out[-1:]]), [*tokens, guess]
        return wide(torch.stack(made), None, len(head.weight))


def transformers_own(network: Any, layer: Tensors) -> LayerLaw:
    """The layer in transformers' MtpModel."""
    network.config.num_mtp_layers = 1
    model = MtpModel(network, 1).eval()
    _, unexpected = model.load_state_dict({f"layers.0.{k}": x for k, x in layer.items()}, False)
    assert not unexpected

    def forward(states: Tensor, tokens: list[int]) -> Tensor:
        places = torch.arange(1, 1 + len(tokens))[None]
        ids = torch.tensor([tokens])
        return model.forward_layer(0, states[None], places, None, input_ids=ids)[0]

    return LayerLaw(network, forward)


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_a_layer_among_the_target_s_is_transformers_own(name: str) -> None:
    """A mixture of experts, whose files hold them one by one."""
    made = census.build(name)
    network = pairs.lively(type(made), made.config)
    layer = mtp_layer(network)
    draft = mtp_draft(network, filed(layer, str(network.config.num_hidden_layers)))
    assert draft.taps == (FINAL_TAP,) and draft.ids is None
    require_course(pairs_drafter(network, draft), transformers_own(network, layer), 1e-5)


@dataclass
class StackLaw:
    """As `LayerLaw`, of a stack of transformers' MtpModel: layer k for draft token k, over all
    pairs anew, with the outputs of the layer before it."""

    network: PreTrainedModel
    model: MtpModel

    @torch.no_grad()
    def __call__(self, text: list[int], guesses: list[int]) -> Tensor:
        states, tokens, made = states_of(self.network, text[:-1], (FINAL_TAP,)), text[1:], []
        head: Any = self.network.get_output_embeddings()
        for k, guess in enumerate(guesses):
            places = torch.arange(1 + k, 1 + k + len(tokens))[None]
            ids = torch.tensor([tokens])
            states = self.model.forward_layer(k, states[None], places, None, input_ids=ids)[0]
            made.append(states[-1] @ head.weight.T.to(states.dtype))
            tokens = [*tokens[1:], guess]
        return torch.stack(made)


def stack(name: str, count: int) -> tuple[Any, Tensors, StackLaw]:
    """A network, the weights of a stack for it by their names in files, and the stack's law."""
    made = census.build(name)
    network = pairs.lively(type(made), made.config)
    network.config.num_mtp_layers = count
    layers, named = mtp_stack(network, count)
    model = MtpModel(network, count).eval()
    every = {f"layers.{k}.{n}": x for k, layer in enumerate(layers) for n, x in layer.items()}
    _, unexpected = model.load_state_dict(every, False)
    assert not unexpected
    return network, named, StackLaw(network, model.to(network.dtype))


@pytest.mark.daily
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_a_stack_draws_from_its_law(name: str, count: int) -> None:
    """One layer for each draft token, never more; in a batch whose rows draft as they like."""
    network, named, expected = stack(name, count)
    draft = mtp_draft(network, named)
    drafter: Any = pairs_drafter(network, draft)
    assert isinstance(drafter, MtpStackDrafter) and draft.taps == (FINAL_TAP,)
    require_course(drafter, expected, 1e-5)
    notes = noted(drafter)
    with Engine(speculator(drafter)) as engine:
        for n, prompt in enumerate([*PROMPTS, [(7 * i * i + i) % V for i in range(90)]]):
            engine.add(prompt, max_new_tokens=40, gamma=n + 1, temperature=2.0, seed=n)
        ended = [e.completion for _ in range(60) for e in engine.step() if e.completion]
    assert len(ended) == 4
    require_true(notes, expected, 1e-5)
    assert {len(note.guesses) for note in notes} >= {*range(1, count + 1)}
    assert max(len(note.guesses) for note in notes) == count
    for gamma in (1, 4):
        for text, prompt in zip(
            speculator(drafter).generate(PROMPTS, max_new_tokens=12, gamma=gamma),
            PROMPTS,
            strict=True,
        ):
            pairs.assert_greedy(text, network, prompt, 12)


def qwen_layer(network: Any, tensors: Tensors) -> LayerLaw:
    """Qwen's, written out: gated attention, norms around one, and rotary parts of the heads."""
    c, embedded = network.config, network.get_input_embeddings().weight.double()
    every, w = part(tensors, "mtp."), part(tensors, "mtp.layers.0.")
    rope = c.rope_parameters
    turns = int(c.head_dim * rope["partial_rotary_factor"])

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, 1 + weight, c.rms_norm_eps)

    def placed(x: Tensor, weight: Tensor) -> Tensor:
        x = norm(x, weight)
        return torch.cat([turned(x[..., :turns], rope["rope_theta"]), x[..., turns:]], -1)

    def forward(states: Tensor, tokens: list[int]) -> Tensor:
        n = len(tokens)
        parts = (embedded[tokens], "embedding"), (states.double(), "hidden")
        both = torch.cat([norm(x, every[f"pre_fc_norm_{name}"]) for x, name in parts], -1)
        x = both @ every["fc"].T
        read = norm(x, w["input_layernorm"])
        q, k, v = ((read @ w[f"self_attn.{n}_proj"].T) for n in "qkv")
        q, gate = q.view(n, c.num_attention_heads, -1).chunk(2, -1)
        k, v = (y.view(n, c.num_key_value_heads, -1) for y in (k, v))
        y = attended(placed(q, w["self_attn.q_norm"]), placed(k, w["self_attn.k_norm"]), v)
        x = x + (y * gate.reshape(n, -1).sigmoid()) @ w["self_attn.o_proj"].T
        x = x + gated(w, norm(x, w["post_attention_layernorm"]))
        return norm(x, every["norm"])

    return LayerLaw(network, forward)


@cache
def qwen(name: str) -> Any:
    if name in hybrids.FAMILIES:
        return hybrids.random(name, 0)
    made: Any = census.build(name)
    config = copy.deepcopy(made.config)
    config.num_experts = 0  # their grouped product knows no float64
    torch.manual_seed(0)
    network = type(made)(config).double().eval()
    randomize_weights(network)
    return network.requires_grad_(False)


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_qwen_s_layer_draws_from_its_law(name: str) -> None:
    network = qwen(name)
    tensors = filed(mtp_layer(network), "mtp")
    draft = mtp_draft(network, tensors)
    drafter: Any = pairs_drafter(network, draft)
    require_course(drafter, qwen_layer(network, tensors), 1e-4)
    # recurrent targets run on torch; the layer has no recurrence
    decoder = GraphPairModel(draft.network)
    drafter = PairsDrafter(drafter.target, decoder, drafter.embedding, draft.ids)
    require_course(drafter, qwen_layer(network, tensors), 1e-4)


def test_mimo_s_projection_takes_the_state_before_the_embedding() -> None:
    network = qwen("Qwen3_5ForCausalLM")
    layer = mtp_layer(network)
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    names |= {"post_norm": "final_layernorm"}
    mimo: Tensors = {}
    for key, x in layer.items():
        part, _, rest = key.partition(".")
        own = rest if part == "mtp_block" else f"{names[part]}.{rest}"
        x = torch.cat([x[:, 64:], x[:, :64]], 1) if part == "eh_proj" else x
        mimo[f"model.mtp_layers.0.{own}"] = x
    one, other = (
        mtp_draft(network, each).network.state_dict() for each in (mimo, filed(layer, "mtp"))
    )
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_large_output_layer_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_files, "MAX_HEAD_ROWS", 20)
    network = qwen("Qwen3_5ForCausalLM")
    tensors = filed(mtp_layer(network), "mtp")
    draft = mtp_draft(network, tensors)
    assert draft.network.head.out_features == 20
    expected = qwen_layer(network, tensors)
    expected.rows = 20
    require_course(pairs_drafter(network, draft), expected, 1e-4)


SOME = EAGLES["some tokens"]
UP = "layers.0.mlp.up_proj.weight"
# Files that do not fit, and what is named of them; behind it a remedy
WRONG: list[tuple[EagleFile, str]] = [
    (
        eagle_file(V, TAPS, width=48).with_config(target_hidden_size=48),
        r"states of size 48 \(144 for all taps\), but the target's have size 32",
    ),
    (
        eagle_file(V, TAPS, width=24),
        r"states of size 32 \(72 for all taps\), but the target's have size 32",
    ),
    (
        SOME.with_config(eagle_aux_hidden_state_layer_ids=[2, 18, 33]),
        r"layers \[2, 18, 33\] .* 4 layers",
    ),
    (
        SOME.with_config(eagle_aux_hidden_state_layer_ids=[2, 3]),
        r"\[2, 3\] and has a projection for",
    ),
    (
        eagle_file(V, (1, 2), KEPT).with_config(eagle_aux_hidden_state_layer_ids=None),
        "of 2 layers, but its config does not list the",
    ),
    (eagle_file(80, TAPS), "80 tokens, but this target has 64"),
    (SOME.with_tensors(d2t=torch.full((len(KEPT),), 30)), "ids from 30 to 69, .* 64 tokens"),
    (SOME.with_tensors(d2t=-torch.arange(len(KEPT))), "two outputs for one token in d2t"),
    (
        SOME.with_tensors(t2d=torch.isin(torch.arange(V), torch.tensor([0, *KEPT[1:]]))),
        "output 0 is token 3 .* token 0",
    ),
    (SOME.with_tensors(t2d=torch.zeros(V).bool()), f"d2t .* t2d: .* {len(KEPT)} tokens, .* 0"),
    (SOME.with_tensors(t2d=torch.zeros(V + 8).bool()), "72 tokens, but this target has 64"),
    (SOME.with_tensors(d2t=None), f"{len(KEPT)} outputs .* but no d2t"),
    (SOME.with_tensors(d2t=torch.tensor(0)), rf"d2t of shape \(\) for {len(KEPT)} outputs"),
    (
        SOME.with_config(
            transformer_layer_config={**LAYER, "num_hidden_layers": 10**6, "vocab_size": V}
        ),
        r"num_hidden_layers 1e\+06",
    ),
    (SOME.with_tensors(norm__weight=torch.ones(32).long()), "norm.weight in int64"),
    (
        SOME.with_tensors(embed_tokens__weight=torch.randn(50, 32)),
        "50 tokens, but the target has 64",
    ),
    (SOME.with_tensors(embed_tokens__weight=torch.randn(V, 16)), "but its own have size 16"),
    (SOME.with_config(transformer_layer_config={"model_type": "no_such"}), "'no_such'"),
    (SOME.with_tensors(fc__weight=None), "no weights for fc.weight"),
    (SOME.with_tensors(layers__0__mlp__up_proj__weight=None), f"no weights for {UP}"),
    (
        SOME.with_tensors(layers__0__mlp__up_proj__weight=torch.zeros(40, 32)),
        rf"{UP} of shape \(40, 32\), but its config needs \(48, 32\)",
    ),
    (SOME.with_tensors(norm__weight=torch.full((32,), torch.nan)), "non-finite values in norm"),
    (
        SOME.with_tensors(embed_tokens__weight=torch.full((V, 32), torch.inf)),
        "non-finite values in embed_tokens.weight",
    ),
]


def test_an_output_layer_that_a_file_lacks_is_the_target_s() -> None:
    rows: Any = TARGET.get_output_embeddings()
    for file in (SOME, EAGLES["all tokens"]):
        draft = file.with_tensors(lm_head__weight=None).read(TARGET)
        head: Any = draft.network.head
        own = rows.weight if draft.ids is None else rows.weight[draft.ids]
        assert torch.equal(head.linear.weight, own)


@pytest.mark.parametrize(("file", "says"), WRONG, ids=[says for _, says in WRONG])
def test_drafts_that_do_not_fit_are_refused(file: EagleFile, says: str) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        file.read(TARGET)
    assert "\n" not in str(refused.value)
    assert "'no_such'" in says or re.search("; (give|download)", str(refused.value))


def test_layers_for_multi_token_prediction_that_do_not_fit_are_refused() -> None:
    network = copy.deepcopy(qwen("Qwen3_5ForCausalLM"))
    good = filed(mtp_layer(network), "mtp")
    for tensors, says in (
        ({}, "has no layer for multi-token prediction; give"),
        ({k: x for k, x in good.items() if "up_proj" not in k}, "mtp_block.mlp.up_proj.weight"),
    ):
        with pytest.raises(RefusedError, match=says):
            mtp_draft(network, tensors)
    alone = filed(mtp_layer(network), "7")  # as MiMo-V2 has them: each layer with its projection
    mimo = {k.replace("model.layers.7", "model.mtp.layers.0"): x for k, x in alone.items()}
    with pytest.raises(RefusedError, match="layout of MiMo-V2 .*; give another draft"):
        mtp_draft(network, mimo)
    network, named, _ = stack("Glm4MoeForCausalLM", 2)
    count = network.config.num_hidden_layers
    own = f"layers.{count}."
    for tensors, says in (
        ({k: x for k, x in named.items() if own in k}, "2 layers .* config, but 1 in its files"),
        ({k: x for k, x in named.items() if own not in k}, "no weights for enorm.weight"),
        ({k: x for k, x in named.items() if f"{count + 1}.eh_" not in k}, "more.0.eh_proj.weight"),
    ):
        with pytest.raises(RefusedError, match=f"{says}.*; give"):
            mtp_draft(network, tensors)


def test_of_layers_that_share_a_projection_the_first_is_used() -> None:
    """As vLLM does, whatever the config says."""
    network = copy.deepcopy(qwen("Qwen3_5ForCausalLM"))
    network.config.mtp_num_hidden_layers = 2
    good = filed(mtp_layer(network), "mtp")
    more = {k.replace("layers.0", "layers.1"): 2 * x for k, x in good.items() if "layers.0" in k}
    one, both = (mtp_draft(network, each).network.state_dict() for each in (good, good | more))
    assert one.keys() == both.keys() and all(torch.equal(one[k], both[k]) for k in one)


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("rope", "reaches", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256, 1.0),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 256, 1.0),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 128, 1.0),
        ({"rope_type": "longrope", **LONG}, 64, (1 + math.log(2) / math.log(64)) ** 0.5),
    ],
)
def test_a_draft_turns_by_its_own_context(rope, reaches, scaling):
    """The target's, 256, would change factors that follow from the length of the draft's."""
    layers = {**LAYER, "max_position_embeddings": 128, "rope_parameters": rope}
    layers |= {"num_hidden_layers": 1, "vocab_size": V}
    read = eagle_file(V, TAPS).with_config(transformer_layer_config=layers).read(TARGET)
    rotary: Any = read.network.rotary
    own = AutoConfig.for_model(**layers)
    expected = type(rotary)(own)
    assert rotary.attention_scaling == pytest.approx(scaling)
    places = torch.arange(200)[None]  # longer than the draft's, where frequencies may change
    for found, meant in zip(
        rotary(torch.ones(1), places), expected(torch.ones(1), places), strict=True
    ):
        assert torch.equal(found, meant)
    assert get_context_limit(read.network.config) == reaches
