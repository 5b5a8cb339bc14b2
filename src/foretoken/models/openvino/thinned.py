"""A transformers model with some of its decoder's layers, over the same weights.

It does not know what the copy is for, nor how it is exported.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.stock.attention import twin


def thinned(model: PreTrainedModel, layers: tuple[int, ...]) -> PreTrainedModel:
    """`model` with these layers of its decoder alone, in this order; the original stays as it is.

    Raises RefusedError where the layers do not stand in one list.
    """
    copy = twin(model)
    stack = stack_of(copy)
    if layers[0] and any(
        getattr(part, "has_relative_attention_bias", 0) for part in stack.modules()
    ):
        raise RefusedError(
            f"the first layer of {type(model).__name__} has the positions of all; give layers that "
            "begin with 0"
        )
    count, layers_kept = len(stack), [stack[i] for i in layers]
    stack._modules.clear()
    stack.extend(layers_kept)
    for i, layer in enumerate(layers_kept):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                setattr(part, "layer_idx", i)  # noqa: B010
    _shorten(copy, count, layers)
    return copy


def stack_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the decoder's layers; RefusedError where there is none."""
    decoder: Any = model.get_decoder() if model.config.is_encoder_decoder else model
    for parts in decoder.modules():  # the outermost first: lists within a layer come behind
        if isinstance(parts, nn.ModuleList) and len({type(layer) for layer in parts}) == 1:
            return parts
    raise RefusedError(
        f"the layers of {type(model).__name__} do not stand in one list; give draft='self', with "
        "all of them"
    )


def _shorten(model: PreTrainedModel, count: int, layers: tuple[int, ...]) -> None:
    """Reduce the model's configurations to these layers."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    for config in configs.values():
        text_config: Any = config.get_text_config(decoder=True)  # pyright: ignore
        for name, value in list(vars(text_config).items()):
            if isinstance(value, list) and len(value) == count:
                setattr(text_config, name, [value[i] for i in layers])
        if not model.config.is_encoder_decoder:
            text_config.num_hidden_layers = len(layers)
