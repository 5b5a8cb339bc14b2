"""A decoder on the native kernels whose prompts may hold pictures and sounds.

transformers' own code makes of these, on torch, what the decoder reads of a prompt: embeddings,
positions of one or several axes, up to where each token attends, what is added between layers, once
for each prompt. The decoder's own layers are not kept there. A family whose decoder reads more is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.errors import RefusedError, kind_of, one_line
from foretoken.kernels.tokens import THREADS
from foretoken.media.inputs import Media
from foretoken.models.native.embedded import INPUTS, EmbeddedPrompt, added_states, ends_of
from foretoken.models.native.model import NativeModel, Unshared
from foretoken.models.rows import check_room
from foretoken.storage.cache import remember, remembered

if TYPE_CHECKING:  # which takes seconds to import
    from transformers import PreTrainedModel

    from foretoken.models.native.passes import NativePasses

CHECKS = "media-checks.json"
INSTEAD = "give runtime='transformers'"


class NativeMediaModel(NativeModel):
    """Model protocol over `passes`, with media in prompts.

    network: Loads the model, of which all but the decoder's layers is used, when the first media
    come. exact: Makes a model of it in float32, to check how this one reads media.
    """

    needs_media = False

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
        self._checked: dict[frozenset[str], str | None] = {}

    @cached_property
    def _network(self) -> Any:
        from foretoken.models.stock.attention import twin  # late: takes seconds
        from foretoken.models.stock.taps import layers_of

        network = twin(self._load().float().eval())
        layers: Any = layers_of(network)
        del layers[:]
        return network

    def objection(self, media: Media) -> str | None:
        from foretoken.models.stock.media import UNENDED, marks  # late: takes seconds

        if media.ids and media.ids[-1] in marks(self._network):
            return UNENDED
        names = frozenset(media.inputs)
        if names not in self._checked:
            reason, judged = self._check(media)
            if not judged:
                return reason
            self._checked[names] = reason
        reason = self._checked[names]
        try:
            if reason is None:
                self._embedded(media.ids, media)
                return None
        except RefusedError as error:
            reason = str(error)
        except Exception as error:  # a family's code raises anything
            return f"{type(self._network).__name__} raised {kind_of(error)}: {one_line(error)}"
        return reason

    def _check(self, media: Media) -> tuple[str | None, bool]:
        """Compare with transformers' own `generate` of all of the model, in float32, once for each
        kind of media of a folder; return why they differ, and whether that is so of all."""
        from foretoken.models.stock.media import objection  # late: takes seconds

        key = f"{self.identity} {' '.join(sorted(media.inputs))}"
        known = remembered(CHECKS)
        if self.identity is not None and key in known:
            return known[key], True
        network = self._load().float().eval()
        with every_torch_thread():
            reason, judged = objection(network, self._exact(network), media)  # pyright: ignore
        if reason and " is not exact " in reason:
            reason += f"; {INSTEAD}"
        if judged and self.identity is not None:
            remember(CHECKS, key, reason)
        return reason, judged

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        media, self.attached = self.attached or [None] * len(prompts), []
        # a draft that cannot read a prompt begins with nothing
        pairs = zip(prompts, media, strict=True)
        made = [self._embedded(prompt, one) if one and prompt else None for prompt, one in pairs]
        limit = self.longest if self._beyond else self.context
        check_room([0] * len(prompts), [len(p) for p in prompts], limit)
        first = len(self.rows)
        super().start([[] if x else prompt for prompt, x in zip(prompts, made, strict=True)])
        for b, one in enumerate(made, first):
            if one:
                self._read_embedded(b, one.first(len(prompts[b - first])), one.shift)

    def _read_embedded(self, b: int, prompt: EmbeddedPrompt, shift: int) -> None:
        row = self.rows[b]
        self.salts[b], row.following, row.shift = Unshared(), False, shift
        if prompt.ends is not None:  # tokens attend to later ones of the same pass
            self.passes.fit(len(prompt.ids))
        blocks: list[list[int]] = [[] for _ in self.rows]
        blocks[b] = prompt.ids
        self.passes.given, self.passes.embedded = prompt.embeddings, prompt
        try:
            self._appended(blocks, [0 for _ in blocks])
        finally:
            self.passes.given = self.passes.embedded = None

    @torch.inference_mode()
    def _embedded(self, prompt: list[int], media: Media) -> EmbeddedPrompt:
        """Return what the decoder reads of a prompt, or of all of one of which it is the first
        part; the media keep that of their own."""
        from foretoken.models.stock.media import decoder_arguments, first_pass  # late: seconds

        ids = media.ids if len(prompt) < len(media.ids) else prompt
        key = f"embedded {id(self)}"
        if key in media.encoded and ids == media.ids:
            return media.encoded[key]
        network, text = self._network, torch.tensor([ids])
        with every_torch_thread():
            fitted = media.fitted(len(ids), network.dtype, network.device)
            given = decoder_arguments(network, first_pass(network, text, fitted))
            made = self._understood(ids, given)
        if ids == media.ids:
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
        from foretoken.models.stock.media import marks  # late: takes seconds

        config = self._network.config.get_text_config(decoder=True)
        marked = marks(self._network)
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
