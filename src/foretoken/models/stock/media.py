"""Media in transformers' own code: the pass that reads a prompt with them, as `generate` prepares
it, the encoder's, and the check that a model reads them exactly over a ragged cache.

The check is made on the first media of their kind, against the model's own `generate`: what a
processor makes of a picture is each family's own, so that none can be made up.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import MoEModelOutput

from foretoken.errors import RefusedError, kind_of, one_line
from foretoken.media.inputs import Media
from foretoken.models.base import ReadsMedia
from foretoken.models.stock.attention import twin
from foretoken.models.stock.sizes import always_as_many, encoder_limit, sketch

NEW = 4  # tokens of the check: the first by the prompt's pass, the others by one behind it
# Largest |delta logit| over the spread of the logits; half precisions round at every layer
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
COARSE = 0.05
KINDS = 64  # of random states
# transformers' own preparation of an encoder-decoder, and its name before 5.23
PREPARES = "_maybe_prepare_encoder_kwargs_for_generation"
PREPARED = "_prepare_encoder_decoder_kwargs_for_generation"
ENCODED = "encoder_outputs"  # media that an encoder has read
NO_TOKEN = 2**30  # ends no text


class RunsNetwork(ReadsMedia, Protocol):
    """One that runs a network of transformers."""

    model: PreTrainedModel


@lru_cache
def accepted_by(kind: type[PreTrainedModel]) -> frozenset[str]:
    """The names of a forward's arguments."""
    return frozenset(inspect.signature(kind.forward).parameters)


def first_pass(network: Any, text: Tensor, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return a forward's arguments for a prompt `[1, n]` with media, as `generate` makes them."""
    given: dict[str, Any] = {"use_cache": True, "attention_mask": None, **inputs}
    if "position_ids" in inputs:
        given["position_ids"] = _continued(inputs["position_ids"], text.shape[1])
    elif "position_ids" in accepted_by(type(network)):
        known = {"input_ids": text, **inputs}
        given["position_ids"] = network._prepare_position_ids_for_generation(text, known)
    made = network.prepare_inputs_for_generation(text, is_first_iteration=True, **given)
    return {name: value for name, value in made.items() if value is not None}


class Reached(Exception):
    """The decoder is about to run, with these arguments."""


def embedded_parts(network: Any, inputs: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Return arguments of several forwards, over `size` tokens each, in place of those of one: the
    embeddings of its tokens and media, and their positions. RefusedError where the decoder is given
    more than these."""

    def stop(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        raise Reached(given)

    hook = network.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
    try:
        network(**inputs, return_dict=True)
        raise AssertionError("the decoder did not run")
    except Reached as reached:
        given: dict[str, Any] = reached.args[0]
    finally:
        hook.remove()
    embeds, positions = given["inputs_embeds"], given.get("position_ids")
    beside = {n for n, x in given.items() if isinstance(x, Tensor)} - {
        "inputs_embeds",
        "position_ids",
        "attention_mask",
    }
    if beside or any(isinstance(x, list) for x in given.values()):
        raise RefusedError(f"its layers read {', '.join(sorted(beside)) or 'more'} of media")
    parts: list[dict[str, Any]] = []
    for at in range(0, embeds.shape[1], size):
        part = {"inputs_embeds": embeds[:, at : at + size], "use_cache": True}
        if positions is not None:
            part["position_ids"] = positions[..., at : at + size]
        parts.append(part)
    return parts


def _continued(positions: Tensor, length: int) -> Tensor:
    """A prompt's positions, of several axes or one, cut, or counted on, up to `length`."""
    more = torch.arange(1, max(0, length - positions.shape[-1]) + 1, device=positions.device)
    behind = (positions[-3:].max() + more).expand(*positions.shape[:-1], -1)
    return torch.cat([positions, behind], -1)[..., :length]


def shift_of(positions: Tensor | None, n: int) -> int:
    """Return how far the tokens behind n others are from their places, by the positions of these,
    `[1, n]` or, of several axes, `[axes, 1, n]`: a picture takes fewer than its tokens."""
    if positions is None:
        return 0
    return int(positions[-3:].max()) + 1 - n


class EncoderOutput(MoEModelOutput):
    """The output of an encoder, in the fullest form: some decoders look for their experts' choices
    in it, some for a mask."""

    attention_mask: Tensor | None = None


def encoder_key(model: PreTrainedModel) -> str:
    """Return a digest of an encoder's weights and precision."""
    weights = sketch(cast(PreTrainedModel, model.get_encoder()))
    digest = hashlib.blake2b(weights.numpy().tobytes(), digest_size=16).hexdigest()
    return f"{digest} {model.dtype} {model.device}"


def encoded(network: Any, media: Media, key: str = "") -> Any:
    """Return the encoder's output, states `[1, S, H]` first, of media, as `generate` makes it; what
    media hold of this encoder is returned. key: of the encoder; "": its output is not kept."""
    if key in media.encoded:
        return media.encoded[key]
    inputs = media.fitted(0, network.dtype, network.device)
    if ENCODED in inputs:
        return EncoderOutput(last_hidden_state=inputs[ENCODED])  # pyright: ignore
    output = _run_encoder(network, inputs)
    if key:
        media.encoded[key] = output
    return output


def _run_encoder(network: Any, inputs: dict[str, Tensor]) -> Any:
    main = network.main_input_name if network.main_input_name in inputs else "input_ids"
    rest = {name: x for name, x in inputs.items() if name != main}
    prepare = getattr(network, PREPARES, None) or getattr(network, PREPARED)
    return prepare(inputs[main], rest, main, GenerationConfig())[ENCODED]


def padding(model: PreTrainedModel, media: Media) -> str | None:
    """Say that media of an encoder are padded, if they are: its decoder would have to be told."""
    mask = media.inputs.get("attention_mask")
    if not model.config.is_encoder_decoder or always_as_many(model) or mask is None or mask.all():
        return None
    return "attention_mask leaves out a part of them; process each sound or text by itself"


class Objections:
    """Objections of one model to media; each kind of them, by the names of its inputs, is tried
    once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._known: dict[frozenset[str], str | None] = {}

    def to(self, media: Media, fresh: Callable[[], RunsNetwork]) -> str | None:
        """Say why the model cannot read these, or None; tried on a fresh one, without rows."""
        if reason := padding(self.model, media):
            return reason
        names = frozenset(media.inputs)
        if names not in self._known:
            self._known[names] = objection(fresh(), media)
        return self._known[names]


def objection(fresh: RunsNetwork, media: Media) -> str | None:
    """Say why a model, which has no rows, cannot read these media exactly, or None."""
    network: Any = fresh.model
    try:
        network._validate_model_kwargs({**media.inputs})
    except (ValueError, TypeError):
        return f"{type(network).__name__} does not take {', '.join(sorted(media.inputs))}"
    try:
        delta = deviation(fresh, media)
    except Exception as error:  # a family's code raises anything
        return f"{type(network).__name__} raised {kind_of(error)}: {one_line(error)}"
    if delta < TOLERANCE.get(network.dtype, COARSE):
        return None
    return (
        f"{type(network).__name__} is not exact with them: logits differ by "
        f"{delta:.1e} of their spread from transformers' generate"
    )


@torch.inference_mode()
def deviation(fresh: RunsNetwork, media: Media) -> float:
    """Largest |delta logit| over the spread of the logits between a model and its own `generate`,
    of some tokens behind a prompt with media."""
    network, prompt = twin(fresh.model), media.ids or [0]
    text = torch.tensor([prompt], device=network.device)
    made = _generated(network, text, media)
    new = made.sequences[0, -NEW:].tolist()
    fresh.attached = [media]
    fresh.start([prompt[:-1]], [[]] if fresh.encoder_decoder else None)
    first = fresh.score([prompt[-1:]], [1])[0].clone()
    ours = torch.cat([first, fresh.score([new[:-1]], [NEW - 1])[0]])
    stock = torch.cat(made.logits)
    spread = float((stock.amax(-1) - stock.amin(-1)).max()) + 1e-9
    return float((ours - stock).abs().max().nan_to_num(float("inf"))) / spread


def _generated(network: Any, text: Tensor, media: Media) -> Any:
    """Return what transformers' `generate` makes of a prompt, with its logits."""
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, num_beams=1)
    settings.eos_token_id = NO_TOKEN
    settings.output_logits = settings.return_dict_in_generate = True
    inputs: dict[str, Any] = media.fitted(text.shape[1], network.dtype, network.device)
    if ENCODED in inputs:
        inputs[ENCODED] = encoded(network, media)
    if not network.config.is_encoder_decoder:
        return network.generate(input_ids=text, **inputs, generation_config=settings)
    settings.decoder_start_token_id = int(text[0, 0])
    # a family's own, as Whisper's, cuts sounds into windows and calls this one
    mixin: Any = GenerationMixin
    return mixin.generate(network, **inputs, decoder_input_ids=text, generation_config=settings)


def encoder_input(model: PreTrainedModel, source: Tensor) -> dict[str, Any]:
    """Return a forward's argument for a source `[1, m]`: its ids, or states of random numbers by
    them where the encoder reads no ids, as inputs of such encoders are each family's own."""
    if model.main_input_name == "input_ids":
        return {"input_ids": source}
    return {ENCODED: EncoderOutput(last_hidden_state=random_states(model, source))}  # pyright: ignore


def stand_in(model: PreTrainedModel, source: list[int]) -> Tensor:
    """Random states in place of media, by which passes are measured: as many as the encoder always
    makes, else one for each id."""
    count = encoder_limit(model) if always_as_many(model) else None
    ids = torch.tensor([source], device=model.device)
    return random_states(model, ids if count is None else ids[:, :1].expand(1, count))


def random_states(model: PreTrainedModel, source: Tensor) -> Tensor:
    """`[1, m, H]`, of an encoder's width."""
    config: Any = model.config
    parts = [getattr(config, "encoder", None), config, config.get_text_config()]
    sizes = [getattr(part, name, None) for part in parts for name in ("d_model", "hidden_size")]
    width = next(size for size in sizes if isinstance(size, int))
    table = torch.randn(KINDS, width, generator=torch.Generator().manual_seed(0))
    return F.embedding(source.cpu() % KINDS, table).to(source.device, model.dtype)
