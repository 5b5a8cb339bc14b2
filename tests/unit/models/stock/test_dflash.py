"""Networks of blocks: their passes, rows, files and draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

import tiny
from blocks import (
    ADDED,
    CONFIDENT,
    DFLASH2,
    DOMINO,
    DSPARK,
    LAYERS,
    ZLAB,
    draft,
    pair,
    speculators,
    tensors,
)
from foretoken import SamplingParams
from foretoken.errors import InputError, RefusedError
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.dflash import StockBlockModel
from foretoken.models.stock.dflash_files import build_blocks_draft, parse_block_config
from foretoken.models.stock.small_copy import randomize_weights
from foretoken.sampling.distributions import probabilities
from foretoken.sampling.draw import Draw, SharedDraw
from foretoken.sampling.keys import SequenceKey

pytestmark = pytest.mark.daily

V, H = 40, 32
SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)
TARGET = tiny.llama(V, seed=5)
CLOSE = 1e-5  # float32


def states(n: int, seed: int = 0, taps: int = 1) -> Tensor:
    return torch.randn(n, taps * H, generator=torch.Generator().manual_seed(seed))


def alone(model: StockBlockModel, read: Tensor, anchor: int, count: int) -> Tensor:
    """Logits of the guesses of a text that is the only one."""
    model.permute([])
    model.start(1)
    model.append_context([read])
    return model.predict_block([anchor], [count])[1][0]


@pytest.mark.parametrize("n", [1, 3, 12])
def test_states_are_those_of_transformers_own_assistant(n):
    """12 is more than the window, which counts both ways from each place."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        **{**LAYERS, "num_hidden_layers": 3},
        layer_types=kinds,
        sliding_window=4,
        block_size=6,
        mask_token_id=3,
        target_layer_ids=[0, 1],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
    own = MuseGlimmerAssistantModel(config).eval()
    randomize_weights(own)
    embedding, seen = TARGET.get_input_embeddings(), states(n, taps=2)
    read = build_blocks_draft(config.to_dict(), own.state_dict(), H, embedding, nn.Linear(H, V))
    mine = StockBlockModel(read)
    cache = DFlashCache(config=config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(n)
    with torch.no_grad():
        block = embedding(torch.tensor([[7] + [3] * 5]))
        expected = own(block, seen[None], past_key_values=cache).last_hidden_state
    mine.start(1)
    for part in seen.split(5):
        mine.append_context([part])
    assert torch.allclose(mine.predict_block([7], [5])[0], expected[:, 1:], atol=CLOSE)


def test_both_layouts_of_one_network_guess_the_same():
    given = tensors(ZLAB, TARGET)
    one, other = draft(ZLAB, TARGET, given), draft(speculators(), TARGET, given)
    assert one.taps == other.taps == (1,) and one.max_draft_tokens == other.max_draft_tokens == 4
    results = [alone(model, states(6), 9, 4) for model in (one, other)]
    assert torch.equal(*results)


def windowed(**more: Any) -> StockBlockModel:
    layers = {**LAYERS, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    layers |= {"use_sliding_window": True, "sliding_window": 3}
    config = speculators(transformer_layer_config=layers, **more)
    return draft(config, TARGET)


def test_a_window_of_speculators_counts_from_the_last_token():
    model, read = windowed(), states(8)
    before, inside = read.clone(), read.clone()
    before[4] += 1
    inside[5] += 1
    own = alone(model, read, 9, 4)
    assert torch.allclose(alone(model, before, 9, 4), own, atol=CLOSE)
    other = alone(model, inside, 9, 4)
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in zip(other, own, strict=True))


@pytest.mark.parametrize("both_ways", [False, True])
def test_places_of_a_window_see_the_block_behind_them_where_the_config_says_so(both_ways):
    model, read = windowed(sliding_window_non_causal=both_ways), states(8)
    short, long = alone(model, read, 9, 1), alone(model, read, 9, 4)
    assert torch.allclose(short[0], long[0], atol=CLOSE) != both_ways


def draw(rows: int, params: SamplingParams = SAMPLED) -> Draw:
    return Draw([SequenceKey(1, b) for b in range(rows)], [5] * rows, [params] * rows)


def started(config: dict[str, Any], prompts: list[list[int]], network: Any = TARGET):
    """A drafter whose rows have been read up to their last tokens."""
    target, drafter = pair(config, network)
    target.expose_hidden_states(drafter.count_cached_tokens)
    target.start([prompt[:-1] for prompt in prompts])
    drafter.start(list(range(len(prompts))), prompts, None)
    return target, drafter


PROMPTS = [[3, 7, 1, 9], [5], [2, 8, 8, 30, 31, 4, 6]]


def bias(kind: str, model: StockBlockModel, hidden: Tensor, text: list[int]) -> Tensor:
    """Of the guess behind `text`, the block's tokens from the last known one on; by the papers'
    formulas. hidden: of all its guesses."""
    chain: Any = model.network.markov_head
    w1, w2 = chain.markov_w1.weight, chain.markov_w2.weight
    if kind == "vanilla":
        return w2 @ w1[text[-1]]
    if kind == "gated":
        both = torch.cat([hidden[len(text) - 1], w1[text[-1]]])
        return w2 @ (torch.sigmoid(chain.gate_proj(both)) * w1[text[-1]])
    memory = torch.zeros(w1.shape[1])
    for k, token in enumerate(text):
        read = chain.joint_proj(torch.cat([memory, w1[token], hidden[k]]))
        gate, new, out = read.chunk(3)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh()
    return w2 @ out.tanh()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_distributions_follow_from_the_tokens_drawn_before(kind):
    _, drafter = started({**DSPARK, "markov_head_type": kind}, PROMPTS)
    found = drafter.propose([4, 3, 4], draw(3))
    assert found.q is not None and found.lengths.tolist() == [4, 3, 4] and found.calls == 2
    model: Any = drafter.blocks
    hidden, logits = model.predict_block([prompt[-1] for prompt in PROMPTS], [4, 3, 4])
    for b, prompt in enumerate(PROMPTS):
        text = [prompt[-1], *found.tokens[b].tolist()]
        for k in range(int(found.lengths[b])):
            own = logits[b, k] + bias(kind, model, hidden[b], text[: k + 1])
            assert torch.allclose(found.q[b, k], probabilities(own, SAMPLED), atol=CLOSE)


@torch.inference_mode()
def test_blind_guesses_are_the_likeliest_and_certain():
    _, drafter = started(ZLAB, PROMPTS)
    found = drafter.propose([4, 9, 0], draw(3))
    assert found.q is None and found.lengths.tolist() == [4, 4, 0]
    _, logits = drafter.blocks.predict_block([9, 5, 6], [4, 4, 0])
    assert torch.equal(found.tokens[:2], logits[:2].argmax(-1))


@torch.inference_mode()
def test_shared_noise_is_used_at_the_depths_where_it_was_right_more_often():
    _, drafter = started(ZLAB, PROMPTS)
    shared = SharedDraw([SequenceKey(1, b) for b in range(3)], [5] * 3, [SAMPLED] * 3)
    drawn = drafter.propose([4, 2, 4], shared)
    likeliest = drafter.sampler.attempts[1][True].tolist()
    assert drawn.q is not None
    for k in range(4):
        assert torch.equal(drawn.tokens[:, k], shared.find_winners(drawn.q[:, k : k + 1], k)[:, 0])
    drafter.commit(
        [[row[0], best] for row, best in zip(drawn.tokens.tolist(), likeliest, strict=True)]
    )
    assert drafter.sampler.num_correct[0, False] == 3 and drafter.sampler.num_correct[1, True] == 3
    ways = drafter.sampler
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(2))
    assert torch.equal(ways.sample(shared, logits, 0)[0], shared.sample(logits, 0)[0])
    ids, q = ways.sample(shared, logits, 1)
    assert q is not None and torch.equal(ids, logits.argmax(-1)) and torch.equal(q.argmax(-1), ids)


@torch.inference_mode()
def test_a_row_stops_before_a_guess_that_will_hardly_be_judged_and_accepted():
    given = tensors(CONFIDENT, TARGET)
    given["confidence_head.proj.weight"] *= 0
    for chance, count in [(0.9, 4), (0.5, 2), (0.1, 0)]:
        given["confidence_head.proj.bias"][:] = torch.logit(torch.tensor(chance))
        _, drafter = started(CONFIDENT, PROMPTS)
        drafter.blocks = draft(CONFIDENT, TARGET, given)
        drafter.blocks.start(3)
        found = drafter.propose([4, 1, 4], draw(3))
        assert found.lengths.tolist() == [count, min(count, 1), count]


@torch.inference_mode()
def test_a_row_whose_states_are_missing_guesses_nothing():
    target, drafter = started(ZLAB, PROMPTS)
    drafter.seqs[0].tokens.append(3)  # as if the target had not read the token before
    assert drafter.propose([4, 4, 4], draw(3, GREEDY)).lengths.tolist() == [0, 4, 4]


@torch.inference_mode()
def test_no_block_reaches_beyond_the_draft_s_positions():
    prompt = [3] * 94
    _, drafter = started(ZLAB, [prompt])
    assert drafter.propose([4], draw(1, GREEDY)).lengths.tolist() == [2]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_ids_that_a_draft_lacks_are_never_guessed(params):
    ids = [2, 5, 6, 21, 39]
    config = speculators("dspark", markov_rank=3, enable_confidence_head=False)
    given = tensors(config, TARGET, len(ids))
    given |= {
        "d2t": torch.tensor(ids) - torch.arange(5),
        "t2d": torch.isin(torch.arange(V), torch.tensor(ids)),
    }
    given["lm_head.weight"] = torch.randn(5, H, generator=torch.Generator().manual_seed(1))
    target, drafter = started(config, PROMPTS)
    drafter.blocks = draft(config, TARGET, given)
    drafter.blocks.start(3)
    with torch.inference_mode():
        found = drafter.propose([5, 5, 5], draw(3, params))
    assert set(found.tokens.flatten().tolist()) <= set(ids)
    if found.q is not None:
        gone = [i for i in range(V) if i not in ids]
        assert float(found.q[..., gone].abs().max()) == 0


def test_layers_are_numbered_as_each_publisher_numbers_them():
    ends = {**ZLAB, "num_target_layers": 3}
    ends["dflash_config"] = {**ZLAB["dflash_config"], "target_layer_ids": [0, 2]}
    assert parse_block_config(ends).layout.taps == (1, FINAL_TAP)
    assert parse_block_config(DSPARK).layout.taps == (0, 1)
    assert parse_block_config(speculators()).layout.taps == (1,)


@pytest.mark.parametrize(
    "angles",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}},
    ],
)
def test_angles_are_read_from_configs_of_every_age(angles):
    read = parse_block_config({**ZLAB, **angles}).layers
    assert read.rope_parameters["rope_theta"] == 5e5


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != name}


def with_domino(**more: Any) -> dict[str, Any]:
    return {**DOMINO, "dflash_config": {**DOMINO["dflash_config"], **more}}


def with_added(**more: Any) -> dict[str, Any]:
    return {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **more}}


def test_domino_corrects_logits_by_the_tokens_before_them():
    """As SGLang's chain does: the first token of a block by its own logits, each later one with a
    bias from a network over the last token and the draft tokens so far."""
    model = draft(DOMINO, TARGET)
    model.start(1)
    model.append_context([states(6)])
    hidden, logits = model.predict_block([9], [4])
    head, embedding = model.domino_head, TARGET.get_input_embeddings()
    tokens, memory, found = [9], None, []
    for i in range(4):
        made, _, memory = model.condition_on_previous(
            hidden[:, i], logits[:, i], torch.tensor(tokens[-1:]), memory
        )
        found.append(made[0])
        tokens.append(int(made.argmax()))
    assert torch.equal(found[0], logits[0, 0]) and model.max_draft_tokens == 5
    for i in range(1, 4):
        _, after = head.prefix_gru(embedding(torch.tensor([tokens[: i + 1]])))
        bias = head.embed_proj(torch.cat([hidden[0, i], after[0, 0]]))
        assert bias.abs().max() > 0.1
        assert torch.allclose(found[i], logits[0, i] + bias, atol=CLOSE)


def test_a_causal_block_sees_nothing_after_its_places():
    """JetSpec's: a shorter block gives the same states."""
    causal = {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal": True}}
    for config, same in ((causal, True), (ZLAB, False)):
        model, read = draft(config, TARGET, tensors(ZLAB, TARGET)), states(6)
        short, long = alone(model, read, 9, 2), alone(model, read, 9, 4)
        assert torch.allclose(short, long[:2], atol=CLOSE) == same


GEMMA = {**DSPARK, "architectures": ["Gemma4DSparkModel"]}


@pytest.mark.parametrize(
    ("config", "change", "error", "words"),
    [
        (without(DSPARK, "mask_token_id"), {}, InputError, "mask_token_id"),
        (without(DSPARK, "block_size"), {}, InputError, "block_size"),
        (without(ZLAB, "hidden_size"), {}, InputError, "hidden_size"),
        ({**DSPARK, "mask_token_id": V}, {}, InputError, "40 tokens"),
        (with_added(conv_group_size=None), {}, InputError, "no conv_group_size"),
        (with_added(conv_group_size=7), {}, InputError, "conv_group_size is 7; give a divisor of"),
        (with_added(selector_rank=0), {}, InputError, "selector_rank is 0; give an integer of"),
        (with_added(selector_top_k=V + 1), {}, InputError, "selector_top_k is 41, but the target"),
        (
            with_added(output_multiplier=-1),
            {},
            InputError,
            "output_multiplier is -1; give",
        ),
        (with_domino(pure_draft_prefix_len=2), {}, RefusedError, "only 0 and 1 are supported"),
        (with_domino(gru_hidden_dim=0), {}, InputError, "gru_hidden_dim is 0; give an integer of"),
        (with_added(markov_rank=3), {}, RefusedError, "the draft has several heads"),
        (with_added(sample_from_anchor=True), {}, RefusedError, "only without sample_from_anchor"),
        (with_domino(enable_confidence_head=True), {}, RefusedError, "has several heads"),
        (with_domino(**ADDED), {}, RefusedError, "has several heads"),
        ({**DSPARK, "markov_head_type": "deep"}, {}, RefusedError, "vanilla, gated and rnn"),
        (GEMMA, {}, RefusedError, "Gemma4DSparkModel"),
        (ZLAB, {"fc.weight": None}, InputError, "no fc.weight"),
        (ZLAB, {"fc.weight": torch.zeros(H, 2 * H)}, InputError, r"\(32, 64\).*\(32, 32\)"),
        (ZLAB, {"layers.0.self_attn.g_proj.weight": torch.zeros(1)}, RefusedError, "g_proj"),
        ({**DSPARK, "block_size": 0}, {}, InputError, "block_size is 0; give an integer of"),
        ({**DSPARK, "mask_token_id": True}, {}, InputError, "mask_token_id is True"),
        ({**DSPARK, "target_layer_ids": [-2]}, {}, InputError, r"layers are \[-2\]; give"),
        (ZLAB, {"d2t": torch.zeros(4).long()}, InputError, "lm_head"),
        (ZLAB, {"embed_tokens.weight": torch.zeros(V, 16)}, InputError, "embedding"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_line(config, change, error, words):
    given = tensors(ZLAB, TARGET) | change
    with pytest.raises(error, match=words) as caught:
        draft(config, TARGET, {name: x for name, x in given.items() if x is not None})
    assert "\n" not in str(caught.value)


def test_a_d2t_that_contradicts_its_t2d_is_refused():
    config = speculators("dspark", markov_rank=3, enable_confidence_head=False)
    given = tensors(config, TARGET, 5) | {"lm_head.weight": torch.randn(5, H)}
    given |= {"d2t": torch.tensor([2, 4, 4, 18, 35]), "t2d": torch.zeros(V).bool()}
    for ids, says in (([2, 5, 6, 21, 38], "output 4 is token 39 .* token 38"), ([2], "5 .* 1;")):
        given["t2d"] = torch.isin(torch.arange(V), torch.tensor(ids))
        with pytest.raises(RefusedError, match=f"the draft has a d2t that contradicts .*{says}"):
            draft(config, TARGET, given)


def test_ends_of_the_draft_s_own_take_the_place_of_the_target_s():
    given = tensors(ZLAB, TARGET)
    ends = TARGET.get_input_embeddings(), TARGET.get_output_embeddings()
    copies = {"embed_tokens.weight": ends[0].weight.clone(), "lm_head.weight": ends[1].weight}
    same = draft(ZLAB, TARGET, given | copies)
    assert (same.embedding, same.head) == ends
    other = draft(ZLAB, TARGET, given | {"lm_head.weight": ends[1].weight * 2})
    results = [alone(model, states(6), 9, 4) for model in (same, other)]
    assert torch.allclose(2 * results[0], results[1], atol=CLOSE)
