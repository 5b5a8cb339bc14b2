"""Each thing that the native decoder knows of families, by the logits of one that has it: they are
transformers', and the same to the bit on every instruction set, in whatever pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

import census
import foretoken
import hybrids
import tiny_families
from decoder_reference import DecoderReference
from foretoken.errors import RefusedError
from foretoken.kernels import library
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel
from foretoken.models.native.network_reader import NetworkReader
from foretoken.models.stock.selfcheck import LOGIT_TOLERANCE, measure_deviation
from foretoken.models.stock.small_copy import make_small_copy, randomize_weights
from tiny_families import EXPERTS, LEARNED, MIXED, ROPE, WINDOWED

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]

Rope = dict[str, dict[str, Any]]


def rope(kind: str = "default", **more: Any) -> Rope:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


HALF, PLAIN = rope(partial_rotary_factor=0.5), LEARNED | {"intermediate_size": 48}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["rope_parameters"] |= {"original_max_position_embeddings": 32}
GROWING = rope("yarn", factor=8.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5)
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
GRANITE |= {"attention_multiplier": 0.2}
GEMMA4 = MIXED | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
GEMMA4 |= {"vocab_size_per_layer_input": 64, "attention_k_eq_v": True}
GEMMA4 |= {"num_global_key_value_heads": 1, "global_head_dim": 16}
FALCON = LEARNED | {"alibi": False}
GROUPS = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
NEO = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8}
NEO |= {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128}
MPT = {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
XGLM = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
XGLM |= {"max_position_embeddings": 128, "pad_token_id": 1, "eos_token_id": 2}

LATENT = ROPE | {"hidden_size": 48, "num_key_value_heads": 4, "kv_lora_rank": 40}
LATENT |= {"max_position_embeddings": 256}
WIDE = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
LONG = {"qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 96}  # a result is wider
# the last three layers read keys and values of the second and third, and have MLPs twice as wide
LENT = ROPE | {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 6, "head_dim": 24}
LENT |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "sliding_window": 20}
LENT |= {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "max_position_embeddings": 256}
LENT |= {"per_layer_config": {"1": {"head_dim": 32}, "5": {"head_dim": 32}}}
LENT["layer_types"] = ["full_attention" if i in (1, 5) else "sliding_attention" for i in range(6)]
QWEN = ROPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN |= {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}

# What is proved, by a family: the name of its classes, and the settings of a tiny model
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of all heads together": ("Olmo2", ROPE),
    "norms of each head, parallel parts": ("Cohere", ROPE | {"use_qk_norm": True}),
    "norms behind the turn": ("HunYuanDenseV1", ROPE | {"head_dim": 8}),
    "norms without weights, clipped": ("Olmo", ROPE | {"clip_qkv": 0.5}),
    "learned positions": ("OPT", tiny_families.OPT),
    "ALiBi, embeddings normed": ("Bloom", LEARNED | {"n_head": 4, "n_layer": 2}),
    "groups of queries in one product": ("Falcon", GROUPS),
    "experts": ("Mixtral", EXPERTS),
    "experts beside a gated MLP": ("Qwen2Moe", QWEN),
    "xIELU": ("Apertus", ROPE | {"hidden_act": "xielu"}),
    "sinks, multipliers": ("GraniteSWA", WINDOWED | GRANITE),
    "queries that grow": ("Ministral3", ROPE | GROWING | {"head_dim": 8}),
    "caps, windows": ("Gemma2", MIXED),
    "values normed, factors of layers": ("Gemma4", GEMMA4),
    "layers without positions": ("SmolLM3", ROPE | {"no_rope_layers": [1, 0]}),
    "squares, half turned": ("Nemotron", ROPE | HALF),
    "latents, interleaved": (
        "DeepseekV3", LATENT | WIDE | {"q_lora_rank": 36, "first_k_dense_replace": 2},
    ),
    "latents, whole queries": (
        "DeepseekV2", LATENT | LONG | {"q_lora_rank": None, "first_k_dense_replace": 2},
    ),
    "latents, halves": ("MiniCPM3", LATENT | LONG | {"q_lora_rank": 32}),
    "inputs of layers, keys of others": ("Gemma4", LENT),
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BigCode": ("GPTBigCode", LEARNED),
    "BigCode, many keys": ("GPTBigCode", LEARNED | {"multi_query": False}),
    "BioGPT": ("BioGpt", PLAIN),
    "CodeGen": ("CodeGen", LEARNED | {"rotary_dim": 4, "n_inner": 48}),
    "Cohere 2": ("Cohere2", MIXED | {"logit_scale": 0.5}),
    "ERNIE 4.5": ("Ernie4_5", ROPE | {"head_dim": 8}),
    "EXAONE 4": ("Exaone4", MIXED),
    "Falcon 7b": ("Falcon", FALCON),
    "Falcon 11b": ("Falcon", GROUPS | {"num_ln_in_parallel_attn": 1}),
    "Falcon in turn": ("Falcon", FALCON | {"multi_query": False, "parallel_attn": False}),
    "GLM": ("Glm", ROPE | HALF | {"head_dim": 8}),
    "GLM 4": ("Glm4", ROPE | HALF | {"head_dim": 8}),
    "GPT-J": ("GPTJ", LEARNED | {"rotary_dim": 4, "n_inner": 48}),
    "GPT-Neo": ("GPTNeo", NEO),
    "GPT-NeoX in turn": ("GPTNeoX", PLAIN | HALF | {"use_parallel_residual": False}),
    "Gemma": ("Gemma", ROPE | {"head_dim": 8}),
    "Gemma 3": ("Gemma3", MIXED),
    "Helium": ("Helium", ROPE | {"head_dim": 8}),
    "Llama 3": ("Llama", ROPE | LLAMA3),
    "Llama of narrow heads": ("Llama", ROPE | {"hidden_size": 40, "num_attention_heads": 2}),
    "Llama with biases": ("Llama", ROPE | {"attention_bias": True, "mlp_bias": True}),
    "Llama by YaRN": ("Llama", ROPE | YARN),
    "MPT": ("Mpt", MPT | {"attn_config": {"clip_qkv": 0.5}}),
    "MPT of six heads": ("Mpt", MPT | {"d_model": 48, "n_heads": 6}),
    "OLMo 3": ("Olmo3", MIXED),
    "Persimmon": ("Persimmon", PLAIN | HALF),
    "Phi": ("Phi", ROPE | HALF | {"qk_layernorm": True}),
    "Phi-4": ("Phi3", ROPE | HALF),
    "Seed-OSS": ("SeedOss", ROPE | {"head_dim": 8}),
    "StableLM": ("StableLm", ROPE | HALF | {"qk_layernorm": True}),
    "StableLM at once": ("StableLm", ROPE | HALF | {"use_parallel_residual": True}),
    "Starcoder 2": ("Starcoder2", WINDOWED),
    "XGLM": ("XGLM", XGLM),
    "Granite MoE": ("GraniteMoe", EXPERTS | GRANITE),
    "OLMoE": ("Olmoe", ROPE | {"num_experts": 4, "num_experts_per_tok": 3}),
    "Qwen 3 MoE": ("Qwen3Moe", QWEN | {"norm_topk_prob": True, "head_dim": 8}),
}
NAMED = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi-3", "GPT-2", "GPT-NeoX")  # in tiny_families
# by the small copies that their self-checks make
COPIED = ["Afmoe", "Bamba", "Dots1", "Ernie4_5_Moe", "Glm4Moe", "GptOss", "GraniteMoeHybrid"]
COPIED += ["HunYuanMoEV1", "Lfm2Moe", "Lfm3", "MiniMaxM2", "NemotronH", "OlmoHybrid"]
COPIED += ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe"]
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig"}


def tiny(family: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**settings)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def stirred(made: PreTrainedModel) -> PreTrainedModel:
    """None of its norms, biases and factors are what they are in a new one."""
    torch.manual_seed(0)
    randomize_weights(made)
    with torch.no_grad():
        for weight in made.state_dict(keep_vars=True).values():
            if weight.ndim == 1 and weight.is_floating_point():
                weight.add_(0.3 * torch.randn(weight.shape))
    return made


def built(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name in COPIED:
        whole = census.build(f"{name}ForCausalLM")
        return stirred(make_small_copy(type(whole), whole.config))
    if name in NAMED:
        return stirred(tiny_families.build(name))
    return stirred(tiny(*(FEATURES | FAMILIES)[name]))


def native(network: PreTrainedModel, dtype: str = "float32") -> NativeModel:
    return NativeConversion(None, dtype, lambda: network).load_model()


def check(name: str) -> None:
    model = built(name)
    with torch.inference_mode():
        assert measure_deviation(model, native(model)) < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_computed_as_transformers_does(name: str) -> None:
    check(name)


@pytest.mark.prove
@pytest.mark.parametrize("name", [*NAMED, *FAMILIES, *COPIED])
def test_families_are_computed_as_transformers_does(name: str) -> None:
    check(name)


RECURRENT = ["Qwen3_5", "GraniteMoeHybrid", "Lfm2", "FalconH1"]
SEQUENCE = [(7 * i * i + 3 * i) % 60 + 3 for i in range(150)]  # behind a block of attention's
BITS = [(name, "float32") for name in (*FEATURES, *RECURRENT)]
BITS += [(name, dtype) for name in FEATURES for dtype in ("int8", "int4")]


def piecewise(model: NativeModel, sequence: list[int], sizes: tuple[int, ...]) -> Any:
    """The logits of a sequence that is scored in pieces of these sizes beside another row, with
    draft tokens that are taken back."""
    model.permute([])
    model.start([sequence[:1], sequence[::-1][:90]])
    logits, n, step = np.zeros((len(sequence), model.vocab_size), np.float32), 1, 0
    while n < len(sequence):
        block = sequence[n : n + sizes[step % len(sizes)]]
        draft = [1 + i for i in range(step % 3)]
        step += 1
        one = model.score([[*block, *draft], [5] * (step % 3)], [len(block) + len(draft), 0])[0]
        logits[n : n + len(block)] = one[: len(block)]
        n += len(block)
        model.set_lengths([n, model.lengths[1]])
    return logits[1:]


@pytest.mark.daily("inputs of layers, keys of others, int4", "latents, interleaved, int8")
@pytest.mark.parametrize(("name", "dtype"), BITS, ids=[", ".join(x) for x in BITS])
def test_passes_are_the_same_bits(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the reference in NumPy, or with rounded weights those of one pass by one thread of
    portable code: on every instruction set, by one to three threads, in whatever pieces."""
    recurrent = name in RECURRENT
    network = hybrids.random(f"{name}ForCausalLM", 0).float() if recurrent else built(name)
    _, settings = FEATURES.get(name, ("", {}))
    short = settings.get("max_position_embeddings") == 128  # the row beside grows, too
    sequence = SEQUENCE[: 40 if short else None]

    def logits(instructions: str, threads: int, sizes: tuple[int, ...]) -> Any:
        monkeypatch.setenv(library.INSTRUCTIONS_VARIABLE, instructions)
        monkeypatch.setattr("foretoken.models.native.passes.count_threads", lambda: threads)
        return piecewise(native(network, dtype), sequence, sizes).view(np.int32)

    if dtype == "float32":
        with torch.inference_mode():
            decoder = NetworkReader(network).read_decoder()
        expected = DecoderReference(decoder).forward(sequence)[1:].view(np.int32)
    else:
        expected = logits("portable", 1, (len(sequence),))
    for instructions in library.list_instruction_sets():
        for threads, sizes in ((1, (1,)), (2, (1, 3)), (3, (9, 70, 2))):
            same = logits(instructions, threads, sizes) == expected
            assert same.all(), (instructions, threads, np.argwhere(~same)[:3])


REFUSED = {
    "experts chosen in another way": ("Phimoe", EXPERTS),
    "ALiBi of rounded positions": ("Falcon", LEARNED | {"alibi": True}),
    "per-layer inputs of other shapes": ("Gemma4", GEMMA4 | {"hidden_size_per_layer_input": 8}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_built_otherwise_is_refused(reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        native(tiny(*REFUSED[reason]))


def test_a_stored_factor_that_is_not_known_is_refused() -> None:
    """In a new model it changes nothing, so that the self-check could not see it."""
    model = tiny_families.build("Llama")
    model.register_buffer("factor", torch.ones(1))
    with pytest.raises(RefusedError, match="factor"):
        native(model)


def test_latents_with_a_part_that_is_not_known_are_refused() -> None:
    network: Any = built("latents, halves")
    keys = network.model.layers[1].self_attn.kv_b_proj
    keys.bias = torch.nn.Parameter(torch.ones(keys.out_features))
    with pytest.raises(RefusedError, match="keys of latents with a bias"):
        native(network)


def test_copies_of_layers_need_those_whose_keys_they_read() -> None:
    network = built("inputs of layers, keys of others")
    target = native(network)
    with pytest.raises(RefusedError, match="leaves out layer 2, .*; include layer 2"):
        NativeConversion(None, "float32", lambda: network, layers=(0, 3)).build_target_copy(target)
    spec = foretoken.load(network, "self:0,1,2,3", runtime="native")
    (plain,), (drafted,) = (
        spec.generate([SEQUENCE[:40]], max_new_tokens=30, gamma=gamma, ignore_eos=True)
        for gamma in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.drafted


def test_a_token_loads_only_the_chosen_experts() -> None:
    # NemotronH has experts without a gate
    everything, loaded = native(built("NemotronH")).passes.bytes
    assert 0 < loaded < everything
