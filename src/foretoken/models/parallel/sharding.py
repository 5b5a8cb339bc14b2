"""The weights of a network over several ranks, by the plan that its family has in transformers.

Does not know how ranks are started, nor what they are asked.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from foretoken.errors import RefusedError


def require_plan(network: PreTrainedModel, ranks: int) -> None:
    """RefusedError, with the family's name, for a network that cannot be spread over so many ranks;
    it may be on the meta device."""
    reason = objection(network, ranks)
    if reason is not None:
        name = f"{network.config.model_type} ({type(network).__name__})"
        raise RefusedError(f"tensor_parallel is {ranks}, but {name} {reason}")


def objection(network: PreTrainedModel, ranks: int) -> str | None:
    if network.config.is_encoder_decoder:
        return "is an encoder-decoder; only decoders are spread"
    if not hasattr(network, "maybe_distribute_model"):
        return f"has no plan in transformers {transformers.__version__}; install 5.23 or newer"
    if not getattr(network.base_model, "tp_plan", None):  # a head's alone spreads no layer
        return "has no tensor parallel plan in transformers; leave it at 1"
    heads = key_heads(network)
    if heads % ranks:
        allowed = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        return (
            f"has {heads} key-value heads, which do not divide by it; give {' or '.join(allowed)}"
        )
    if torch.accelerator.is_available():
        return "would be put on an accelerator, which was not tried; set CUDA_VISIBLE_DEVICES="
    return None


def key_heads(network: PreTrainedModel) -> int:
    """Heads that keys and values have, in every layer."""
    config = network.config.get_text_config(decoder=True)
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


class Mesh:
    """All ranks in one line. Each of them makes its own at the same time."""

    def __init__(self, ranks: int) -> None:
        # late: a version of transformers without them is refused by `require_plan`
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.utils import initialize_distributed_mesh

        self.config = DistributedConfig(tp_size=ranks)
        self._mesh = initialize_distributed_mesh(self.config)[1]

    def shard(self, network: PreTrainedModel) -> PreTrainedModel:
        """The same network, which keeps no more than this rank's shards of what is spread. Its
        forward is every rank's to call, with the same input, and returns the same everywhere."""
        first, last = _ends(network)
        tied = first.weight is last.weight
        if tied:  # the plan names both weights
            last.weight = nn.Parameter(first.weight.detach(), requires_grad=False)
        network.maybe_distribute_model(network, self.config, self._mesh)
        if tied and _placed(first) == _placed(last):
            last.weight = first.weight
        return network


def _ends(network: PreTrainedModel) -> tuple[Any, Any]:
    """The embeddings and the output layer, which a decoder that is spread has."""
    return network.get_input_embeddings(), network.get_output_embeddings()


def _placed(part: Any) -> Any:
    """How a part's weight lies over the ranks; None where it is whole on each."""
    return getattr(part.weight, "placements", None)
