"""Prompts with pictures and sounds as a decoder reads them, of what transformers gives its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.errors import RefusedError

if TYPE_CHECKING:  # which takes seconds to import
    from transformers import PreTrainedModel

SLIDING = "sliding_attention"
# Arguments of a decoder's forward that are read here, or mean nothing for a prompt
VISUAL = {"visual_pos_masks", "deepstack_visual_embeds"}  # states that are added behind layers
INPUTS = "per_layer_inputs"
ARGUMENTS = {"inputs_embeds", "position_ids", "attention_mask", "input_ids", INPUTS, *VISUAL}
ARGUMENTS |= {"self", "kwargs", "use_cache", "past_key_values", "logits_to_keep", "labels"}


@dataclass(frozen=True, slots=True)
class EmbeddedPrompt:
    """Arrays that a decoder reads of a prompt of n tokens with media.

    Attributes:
        ids: The tokens, as inputs of layers are looked up by.
        embeddings: `[n, H]`.
        positions: `[axes, n]`.
        axes: The axis that turns each pair of rotary positions, where there are several.
        ends: `[n]`, the position up to, not including, which each token attends; None: its own,
            included.
        added: By layers, what is added to the states behind them, `[n, H]`.
    """

    ids: list[int]
    embeddings: Tensor
    positions: NDArray[np.int64]
    axes: list[int]
    ends: NDArray[np.int64] | None
    added: dict[int, Tensor]

    @property
    def shift(self) -> int:
        """Return how far the tokens behind are from their places: pictures take fewer positions
        than tokens."""
        return int(self.positions.max()) + 1 - len(self.ids)

    def first(self, n: int) -> EmbeddedPrompt:
        ends = None if self.ends is None else self.ends[:n]
        return replace(self, ids=self.ids[:n], embeddings=self.embeddings[:n], ends=ends)

    def behind(self, n: int) -> EmbeddedPrompt | None:
        """Return what is left behind the first n tokens."""
        if n >= len(self.ids):
            return None
        return replace(
            self,
            ids=self.ids[n:],
            embeddings=self.embeddings[n:],
            positions=self.positions[:, n:],
            ends=None if self.ends is None else self.ends[n:],
            added={layer: rows[n:] for layer, rows in self.added.items()},
        )


def ends_of(mask: Any, n: int, window: int | None) -> NDArray[np.int64] | None:
    """Return up to where each of n tokens attends, by masks as transformers makes them: None, of
    padding, or of all pairs, for each kind of layers; None: up to itself. Raises RefusedError for
    masks of other shapes."""
    if isinstance(mask, dict):
        found = [ends_of(x, n, window if k == SLIDING else None) for k, x in mask.items()]
        known = [x for x in found if x is not None]
        if known and not all(x is not None and np.array_equal(x, known[0]) for x in found):
            raise _unknown()
        return known[0] if known else None
    own = np.arange(n) + 1
    if mask is None or (mask.ndim == 2 and bool(mask.bool().all())):
        return None
    if mask.ndim != 4:
        raise _unknown()
    visible = (mask if mask.dtype == torch.bool else mask >= 0)[0, 0, -n:, :n].numpy()
    first, ends = visible.argmax(1), n - visible[:, ::-1].argmax(1)
    expected = np.maximum(own - window, 0) if window else np.zeros(n)
    if not (visible.sum(1) == ends - first).all() or not np.array_equal(first, expected):
        raise _unknown()
    if (ends < own).any() or (np.diff(ends) < 0).any():
        raise _unknown()
    return None if np.array_equal(ends, own) else ends


def _unknown() -> RefusedError:
    return RefusedError(
        "the native decoder does not know its masks of media; give runtime='transformers'"
    )


def added_states(given: dict[str, Any], n: int) -> dict[int, Tensor]:
    """Return what is added to states behind layers (Qwen3-VL's features of pictures)."""
    features, where = given.get("deepstack_visual_embeds"), given.get("visual_pos_masks")
    if features is None:
        return {}
    assert where is not None
    made: dict[int, Tensor] = {}
    for layer, rows in enumerate(features):
        made[layer] = torch.zeros(n, rows.shape[-1])
        made[layer][where.reshape(-1)] = rows.float()
    return made


def stock_media():  # not annotated: the type is the module's
    """Import what reads media on torch, late as it takes seconds, which text does without."""
    from foretoken.models.stock import media

    return media


def facts_of(network: PreTrainedModel) -> dict[str, Any]:
    """Return what is stored of a decoder that reads media. Raises RefusedError for one that reads
    more of them than `EmbeddedPrompt` has, or that is within a model whose `generate` differs."""
    media = stock_media()
    more = media.accepted_by(type(network.get_decoder())) - ARGUMENTS
    if more or media.writer(network) is not network:
        raise unread(network, ", ".join(sorted(more)) or "media by a model within it")
    return {"axes": axes_of(network)}


def axes_of(network: PreTrainedModel) -> list[int]:
    """Return which axis of positions turns each pair of a head, of a decoder of three axes, as
    Qwen-VL's; [] for one axis. Raises RefusedError for others."""
    config: Any = network.config.get_text_config(decoder=True)
    rotary: Any = getattr(network.get_decoder(), "rotary_emb", None)
    settings: Any = getattr(config, "rope_parameters", None) or {}
    sections = getattr(rotary, "mrope_section", settings.get("mrope_section"))
    if sections is None:
        return []
    if not isinstance(sections, list) or len(sections) != 3:
        raise unread(network, "positions of other axes")
    each = [rotary(torch.zeros(1), places)[1] for places in torch.eye(3).long()[:, :, None, None]]
    if each[0].ndim == 4:  # families mix these later
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    sines = torch.stack([sine.reshape(-1) for sine in each])
    half, expected = sines.shape[1] // 2, rotary.inv_freq.sin()
    for pairs in (sines.unflatten(1, (2, half)), sines.unflatten(1, (half, 2)).mT):
        if torch.allclose(pairs.sum(0), expected.expand(2, half)):
            axes = pairs.abs().argmax(0)
            if torch.equal(axes[0], axes[1]):
                return axes[0].tolist()
    raise unread(network, "positions of axes that mix in another way")


def unread(network: PreTrainedModel, what: str) -> RefusedError:
    return RefusedError(
        f"{type(network).__name__} is not built as the native decoder expects ({what})"
    )
