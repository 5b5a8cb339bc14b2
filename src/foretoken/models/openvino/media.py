"""An encoder-decoder on OpenVINO whose encoder reads sounds or pictures, all of one size.

The encoder's states of media are kept with these, so that target and draft, or transformers' own
`generate` before them, share an encoder. It does not know processors, nor how graphs are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import openvino as ov
import torch

from foretoken.media.inputs import ENCODED, Media, objection_of_size
from foretoken.models.openvino.explicit import Array, ExplicitModel, Feed


class MediaModel(ExplicitModel):
    """Runs what `export_explicit` made of a model that reads media.

    compile_encoder: Called when the encoder is first needed: a draft that shares the target's never
    needs its own.
    """

    needs_media = True

    def __init__(
        self,
        decoder: ov.CompiledModel,
        facts: dict[str, Any],
        cross: ov.CompiledModel,
        compile_encoder: Callable[[], ov.CompiledModel],
    ) -> None:
        super().__init__(decoder, facts, cross)
        self.attached: list[Media | None] = []
        hears = facts["hears"]
        self.input: str = hears["input"]
        self.shape, self.states = tuple(hears["shape"]), tuple(hears["states"])
        # its weights are never rounded to integers
        arithmetic = "bfloat16" if self.computed == "bfloat16" else "float32"
        self.encoder_key = f"{hears['weights']} {arithmetic} cpu"
        self._compile_encoder = compile_encoder

    @cached_property
    def hearing(self) -> Feed:
        return Feed(self._compile_encoder(), [])

    def objection(self, media: Media) -> str | None:
        return objection_of_size(media, self.input, self.shape)

    def _encoded(
        self, prompts: list[list[int]], sources: list[list[int]] | None
    ) -> tuple[Array, list[int]]:
        media, self.attached = self.attached or [None] * len(prompts), []
        states = np.concatenate([self._states(one) for one in media])
        return states, [states.shape[1]] * len(states)

    def _states(self, media: Media | None) -> Array:
        """`[1, S, H]`: the encoder's of media, or random ones, by which passes are measured."""
        if media is None:
            return np.random.default_rng(0).standard_normal(self.states, np.float32)
        states = media.inputs.get(ENCODED)
        if states is None and self.encoder_key in media.encoded:
            states = media.encoded[self.encoder_key][0]
        if states is not None:
            return states.float().numpy()
        # a copy: later ones are written over it
        self.hearing.put(self.input, media.inputs[self.input].float().numpy().copy())
        self.hearing.run()
        states = self.hearing.read("states").copy()
        media.encoded[self.encoder_key] = (torch.from_numpy(states),)
        return states
