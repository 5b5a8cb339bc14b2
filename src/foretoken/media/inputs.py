"""Pictures and sounds of a prompt, as the model's own processor made them.

A model reads them with the prompt, or with its encoder; from then on a sequence is its tokens.
Knows no models and no processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from foretoken.errors import InputError, format_value
from foretoken.media import IGNORED_INPUTS, TEXT_INPUTS

ENCODER_OUTPUTS = "encoder_outputs"  # states that an encoder has made of media, in place of these
IGNORED_ENCODER_INPUTS = {
    "attention_mask"
}  # what encoders of one size are given too, and do not read
DECODER_INPUT_IDS = (
    "decoder_input_ids"  # what a decoder's text begins with, where an encoder reads media
)


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """The media of one prompt, beside its ids.

    Attributes:
        ids: The prompt's ids, with those that stand for its media; for an encoder-decoder what the
            decoder's text begins with, which may be nothing.
        inputs: Arguments of the model's forward, or of its encoder, by name: tensors `[1, ..]` or
            of all pictures of the prompt, or what the model itself has made of such.
        encoded: The outputs of encoders that have read the inputs, by a key of each encoder: one
            that target and draft share runs once.
    """

    ids: list[int]
    inputs: Mapping[str, Any]
    encoded: dict[str, Any] = field(default_factory=dict[str, Any])

    def fit_inputs(self, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the inputs for a model, floats in its precision; what there is one of for each id
        of the prompt, such as token types, is cut, or goes on with zeros, up to `length`."""
        n, inputs = len(self.ids), dict(self.inputs)
        for name, x in inputs.items():
            if not isinstance(x, Tensor):
                continue
            x = x.to(device, dtype if x.is_floating_point() else None)
            if n and tuple(x.shape) == (1, n) and _is_per_token(name):
                x = torch.cat([x, x.new_zeros(1, max(0, length - n))], 1)[:, :length]
            inputs[name] = x
        return inputs


def find_size_problem(media: Media, name: str, shape: tuple[int, ...]) -> str | None:
    """Say why an encoder that reads this input alone, of one shape, cannot read these media."""
    if ENCODER_OUTPUTS in media.inputs:
        return None
    others = sorted(media.inputs.keys() - {name} - IGNORED_ENCODER_INPUTS)
    if others or name not in media.inputs:
        return f"it reads {name} alone, not {', '.join(others) or 'nothing'}"
    own = tuple(media.inputs[name].shape)
    if own == shape:
        return None
    return f"{name} has the shape {own}, and the encoder reads {shape}"


def has_media_inputs(output: Mapping[str, Any]) -> bool:
    """Tell whether a processor's output holds more than text."""
    return not TEXT_INPUTS.issuperset(output)


def get_main_input_name(network: Any) -> str:
    """Return the name of what a network of transformers reads first; of a pair of models, what its
    encoder does."""
    own: str = network.main_input_name
    return getattr(getattr(network, "encoder", None), "main_input_name", own)


def split_media(output: Mapping[str, Any], *, encodes: bool) -> list[Media]:
    """Return the media of each prompt in a processor's output.

    Args:
        output: Its tensors by name: `input_ids [B, n]`, which an attention mask may pad, and those
            of the media; of several prompts only where each of them has B of something.
        encodes: True where an encoder reads all of them, ids included.

    Raises:
        InputError: A value is no tensor, or cannot be divided among prompts.
    """
    named = {name: x for name, x in output.items() if x is not None and name not in IGNORED_INPUTS}
    inputs = {name: _to_tensor(name, x) for name, x in named.items()}
    ids = inputs.pop(DECODER_INPUT_IDS if encodes else "input_ids", None)
    if ids is None and not encodes:
        raise InputError("prompts holds no input_ids; give all that the processor returns")
    mask = None if encodes else inputs.pop("attention_mask", None)
    _require_ids(ids, mask)
    count = len(next(iter(inputs.values())) if ids is None else ids)
    several = {name: len(x) for name, x in inputs.items() if len(x) != count}
    if count != 1 and several:
        name, n = next(iter(several.items()))
        raise InputError(
            f"{name} has {n} entries for {count} prompts; give the processor's output for each "
            "prompt by itself, in a list"
        )
    return [
        _build_media(
            b, ids, mask, inputs if count == 1 else {n: x[b : b + 1] for n, x in inputs.items()}
        )
        for b in range(count)
    ]


def _require_ids(ids: Tensor | None, mask: Tensor | None) -> None:
    """InputError for ids that are none, and a mask of another shape."""
    if ids is None:
        return
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = f"{str(ids.dtype).removeprefix('torch.')} {[*ids.shape]}"
        raise InputError(f"input_ids is {kind}; give whole numbers [B, n]")
    if mask is not None and mask.shape != ids.shape:
        raise InputError(
            f"attention_mask is {[*mask.shape]} and input_ids {[*ids.shape]}; both must be [B, n]"
        )


def _build_media(
    b: int, ids: Tensor | None, mask: Tensor | None, inputs: dict[str, Tensor]
) -> Media:
    """The media of prompt b, without its padding."""
    if ids is None:
        return Media([], inputs)
    own = ids[b]
    if mask is None:
        return Media(cast(list[int], own.tolist()), inputs)
    keep = mask[b].bool()
    per_token = {n for n, x in inputs.items() if x.shape == (1, len(keep)) and _is_per_token(n)}
    cut = {n: x[:, keep] if n in per_token else x for n, x in inputs.items()}
    return Media(cast(list[int], own[keep].tolist()), cut)


def _is_per_token(name: str) -> bool:
    """Tell whether an input may have one number for each id: masks of frames do not."""
    return not any(part in name for part in ("feature", "audio", "pixel", "values"))


def _to_tensor(name: str, value: Any) -> Tensor:
    """A tensor `[n, ..]` of numbers."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        problem = f"{name} is {format_value(value)}; let the processor return_tensors='pt'"
        raise InputError(problem) from None
    if tensor.ndim == 0:
        raise InputError(
            f"{name} is {format_value(value)}, one number; give what the processor returns"
        )
    return tensor
