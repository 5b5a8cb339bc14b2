"""Images and audio for models that run transformers' own code: the first forward pass over a prompt
with media, prepared as in `generate`; the encoder's forward pass; and a check that a model is exact
with media over a ragged cache.

The check compares the model with its own `generate` on the first media of each kind. The check
cannot run earlier: each family's processor makes inputs of its own kind, and valid inputs cannot be
made at random unless the encoder has a single input size.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import MoEModelOutput

from foretoken.errors import RefusedError, log_error_kind, to_one_line
from foretoken.media.inputs import ENCODER_OUTPUTS, Media, get_main_input_name
from foretoken.models.base import Model
from foretoken.models.stock.attention import make_twin
from foretoken.models.stock.sizes import sketch_weights, takes_ids
from foretoken.models.stock.taps import get_decoder_layers

# Tokens after the prompt: the check compares the logits at the prompt's last token, then at a block
# of all these tokens but the last
NUM_CHECKED_TOKENS = 4
# Maximum |delta logit| relative to the spread of the logits; half precisions round at every layer
MEDIA_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
HALF_PRECISION_TOLERANCE = 0.05
NUM_RANDOM_STATES = 64  # different random hidden states
ENDS_IN_MEDIA = "the prompt ends with a media token, but text must follow the media"
SMALL_INPUT_SIZE = 64  # audio frames, or pixels along a side
# transformers' method that runs the encoder in `generate`, and its name before 5.23
PREPARE_ENCODER_METHOD = "_maybe_prepare_encoder_kwargs_for_generation"
OLD_PREPARE_ENCODER_METHOD = "_prepare_encoder_decoder_kwargs_for_generation"
UNUSED_TOKEN_ID = 2**30  # an end-of-sequence id outside every vocabulary
MEDIA_TOKEN_FIELD = re.compile(r"(image|audio|video)_token_(id|index)")
LANGUAGE_MODEL_FIELDS = ("language_model", "text_model", "text_decoder")


@lru_cache
def get_forward_parameters(model_class: type[PreTrainedModel]) -> frozenset[str]:
    """Return the names of the parameters of a model's forward."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def get_language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model that generates tokens: the model itself or, if its own `generate` only
    prepares the image and calls the `generate` of a language model within it (BLIP-2), that
    language model."""
    if model.main_input_name == "input_ids":
        return model
    parts: Any = (getattr(model, name, None) for name in LANGUAGE_MODEL_FIELDS)
    return next((x for x in parts if isinstance(x, PreTrainedModel) and x.can_generate()), model)


def capture_generate_arguments(
    model: PreTrainedModel, prompt_ids: Tensor, inputs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments with which a model's `generate` calls the `generate` of its language
    model (`get_language_model`). If the model is its own language model, return `inputs`. Raises
    RefusedError if the model changes the prompt."""

    def stop(**given: Any) -> None:
        raise ArgumentsCaptured(given)

    if get_language_model(model) is model:
        return inputs
    outer: Any = make_twin(model)
    vars(get_language_model(outer))["generate"] = stop
    try:
        outer.generate(input_ids=prompt_ids.clone(), **inputs)
        raise AssertionError("its generate does not call its language model's")
    except ArgumentsCaptured as reached:
        arguments: dict[str, Any] = reached.args[0]
    ids = arguments.pop("input_ids", None)
    if ids is not None and not torch.equal(ids, prompt_ids):
        raise RefusedError("its generate changes the prompt that it is given")
    # A decoder-only model's prompt has no padding here, so it needs no mask
    is_encoder_decoder = get_language_model(model).config.is_encoder_decoder
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    return {n: x for n, x in tensors.items() if is_encoder_decoder or n != "attention_mask"}


def prepare_first_forward(
    network: Any, prompt_ids: Tensor, inputs: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the arguments with which `generate` would call the forward, for a prompt `[1, n]` with
    media."""
    arguments: dict[str, Any] = {"use_cache": True, "attention_mask": None, **inputs}
    if "position_ids" in inputs:
        arguments["position_ids"] = extend_positions(inputs["position_ids"], prompt_ids.shape[1])
    elif "position_ids" in get_forward_parameters(type(network)):
        known = {"input_ids": prompt_ids, **inputs}
        arguments["position_ids"] = network._prepare_position_ids_for_generation(prompt_ids, known)
    prepared = network.prepare_inputs_for_generation(
        prompt_ids, is_first_iteration=True, **arguments
    )
    return {name: value for name, value in prepared.items() if value is not None}


class ArgumentsCaptured(Exception):
    """Raised instead of running a call, to pass on the call's arguments."""


def capture_decoder_arguments(network: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a forward pass calls the model's decoder, without running the
    decoder."""

    def stop(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        raise ArgumentsCaptured(given)

    hook = network.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
    try:
        network(**inputs, return_dict=True)
        raise AssertionError("the decoder did not run")
    except ArgumentsCaptured as reached:
        return reached.args[0]
    finally:
        hook.remove()


def embed_in_chunks(network: Any, inputs: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Split a forward pass into passes of at most `size` tokens each. Returns the arguments of each
    pass: the embeddings of tokens and media, and their positions. Raises RefusedError if the
    decoder takes further inputs."""
    given = capture_decoder_arguments(network, inputs)
    embeds, positions = given["inputs_embeds"], given.get("position_ids")
    others = {n for n, x in given.items() if isinstance(x, Tensor)} - {
        "inputs_embeds",
        "position_ids",
        "attention_mask",
    }
    if others or any(isinstance(x, list) for x in given.values()):
        raise RefusedError(
            f"its layers take {', '.join(sorted(others)) or 'lists'} in addition to the embeddings "
            "of media"
        )
    parts: list[dict[str, Any]] = []
    for at in range(0, embeds.shape[1], size):
        part = {"inputs_embeds": embeds[:, at : at + size], "use_cache": True}
        if positions is not None:
            part["position_ids"] = positions[..., at : at + size]
        parts.append(part)
    return parts


def extend_positions(positions: Tensor, length: int) -> Tensor:
    """Return `positions` `[..., n]`, truncated to `length` or extended to `length` by counting up
    from the last position."""
    more = torch.arange(1, max(0, length - positions.shape[-1]) + 1, device=positions.device)
    return torch.cat([positions, positions[..., -1:] + more], -1)[..., :length]


def compute_position_shift(positions: Tensor | None, n: int) -> int:
    """Return how much the position ids of tokens after a prompt of n tokens differ from the tokens'
    indices: an image may take fewer positions than tokens.

    positions: the position ids of the prompt, `[1, n]`, or `[axes, 1, n]` with several axes.
    """
    if positions is None:
        return 0
    return int(positions[-3:].max()) + 1 - n


class EncoderOutput(MoEModelOutput):
    """The output of an encoder, with all fields that any decoder uses, such as router outputs and a
    mask."""

    attention_mask: Tensor | None = None


def compute_encoder_key(model: PreTrainedModel) -> str:
    """Return a string that identifies an encoder by the digest of its weights, its dtype and its
    device."""
    return f"{hash_encoder_weights(model)} {str(model.dtype).removeprefix('torch.')} {model.device}"


def hash_encoder_weights(model: PreTrainedModel) -> str:
    """Return a digest of an encoder's weights that does not depend on the weights' precision."""
    weights = sketch_weights(cast(PreTrainedModel, model.get_encoder()))
    return hashlib.blake2b(weights.numpy().tobytes(), digest_size=16).hexdigest()


def encode_media(
    network: Any, media: Media, key: str = "", outer_model: PreTrainedModel | None = None
) -> Any:
    """Return the encoder's output for media, as in `generate`, with the hidden states `[1, S, H]`
    as first entry. If `media` already has the output of this encoder, return that output.

    key: The encoder's `compute_encoder_key`; "": neither use nor store an output in `media`.
    outer_model: The model that prepares the encoder's input from the media, if it is not `network`.
    """
    inputs = media.fit_inputs(0, network.dtype, network.device)
    if ENCODER_OUTPUTS in inputs:
        return EncoderOutput(last_hidden_state=inputs[ENCODER_OUTPUTS])  # pyright: ignore
    if outer_model is not None and get_language_model(outer_model) is not outer_model:
        inputs, key = capture_generate_arguments(outer_model, inputs.pop("input_ids"), inputs), ""
    output = media.encoded.get(key)
    if output is None:
        output = _run_encoder(network, inputs)
    if key:
        media.encoded[key] = output
    # Cloned, since a decoder may add positions to the hidden states in place
    return type(output)(**{**output, "last_hidden_state": output.last_hidden_state.clone()})


def encode_without_padding(
    network: Any, media: Media, key: str = "", outer_model: PreTrainedModel | None = None
) -> Tensor:
    """Return the encoder's hidden states `[1, S, H]` for media, without the states that the
    family's own decoder masks as padding. The arguments are explained in `encode_media`."""
    output = encode_media(network, media, key, outer_model)
    mask = media.fit_inputs(0, network.dtype, network.device).get("attention_mask")
    if mask is None and getattr(output, "attention_mask", None) is None:
        return output[0]
    begun = torch.zeros(1, 1, dtype=torch.long, device=network.device)
    inputs = {ENCODER_OUTPUTS: output, "attention_mask": mask, "decoder_input_ids": begun}
    own = capture_decoder_arguments(network, inputs).get("encoder_attention_mask")
    return output[0] if own is None else output[0][:, own[0].bool()]


def _run_encoder(network: Any, inputs: dict[str, Tensor]) -> Any:
    names = (get_main_input_name(network), "inputs_embeds", "input_ids")
    main = next((name for name in names if name in inputs), next(iter(inputs)))
    rest = {name: x for name, x in inputs.items() if name != main}
    prepare = getattr(network, PREPARE_ENCODER_METHOD, None) or getattr(
        network, OLD_PREPARE_ENCODER_METHOD
    )
    return prepare(inputs[main], rest, main, GenerationConfig())[ENCODER_OUTPUTS]


class MediaObjections:
    """Results of the media check of one model, cached for each set of input names."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._known: dict[frozenset[str], str | None] = {}

    def to(self, media: Media, fresh: Callable[[], Model]) -> str | None:
        """Return why the model cannot take these media exactly; None if it can. fresh: Returns a
        Model without sequences, on which the check runs."""
        if media.ids and media.ids[-1] in get_media_token_ids(self.model):
            return ENDS_IN_MEDIA
        names = frozenset(media.inputs)
        if names in self._known:
            return self._known[names]
        reason, is_general = find_media_objection(self.model, fresh(), media)
        if is_general:
            self._known[names] = reason
        return reason


def get_media_token_ids(model: PreTrainedModel) -> set[int]:
    """Return the ids of the tokens that stand for images, audio and video in a prompt."""
    settings = vars(model.config).items()
    return {
        id for name, id in settings if MEDIA_TOKEN_FIELD.fullmatch(name) and isinstance(id, int)
    }


def find_media_objection(
    model: PreTrainedModel, fresh: Model, media: Media
) -> tuple[str | None, bool]:
    """Check a model on media.

    Returns why `fresh`, a Model of `model` without sequences, is not exact with these media, or
    None if it is. The second value is True if the result is valid for all media with the same
    inputs; it is False for invalid inputs.
    """
    network: Any = model
    try:
        network._validate_model_kwargs({**media.inputs})
    except (ValueError, TypeError):
        return f"{type(network).__name__} does not take {', '.join(sorted(media.inputs))}", True
    try:
        delta = measure_generate_deviation(network, fresh, media)
    except RefusedError as error:
        return str(error), True
    except Exception as error:  # a family's code may raise any exception
        return (
            f"{type(network).__name__} raised {log_error_kind(error)}: {to_one_line(error)}",
            False,
        )
    if delta < MEDIA_TOLERANCES.get(network.dtype, HALF_PRECISION_TOLERANCE):
        return None, True
    reason = (
        f"{type(network).__name__} is not exact with these media: logits differ by "
        f"{delta:.1e} of their spread from transformers' generate"
    )
    return reason, math.isfinite(delta)


@torch.inference_mode()
def measure_generate_deviation(model: PreTrainedModel, fresh: Model, media: Media) -> float:
    """Return the largest |delta logit| between `fresh` and transformers' `generate`, for the tokens
    after a prompt with media, relative to the spread of the logits.

    fresh: a Model of `model` without sequences.
    """
    network, prompt = make_twin(model), media.ids or [0]
    prompt_ids = torch.tensor([prompt], device=network.device)
    inputs: dict[str, Any] = media.fit_inputs(prompt_ids.shape[1], network.dtype, network.device)
    if ENCODER_OUTPUTS in inputs:
        inputs[ENCODER_OUTPUTS] = encode_media(network, media)
    own = not network.config.is_encoder_decoder or get_language_model(network) is not network
    generated = run_generate(network, prompt_ids, inputs, NUM_CHECKED_TOKENS, use_own_generate=own)
    new = generated.sequences[0, -NUM_CHECKED_TOKENS:].tolist()
    fresh.joining_media = [media]
    fresh.start([prompt[:-1]], [[]] if fresh.encoder_decoder else None)
    first = fresh.score([prompt[-1:]], [1])[0].clone()
    ours = torch.cat([first, fresh.score([new[:-1]], [NUM_CHECKED_TOKENS - 1])[0]])
    stock = torch.cat(generated.logits)
    spread = float((stock.amax(-1) - stock.amin(-1)).max()) + 1e-9
    return float((ours - stock).abs().max().nan_to_num(float("inf"))) / spread


@torch.inference_mode()
def run_generate(
    network: Any,
    prompt_ids: Tensor,
    inputs: dict[str, Any],
    num_new_tokens: int,
    *,
    use_own_generate: bool = True,
) -> Any:
    """Run transformers' greedy `generate`.

    Args:
        network: The model.
        prompt_ids: The prompt `[1, n]`; for an encoder-decoder, the decoder's prompt.
        inputs: Other arguments of `generate`, such as the encoder's input.
        num_new_tokens: Number of tokens to generate.
        use_own_generate: True to call the family's own `generate`, which may require audio and cut
            it into windows; False to call `GenerationMixin.generate`.

    Returns:
        The output of `generate`, with `sequences` and the `logits` of each new token.
    """
    settings = GenerationConfig(
        max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=0, num_beams=1
    )
    settings.eos_token_id = UNUSED_TOKEN_ID
    settings.output_logits = settings.return_dict_in_generate = True
    settings.decoder_start_token_id = int(prompt_ids[0, 0])
    kind: Any = type(network) if use_own_generate else GenerationMixin
    name = "decoder_input_ids" if network.config.is_encoder_decoder else "input_ids"
    return kind.generate(network, **inputs, **{name: prompt_ids}, generation_config=settings)


@torch.inference_mode()
def make_random_inputs(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return random inputs `[1, ...]` for a media encoder that accepts only one input size; None
    for other encoders. Such an encoder always makes the same number of hidden states, so its
    decoder needs no mask."""
    shape = _get_input_shape(model) if model.config.is_encoder_decoder else None
    if shape is None:
        return None
    smaller = torch.zeros(shape[0], *(min(SMALL_INPUT_SIZE, n // 2) for n in shape[1:]))
    encoder: Any = model.get_encoder()
    try:
        encoder(smaller[None].to(model.device, model.dtype))
        return None
    except ValueError:  # the encoder's own error for another size
        noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
        return {model.main_input_name: noise.to(model.device, model.dtype)}


def _get_input_shape(model: PreTrainedModel) -> list[int] | None:
    """Return the shape of an image or audio input according to the encoder's config; None if it is
    unknown."""
    config: Any = getattr(model.config, "encoder", model.config)
    if model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        return [config.num_mel_bins, 2 * config.max_source_positions]  # two frames per state
    size = getattr(config, "image_size", None)
    if model.main_input_name == "pixel_values" and size:
        return [config.num_channels, *(size if isinstance(size, list | tuple) else (size, size))]
    return None


def make_encoder_input(model: PreTrainedModel, source: Tensor) -> dict[str, Any]:
    """Return the argument of the forward for a source `[1, m]`: its ids or, if the encoder takes no
    ids, random hidden states chosen by the ids, since encoder inputs differ between families."""
    if takes_ids(model):
        return {"input_ids": source}
    # pyright: ignore
    return {ENCODER_OUTPUTS: EncoderOutput(last_hidden_state=make_random_states(model, source))}


def make_placeholder_states(model: PreTrainedModel, source: list[int]) -> Tensor:
    """Return random hidden states in place of media, for timing. The number of states is the
    encoder's fixed number or, if the encoder has none, the number of ids of `source`."""
    ids = torch.tensor([source], device=model.device)
    if inputs := make_random_inputs(model):
        encoder: Any = model.get_encoder()
        with torch.device("meta"):  # only to count the encoder's hidden states
            (x,) = inputs.values()
            count = type(encoder)(encoder.config)(x.to("meta", torch.get_default_dtype()))[0].shape[
                1
            ]
        ids = ids[:, :1].expand(1, count)
    return make_random_states(model, ids)


def make_random_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return random hidden states `[1, m, H]` of the encoder's width, one for each id; equal ids
    get equal states."""
    config: Any = model.config
    encoders = [getattr(config, name, None) for name in ("encoder", "encoder_config")]
    parts = [*encoders, config, config.get_text_config()]
    sizes = [getattr(part, name, None) for part in parts for name in ("d_model", "hidden_size")]
    width = next(size for size in sizes if isinstance(size, int))
    table = torch.randn(NUM_RANDOM_STATES, width, generator=torch.Generator().manual_seed(0))
    return F.embedding(ids.cpu() % NUM_RANDOM_STATES, table).to(ids.device, model.dtype)


def strip_decoder_layers(network: PreTrainedModel) -> Any:
    """Return a twin of a model whose decoder has no layers."""
    made = make_twin(network)
    layers: Any = get_decoder_layers(made)
    del layers[:]
    return made
