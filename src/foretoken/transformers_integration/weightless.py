"""A network of transformers without weights: its own `generate` prepares calls, cuts sounds into
windows and times what is said, and a Speculator, which may run anywhere, reads and writes.

The encoder's states are made where the Speculator's target reads media; what it has made of the
last ones is kept, as a sound's language is heard before its first window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput


def make_weightless(structure: PreTrainedModel, spec: Callable[..., Any]) -> Any:
    """Return a network of that class, with that configuration, whose `generate` takes
    custom_generate=spec, a Speculator, alone, and whose forward gives the logits of one
    position."""
    kind: Any = type(structure)

    class Weightless(kind):
        device = torch.device("cpu")  # of what it prepares

        def get_encoder(self, *_: Any, **__: Any) -> PendingEncoder:
            return self.pending_encoder

        @wraps(kind.forward)
        def forward(self, *, decoder_input_ids: Tensor, **inputs: Any) -> Seq2SeqLMOutput:
            mixin: Any = GenerationMixin
            made = mixin.generate(
                self,
                **inputs | {"use_cache": True},
                decoder_input_ids=decoder_input_ids,
                max_new_tokens=1,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                custom_generate=spec,
                num_assistant_tokens=0,
            )
            return Seq2SeqLMOutput(logits=made.logits[0][:, None])

    with torch.device("meta"):
        network = Weightless(copy.deepcopy(structure.config)).eval()
    network.generation_config = structure.generation_config
    network.pending_encoder = PendingEncoder(network.main_input_name)
    return network


class PendingEncoder:
    """Stands for an encoder: hands on where the states of media are kept once they are made."""

    def __init__(self, name: str) -> None:
        self.name, self.last = name, None
        self.encoded: list[dict[str, Any]] = []

    def forward(self, **inputs: Any) -> PendingEncoderOutput:
        """Return what stands for the states of these media."""
        media: Tensor = inputs[self.name]
        if self.last is None or not torch.equal(self.last, media):
            self.last, self.encoded = media, [{} for _ in media]
        output = PendingEncoderOutput(
            last_hidden_state=torch.empty(len(media), 1, 1, device="meta")
        )  # pyright: ignore
        output.encoded = self.encoded
        return output

    __call__ = forward


class PendingEncoderOutput(BaseModelOutput):
    """An encoder's output that is not made yet."""

    encoded: list[dict[str, Any]]  # `Media.encoded` of each row
