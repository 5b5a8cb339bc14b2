"""Every class of transformers that generates text, as a tiny random model: how it runs here, and
whether its text is that of its own `generate`; and whether the native decoder serves it, too.

A class is judged by the small copy that the self-check makes of its default configuration: windows,
chunks and other lengths at which a family changes are 8 tokens there, and the texts are longer. A
class that reads pictures or sounds is given two prompts with one each and, where it takes that, one
of text.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from census_media import (
    BESIDE,
    MEDIA,
    MODALITIES,
    Inputs,
    fitted,
    generated,
    prompts,
    set_parts,
)
from foretoken.errors import InputError, RefusedError, log_error_kind, to_one_line
from foretoken.loading.load import load
from foretoken.media.inputs import has_media_inputs, split_media
from foretoken.models.native import conversion
from foretoken.models.stock.media import get_forward_parameters, measure_generate_deviation
from foretoken.models.stock.selfcheck import LOGIT_TOLERANCE, check
from foretoken.models.stock.small_copy import get_setting, iterate_configs, make_small_copy

# By what they read; a class of several maps is of the last
MAPS = {
    "text": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "text, by an encoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "sounds": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "pictures": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
# Classes of the maps of text that read sounds, too
HEARING = {"AudioFlamingo3ForConditionalGeneration", "MusicFlamingoForConditionalGeneration"}
HEARING |= {*auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()} - {*MAPS["pictures"].values()}
PROMPTS = [[3, 7, 11, 5, 9, 3, 7, 11], [4, 5, 6], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 9, 8]]
NEW, GAMMAS = 16, (0, 1, 4)
NOISE = 0.03  # of a draft's weights, which are else the target's
SECONDS = 300.0  # for one class

# What classes of these maps write that write no text
WRITES = {
    "DiaForConditionalGeneration": "codes of audio",
    "DiffusionGemmaForBlockDiffusion": "blocks of tokens by diffusion, not one after another",
    "PI0ForConditionalGeneration": "a robot's actions",
    "Pop2PianoForConditionalGeneration": "notes",
    "VibeVoiceForConditionalGeneration": "audio, by diffusion",
}

# Configurations by hand, where the default one is none that a model can be built or run with
AXES = {"rope_type": "default", "rope_theta": 1e4}
SECTIONS = {"rope_parameters": AXES | {"mrope_section": [16, 24, 24]}}
TURNED = {"rope_parameters": AXES | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}}
COMPASS = {"rope_parameters": {"full_attention": AXES | {"mrope_section": [24, 20, 20]}}}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
INDEXER |= {"indexer_budget": 16, "indexer_compress_ratio": 2, "ple_layer_ids": []}
CODES = {f"<|visual token {i:06}|>": 40 + i for i in range(8)}
HYBRID = ["linear_attention", "full_attention"] * 16
SETTINGS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "ChameleonForConditionalGeneration": {
        "vocabulary_map": {"<image>": 90, "IMGIMGAZ": 6, "IMGIMGBZ": 7},
        "vq_config": {"num_embeddings": 2, "base_channels": 32, "resolution": 32},
    },
    "CohereCompassForCausalLM": COMPASS,
    "CohereCompassForConditionalGeneration": COMPASS,
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "DeepseekOcr2ForConditionalGeneration": {"mlp_layer_types": ["dense", *["sparse"] * 31]},
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 90, "<|extra_200|>": 6} | CODES,
        "vq_config": {"codebook_size": 8, "base_channels": 32},
    },
    "Glm46VForConditionalGeneration": TURNED,
    "Glm4vForConditionalGeneration": TURNED,
    "Glm4vMoeForConditionalGeneration": TURNED | {"num_attention_heads": 32},
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [], "downsample_rate": "4/8", "spatial_target_layers": []
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": HYBRID},
    "HunYuanVLForConditionalGeneration": {
        "rope_parameters": AXES | {"mrope_section": [16, 16, 16, 16]}
    },
    "KyutaiSpeechToTextForConditionalGeneration": {
        "audio_pad_token_id": 70, "codebook_vocab_size": 17
    },
    "Lfm2ForCausalLM": {"layer_types": ["full_attention", "conv"] * 16},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"] * 16},
    "Lfm2VlForConditionalGeneration": {
        "text_config": {"layer_types": ["conv", "full_attention"] * 16}
    },
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 8},
    "Qwen2VLForConditionalGeneration": SECTIONS,
    "Qwen2_5_VLForConditionalGeneration": SECTIONS,
    "Qwen4ExpForCausalLM": INDEXER,
    "Qwen4ExpForConditionalGeneration": INDEXER,
    "Step3p7ForConditionalGeneration": {"sliding_window": 512},
    "XmodForCausalLM": {"default_language": "en_XX"},
}  # fmt: skip
# What some of them leave open, though no model can be built without
OPEN = {"head_dim": 128, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts": 4}
OPEN |= {"num_experts_per_tok": 2, "top_k_experts": 2, "n_shared_experts": 1, "n_group": 1}
OPEN |= {"topk_group": 1, "moe_intermediate_size": 48, "pad_token_id": 0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A class, by name and the kind of its map, and what came of it."""

    name: str
    kind: str
    outcome: str  # equal, refused, differs, failed, no text, no inputs, not built
    form: str | None = None  # that it runs in
    reason: str | None = None
    seconds: float = 0.0
    native: str | None = None  # "equal", or why the native decoder refuses it


def classes() -> dict[str, str]:
    """Return the names of the classes, each with the kind of its map."""
    kinds: dict[str, str] = {}
    for kind, names in MAPS.items():
        for listed in names.values():
            kinds |= dict.fromkeys(_listed(listed), kind)
    return kinds | dict.fromkeys(HEARING & {*kinds}, "sounds")


def build(name: str) -> PreTrainedModel:
    """Return a tiny model of that class, random and far from flat; raises whatever its code
    raises."""
    cls = getattr(transformers, name)
    types = (t for names in MAPS.values() for t, listed in names.items() if name in _listed(listed))
    config: PreTrainedConfig = (cls.config_class or CONFIG_MAPPING[next(types)])()
    for part, kind in config.sub_configs.items():
        if getattr(config, part) is None and kind is not AutoConfig:  # it may be left out
            setattr(config, part, kind())
    text = config.get_text_config(decoder=True)
    settings = copy.deepcopy(SETTINGS.get(name, {}))
    set_parts(config, {n: x for n, x in settings.items() if n not in {*dir(text)} - {*dir(config)}})
    set_parts(text, {n: x for n, x in settings.items() if n in dir(text)})
    if not config.is_encoder_decoder and "is_decoder" in vars(config):
        config.is_decoder = True
    torch.manual_seed(0)
    return _ended(_copied(cls, config, reads_text=classes().get(name) not in MODALITIES))


def _copied(
    cls: type[PreTrainedModel], config: PreTrainedConfig, *, reads_text: bool
) -> PreTrainedModel:
    """A small copy; of a class that need not read text alone, one that does where there is one."""
    try:
        return make_small_copy(cls, config)
    except Exception:
        if reads_text:
            return make_small_copy(cls, _closed(config))
        with suppress(Exception):
            return make_small_copy(cls, _closed(config))
        return make_small_copy(cls, config, try_forward=False)


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _closed(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with what its class has left open."""
    config = copy.deepcopy(config)
    for part in iterate_configs(config):
        for name, value in OPEN.items():
            if name in dir(type(part)) and get_setting(part, name) is None:
                with suppress(AttributeError, NotImplementedError):  # it follows from others
                    setattr(part, name, value)
    return config


def _ended(model: PreTrainedModel) -> PreTrainedModel:
    """With an id that a text of an encoder-decoder begins with, and none that end one."""
    config: Any = getattr(model, "generation_config", None)
    if config is None:
        return model
    config.eos_token_id = config.forced_eos_token_id = config.forced_bos_token_id = None
    config.pad_token_id, config.num_beams = 0, 1
    config.suppress_tokens = config.begin_suppress_tokens = None  # ids of the real vocabulary
    if model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        config.decoder_start_token_id = 0
    return model


def judge(name: str) -> Verdict:
    """Build a class and compare its greedy texts with those of its own `generate`: by all gammas,
    with draft tokens of a look-up and of a model, in a ragged batch."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random configurations
        verdict = _judged(Verdict(name, classes()[name], "not built"))
    return replace(verdict, seconds=round(time.perf_counter() - start, 1))


def _judged(verdict: Verdict) -> Verdict:
    if verdict.name in WRITES:
        return replace(verdict, outcome="no text", reason=f"it generates {WRITES[verdict.name]}")
    try:
        model = build(verdict.name)
        if verdict.kind in MODALITIES:
            model = _ended(fitted(model, copy.deepcopy(BESIDE.get(verdict.name, {}))))
    except Exception as error:
        return replace(verdict, reason=f"its code raised {log_error_kind(error)}")
    try:
        asked = _asked(model, verdict)
        expected = [_generated(model, each) for each in asked]
    except Exception as error:
        reason = f"its generate raised {log_error_kind(error)}"
        return replace(verdict, outcome="no inputs", reason=reason)
    if not asked:
        return replace(
            verdict, outcome="no inputs", reason="its output does not depend on the inputs"
        )
    try:
        form, unequal = _compared(model, asked, expected)
    except (RefusedError, InputError) as error:  # a prompt is refused by name, too
        return replace(verdict, outcome="refused", reason=str(error))
    except Exception as error:
        return replace(
            verdict, outcome="failed", reason=f"{log_error_kind(error)}: {to_one_line(error)}"
        )
    outcome = "differs" if unequal else "equal"
    native = natively(model, asked)
    return replace(verdict, outcome=outcome, form=form, reason=unequal, native=native)


def natively(model: PreTrainedModel, asked: list[Inputs]) -> str:
    """Return "equal" where the native decoder passes the self-check, and reads media as the class's
    own `generate`, or why it refuses a class."""
    try:
        check(model, conversion.make_form())
        for inputs in filter(has_media_inputs, asked):
            target: Any = conversion.NativeConversion(None, "float32", lambda: model).load_model()
            (media,) = split_media(inputs, encodes=model.config.is_encoder_decoder)
            if reason := target.find_media_problem(media):
                return reason
            if not (delta := measure_generate_deviation(model, target, media)) < LOGIT_TOLERANCE:
                return f"logits behind media differ by {delta:.1e} of their spread"
    except RefusedError as error:
        return str(error)
    except Exception as error:  # media are read by a family's own code
        return f"its code raised {log_error_kind(error)}"
    return "equal"


def _asked(model: PreTrainedModel, verdict: Verdict) -> list[Inputs]:
    """The prompts that a class is given."""
    if verdict.kind in MODALITIES and MEDIA.intersection(get_forward_parameters(type(model))):
        return prompts(model, verdict.kind, verdict.name)
    return [{"input_ids": torch.tensor([prompt])} for prompt in PROMPTS]


def _generated(model: PreTrainedModel, inputs: Inputs) -> list[int]:
    return generated(model, inputs, NEW).sequences[0, -NEW:].tolist()


def _compared(
    model: PreTrainedModel, asked: list[Inputs], expected: list[list[int]]
) -> tuple[str, str | None]:
    """The form that a model runs in, and how its texts differ, if they do."""
    given: Any = asked
    if not any(map(has_media_inputs, asked)):
        given = [each["input_ids"][0].tolist() for each in asked]
    for draft in ("lookup", _relative(model)):
        spec = load(model, draft, runtime="transformers")
        for gamma in GAMMAS:
            texts = spec.generate(given, max_new_tokens=NEW, gamma=gamma)
            for b, (text, own) in enumerate(zip(texts, expected, strict=True)):
                if list(text.tokens) != own:
                    drafter = "lookup" if draft == "lookup" else "a model"
                    return spec.target.runtime, f"text {b} with {drafter} at gamma {gamma}"
    return spec.target.runtime, None


def _relative(model: PreTrainedModel) -> PreTrainedModel:
    """A draft that agrees at times."""
    draft = copy.deepcopy(model)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            off = torch.randn(weight.shape, generator=dice, dtype=weight.dtype)
            weight += NOISE * weight.std(correction=0) * off
    return draft


def census(names: Iterable[str], workers: int, seconds: float = SECONDS) -> Iterator[Verdict]:
    """Judge classes in processes of their own, and yield each as it comes.

    Args:
        names: Classes, as `classes` has them.
        workers: Processes at a time.
        seconds: For one class; then its process is ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["foretoken.loading.load"])
    running, pool = set[Any](), ThreadPoolExecutor(workers)
    try:
        for done in as_completed(
            pool.submit(_apart, context, running, seconds, name) for name in names
        ):
            yield done.result()
    finally:  # also by Ctrl-C
        pool.shutdown(wait=False, cancel_futures=True)
        for process in [*running]:
            process.kill()


def _apart(context: Any, running: set[Any], seconds: float, name: str) -> Verdict:
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(name, send), daemon=True)
    process.start()
    running.add(process)
    send.close()
    lost = Verdict(name, classes()[name], "failed", seconds=seconds)
    try:
        if receive.poll(seconds):
            return receive.recv()
        return replace(lost, reason=f"not done after {seconds:.0f} s")
    except EOFError:
        return replace(lost, reason="its process ended")
    finally:
        process.kill()
        process.join()
        running.discard(process)


def _tell(name: str, send: Connection) -> None:
    with open(os.devnull, "w") as nowhere:  # families print what they like
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    send.send(judge(name))
