"""A decoder on the native kernels whose prompts may contain images and audio.

transformers' own code on torch computes the decoder's inputs, once for each prompt: embeddings,
positions on one or several axes, attention masks, and states that are added between layers. For
this, the transformers model is loaded without its decoder layers. A family whose decoder takes
other inputs is refused.
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

from foretoken.errors import RefusedError, log_error_kind, to_one_line
from foretoken.kernels.tokens import NUM_THREADS
from foretoken.media.inputs import Media
from foretoken.models.native.model import NativeModel, UnsharedSalt
from foretoken.models.row_slots import check_room
from foretoken.storage.cache import load_cached_values, save_cached_value

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel

    from foretoken.models.native.passes import NativePasses

SLIDING_LAYERS = "sliding_attention"
# Arguments of a decoder's forward that are supported, or that have no effect on a prefill
VISUAL_ARGUMENTS = {"visual_pos_masks", "deepstack_visual_embeds"}  # states added after layers
LAYER_INPUTS_ARGUMENT = "per_layer_inputs"
KNOWN_ARGUMENTS = {
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "input_ids",
    LAYER_INPUTS_ARGUMENT,
    *VISUAL_ARGUMENTS,
}
KNOWN_ARGUMENTS |= {"self", "kwargs", "use_cache", "past_key_values", "logits_to_keep", "labels"}
CHECKS_FILE = "media-checks.json"
TORCH_REMEDY = "give runtime='transformers'"


@dataclass(frozen=True, slots=True)
class EmbeddedPrompt:
    """A decoder's inputs for a prompt of n tokens with media.

    Attributes:
        ids: Token ids, used to look up per-layer inputs.
        embeddings: `[n, H]`.
        positions: `[axes, n]`.
        axes: For each pair of numbers in a head, the axis whose positions rotate the pair; [] if
            there is only one axis.
        ends: `[n]`: token i attends to the positions before ends[i]. None: attention is causal.
        added: For some layers, states `[n, H]` that are added to the layer's output.
    """

    ids: list[int]
    embeddings: Tensor
    positions: NDArray[np.int64]
    axes: list[int]
    ends: NDArray[np.int64] | None
    added: dict[int, Tensor]

    @property
    def position_shift(self) -> int:
        """The difference between the next token's rotary position and its index. An
        image may take fewer positions than tokens, so the difference may be negative."""
        return int(self.positions.max()) + 1 - len(self.ids)

    def take_first(self, n: int) -> EmbeddedPrompt:
        ends = None if self.ends is None else self.ends[:n]
        return replace(self, ids=self.ids[:n], embeddings=self.embeddings[:n], ends=ends)

    def drop_first(self, n: int) -> EmbeddedPrompt | None:
        """Return the inputs of all but the first n tokens; None if no tokens remain."""
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
    """A Model over `passes` whose prompts may contain media.

    network: Loads transformers' model; called when the first media arrive. All of that model except
    its decoder layers is used.

    exact: Converts transformers' model to a native float32 model, to compare both on media.
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
        self.joining_media: list[Media | None] = []
        self._load, self._exact, self._axes = network, exact, facts["sees"]["axes"]
        # sets of input names, such as {"pixel_values"}, for which the comparison has passed
        self._checked_inputs: set[frozenset[str]] = set()

    @cached_property
    def _network(self) -> Any:
        return import_stock_media().strip_decoder_layers(self._load().float().eval())

    def find_media_problem(self, media: Media) -> str | None:
        names, network = frozenset(media.inputs), None
        if names not in self._checked_inputs and not self._was_checked(names):
            network = self._load().float().eval()  # loaded once, for the check and for `_network`
            vars(self).setdefault("_network", import_stock_media().strip_decoder_layers(network))
        try:
            self._embed(media)
        except RefusedError as error:
            return str(error)
        except Exception as error:  # a family's code raises anything
            family = type(self._network).__name__
            return f"{family} raised {log_error_kind(error)}: {to_one_line(error)}"
        if network is not None and (reason := self._compare_with_stock(network, media)):
            return reason
        self._checked_inputs.add(names)
        return None

    def _was_checked(self, names: frozenset[str]) -> bool:
        """Return whether an earlier run, with a model of the same files, has stored that these
        inputs passed the comparison."""
        return self.identity is not None and bool(
            load_cached_values(CHECKS_FILE).get(self._get_check_key(names))
        )

    def _get_check_key(self, names: frozenset[str]) -> str:
        return f"{self.identity} {' '.join(sorted(names))}"

    def _compare_with_stock(self, network: PreTrainedModel, media: Media) -> str | None:
        """Compare the output of a float32 native model with transformers' `generate` of the whole
        model, on these media. Return why the outputs differ. If they agree, store that fact, so
        that the comparison need not be repeated, and return None."""
        with use_all_torch_threads():
            exact: Any = self._exact(network)
            reason, judged = import_stock_media().find_media_objection(network, exact, media)
        if reason:
            return f"{reason}; {TORCH_REMEDY}" if judged and " is not exact " in reason else reason
        if self.identity is not None:
            save_cached_value(CHECKS_FILE, self._get_check_key(frozenset(media.inputs)), True)
        return None

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        media, self.joining_media = self.joining_media or [None] * len(prompts), []
        # a draft that cannot take a prompt's media starts with an empty prompt
        pairs = zip(prompts, media, strict=True)
        made = [self._embed(one) if one and prompt else None for prompt, one in pairs]
        limits = self.compute_max_lengths([self._long_context] * len(prompts))
        check_room([0] * len(prompts), [len(p) for p in prompts], limits)
        first = len(self.seqs)
        super().start([[] if x else prompt for prompt, x in zip(prompts, made, strict=True)])
        for b, one in enumerate(made, first):
            if one:
                self._prefill_embedded(b, prompts[b - first], one)

    def _prefill_embedded(self, b: int, prompt: list[int], embedded: EmbeddedPrompt) -> None:
        """Prefill sequence b with a prompt that contains media. `prompt` may be shorter than the
        embedded prompt, or longer if the sequence joins again with its output: output tokens are
        embedded as text, even if they have ids of media tokens."""
        seq, n = self.seqs[b], len(embedded.ids)
        self.salts[b], seq.may_share, seq.position_shift = (
            UnsharedSalt(),
            False,
            embedded.position_shift,
        )
        first = embedded.take_first(min(n, len(prompt)))
        if first.ends is not None:  # tokens attend to later tokens, so all must be in one pass
            self.passes.reserve_tokens(len(first.ids))
        self.passes.input_states, self.passes.embedded_prompt = first.embeddings, first
        self._append_tokens(b, first.ids)
        if len(prompt) > n:
            self._append_tokens(b, prompt[n:])
        self.token_ids[b] = list(prompt)

    def _append_tokens(self, b: int, tokens: list[int]) -> None:
        blocks: list[list[int]] = [[] for _ in self.seqs]
        blocks[b] = tokens
        self._append_blocks(blocks, [0 for _ in blocks])

    @torch.inference_mode()
    def _embed(self, media: Media) -> EmbeddedPrompt:
        """Return the decoder's inputs for a prompt with media; they are cached in `media`. Raises
        RefusedError if a token attends to the last token, because the last token may be scored in a
        later pass."""
        key = f"embedded {id(self)}"
        if key in media.encoded:
            return media.encoded[key]
        network, ids, stock = self._network, media.ids, import_stock_media()
        if not ids or ids[-1] in stock.get_media_token_ids(network):
            raise RefusedError(stock.ENDS_IN_MEDIA)
        with use_all_torch_threads():
            fitted = media.fit_inputs(len(ids), network.dtype, network.device)
            first = stock.prepare_first_forward(network, torch.tensor([ids]), fitted)
            made = self._make_prompt(ids, stock.capture_decoder_arguments(network, first))
        if made.ends is not None and len(ids) > 1 and made.ends[-2] >= len(ids):
            raise RefusedError(stock.ENDS_IN_MEDIA)
        media.encoded[key] = made
        return made

    def _make_prompt(self, ids: list[int], given: dict[str, Any]) -> EmbeddedPrompt:
        """Return the decoder's inputs, given the arguments that transformers passes to its decoder.
        Raises RefusedError for unknown kinds of masks or per-layer inputs."""
        n, network = len(ids), self._network
        positions = given.get("position_ids")
        position_ids = torch.arange(n)[None] if positions is None else positions[-3:].reshape(-1, n)
        if len(position_ids) > 1 and bool((position_ids == position_ids[:1]).all()):
            position_ids = position_ids[:1]
        if given.get(LAYER_INPUTS_ARGUMENT) is not None:
            ids = self._find_lookup_ids(ids, given[LAYER_INPUTS_ARGUMENT])
        config = network.config.get_text_config(decoder=True)
        factor = getattr(config, "embedding_multiplier", None) or 1.0  # the decoder applies it
        embeddings = given["inputs_embeds"][0] * factor
        window = getattr(config, "sliding_window", None)
        return EmbeddedPrompt(
            ids,
            embeddings.float().contiguous(),
            position_ids.numpy(),
            self._axes,
            find_attention_ends(given.get("attention_mask"), n, window),
            collect_added_states(given, n),
        )

    def _find_lookup_ids(self, ids: list[int], inputs: Tensor) -> list[int]:
        """Return the ids with which families look up per-layer inputs: the prompt's ids, with the
        padding id in place of media tokens. Raises RefusedError if these ids do not give
        `inputs`."""
        config = self._network.config.get_text_config(decoder=True)
        marked = import_stock_media().get_media_token_ids(self._network)
        other = [config.pad_token_id if id in marked else id for id in ids]
        table = self._network.get_decoder().embed_tokens_per_layer
        if not torch.equal(table(torch.tensor(other)).reshape(inputs[0].shape), inputs[0]):
            raise RefusedError(
                f"the native decoder does not support the model's per-layer inputs; {TORCH_REMEDY}"
            )
        return other


@contextmanager
def use_all_torch_threads() -> Generator[None]:
    """Let torch use as many threads as the kernels do; the kernels are idle meanwhile."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(NUM_THREADS)
        yield
    finally:
        torch.set_num_threads(before)


def find_attention_ends(mask: Any, n: int, window: int | None) -> NDArray[np.int64] | None:
    """Return ends `[n]`, such that token i attends to positions before ends[i]; None if the mask is
    causal. Raises RefusedError for masks that are not of this form.

    mask: A mask as transformers makes it: None, a padding mask `[B, n]`, a mask of all pairs `[B,
    1, n, n]`, or a dict of masks by kind of layer.
    """
    if isinstance(mask, dict):
        found = [
            find_attention_ends(x, n, window if k == SLIDING_LAYERS else None)
            for k, x in mask.items()
        ]
        known = [x for x in found if x is not None]
        if known and not all(x is not None and np.array_equal(x, known[0]) for x in found):
            raise _make_mask_refusal()
        return known[0] if known else None
    own = np.arange(n) + 1
    if mask is None or (mask.ndim == 2 and bool(mask.bool().all())):
        return None
    if mask.ndim != 4:
        raise _make_mask_refusal()
    visible = (mask if mask.dtype == torch.bool else mask >= 0)[0, 0, -n:, :n].numpy()
    first, ends = visible.argmax(1), n - visible[:, ::-1].argmax(1)
    expected = np.maximum(own - window, 0) if window else np.zeros(n)
    if not (visible.sum(1) == ends - first).all() or not np.array_equal(first, expected):
        raise _make_mask_refusal()
    if (ends < own).any() or (np.diff(ends) < 0).any():
        raise _make_mask_refusal()
    return None if np.array_equal(ends, own) else ends


def _make_mask_refusal() -> RefusedError:
    return RefusedError(
        "the native decoder does not support the model's attention masks for media; give "
        "runtime='transformers'"
    )


def collect_added_states(given: dict[str, Any], n: int) -> dict[int, Tensor]:
    """Return, by layer, the states `[n, H]` to add to the layer's output (Qwen3-VL's image
    features). given: the arguments of transformers' decoder."""
    features, positions = given.get("deepstack_visual_embeds"), given.get("visual_pos_masks")
    if features is None:
        return {}
    assert positions is not None
    made: dict[int, Tensor] = {}
    for layer, rows in enumerate(features):
        made[layer] = torch.zeros(n, rows.shape[-1])
        made[layer][positions.reshape(-1)] = rows.float()
    return made


def import_stock_media():  # not annotated: the type is the module's
    """Return the module that encodes media on torch. It is imported here because its import takes
    seconds."""
    from foretoken.models.stock import media

    return media


def describe_media(network: PreTrainedModel) -> dict[str, Any]:
    """Return facts to store about a model that takes media. Raises RefusedError if the decoder has
    inputs that `EmbeddedPrompt` lacks, or is in an inner model with a `generate` of its own."""
    media = import_stock_media()
    more = media.get_forward_parameters(type(network.get_decoder())) - KNOWN_ARGUMENTS
    if more or media.get_language_model(network) is not network:
        raise make_media_refusal(
            network, ", ".join(sorted(more)) or "media processed by an inner model"
        )
    return {"axes": find_position_axes(network)}


def find_position_axes(network: PreTrainedModel) -> list[int]:
    """Return, for each pair of numbers in a head, the axis whose positions rotate the pair, for a
    decoder with three axes of positions (Qwen-VL); [] for a decoder with one axis. Raises
    RefusedError for any other decoder."""
    config: Any = network.config.get_text_config(decoder=True)
    rotary: Any = getattr(network.get_decoder(), "rotary_emb", None)
    settings: Any = getattr(config, "rope_parameters", None) or {}
    sections = getattr(rotary, "mrope_section", settings.get("mrope_section"))
    if sections is None:
        return []
    if not isinstance(sections, list) or len(sections) != 3:
        raise make_media_refusal(network, "another number of position axes")
    each = [rotary(torch.zeros(1), places)[1] for places in torch.eye(3).long()[:, :, None, None]]
    if each[0].ndim == 4:  # [axes, ..]: such families mix the axes after the rotary module
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    sines = torch.stack([sine.reshape(-1) for sine in each])
    half, expected = sines.shape[1] // 2, rotary.inv_freq.sin()
    for pairs in (sines.unflatten(1, (2, half)), sines.unflatten(1, (half, 2)).mT):
        if torch.allclose(pairs.sum(0), expected.expand(2, half)):
            axes = pairs.abs().argmax(0)
            if torch.equal(axes[0], axes[1]):
                return axes[0].tolist()
    raise make_media_refusal(network, "position axes that are mixed in another way")


def make_media_refusal(network: PreTrainedModel, what: str) -> RefusedError:
    return RefusedError(
        f"{type(network).__name__} is not built as the native decoder expects ({what})"
    )
