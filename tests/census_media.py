"""Pictures and sounds for a tiny model of any class, as the inputs that its processor would make.

Each processor makes its own; but the names of a forward's arguments and of a configuration's
settings say most of it, and the model itself says how many tokens stand for a picture. Several
shapes are tried until the model's `generate` takes one and writes by it. Does not know how a class
is judged.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.models.stock.media import get_forward_parameters, get_language_model
from foretoken.models.stock.small_copy import (
    COPY_VOCAB_SIZE,
    get_setting,
    iterate_configs,
    randomize_weights,
)

Inputs = dict[str, Tensor]
SIDE = 4  # patches along a picture's edge
START = 2  # of a decoder's text; padding, which is 0, has positions of its own in some families
MARKS = 32  # ids that may stand for something
FRAMES, WAVE = 200, 4000  # of a sound: frames, samples
MODALITIES = {"pictures": ("image", "video"), "sounds": ("audio",)}
# Arguments of a forward that hold pictures, sounds, or what a class reads instead of them
MEDIA = {"pixel_values", "image_pixel_values", "flattened_patches", "protein_input_ids"}
MEDIA |= {"input_features", "input_values", "inputs"}
WIDTH = "the decoder's hidden size"
FIRST = {"insert_layer_id": 1}
# The ids around what stands for a picture or sound, in two prompts; and a prompt of text
AROUND = (([3, 7], [11, 5, 9]), ([4], [5, 6, 8, 4]))
TEXT = [9, 8, 7, 6, 5, 9, 8]
# Settings of parts beside the decoder: widths that are the decoder's, and others by small values
AS_DECODER = ("out_hidden_size", "projection_dim", "output_dim", "adapter_out_dim")
AS_DECODER += ("output_proj_dims", "text_hidden_size", "projector_output_dim")
AS_DECODER += ("image_token_embed_dim", "mm_embed_dim")
SMALL: dict[str, Any] = {
    "depth": 2,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "max_source_positions": FRAMES // 2,
    "num_position_embeddings": SIDE**2,
    "image_seq_length": SIDE**2,
    "mm_tokens_per_image": 4,
    "pooling_kernel_size": 2,
    "num_image_tokens": SIDE**2,
}


def fitted(model: PreTrainedModel, settings: dict[str, Any]) -> PreTrainedModel:
    """Return the model anew, with encoders of pictures and sounds that are small and fit the
    decoder, and ids of its vocabulary that stand for them. settings: of its parts, by their names,
    or of its own, put last."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    width = get_setting(text, "hidden_size")
    for part in iterate_configs(config):
        if part is not text:
            _put(part, SMALL | dict.fromkeys(AS_DECODER, width))
            patch = get_setting(part, "patch_size")
            if patch is not None and get_setting(part, "image_size") is not None:
                edge = SIDE * _number(patch)
                part.image_size = edge if isinstance(part.image_size, int) else [edge, edge]
    if get_setting(config, "image_grid_pinpoints"):
        edge = _edge(config)
        config.image_grid_pinpoints = [[edge, edge]]
    _mark(config)
    set_parts(config, settings, width)
    again = type(model)(config).float().eval()
    settings_of: Any = getattr(again, "generation_config", None)
    if settings_of is not None and config.is_encoder_decoder:
        settings_of.decoder_start_token_id = START
    randomize_weights(again)
    with torch.no_grad():
        for weight in again.parameters():
            if weight.numel() == 1:  # a gate, which is shut at first
                weight.fill_(0.5)
    return again


def set_parts(config: PreTrainedConfig, settings: dict[str, Any], width: int = 0) -> None:
    """Change settings of a configuration, and of those in it, by their names."""
    for key, value in settings.items():
        own = get_setting(config, key)
        if isinstance(own, PreTrainedConfig):
            set_parts(own, value, width)
        else:
            setattr(config, key, width if value == WIDTH else value)


def _put(part: PreTrainedConfig, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if get_setting(part, name) is not None:
            with suppress(AttributeError, NotImplementedError):  # one that follows from others
                setattr(part, name, value)


def _mark(config: PreTrainedConfig) -> None:
    """Let ids that stand for something be of a wider vocabulary, each another: beyond that of the
    self-check, as real ones are."""
    free, marks = iter(range(COPY_VOCAB_SIZE, COPY_VOCAB_SIZE + MARKS)), dict[str, int]()
    for part in iterate_configs(config):
        for name in ("vocab_size", "vocab_size_per_layer_input"):
            if get_setting(part, name) == COPY_VOCAB_SIZE:
                setattr(part, name, COPY_VOCAB_SIZE + MARKS)
        for name, value in [*vars(part).items()]:
            stands = name.startswith(("image", "video", "audio"))
            beyond = type(value) is int and value >= COPY_VOCAB_SIZE
            if MARK.search(name) and (beyond or (stands and not isinstance(value, list | tuple))):
                what = MARK.sub("", name)
                marks[what] = marks.get(what) or next(free)
                setattr(part, name, marks[what])


MARK = re.compile("_(token|patch|start|end)_(id|index)$")


def prompts(model: PreTrainedModel, kind: str, name: str) -> list[Inputs]:
    """Return what a processor would make of two prompts with a picture or sound each and, where
    such a model writes text from ids alone, of one without; [] where its text depends on none of
    those known. Raises what the model's code raises."""
    problem: Exception | None = None
    for media in _candidates(model, kind, name):
        try:
            some = _prompts(model, kind, media)
            if _reads(model, some[0]):
                return [*some, *_plain(model, some[0])]
        except Exception as error:  # a family's code raises anything
            problem = problem or error
    if problem is not None:
        raise problem
    return []


def another(inputs: Inputs) -> Inputs:
    """The same prompt with another picture or sound."""
    changes = {n for n, x in inputs.items() if x.is_floating_point()} | {"protein_input_ids"}
    return {n: x + 1 if n in changes - {"bbox"} else x for n, x in inputs.items()}


@torch.inference_mode()
def _reads(model: Any, inputs: Inputs) -> bool:
    """Tell whether a text depends on its picture or sound; raises where it cannot be read."""
    first, second = (generated(model, each, 1).logits[0] for each in (inputs, another(inputs)))
    return bool(first.isfinite().all()) and not torch.allclose(first, second)


@torch.inference_mode()
def generated(model: Any, inputs: Inputs, new: int) -> Any:
    """Return what transformers' greedy `generate` makes of a prompt, with its logits."""
    settings = {"max_new_tokens": new, "do_sample": False, "num_beams": 1}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    return _writer(model)(model, **inputs, **settings)


def _writer(model: PreTrainedModel) -> Callable[..., Any]:
    """The class's own `generate`; where an encoder reads no text that of all, as a family's own
    looks for languages, or cuts sounds into windows, and calls that one."""
    from transformers.generation.utils import GenerationMixin

    apart = model.config.is_encoder_decoder and model.main_input_name != "input_ids"
    apart = apart and get_language_model(model) is model
    kind: Any = GenerationMixin if apart else type(model)
    return kind.generate


def _prompts(model: Any, kind: str, media: Inputs) -> list[Inputs]:
    config, accepted = model.config, get_forward_parameters(type(model))
    encoder = type(model.get_encoder()) if config.is_encoder_decoder else None
    if encoder is not None and "input_ids" not in get_forward_parameters(encoder):
        start = model.generation_config.decoder_start_token_id
        begun = {"decoder_input_ids": torch.tensor([[start, 7]])}
        return [media | begun, another(media)]
    if "input_ids" in media:
        return [media, another(media)]
    count, mark = _stands(model, kind, media)
    made: list[Inputs] = []
    for i, (before, behind) in enumerate(AROUND):
        ids = torch.tensor([[*before, *[mark] * count, *behind]])
        types = {n: (ids == mark).long() for n in TYPES if n in accepted}
        made.append({"input_ids": ids, **types, **(another(media) if i else media)})
    return made


TYPES = ("token_type_ids", "mm_token_type_ids")


def _stands(model: Any, kind: str, media: Inputs) -> tuple[int, int]:
    """Return how many tokens stand for a picture or sound, and their id."""
    for modality in MODALITIES[kind]:
        name = f"get_{modality}_features"
        asked = next((x for x in (model.base_model, model) if hasattr(x, name)), None)
        if asked is None:
            continue
        get: Any = getattr(asked, name)
        known = inspect.signature(get).parameters
        with torch.inference_mode():
            output = get(**{n: x for n, x in media.items() if n in known}, return_dict=True)
        states = output.get("pooler_output")
        states = output[0] if states is None else states
        listed = states if isinstance(states, list | tuple) else [states]
        count = sum(x.numel() // x.shape[-1] for x in listed)
        return count, getattr(model.config, f"{modality}_token_id")
    return 0, -1


def _plain(model: Any, inputs: Inputs) -> list[Inputs]:
    """A prompt of text, if the model takes one."""
    if "input_ids" not in inputs:
        return []
    text = {"input_ids": torch.tensor([TEXT])}
    try:
        generated(model, text, 1)
    except Exception:  # a family's code raises anything
        return []
    return [text]


def _candidates(model: PreTrainedModel, kind: str, name: str) -> Iterator[Inputs]:
    """Inputs that may be what a processor makes of a picture or sound, beside the text."""
    config, accepted = model.config, get_forward_parameters(type(model))
    dice = torch.Generator().manual_seed(0)
    if name in BY_HAND:
        yield BY_HAND[name](config, dice)
        return
    for media in (_pictures if kind == "pictures" else _sounds)(config, accepted):
        yield {
            n: x if isinstance(x, Tensor) else torch.randn(*x, generator=dice)
            for n, x in media.items()
        }


def _pictures(
    config: PreTrainedConfig, accepted: frozenset[str]
) -> Iterator[dict[str, Tensor | tuple[int, ...]]]:
    """Their arguments by name: tensors, or shapes of random ones."""
    part = _part(config, "patch_size")
    names = ("model_patch_size", "patch_size")
    patch = _number(next((x for n in names if (x := get_setting(part, n))), 1))
    edge = _edge(config)
    colours = get_setting(part, "num_channels") or get_setting(part, "in_channels") or 3
    frames = get_setting(part, "temporal_patch_size") or get_setting(part, "patch_temporal") or 1
    grids = {n: torch.tensor(x) for n, x in GRIDS.items() if n in accepted}
    n, square = SIDE**2, (colours, patch, patch)
    flat = colours * patch * patch
    in_patches = [(n, frames * flat), (n, *square), (n, frames, *square), (1, n, flat)]
    in_patches += [(1, n, *square), (1, colours, patch, n * patch)]
    whole = [(1, colours, edge, edge), (1, 1, colours, edge, edge), (1, 2, colours, edge, edge)]
    for shape in in_patches + whole if grids else whole + in_patches[::-1]:
        media: dict[str, Tensor | tuple[int, ...]] = {"pixel_values": shape, **grids}
        if "image_sizes" in accepted:
            yield media | {"image_sizes": torch.tensor([[edge, edge]])}
        if "qformer_input_ids" in accepted:
            media["qformer_input_ids"] = torch.tensor([AROUND[0][1]])
        if "image_position_ids" in accepted:
            places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
            media["image_position_ids"] = places[None]
        yield media
        named = [name for name in MASKS if name in accepted]
        seen = {4: (1, edge, edge), 5: (*shape[:2], edge, edge)}.get(len(shape), (1, n))
        for mask in (torch.ones(seen).long(), torch.ones(shape[:2]).bool()) if named else ():
            yield media | dict.fromkeys(named, mask)


GRIDS: dict[str, list[Any]] = {
    "image_grid_thw": [[1, SIDE, SIDE]],
    "image_grid_hw": [[SIDE, SIDE]],
    "spatial_shapes": [[SIDE, SIDE]],
    "target_sizes": [[SIDE, SIDE]],
    "image_merge_sizes": [2],
}
MASKS = ("pixel_attention_mask", "pixel_mask")


def _sounds(
    config: PreTrainedConfig, accepted: frozenset[str]
) -> Iterator[dict[str, Tensor | tuple[int, ...]]]:
    """The same of sounds."""
    found = (get_setting(part, n) for n in BINS for part in iterate_configs(config))
    bins = next((x for x in found if isinstance(x, int)), 80)
    bins *= get_setting(_part(config, "num_stacked_frames"), "num_stacked_frames") or 1
    shapes = {(1, bins, FRAMES): "input_features", (1, FRAMES, bins): "input_features"}
    shapes |= {(1, WAVE): "input_values", (1, 1, WAVE): "input_values"}
    for shape, name in shapes.items():
        if name not in accepted:
            continue
        media: dict[str, Tensor | tuple[int, ...]] = {name: shape}
        long = FRAMES if name == "input_features" else WAVE
        known = HEARD if "input_ids" in accepted else (*HEARD, "attention_mask")
        masks = {n: torch.ones(1, long).long() for n in known if n in accepted}
        if masks:
            yield media | masks
        yield media


BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_feat_size", "n_mels")
BINS += ("input_dim", "feature_projection_input_dim")
HEARD = ("input_features_mask", "feature_attention_mask", "padding_mask", "input_values_mask")


def _part(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """The part of a configuration that has this setting; itself if none has."""
    return next(
        (part for part in iterate_configs(config) if get_setting(part, name) is not None), config
    )


def _edge(config: PreTrainedConfig) -> int:
    part = _part(config, "patch_size")
    size, patch = get_setting(part, "image_size"), get_setting(part, "patch_size")
    if size is not None or patch is not None:
        return _number(size) if size is not None else SIDE * _number(patch)
    return 32


def _number(size: Any) -> int:
    return size if isinstance(size, int) else size[0]


# Settings of a class's parts beside its decoder, where names do not say them
WINDOWED = {"vision_config": {"window_size": 56}}
NECK = {"sam_config": {"downsample_channels": [16, 32]}}
STARTS = {"vision_start_token_id": 90, "audio_start_token_id": 91}
HEARS = {"projector_config": {"encoder_hidden_size": 32}, "downsample_rate": 4}
QFORMER = {"qformer_config": {"encoder_hidden_size": 32}}
BESIDE: dict[str, dict[str, Any]] = {
    "AriaForConditionalGeneration": {"projector_patch_to_query_dict": {SIDE**2: 4}},
    "Blip2ForConditionalGeneration": QFORMER,
    "BlipForConditionalGeneration": {"text_config": {"encoder_hidden_size": 32}},
    "ChameleonForConditionalGeneration": {"image_token_id": 90},
    "DeepseekOcr2ForConditionalGeneration": {"vision_config": NECK},
    "Dots3NoteForConditionalGeneration": {"vision_config": {"adapter_in_dim": 32}},
    "Emu3ForConditionalGeneration": {"image_token_id": 90, "vq_config": {"hidden_size": 128}},
    "Exaone4_5_ForConditionalGeneration": WINDOWED,
    "FunAsrNanoForConditionalGeneration": {"adaptor_config": {"hidden_size": WIDTH}},
    "Granite4VisionForConditionalGeneration": QFORMER
    | {"deepstack_layer_map": [(-1, 0)], "downsample_rate": "1/2"},
    "GraniteSpeechForConditionalGeneration": HEARS,
    "GraniteSpeechPlusForConditionalGeneration": HEARS,
    "HyperCLOVAXVisionV2ForConditionalGeneration": WINDOWED,
    "Idefics2ForConditionalGeneration": {"perceiver_config": {"hidden_size": WIDTH}},
    "InstructBlipForConditionalGeneration": QFORMER,
    "InstructBlipVideoForConditionalGeneration": QFORMER,
    "Kimi_K25ForConditionalGeneration": {"projection_hidden_size": 32},
    "Kosmos2ForConditionalGeneration": {"latent_query_num": 4},
    "Kosmos2_5ForConditionalGeneration": {"latent_query_num": 4},
    "Llama4ForConditionalGeneration": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        }
    },
    "MiniCPMOcrForConditionalGeneration": {"insert_layer_id": 1, "vision_config": FIRST},
    "MiniCPMV4_6ForConditionalGeneration": {"insert_layer_id": 1, "vision_config": FIRST},
    "MiniCPMV4_7ForConditionalGeneration": {"insert_layer_id": 1, "vision_config": FIRST},
    "MiniMaxM3SparseForConditionalGeneration": {"merged_hidden_size": 256},
    "MllamaForConditionalGeneration": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            "intermediate_layers_indices": [0],
            "num_global_layers": 1,
            "vision_output_dim": 64,
        },
    },
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [-1]}},
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 128},
    "MuseSparkForConditionalGeneration": {"out_hidden_size": 128},
    "MusicFlamingoForConditionalGeneration": {"head_dim": 32},
    "NemotronH_Omni_Reasoning_V3": {"vision_hidden_size": 32},
    "Ovis2ForConditionalGeneration": {
        "hidden_size": WIDTH, "visual_indicator_token_ids": [90, 91, 92, 93, 94]
    },
    "PPFormulaNetForConditionalGeneration": {"vision_config": {"decoder_hidden_size": WIDTH}},
    "PaliGemmaForConditionalGeneration": {"hidden_size": WIDTH},
    "Qwen2VLForConditionalGeneration": {"vision_config": {"embed_dim": 32, "hidden_size": WIDTH}},
    "Qwen2_5OmniThinkerForConditionalGeneration": WINDOWED | STARTS,
    "Qwen2_5_VLForConditionalGeneration": WINDOWED,
    "Qwen3OmniMoeThinkerForConditionalGeneration": STARTS,
    "UnlimitedOcrForConditionalGeneration": {"vision_config": NECK},
    "VipLlavaForConditionalGeneration": {"vision_feature_layer": [-2, -1]},
}  # fmt: skip


# And inputs, with their ids where they depend on these


def _spliced(config: Any, dice: torch.Generator, count: int) -> Inputs:
    """Ids with places for a picture in a mask."""
    ids = torch.tensor([[3, *[7] * count, 11, 5, 9]])
    mask = torch.tensor([[0, *[1] * count, 0, 0, 0]])
    return {"input_ids": ids, "image_embeds_position_mask": mask}


def _kosmos2(config: Any, dice: torch.Generator) -> Inputs:
    edge = _edge(config)
    pixels = torch.randn(1, 3, edge, edge, generator=dice)
    return _spliced(config, dice, config.latent_query_num) | {"pixel_values": pixels}


def _kosmos2_5(config: Any, dice: torch.Generator) -> Inputs:
    return _spliced(config, dice, config.latent_query_num) | _pix2struct(config, dice)


def _pix2struct(config: Any, dice: torch.Generator) -> Inputs:
    """Patches behind their row and column."""
    width = config.vision_config.patch_embed_hidden_size
    places = torch.cartesian_prod(torch.arange(1, SIDE + 1), torch.arange(1, SIDE + 1))
    patches = torch.randn(SIDE**2, width, generator=dice)
    return {"flattened_patches": torch.cat([places.float(), patches], 1)[None]}


def _mllama(config: Any, dice: torch.Generator) -> Inputs:
    """A picture of one tile of four."""
    ids = torch.tensor([[3, config.image_token_id, 11, 5, 9]])
    edge, seen = _edge(config), torch.zeros(1, 5, 1, 4).long()
    seen[:, 1:, :, 0] = 1
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 4, 3, edge, edge, generator=dice),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
        "cross_attention_mask": seen,
    }


def _molmo2(config: Any, dice: torch.Generator) -> Inputs:
    """A crop, of whose patches four are a token."""
    flat = 3 * config.vision_config.patch_size**2
    windows = torch.arange(SIDE**2).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    return {
        "pixel_values": torch.randn(1, SIDE**2, flat, generator=dice),
        "image_token_pooling": windows,
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
        "image_num_crops": torch.tensor([1]),
    }


def _udop(config: Any, dice: torch.Generator) -> Inputs:
    """Words with their places on a page."""
    ids = torch.tensor([[3, 7, 11, 5, 9]])
    boxes = torch.rand(1, 5, 4, generator=dice).sort().values
    edge = _edge(config)
    pixels = torch.randn(1, 3, edge, edge, generator=dice)
    page = {"attention_mask": torch.ones_like(ids), "bbox": boxes, "pixel_values": pixels}
    return {"input_ids": ids, **page}


def _deepseek_vl_hybrid(config: Any, dice: torch.Generator) -> Inputs:
    low, high = config.vision_config.image_size, config.high_res_vision_config.image_size
    return {
        "pixel_values": torch.randn(1, 3, low, low, generator=dice),
        "high_res_pixel_values": torch.randn(1, 3, high, high, generator=dice),
    }


def _granite4(config: Any, dice: torch.Generator) -> Inputs:
    """A picture and its only tile, of 4 tokens each, whose 2 rows have ends."""
    ids, edge = torch.tensor([[3, *[config.image_token_id] * 10, 11, 5]]), _edge(config)
    pixels = torch.randn(1, 2, 3, edge, edge, generator=dice)
    return {"input_ids": ids, "pixel_values": pixels, "image_sizes": torch.tensor([[edge, edge]])}


def _heard(config: Any, dice: torch.Generator) -> Inputs:
    """Frames of which four are a token."""
    ids = torch.tensor([[3, *[config.audio_token_id] * (FRAMES // 4), 11, 5]])
    sound = torch.randn(1, config.audio_config.num_mel_bins, FRAMES, generator=dice)
    return {"input_ids": ids, "input_features": sound}


def _qwen2_audio(config: Any, dice: torch.Generator) -> Inputs:
    return _heard(config, dice) | {"feature_attention_mask": torch.ones(1, FRAMES).long()}


def _granite_speech(config: Any, dice: torch.Generator) -> Inputs:
    """Two windows of frames, each of which becomes some tokens."""
    window, bins = config.window_size, config.encoder_config.input_dim
    count = 2 * window // config.downsample_rate
    heard = {"input_features": torch.randn(1, 2 * window, bins, generator=dice)}
    heard["input_features_mask"] = torch.ones(1, count).bool()
    before, behind = AROUND[0]
    ids = [*before, *[config.audio_token_index] * count, *behind]
    return {"input_ids": torch.tensor([ids]), **heard}


def _music_flamingo(config: Any, dice: torch.Generator) -> Inputs:
    return _heard(config, dice) | {"input_features_mask": torch.ones(1, FRAMES).long()}


def _inkling(config: Any, dice: torch.Generator) -> Inputs:
    """Patches as they are, colours last."""
    patch = config.vision_config.patch_size
    return {"pixel_values": torch.randn(4, 2, patch, patch, 3, generator=dice)}


def _inkling2(config: Any, dice: torch.Generator) -> Inputs:
    """Merged patches, colours last."""
    edge = config.vision_config.patch_size * config.vision_config.spatial_merge_size
    pixels = torch.randn(4, edge, edge, 3, generator=dice)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}


def _emu3(config: Any, dice: torch.Generator) -> Inputs:
    pixels = torch.randn(1, 3, 32, 32, generator=dice)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32]])}


def _idefics(config: Any, dice: torch.Generator) -> Inputs:
    ids, edge = torch.tensor([[3, 7, 11, 5, 9]]), _edge(config)
    pixels = torch.randn(1, 1, 3, edge, edge, generator=dice)
    seen = torch.ones(1, 5, 1).long()
    return {"input_ids": ids, "pixel_values": pixels, "image_attention_mask": seen}


def _evolla(config: Any, dice: torch.Generator) -> Inputs:
    """A protein."""
    protein = torch.randint(3, 20, (1, 8), generator=dice)
    return {
        "input_ids": torch.tensor([[3, 7, 11, 5, 9]]),
        "protein_input_ids": protein,
        "protein_attention_mask": torch.ones_like(protein),
    }


BY_HAND: dict[str, Callable[[Any, torch.Generator], Inputs]] = {
    "DeepseekVLHybridForConditionalGeneration": _deepseek_vl_hybrid,
    "Emu3ForConditionalGeneration": _emu3,
    "EvollaForProteinText2Text": _evolla,
    "Granite4VisionForConditionalGeneration": _granite4,
    "GraniteSpeechForConditionalGeneration": _granite_speech,
    "GraniteSpeechPlusForConditionalGeneration": _granite_speech,
    "IdeficsForVisionText2Text": _idefics,
    "Inkling2ForConditionalGeneration": _inkling2,
    "InklingForConditionalGeneration": _inkling,
    "Kosmos2ForConditionalGeneration": _kosmos2,
    "Kosmos2_5ForConditionalGeneration": _kosmos2_5,
    "MllamaForConditionalGeneration": _mllama,
    "Molmo2ForConditionalGeneration": _molmo2,
    "MusicFlamingoForConditionalGeneration": _music_flamingo,
    "Pix2StructForConditionalGeneration": _pix2struct,
    "Qwen2AudioForConditionalGeneration": _qwen2_audio,
    "UdopForConditionalGeneration": _udop,
}
