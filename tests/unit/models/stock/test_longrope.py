"""Texts on either side of the length at which long rope takes its other factors, and across it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import pairs
from foretoken import Engine, InputError, RefusedError, Speculator, attach, load
from foretoken.models.graphs import GraphModel
from foretoken.models.stock import sizes
from foretoken.models.stock.attention import LongRopeEmbedding
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.selfcheck import check
from foretoken.models.stock.sizes import get_rope_switch_length
from pairs import relative, stock

N, LIMIT = 40, 120  # tokens read with the short factors, and of a text at most
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": N,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": LIMIT,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi3": ("Phi3ForCausalLM", {"original_max_position_embeddings": N}),
    "Phimoe": ("PhimoeForCausalLM", {"num_local_experts": 4}),
}
SCALES = {"Phimoe": {"short_mscale": 1.1, "long_mscale": 1.3}}
PROMPTS = [
    [(7 * i + 3 + n) % 62 + 2 for i in range(n)] for n in (5, N - 2, N - 1, N, N + 1, N + 2, 80)
]


def model(name: str = "Phi3", **changes: Any) -> PreTrainedModel:
    kind, more = FAMILIES[name]
    rope = {"rope_parameters": ROPE | SCALES.get(name, {})}
    config = getattr(transformers, f"{name}Config")(**(SHAPE | more | rope | changes))
    return pairs.lively(getattr(transformers, kind), config, 1.6)


def require_stock(spec: Speculator, network: PreTrainedModel, gamma: int) -> None:
    expected = [stock(network, prompt, LIMIT - 80) for prompt in PROMPTS]
    texts = spec.generate(PROMPTS, max_new_tokens=LIMIT - 80, gamma=gamma)
    assert [text.tokens for text in texts] == expected
    assert gamma == 0 or sum(step.accepted for text in texts for step in text.steps) > 0


@pytest.mark.native
@pytest.mark.daily("transformers, lookup", "native, self:int8")
@pytest.mark.parametrize(
    "how", ["transformers, lookup", "graphs, lookup", "native, lookup", "native, self:int8"]
)
def test_texts_are_those_of_generate(how: str) -> None:
    """In a ragged batch, on either side of the switch and across it."""
    runtime, draft = how.split(", ")
    spec = load(model(), draft, runtime=runtime)
    assert spec.target.runtime == runtime and spec.target.max_context == LIMIT
    for gamma in (0, 4):
        require_stock(spec, model(), gamma)


@pytest.mark.prove
def test_a_family_whose_experts_look_for_the_longest_text() -> None:
    require_stock(load(model("Phimoe"), "lookup"), model("Phimoe"), 4)


def test_a_prompt_that_is_read_in_pieces_beside_others() -> None:
    """Long rows know from their first piece on which factors they are read with."""
    asked = [(PROMPTS[0], 60), *((prompt, 30) for prompt in PROMPTS[1:]), (PROMPTS[-1] * 2, 8)]
    wide = {"max_position_embeddings": 4 * N + 10}
    with Engine(load(model(**wide), "lookup"), max_rows=3) as engine:
        ids = [engine.add(PROMPTS[0], max_new_tokens=60, gamma=2)]
        for _ in range(5):
            engine.step()
        ids += [engine.add(prompt, max_new_tokens=n, gamma=2) for prompt, n in asked[1:]]
        texts: dict[int, list[int]] = {}
        while len(texts) < len(ids):
            events = [event for event in engine.step() if event.completion]
            texts |= {event.id: event.completion.tokens for event in events if event.completion}
    expected = [stock(model(**wide), prompt, n) for prompt, n in asked]
    assert [texts[id] for id in ids] == expected


def test_pieces_of_both_kinds_of_rows_in_one_pass() -> None:
    network: Any = model().double()
    both = graphs, stock_model = GraphModel(network), CausalModel(network)
    for each in both:
        each.start([[], [5]])
        each.set_long_context(True)
        each.start([PROMPTS[-1]])
    blocks = [PROMPTS[1][:36], [7], PROMPTS[-1][:35]]
    logits, expected = (each.score(blocks, [2, 1, 3]) for each in both)
    assert torch.allclose(logits, expected, 0, 1e-9)
    assert (2, 64) in {key[:2] for key in graphs.prompt_passes}
    assert graphs.long == stock_model.long == [False, False, True]


def test_what_a_row_may_hold() -> None:
    target = CausalModel(model())
    assert (target.context, target.max_context, get_rope_switch_length(target.model)) == (
        N,
        LIMIT,
        N,
    )
    with pytest.raises(InputError, match=f"{N + 1} tokens, but the context length is {N}"):
        target.start([PROMPTS[4]])
    target.set_long_context(True)
    target.start([PROMPTS[4]])
    assert target.long == [True]
    (text,) = load(model(), "lookup").generate([PROMPTS[0]], max_new_tokens=500, gamma=3)
    assert text.finish_reason == "length" and len(text.tokens) == LIMIT - len(PROMPTS[0])


def test_who_reads_again() -> None:
    """Llama's generate keeps what it has read with the short factors: it ends where they do."""
    config = transformers.LlamaConfig(**(SHAPE | {"rope_parameters": ROPE}))
    llama = transformers.LlamaForCausalLM(config)
    assert get_rope_switch_length(llama) is None and CausalModel(llama).context == N
    assert get_rope_switch_length(model(max_position_embeddings=N)) is None
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    assert (
        get_rope_switch_length(model(**plain)) is None
        and CausalModel(model(**plain)).context == LIMIT
    )


def test_a_switch_that_is_passed_over_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check gets to the long factors: they must be there."""
    assert check(model()).delta < 1e-5

    def near(self: LongRopeEmbedding, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.embed(self.short, x, position_ids % 2**24)

    monkeypatch.setattr(LongRopeEmbedding, "forward", near)
    with pytest.raises(RefusedError, match="not exact over a ragged cache"):
        check(model())


def phi4() -> PreTrainedModel:
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    pictures = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "crop_size": 28}
    sounds = {"num_blocks": 1, "nemo_conv_channels": 32, "ext_pw_out_channel": 32}
    config = transformers.Phi4MultimodalConfig(
        **SHAPE,
        original_max_position_embeddings=N,
        rope_parameters=ROPE | {"partial_rotary_factor": 1.0},
        vision_config=small | pictures,
        audio_config=small | sounds,
    )
    return pairs.lively(transformers.Phi4MultimodalForCausalLM, config)


def test_a_family_whose_generate_loses_the_text_at_the_switch_ends_there(monkeypatch) -> None:
    """Phi-4-multimodal's drops the cache and goes on from the last token alone."""
    network = phi4()
    network.generation_config.eos_token_id = None
    assert get_rope_switch_length(network) is None
    (text,) = load(network, "lookup").generate([PROMPTS[0]], max_new_tokens=60, gamma=3)
    assert text.tokens == stock(network, PROMPTS[0], N - len(PROMPTS[0]))
    monkeypatch.setattr(sizes, "_reencodes_long_sequences", lambda model: True)
    with pytest.raises(RefusedError, match="contradicts itself"):  # taken for one of the others
        check(network)


@pytest.mark.parametrize(
    ("lengths", "limit"), [((5, N + 4), 6), ((5, N - 6), 12), ((5, 20), 8), ((N + 2, 60), 8)]
)
def test_a_padded_batch_is_read_as_its_longest_row(lengths: tuple[int, int], limit: int) -> None:
    """transformers changes the factors for all rows at once: across the switch such a batch is left
    to it, in one piece."""
    network, attached = model(), model()
    attach(attached, relative(attached), runtime="transformers")
    rows = [(PROMPTS[-1] * 2)[:n] for n in lengths]
    width = max(lengths)
    batch = {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - n) + [1] * n for n in lengths]),
    }
    how: Any = {"max_new_tokens": limit, "do_sample": False}
    assert torch.equal(attached.generate(**batch, **how), network.generate(**batch, **how))


@pytest.mark.native
def test_long_rows_share_pages_with_long_rows_alone() -> None:
    """Keys of the same tokens are others there, whatever salt somebody has thought of."""
    target: Any = load(model(max_position_embeddings=4 * N), "lookup", runtime="native").target
    text = (PROMPTS[-1] * 2)[: N - 1]
    target.set_prefix_caching(True)
    target.start([text])
    target.leave([0])
    assert target.count_cached_tokens(text) == len(text)
    target.set_long_context(True)
    assert target.count_cached_tokens(text) == 0
    target.start([text])
    target.leave([0])
    assert target.count_cached_tokens(text) == len(text)
    for salt in ("long", "\0long", "('', 'long')"):
        target.set_long_context(False)
        target.set_salt(salt)
        assert target.count_cached_tokens(text) == 0
    target.set_prefix_caching(False)
