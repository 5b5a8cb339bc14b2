"""Drafts by blocks as OpenVINO graphs: a torch network is traced over a context that is an input.

The context's keys and values are read in place, as an explicit cache's are. Embeddings stay with
torch: a block needs few of their rows. Does not know how graphs are compiled, kept or fed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.openvino.export_explicit import Block, additive, recorded, stacked
from foretoken.models.openvino.tracing import Exported
from foretoken.models.stock.dflash import BlockNetwork
from foretoken.models.stock.positions import RUNNING, Running


class HeadedBlocks(nn.Module):
    """A network of blocks with its output layer, to be exported."""

    def __init__(self, network: BlockNetwork, head: nn.Module) -> None:
        super().__init__()
        self.network, self.head = network, head

    def forward(
        self, embedded: Tensor, lengths: Tensor, sizes: Tensor, *past: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Blocks `[B, n, H]` of sizes[b] places behind lengths[b] tokens -> states and logits."""
        half = len(past) // 2
        pairs = list(zip(past[:half], past[half:], strict=True))
        block = Block(pairs, lengths, embedded.shape[1])
        seen = self.network.seen(block.positions, block.keys_at, sizes)
        full, windowed = (
            additive(mask & block.filled[:, None], embedded.dtype)[:, None] for mask in seen
        )
        token = RUNNING.set(Running(block, None))
        try:
            states = self.network(embedded, block.positions, block, (full, windowed))
        finally:
            RUNNING.reset(token)
        states = states[:, int(not self.network.form.from_anchor) :]
        return states, self.head(states)


class ContextGraph(nn.Module):
    """A target's states `[N, W]` -> keys and values of every layer, `[layers, N, heads, dim]`."""

    def __init__(self, network: BlockNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return stacked(self.network.context(states, positions))


def export_dflash(model: HeadedBlocks) -> Exported:
    """Graphs of `model`, which stays as it is but for its kind of attention; they read its weights
    in place.

    "context": states [N, W], positions [N] -> new_keys, new_values [layers, N, heads, dim];
    "decoder": embedded [B, n, H], lengths [B], sizes [B] and, per layer, keys.i and values.i
    [B, heads, capacity, dim] -> states [B, G, H], logits [B, G, Vd];
    "bias", with a Markov head: before [B, r] -> bias [B, Vd].
    """
    network = model.network
    config: Any = network.config
    layers, chain = len(network.layers), network.markov_head
    config._attn_implementation = "explicit"
    feed = {"states": torch.zeros(3, network.fc.in_features), "positions": torch.arange(3)}
    graphs = {"context": recorded(ContextGraph(network), feed, ["new_keys", "new_values"])}
    two, heads = torch.tensor([2, 1]), config.num_key_value_heads
    feed = {"embedded": torch.zeros(2, 3, config.hidden_size), "lengths": two, "sizes": two + 1}
    for name in ("keys", "values"):
        feed |= {f"{name}.{i}": torch.zeros(2, heads, 5, config.head_dim) for i in range(layers)}
    graphs["decoder"] = recorded(model, feed, ["states", "logits"])
    if chain is not None:
        before = torch.zeros(2, chain.markov_w1.embedding_dim)
        graphs["bias"] = recorded(chain.markov_w2, {"before": before}, ["bias"])
    weights = sum(weight.numel() for weight in model.parameters())
    return Exported(graphs, {"form": "blocks", "parameters": weights})
