"""Drafters that use the target's hidden states (EAGLE-3, MTP, DFlash, DSpark and assistants), made
from published drafts or from the target's own files.

A draft of another target is refused before the target is loaded. EAGLE-3 and MTP drafts (pairs
decoders) and block drafts (DFlash, DSpark) run on the target's backend; if that is the native
decoder, in int8 by default. Assistants run on the native decoder in the target's dtype, or on
torch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_layers import MtpLayer

from foretoken.costing import stored_costs
from foretoken.costing.pair_costs import PROBE_PROMPT
from foretoken.drafters.assistant import AssistantDrafter
from foretoken.drafters.dflash import BlockDrafter, BlockModel
from foretoken.drafters.mtp_stacks import MtpStackDrafter
from foretoken.drafters.pairs import HiddenStateDraftModel, PairsDrafter
from foretoken.errors import ForetokenError, RefusedError, log_error_kind, to_one_line
from foretoken.loading.gguf_mtp import read_mtp_weights
from foretoken.loading.options import ROUNDED_DTYPES, LoadOptions
from foretoken.loading.published_drafts import (
    BLOCK_KINDS,
    MASK_EMBEDDING_FILE,
    PublishedDraft,
)
from foretoken.loading.sources import ModelSource
from foretoken.loading.target import LoadedTarget, PendingDraft, TargetEmbeddings, TargetInfo
from foretoken.loading.weights import FolderWeights
from foretoken.models.base import Model
from foretoken.models.graph_blocks import GraphBlockModel
from foretoken.models.graph_pairs import GraphPairModel
from foretoken.models.graphs import rehearse
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.native.assistant import NativeAssistant, PackedEmbedding
from foretoken.models.native.block_reader import BlockDecoder
from foretoken.models.native.conversion import NATIVE_DTYPES, NativeConversion, SharedHead
from foretoken.models.native.model import NativeModel
from foretoken.models.native.passes import NativePasses
from foretoken.models.stock import dflash_files, pair_files
from foretoken.models.stock.assistant import Assistant, StockAssistant
from foretoken.models.stock.assistant_files import build_assistant
from foretoken.models.stock.dflash import BlocksDraft, StockBlockModel
from foretoken.models.stock.mtp_stacks import MtpStackNetwork, StockMtpStack
from foretoken.models.stock.pair_files import PairsDraft
from foretoken.models.stock.pairs import PairsNetwork, StockPairModel
from foretoken.models.store import ConversionSource
from foretoken.storage.cache import load_cached_values, save_cached_value

log = logging.getLogger(__name__)

GRAPH_RUNTIMES = "graphs", "compiled"
TAP_CHOICES_FILE = "taps.json"  # stored choices between the inputs and the outputs of layers
TRIAL_TOKENS = 200  # new tokens of the target on which each choice is measured
TRIAL_GAMMA = 4
MIN_ALPHA_GAIN = 0.02  # gain in alpha for which the second meaning of the layer ids is chosen


def prepare_draft(draft: PublishedDraft, target: TargetInfo, options: LoadOptions) -> PendingDraft:
    """Return a published draft that was checked against the target and can be attached to the
    target once the target is loaded. Raises RefusedError if the draft does not fit the target, is
    of an unsupported kind or cannot be read."""
    try:
        return _prepare(draft, target, options)
    except ForetokenError:
        raise
    except Exception as error:  # a damaged file raises any type
        raise RefusedError(
            f"{draft.name} cannot be read as a draft of kind {draft.kind!r:.40}: its files raised "
            f"{log_error_kind(error)}: {to_one_line(error)}; download the draft again, or give "
            "another draft"
        ) from error


def _prepare(draft: PublishedDraft, target: TargetInfo, options: LoadOptions) -> PendingDraft:
    weights, structure = FolderWeights(draft.folder), target.facts.structure
    pair_files.require_verifier(draft.name, draft.config, structure)
    if draft.kind == "eagle3":
        tensors = weights.read_weights(weights.keys)
        files = draft if "lm_head.weight" in tensors else _add_target_source(draft, target)
        embeddings = TargetEmbeddings(target.facts, None)
        pairs = pair_files.build_eagle(
            draft.name, draft.config, tensors, structure, lambda: embeddings.head
        )
        if not pairs.other_taps:
            because = f"{draft.name} specifies which hidden states it uses"
            options.refuse("draft_taps", because=because)
        return PendingPairsDraft(draft.name, files, pairs, options).draft
    if draft.kind == "mtp":
        options.refuse("draft_taps", because=f"{draft.name} uses the target's last hidden states")
        if (count := draft.config.get("num_nextn_predict_layers", 1)) != 1:
            raise RefusedError(
                f"{draft.name} has num_nextn_predict_layers {count!r:.40}, but only 1 is "
                "supported; give another draft"
            )
        own = weights.read_weights(weights.keys)
        return _prepare_mtp(draft.name, _add_target_source(draft, target), own, target, options)
    if draft.kind in BLOCK_KINDS:
        return _prepare_blocks(draft, target, options)
    if draft.kind == "assistant":
        return _prepare_assistant(draft, target, options)
    raise RefusedError(
        f"{draft.name} is a draft of kind {draft.kind!r:.40}, which is not supported; give a draft "
        f"of kind eagle3, mtp, {', '.join(BLOCK_KINDS)} or assistant, or a model"
    )


def _add_target_source(draft: PublishedDraft, target: TargetInfo) -> ConversionSource | None:
    """Return the files by which the conversion of a draft is stored if it depends on the target,
    for instance on its output layer; None if the target is in memory: nothing is stored."""
    source = target.facts.source
    return source and replace(draft, target_source=source)


def _prepare_assistant(
    draft: PublishedDraft, target: TargetInfo, options: LoadOptions
) -> PendingDraft:
    because = "an assistant has the target's dtype and hidden states"
    options.refuse("draft_taps", "draft_dtype", because=because)
    if options.runtime not in ("auto", "transformers", "native"):
        raise RefusedError(
            f"{draft.name} uses the target's keys and values, which {options.runtime} does not "
            "share; give runtime='auto', or another draft"
        )
    weights = FolderWeights(draft.folder)
    config = target.facts.structure.config.get_text_config(decoder=True)
    rounded = options.dtype in ROUNDED_DTYPES
    dtype = torch.float32 if rounded else getattr(torch, options.dtype, torch.float32)
    tensors = weights.read_weights(weights.keys)
    network: Any = build_assistant(draft.config, tensors, config, dtype)
    native = _convert_assistant(draft, network, target, options)

    def attach(loaded: LoadedTarget) -> AssistantDrafter:
        model = _require_taps(loaded, (FINAL_TAP,), draft.name)
        if native is not None and isinstance(model, NativeModel):
            assistant = NativeAssistant(model, *native, network)
            return AssistantDrafter(model, assistant, PackedEmbedding(model.passes))
        if not model.capabilities.shared_kv:
            raise RefusedError(
                f"{draft.name} uses the target's keys and values, but {target.name} does not share "
                "them; give another draft"
            )
        embedding: Any = TargetEmbeddings(target.facts, loaded.model).embedding
        weight = embedding.weight
        assistant = StockAssistant(network.to(weight.device, weight.dtype), model)
        return AssistantDrafter(model, assistant, embedding)

    return PendingDraft(attach, taps=(FINAL_TAP,), runtime=None if native else "transformers")


def _convert_assistant(
    draft: PublishedDraft, network: Assistant, target: TargetInfo, options: LoadOptions
) -> tuple[NativePasses, dict[str, Any]] | None:
    """Return an assistant in the target's dtype for the native decoder; None if the target must run
    on torch. Raises RefusedError if the options require the native decoder, but it does not support
    the assistant."""
    required = options.runtime == "native" or options.dtype in ROUNDED_DTYPES
    in_memory = target.facts.source is None
    dtype = "float32" if in_memory else target.facts.resolve_dtype(options.dtype)
    on_cpu = torch.device(options.device).type == "cpu"
    possible = options.runtime == "auto" and on_cpu and not in_memory and dtype in NATIVE_DTYPES
    if not required and not possible:
        return None
    try:
        source = _add_target_source(draft, target)
        load: Any = partial(copy.deepcopy, network)
        return NativeConversion(source, dtype, load).load_passes()
    except RefusedError as refusal:
        if required:
            raise
        log.info("%s", refusal)
        return None


def _prepare_blocks(
    draft: PublishedDraft, target: TargetInfo, options: LoadOptions
) -> PendingDraft:
    because = f"{draft.name} specifies which hidden states it uses"
    options.refuse("draft_taps", because=because)
    if (draft.folder / MASK_EMBEDDING_FILE).exists():
        raise RefusedError(
            f"{draft.name} has a separate embedding of the mask token in {MASK_EMBEDDING_FILE}, "
            "which is not supported; give another draft"
        )
    weights = FolderWeights(draft.folder)
    tensors = weights.read_weights(weights.keys)
    text_config = target.facts.structure.config.get_text_config(decoder=True)
    size = text_config.hidden_size
    dflash_files.require_fit(
        draft.config, tensors, size, target.facts.V, text_config.num_hidden_layers
    )
    taps = dflash_files.parse_block_config(draft.config).layout.taps

    def attach(loaded: LoadedTarget) -> BlockDrafter:
        model = _require_taps(loaded, taps, draft.name)
        embeddings = TargetEmbeddings(target.facts, loaded.model)
        head = nn.Linear(1, 1, bias=False, device="meta")
        head.weight = nn.Parameter(embeddings.head, requires_grad=False)
        blocks = dflash_files.build_blocks_draft(
            draft.config, tensors, size, embeddings.embedding, head
        )
        own = _add_target_source(draft, target)
        return BlockDrafter(model, _make_block_model(own, blocks, model, options.draft_dtype))

    return PendingDraft(attach, taps=taps)


def _make_block_model(
    source: ConversionSource | None, blocks: BlocksDraft, target: Model, dtype: str | None
) -> BlockModel:
    """Return a block draft's model. It runs on the target's backend, in int8 by default on the
    native decoder, if this backend supports the draft. Otherwise it runs on torch."""
    dtype = None if dtype == "auto" else dtype
    if target.runtime == "native":
        try:
            load: Any = partial(copy.deepcopy, BlockDecoder(blocks))
            native = NativeConversion(source, dtype or "int8", load)
            return native.load_block_model(blocks)
        except RefusedError as refusal:
            log.info("%s", refusal)
    blocks.network.to(target.device, _choose_torch_dtype(target, dtype))
    if target.runtime in GRAPH_RUNTIMES:
        try:
            return GraphBlockModel(blocks).rehearse()
        except RefusedError as refusal:
            log.info("%s", refusal)
    return StockBlockModel(blocks)


def _require_taps(target: LoadedTarget, taps: tuple[int, ...], name: str) -> Model:
    """Return the target's model. Raises RefusedError if the model does not expose the hidden states
    at `taps`, which the draft called `name` uses."""
    model = target.model
    if model.taps != taps:
        raise RefusedError(
            f"{target.info.name} on {model.runtime} does not expose the hidden states that "
            f"{name} uses; give another draft"
        )
    return model


@dataclass(frozen=True, slots=True)
class PendingPairsDraft:
    """An EAGLE-3 or MTP draft that fits its target, before the target is loaded.

    source: The files by which its conversion for the native decoder is stored; None: the conversion
        is not stored.
    """

    name: str
    source: ConversionSource | None
    pairs: PairsDraft
    options: LoadOptions

    @property
    def draft(self) -> PendingDraft:
        return PendingDraft(self.attach, taps=self.taps)

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps whose hidden states the target must expose. If neither the draft's file nor
        draft_taps specifies whether layer ids mean the inputs or the outputs of layers, the taps
        for both meanings."""
        pairs = self.pairs
        return self._requested_taps if self._requested_taps else (*pairs.taps, *pairs.other_taps)

    @property
    def _requested_taps(self) -> tuple[int, ...]:
        """The taps for the meaning of layer ids that the file or draft_taps specifies; () if the
        meaning must be chosen by measuring."""
        pairs, asked = self.pairs, self.options.draft_taps
        if not pairs.other_taps:
            return pairs.taps
        if asked is None:
            return ()
        # layer ids that mean inputs have lower taps than layer ids that mean outputs
        ordered = sorted((pairs.taps, pairs.other_taps))
        return ordered[asked == "outputs"]

    def attach(self, target: LoadedTarget) -> PairsDrafter:
        """Return the drafter for the loaded target. Raises RefusedError if the target does not
        expose the hidden states that the draft uses."""
        model = _require_taps(target, self.taps, self.name)
        embeddings = TargetEmbeddings(target.info.facts, target.model)
        own_embedding = self.pairs.embedding
        embedding = (
            embeddings.embedding
            if own_embedding is None
            else nn.Embedding.from_pretrained(own_embedding)
        )
        decoder = self._make_decoder(model)

        kind = MtpStackDrafter if decoder.num_layers > 1 else PairsDrafter

        def make(columns: slice | None) -> PairsDrafter:
            return kind(model, decoder, embedding, self.pairs.ids, columns)

        if self._requested_taps:
            return make(None)
        return self._choose_taps(target, make)

    def _make_decoder(self, target: Model) -> HiddenStateDraftModel:
        """Return the draft's decoder. It runs on the target's backend, in int8 by default on the
        native decoder, if this backend supports the draft. Otherwise it runs on torch."""
        dtype, network = self.options.draft_dtype, self.pairs.network
        dtype = None if dtype == "auto" else dtype
        if isinstance(target, NativeModel):
            try:
                return self._load_native(target, dtype or "int8")
            except RefusedError as refusal:
                log.info("%s", refusal)
        assert isinstance(network, PairsNetwork)
        ready: Any = network
        ready = ready.to(target.device, _choose_torch_dtype(target, dtype))
        if isinstance(network, MtpStackNetwork):
            return StockMtpStack(ready)
        if target.runtime in GRAPH_RUNTIMES:
            try:
                return cast(HiddenStateDraftModel, rehearse(GraphPairModel(ready)))
            except RefusedError as refusal:
                log.info("%s", refusal)
        return StockPairModel(ready)

    def _load_native(self, target: NativeModel, dtype: str) -> HiddenStateDraftModel:
        """Return the draft's decoder on the native decoder. An MTP draft uses the target's packed
        head, unless only one of them is rounded. Raises RefusedError if the native decoder does not
        support the draft."""
        network, head = self.pairs.network, None
        same = (dtype in ROUNDED_DTYPES) == (target.compute_dtype in ROUNDED_DTYPES)
        if isinstance(network.first, MtpLayer) and same:
            head = SharedHead(target.passes, cast(Any, network.head).out_features)

        def load() -> PairsNetwork:
            made: Any = copy.deepcopy(network)
            made.head = made.head if head is None else None
            return made

        native = NativeConversion(self.source, dtype, load, shared_head=head).load_model()
        return cast(HiddenStateDraftModel, native)

    def _choose_taps(
        self, target: LoadedTarget, make: Callable[[slice | None], PairsDrafter]
    ) -> PairsDrafter:
        """Return the drafter whose taps give the higher alpha on the target's output. The choice is
        logged, and it is stored so that alpha is measured only once."""
        width = self.pairs.network.join.fc.in_features  # pyright: ignore
        drafters = [make(slice(i * width, (i + 1) * width)) for i in range(2)]
        taps = [self.pairs.taps, self.pairs.other_taps]
        key = stored_costs.make_key(target.model, drafters[0], TAP_CHOICES_FILE)
        choice = load_cached_values(TAP_CHOICES_FILE).get(key) if key else None
        if choice not in (0, 1):
            alphas = [_measure_alpha(target, way) for way in drafters]
            choice = int(alphas[1] > alphas[0] + MIN_ALPHA_GAIN)
            log.info(
                "%s uses the hidden states before layers %s: alpha is %.2f on the target's own "
                "output, and %.2f with those before layers %s; set draft_taps to choose",
                self.name,
                *(taps[choice], alphas[choice], alphas[1 - choice], taps[1 - choice]),
            )
            if key:
                save_cached_value(TAP_CHOICES_FILE, key, choice)
        return drafters[cast(int, choice)]


def _choose_torch_dtype(target: Model, requested: str | None) -> torch.dtype:
    """Return the dtype in which torch runs a draft: the requested dtype, or by default the target's
    dtype (float32 for a target in int8 or int4). Raises RefusedError if int8 or int4 is
    requested."""
    if requested in ROUNDED_DTYPES:
        raise RefusedError(
            f"draft_dtype={requested!r} is supported only by the native decoder, which does not "
            "run this draft; leave out draft_dtype"
        )
    own = "float32" if target.compute_dtype in ROUNDED_DTYPES else target.compute_dtype
    return getattr(torch, own if requested in (None, "auto") else requested)


def _measure_alpha(target: LoadedTarget, drafter: PairsDrafter) -> float:
    """Return the drafter's alpha, measured on an output of TRIAL_TOKENS tokens at temperature 1."""
    spec = target.make_speculator(drafter, "the draft")
    prompt: Any = [0] if spec.tokenizer is None else PROBE_PROMPT
    (completion,) = spec.generate(
        prompt, max_new_tokens=TRIAL_TOKENS, gamma=TRIAL_GAMMA, temperature=1.0, seed=0
    )
    alpha = completion.stats.alpha
    return 0.0 if alpha is None else alpha


def prepare_mtp(target: TargetInfo, options: LoadOptions) -> PendingDraft:
    """Return the target's own layers for multi-token prediction as a draft that can be attached
    once the target is loaded. Raises RefusedError if the target's files have no such layers, or
    are not in a folder."""
    folder = target.facts.folder
    if folder is None:
        raise RefusedError(
            "draft='mtp' needs the target's files; give the target as a folder or a GGUF file"
        )
    layers = target.facts.structure.config.get_text_config(decoder=True).num_hidden_layers
    if folder.gguf:
        own = read_mtp_weights(target.name, folder.gguf, layers)
    else:
        weights = FolderWeights(Path(folder.path))
        own = weights.read_weights(pair_files.map_mtp_names(weights.keys, layers))
    source = MtpLayersSource(folder.name, folder.path, folder.options, folder.adapter)
    return _prepare_mtp(target.name, source, own, target, options)


class MtpLayersSource(ModelSource):
    """A target's own layers for multi-token prediction, in the same files as the target."""

    part = "MTP layers"

    def list_custom_code(self) -> list[str]:
        return [*super().list_custom_code(), self.part]


def _prepare_mtp(
    name: str,
    source: ConversionSource | None,
    tensors: dict[str, torch.Tensor],
    target: TargetInfo,
    options: LoadOptions,
) -> PendingDraft:
    head = TargetEmbeddings(target.facts, None).head
    pairs = pair_files.build_mtp(name, tensors, target.facts.structure, head)
    return PendingPairsDraft(name, source, pairs, options).draft
