"""Records the hidden states between a twin's decoder layers, as inputs of drafters.

Tap j is the input of layer j. The tap whose number equals the number of layers is the last layer's
output before the final norm, and `FINAL_TAP` is the input of the output layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from foretoken.errors import RefusedError
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.positions import FORWARD_CONTEXT

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


def get_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers. Raises RefusedError if the layers are not in one list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder: Any = model.get_decoder() or model
    # from the outermost inwards, so lists within a layer come later
    for parts in decoder.modules():
        if isinstance(parts, nn.ModuleList) and len(parts) == count:
            return parts
    raise RefusedError(
        f"the layers of {type(model).__name__} are not in one list, so the hidden states between "
        "layers cannot be taken; give another draft"
    )


def register_taps(twin: PreTrainedModel, taps: tuple[int, ...]) -> None:
    """Make a twin's forward passes record the hidden states at these taps in the `tap_states` of
    the `FORWARD_CONTEXT`. Raises RefusedError if the twin has no such layers."""
    head = twin.get_output_embeddings()
    if FINAL_TAP in taps:
        if head is None:
            raise RefusedError(
                f"{type(twin).__name__} has no output layer whose input a draft could take; give "
                "another draft"
            )
        head.register_forward_pre_hook(_TapHook(FINAL_TAP).record_first_argument)
    between = [j for j in taps if j != FINAL_TAP]
    if not between:
        return
    layers: Any = get_decoder_layers(twin)
    if max(between) > len(layers):
        raise RefusedError(
            f"the draft takes hidden states after layer {max(between)}, but the target has "
            f"{len(layers)} layers; give a draft for this target"
        )
    for j in between:
        hook = _TapHook(j)
        if j < len(layers):
            layers[j].register_forward_pre_hook(hook.record_layer_input, with_kwargs=True)
        else:
            layers[-1].register_forward_hook(hook.record_layer_output)


class _TapHook:
    """Hooks that record the hidden states at one tap, one method for each kind of hook."""

    def __init__(self, tap: int) -> None:
        self.tap = tap

    def _record(self, states: Tensor) -> None:
        tap_states = FORWARD_CONTEXT.get().tap_states
        if tap_states is not None:
            tap_states[self.tap] = states

    def record_first_argument(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        self._record(args[0])

    def record_layer_input(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._record(args[0] if args else kwargs["hidden_states"])

    def record_layer_output(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._record(output[0] if isinstance(output, tuple) else output)
