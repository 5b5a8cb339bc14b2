"""Makes the kernels' `Decoder` objects of a block draft (DFlash, DSpark and others): one computes
the keys and values of the context from the target's hidden states, the other predicts the blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from foretoken.models.native.network import (
    Attention,
    BlockConvolution,
    Decoder,
    DecoderLayer,
    Linear,
    to_float_array,
)
from foretoken.models.native.network_reader import NetworkReader
from foretoken.models.native.packing import LANES
from foretoken.models.stock.dflash import BlocksDraft
from foretoken.models.stock.dflash2 import ConvolutionLayer, GroupedConvolution


class BlockDecoder(nn.Module):
    """The parts of a block draft that the kernels run: all except the embedding and the small heads
    that condition a draft token on the token before it. The kernels run the layer of these heads
    that is as large as the output layer (`BlockNetwork.bias_layer`)."""

    def __init__(self, draft: BlocksDraft) -> None:
        super().__init__()
        network = draft.network
        self.config, self.layout = network.config, network.layout
        self.fc, self.hidden_norm = network.fc, network.hidden_norm
        self.layers, self.norm, self.head = network.layers, network.norm, draft.head
        self.bias_layer = network.bias_layer and getattr(*network.bias_layer)
        self.rotary = network.rotary[0]

    def get_decoder(self) -> BlockDecoder:
        """Return the module with the rotary positions, as a transformers model does."""
        return self


class BlockNetworks(NamedTuple):
    """The networks of a block draft on the kernels, and two layers that run by themselves."""

    join: Linear  # projects the target's hidden states to the inputs of `context_kv`
    bias_layer: Linear | None  # of a head
    context_kv: Decoder  # computes only keys and values
    blocks: Decoder  # its inputs are embeddings


class BlockReader(NetworkReader):
    """Makes the networks of a block draft."""

    def __init__(self, network: BlockDecoder) -> None:
        base: Any = network
        super().__init__(base)
        self.layout, self.block_layers = network.layout, network.layers
        self.fc, self.hidden_norm = network.fc, network.hidden_norm
        self.norm, self.head, self.bias_layer = network.norm, network.head, network.bias_layer

    def read_networks(self) -> BlockNetworks:
        """Return the draft's networks. Raises RefusedError if the kernels do not support one of
        them."""
        width, kinds = self.config.hidden_size, self.config.layer_types
        pairs = zip(self.block_layers, kinds, strict=True)
        layers = [
            self._read_block_layer(layer, windowed=kind == "sliding_attention")
            for layer, kind in pairs
        ]
        context_kv = Decoder(
            width,
            [_keep_keys_and_values(layer) for layer in layers],
            embedding_norm=self.read_norm(self.hidden_norm),
            ropes=self.ropes,
        )
        norm, head = self.read_norm(self.norm), self.read_linear(self.head)
        blocks = Decoder(width, layers, norm=norm, head=head, ropes=self.ropes)
        join, bias_layer = self.read_linear(self.fc), self.bias_layer
        bias_layer = bias_layer and self.read_linear(bias_layer)
        self._require_all_read()
        return BlockNetworks(join, bias_layer, context_kv, blocks)

    def _read_block_layer(self, layer: Any, *, windowed: bool) -> DecoderLayer:
        """Return a layer whose attention has the mask of `BlockNetwork.make_masks`."""
        layout, window = self.layout, self.config.sliding_window if windowed else None
        made = self._read_layer(layer, 0 if window is None else window + 1)
        fits = window is None or not layout.window_per_position or window + 1 >= layout.block_size
        self.require(fits, f"a window of {window} tokens, shorter than the block")
        causal = layout.causal or (window is not None and layout.causal_window)
        assert isinstance(made.attention, Attention)
        attention = replace(
            made.attention,
            to_block_end=not causal,
            from_block_start=not layout.window_per_position,
        )
        convolutions = None, None
        if isinstance(layer, ConvolutionLayer):
            first, second = map(self._read_convolution, (layer.attention_conv, layer.mlp_conv))
            convolutions = first, second
        return replace(made, attention=attention, convolutions=convolutions)

    def _read_convolution(self, part: GroupedConvolution) -> BlockConvolution:
        width = self.config.hidden_size
        self.require(width % LANES == 0, f"a hidden size of {width}, not a multiple of {LANES}")
        self.read_weights.add(id(part.base_kernel))
        deltas, base = self.read_linear(part.kernel_projection), to_float_array(part.base_kernel)
        groups = len(deltas.weight) // (2 * base.shape[1])
        return BlockConvolution(base, deltas, width // groups)


def _keep_keys_and_values(layer: DecoderLayer) -> DecoderLayer:
    """Return a layer that computes only the keys and values of this layer, without its norm."""
    part = layer.attention
    assert isinstance(part, Attention)
    own = replace(
        part, projections=part.projections[1:], out=None, heads=0, norms=(None, *part.norms[1:])
    )
    return DecoderLayer((None, None, None, None), own, None)
