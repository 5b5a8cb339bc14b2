"""A transformers model without weights. Its own `generate` prepares calls, cuts audio into windows
and computes timestamps, while a Speculator runs the model, on any backend.

The Speculator's target encodes the audio. The last encoder output is retained: Whisper detects the
language of the first window in a separate call, before the call that decodes the window.
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
    """Return a model of the class and config of `structure`, without weights.

    Its `generate` has to be called with custom_generate=spec, where `spec` is a Speculator. Its
    forward returns only the logits of the next token, which `spec` computes.
    """
    kind: Any = type(structure)

    class Weightless(kind):
        device = torch.device("cpu")  # of the inputs that it prepares; the weights are on meta

        def get_encoder(self, *_: Any, **__: Any) -> PendingEncoder:
            return self.pending_encoder

        @wraps(kind.forward)
        def forward(self, *, decoder_input_ids: Tensor, **inputs: Any) -> Seq2SeqLMOutput:
            mixin: Any = GenerationMixin
            output = mixin.generate(
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
            return Seq2SeqLMOutput(logits=output.logits[0][:, None])

    with torch.device("meta"):
        network = Weightless(copy.deepcopy(structure.config)).eval()
    network.generation_config = structure.generation_config
    network.pending_encoder = PendingEncoder(network.main_input_name)
    return network


class PendingEncoder:
    """Takes the place of an encoder. Instead of encoding media, it returns a dict for each input.
    The target stores the encoder output in this dict when the target runs."""

    def __init__(self, name: str) -> None:
        self.name, self.last = name, None
        self.encoded: list[dict[str, Any]] = []

    def forward(self, **inputs: Any) -> PendingEncoderOutput:
        """Return a placeholder for the encoder output of these media. If the media equal the media
        of the last call, the placeholder has the same dicts, with the outputs stored so far."""
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
    """A placeholder for an encoder output that the target has not computed yet."""

    encoded: list[dict[str, Any]]  # for each input, the dict that becomes its `Media.encoded`
