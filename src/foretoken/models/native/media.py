"""A decoder on the native kernels whose prompts may hold pictures and sounds.

transformers' own code makes of these, on torch, what the decoder reads of a prompt: embeddings,
positions of one or several axes, up to where each token attends, what is added between layers, once
for each prompt. The decoder's own layers are not kept there. A family whose decoder reads more is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.errors import RefusedError, kind_of, one_line
from foretoken.kernels.tokens import THREADS
from foretoken.media.inputs import Media
from foretoken.models.native.model import NativeModel, Unshared
from foretoken.models.rows import check_room
from foretoken.storage.cache import remember, remembered

if TYPE_CHECKING:  # which takes seconds to import
    from transformers import PreTrainedModel

    from foretoken.models.native.passes import NativePasses

SLIDING = "sliding_attention"
# Arguments of a decoder's forward that are read here, or mean nothing for a prompt
VISUAL = {"visual_pos_masks", "deepstack_visual_embeds"}  # states that are added behind layers
INPUTS = "per_layer_inputs"
ARGUMENTS = {"inputs_embeds", "position_ids", "attention_mask", "input_ids", INPUTS, *VISUAL}
ARGUMENTS |= {"self", "kwargs", "use_cache", "past_key_values", "logits_to_keep", "labels"}
CHECKS = "media-checks.json"
INSTEAD = "give runtime='transformers'"


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


class NativeMediaModel(NativeModel):
    """A Model over `passes`, with media in prompts.

    network: Loads the model, of which all but the decoder's layers is used, when the first media
    come. exact: Makes a model of it in float32, to check how this one reads media.
    """

    capabilities = replace(NativeModel.capabilities, media=True)

    def __init__(
        self,
        passes: NativePasses,
        facts: dict[str, Any],
        network: Callable[[], PreTrainedModel],
        exact: Callable[[PreTrainedModel], NativeModel],
    ) -> None:
        super().__init__(passes, facts)
        self.attached: list[Media | None] = []
        self._load, self._exact, self._axes = network, exact, facts["sees"]["axes"]
        self._checked: set[frozenset[str]] = set()  # names of inputs that are read exactly

    @cached_property
    def _network(self) -> Any:
        return stock_media().front(self._load().float().eval())

    def objection(self, media: Media) -> str | None:
        names, whole = frozenset(media.inputs), None
        if names not in self._checked and not self._known(names):
            whole = self._load().float().eval()  # once for the check and what is left of it
            vars(self).setdefault("_network", stock_media().front(whole))
        try:
            self._embedded(media)
        except RefusedError as error:
            return str(error)
        except Exception as error:  # a family's code raises anything
            return f"{type(self._network).__name__} raised {kind_of(error)}: {one_line(error)}"
        if whole is not None and (reason := self._check(whole, media)):
            return reason
        self._checked.add(names)
        return None

    def _known(self, names: frozenset[str]) -> bool:
        """Tell whether media of this kind were compared before, of a folder."""
        return self.identity is not None and bool(remembered(CHECKS).get(self._key(names)))

    def _key(self, names: frozenset[str]) -> str:
        return f"{self.identity} {' '.join(sorted(names))}"

    def _check(self, network: PreTrainedModel, media: Media) -> str | None:
        """Compare with transformers' own `generate` of all of the model, in float32, until they
        agree, once for each kind of media; return why they differ."""
        with every_torch_thread():
            exact: Any = self._exact(network)
            reason, judged = stock_media().objection(network, exact, media)
        if reason:
            return f"{reason}; {INSTEAD}" if judged and " is not exact " in reason else reason
        if self.identity is not None:
            remember(CHECKS, self._key(frozenset(media.inputs)), True)
        return None

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        media, self.attached = self.attached or [None] * len(prompts), []
        # a draft that cannot read a prompt begins with nothing
        pairs = zip(prompts, media, strict=True)
        made = [self._embedded(one) if one and prompt else None for prompt, one in pairs]
        limits = self.limits([self._beyond] * len(prompts))
        check_room([0] * len(prompts), [len(p) for p in prompts], limits)
        first = len(self.rows)
        super().start([[] if x else prompt for prompt, x in zip(prompts, made, strict=True)])
        for b, one in enumerate(made, first):
            if one:
                self._read_embedded(b, prompts[b - first], one)

    def _read_embedded(self, b: int, prompt: list[int], embedded: EmbeddedPrompt) -> None:
        """Read a prompt with media, or the first part of it, into row b; and what follows them in
        a sequence that joins again, which is text, whatever its tokens stand for."""
        row, n = self.rows[b], len(embedded.ids)
        self.salts[b], row.following, row.shift = Unshared(), False, embedded.shift
        first = embedded.first(min(n, len(prompt)))
        if first.ends is not None:  # tokens attend to later ones of the same pass
            self.passes.fit(len(first.ids))
        self.passes.given, self.passes.embedded = first.embeddings, first
        self._append(b, first.ids)
        if len(prompt) > n:
            self._append(b, prompt[n:])
        self.texts[b] = list(prompt)

    def _append(self, b: int, tokens: list[int]) -> None:
        blocks: list[list[int]] = [[] for _ in self.rows]
        blocks[b] = tokens
        self._appended(blocks, [0 for _ in blocks])

    @torch.inference_mode()
    def _embedded(self, media: Media) -> EmbeddedPrompt:
        """Return what the decoder reads of a prompt with media, which keep it. Raises RefusedError
        where a token attends to the last one, which is read by itself."""
        key = f"embedded {id(self)}"
        if key in media.encoded:
            return media.encoded[key]
        network, ids, stock = self._network, media.ids, stock_media()
        if not ids or ids[-1] in stock.marks(network):
            raise RefusedError(stock.UNENDED)
        with every_torch_thread():
            fitted = media.fitted(len(ids), network.dtype, network.device)
            first = stock.first_pass(network, torch.tensor([ids]), fitted)
            made = self._understood(ids, stock.decoder_arguments(network, first))
        if made.ends is not None and len(ids) > 1 and made.ends[-2] >= len(ids):
            raise RefusedError(stock.UNENDED)
        media.encoded[key] = made
        return made

    def _understood(self, ids: list[int], given: dict[str, Any]) -> EmbeddedPrompt:
        """RefusedError where the decoder is given what this one does not read."""
        n, network = len(ids), self._network
        positions = given.get("position_ids")
        places = torch.arange(n)[None] if positions is None else positions[-3:].reshape(-1, n)
        if len(places) > 1 and bool((places == places[:1]).all()):
            places = places[:1]
        if given.get(INPUTS) is not None:
            ids = self._looked_up(ids, given[INPUTS])
        config = network.config.get_text_config(decoder=True)
        factor = getattr(config, "embedding_multiplier", None) or 1.0  # which the decoder applies
        embeddings = given["inputs_embeds"][0] * factor
        window = getattr(config, "sliding_window", None)
        return EmbeddedPrompt(
            ids,
            embeddings.float().contiguous(),
            places.numpy(),
            self._axes,
            ends_of(given.get("attention_mask"), n, window),
            added_states(given, n),
        )

    def _looked_up(self, ids: list[int], inputs: Tensor) -> list[int]:
        """Return the tokens whose inputs of layers these are: another one stands for media."""
        config = self._network.config.get_text_config(decoder=True)
        marked = stock_media().marks(self._network)
        other = [config.pad_token_id if id in marked else id for id in ids]
        table = self._network.get_decoder().embed_tokens_per_layer
        if not torch.equal(table(torch.tensor(other)).reshape(inputs[0].shape), inputs[0]):
            raise RefusedError(f"the native decoder does not know its inputs of layers; {INSTEAD}")
        return other


@contextmanager
def every_torch_thread() -> Generator[None]:
    """Torch on as many threads as the kernels, which wait meanwhile."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(THREADS)
        yield
    finally:
        torch.set_num_threads(before)


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


def facts_of_media(network: PreTrainedModel) -> dict[str, Any]:
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
