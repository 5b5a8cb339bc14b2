"""Hidden states of a twin between its decoder's layers, for drafters that read them.

A tap is the number of the layer whose input is taken; the number of layers itself is the output of
the last, before the final norm, and `FINAL_TAP` is what the output layer reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from foretoken.errors import RefusedError
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.stock.positions import FORWARD_CONTEXT

if TYPE_CHECKING:  # which takes seconds to import
    from transformers import PreTrainedModel


def get_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers. RefusedError where they do not stand in one list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder: Any = model.get_decoder() or model
    for parts in decoder.modules():  # the outermost first: lists within a layer come behind
        if isinstance(parts, nn.ModuleList) and len(parts) == count:
            return parts
    raise RefusedError(
        f"the layers of {type(model).__name__} do not stand in one list, so that a draft cannot "
        "read states between them; give another draft"
    )


def register_taps(twin: PreTrainedModel, taps: tuple[int, ...]) -> None:
    """Let the forwards of a twin note the states at these taps, in the dict `FORWARD_CONTEXT` has
    for them.
    Raises RefusedError where it has no such layers."""
    head = twin.get_output_embeddings()
    if FINAL_TAP in taps:
        if head is None:
            raise RefusedError(
                f"{type(twin).__name__} has no output layer whose input could be read; give "
                "another draft"
            )
        head.register_forward_pre_hook(_TapHook(FINAL_TAP).record_first_argument)
    between = [j for j in taps if j != FINAL_TAP]
    if not between:
        return
    layers: Any = get_decoder_layers(twin)
    if max(between) > len(layers):
        raise RefusedError(
            f"the draft reads behind layer {max(between)}, the target has {len(layers)}; give a "
            "draft for this target"
        )
    for j in between:
        hook = _TapHook(j)
        if j < len(layers):
            layers[j].register_forward_pre_hook(hook.record_layer_input, with_kwargs=True)
        else:
            layers[-1].register_forward_hook(hook.record_layer_output)


class _TapHook:
    """Hooks that note what passes at a tap."""

    def __init__(self, tap: int) -> None:
        self.tap = tap

    def _record(self, states: Tensor) -> None:
        noted = FORWARD_CONTEXT.get().tap_states
        if noted is not None:
            noted[self.tap] = states

    def record_first_argument(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        self._record(args[0])

    def record_layer_input(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._record(args[0] if args else kwargs["hidden_states"])

    def record_layer_output(self, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._record(output[0] if isinstance(output, tuple) else output)
