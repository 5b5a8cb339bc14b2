"""Images and audio of a prompt, as converted by the model's own processor.

The model takes them in the prefill or in its encoder; later forward passes need only the sequence's
tokens. Does not depend on models or processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from foretoken.errors import InputError, format_value
from foretoken.media import IGNORED_INPUTS, TEXT_INPUTS

ENCODER_OUTPUTS = "encoder_outputs"  # hidden states from an encoder, in place of media inputs
IGNORED_ENCODER_INPUTS = {"attention_mask"}  # encoders with a fixed input size ignore it
# Initial output tokens of an encoder-decoder whose encoder takes media
DECODER_INPUT_IDS = "decoder_input_ids"


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """The media of one prompt, with its token ids.

    Attributes:
        ids: The prompt's token ids, with placeholders for its media; for an encoder-decoder the
            initial tokens of the decoder, possibly none.
        inputs: Arguments of the model's forward or of its encoder, by name: tensors `[1, ..]` for
            the prompt or `[n, ..]` for its n images; or, instead of such tensors, the outputs that
            an encoder has computed from them.
        encoded: Encoder outputs for these inputs, by the encoder's key: an encoder that target and
            draft share runs only once.
    """

    ids: list[int]
    inputs: Mapping[str, Any]
    encoded: dict[str, Any] = field(default_factory=dict[str, Any])

    def fit_inputs(self, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        """Return the inputs on a model's device, with floating-point tensors in its dtype. Inputs
        with one value for each prompt token, such as token types, are truncated or zero-padded to
        `length`."""
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
    """Return why an encoder whose only input is `name`, of this shape, cannot take these media;
    None if it can."""
    if ENCODER_OUTPUTS in media.inputs:
        return None
    others = sorted(media.inputs.keys() - {name} - IGNORED_ENCODER_INPUTS)
    if others or name not in media.inputs:
        return f"it takes only {name}, not {', '.join(others) or 'nothing'}"
    own = tuple(media.inputs[name].shape)
    if own == shape:
        return None
    return f"{name} has the shape {own}, but the encoder takes {shape}"


def has_media_inputs(output: Mapping[str, Any]) -> bool:
    """Return whether a processor's output contains media."""
    return not TEXT_INPUTS.issuperset(output)


def get_main_input_name(network: Any) -> str:
    """Return the name of a transformers network's main input; for an encoder-decoder, the
    name of its encoder's main input."""
    own: str = network.main_input_name
    return getattr(getattr(network, "encoder", None), "main_input_name", own)


def split_media(output: Mapping[str, Any], *, encodes: bool) -> list[Media]:
    """Return the media of each prompt in a processor's output.

    Args:
        output: The processor's tensors by name: `input_ids [B, n]`, an attention mask if the ids
            are padded, and the tensors of the media. With B > 1 prompts, each tensor must have B
            entries.
        encodes: True for an encoder-decoder whose encoder takes all of these tensors, `input_ids`
            included.

    Raises:
        InputError: A value is not a tensor, or cannot be divided among prompts.
    """
    named = {name: x for name, x in output.items() if x is not None and name not in IGNORED_INPUTS}
    inputs = {name: _to_tensor(name, x) for name, x in named.items()}
    ids = inputs.pop(DECODER_INPUT_IDS if encodes else "input_ids", None)
    if ids is None and not encodes:
        raise InputError("prompts holds no input_ids; give the processor's whole output")
    mask = None if encodes else inputs.pop("attention_mask", None)
    _require_ids(ids, mask)
    count = len(next(iter(inputs.values())) if ids is None else ids)
    several = {name: len(x) for name, x in inputs.items() if len(x) != count}
    if count != 1 and several:
        name, n = next(iter(several.items()))
        raise InputError(
            f"{name} has {n} entries for {count} prompts; give a list with the processor's "
            "output for each single prompt"
        )
    return [
        _build_media(
            b, ids, mask, inputs if count == 1 else {n: x[b : b + 1] for n, x in inputs.items()}
        )
        for b in range(count)
    ]


def _require_ids(ids: Tensor | None, mask: Tensor | None) -> None:
    """Raise InputError for invalid ids, or for a mask that has another shape than the ids."""
    if ids is None:
        return
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = f"{str(ids.dtype).removeprefix('torch.')} {[*ids.shape]}"
        raise InputError(f"input_ids is {kind}; give integers [B, n]")
    if mask is not None and mask.shape != ids.shape:
        raise InputError(
            f"attention_mask is {[*mask.shape]}, input_ids is {[*ids.shape]}; both must be [B, n]"
        )


def _build_media(
    b: int, ids: Tensor | None, mask: Tensor | None, inputs: dict[str, Tensor]
) -> Media:
    """Return the media of prompt b, without its padding."""
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
    """Return whether the input called `name` may have one value for each token. Inputs made from
    audio or images, such as a mask of frames, never do."""
    return not any(part in name for part in ("feature", "audio", "pixel", "values"))


def _to_tensor(name: str, value: Any) -> Tensor:
    """Return the value as a tensor `[n, ..]`. Raises InputError if the value cannot be converted,
    or is a single number."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        problem = f"{name} is {format_value(value)}; call the processor with return_tensors='pt'"
        raise InputError(problem) from None
    if tensor.ndim == 0:
        raise InputError(
            f"{name} is {format_value(value)}, one number; give the processor's output unchanged"
        )
    return tensor
