"""Encoder-decoders on the native kernels: what transformers computes, and of each row the same bits
in any company, of whatever lengths the sources are, and on every instruction set."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import foretoken
import tiny
from foretoken.kernels import library
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.encoder_decoder import NativeEncoderDecoder
from foretoken.models.stock.selfcheck import LOGIT_TOLERANCE, measure_deviation
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import BART, GATED, T5

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]

# What is proved, by a family: the name of its class, and the settings of a tiny model
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("T5", T5),
    "T5, gated, untied": ("T5", GATED),
    "T5 of narrow heads, a deep decoder": (
        "T5", T5 | {"d_kv": 12, "num_heads": 2, "num_decoder_layers": 3},
    ),
    "mT5": ("MT5", T5 | {"feed_forward_proj": "gated-gelu"}),
    "UMT5, biases of each layer": ("UMT5", T5),
    "BART": ("Bart", BART),
    "BART, encoder of other heads": (
        "Bart", BART | {"encoder_attention_heads": 2, "scale_embedding": True},
    ),
    "mBART": ("MBart", BART | {"scale_embedding": True}),
    "Marian": ("Marian", BART | {"activation_function": "swish", "scale_embedding": True}),
    "Marian of two vocabularies": (
        "Marian", BART | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 48},
    ),
    "M2M100": ("M2M100", BART | {"pad_token_id": 1, "bos_token_id": 0}),
    "M2M100, padding first": ("M2M100", BART | {"scale_embedding": True}),
    "Pegasus": ("Pegasus", BART),
    "Blenderbot": ("Blenderbot", BART),
    "PLBART": ("PLBart", BART),
}  # fmt: skip
SOURCES = [[(5 * i * i + 3 * i) % 45 + 3 for i in range(n)] for n in (7, 1, 40)]
TEXT = [(7 * i * i + 3 * i) % 45 + 3 for i in range(60)]


def built(name: str) -> PreTrainedModel:
    """A tiny model, none of whose norms, biases and factors are what they are in a new one."""
    torch.manual_seed(0)
    kind, settings = FAMILIES[name]
    ending = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
    family = getattr(transformers, kind + ending)
    model = family(family.config_class(**settings)).eval()
    randomize_weights(model)
    with torch.no_grad():
        for key, weight in model.state_dict(keep_vars=True).items():
            if weight.ndim == 1 or key == "final_logits_bias":
                weight.add_(0.3 * torch.randn(weight.shape))
    return model


def converted(network: PreTrainedModel, dtype: str = "float32") -> NativeEncoderDecoder:
    model = NativeConversion(None, dtype, lambda: copy.deepcopy(network)).load_model()
    assert isinstance(model, NativeEncoderDecoder)
    return model


@cache
def network() -> PreTrainedModel:
    return tiny.t5(64)


def scores(model: NativeEncoderDecoder, source: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of TEXT after a source, alone, in pieces."""
    model.permute([])
    model.start([[]], [source])
    parts = zip([0, *cuts], [*cuts, len(TEXT)], strict=True)
    return torch.cat([model.score([TEXT[a:b]], [b - a])[0].clone() for a, b in parts])


@pytest.mark.daily(
    "T5", "UMT5, biases of each layer", "BART", "M2M100, padding first", "Blenderbot"
)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_transformers_on_every_instruction_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = built(name), list[torch.Tensor]()
    for instructions in library.list_instruction_sets():
        monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, instructions)
        made.append(scores(converted(model), SOURCES[2], [1, 3, 20]))
    for other in made[1:]:
        assert torch.equal(made[0], other)
    assert measure_deviation(model, converted(model)) < LOGIT_TOLERANCE


def test_long_sources_are_read_in_one_pass() -> None:
    model = converted(network())
    source = [(11 * i * i + i) % 60 + 3 for i in range(700)]
    alone = scores(model, source, [])
    with torch.inference_mode():
        given = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([TEXT])}
        expected = network()(**given).logits[0]
    assert (alone - expected).abs().max() < LOGIT_TOLERANCE * expected.std()
    model.permute([])
    model.start([[], [], []], [SOURCES[0], source, SOURCES[2]])
    assert torch.equal(model.score([[], TEXT, []], [0, len(TEXT), 0])[1], alone)


def test_an_encoder_that_target_and_draft_share_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft has the target's encoder, and another decoder; one with an encoder of its own runs
    it."""
    model: Any = built("T5, gated, untied")
    same, different = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for draft in (same, different):
            weight = draft.decoder.block[0].layer[0].SelfAttention.q.weight
            weight += 0.1 * torch.randn_like(weight)
        different.encoder.block[0].layer[0].SelfAttention.q.weight += 0.01
    sources, runs = [[5, 6, 7, 8, 9], [9, 8, 7]], list[int]()
    own = NativeEncoderDecoder._run_encoder

    def counted(self: Any, some: list[list[int]]) -> Any:
        runs.append(len(some))
        return own(self, some)

    monkeypatch.setattr(NativeEncoderDecoder, "_run_encoder", counted)
    for draft, expected in ((same, [2]), (different, [2, 2])):
        spec = foretoken.load(model, draft, runtime="native")
        texts = []
        for gamma in (0, 3):
            runs.clear()
            outs = spec.generate(sources, max_new_tokens=8, gamma=gamma, ignore_eos=True)
            texts.append([out.tokens for out in outs])
        assert runs == expected
        assert texts[0] == texts[1]
