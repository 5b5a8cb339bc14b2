"""A target and a draft, from folders, the hub or memory, become a Speculator."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from importlib.resources import files
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from foretoken.drafters.base import Drafter
from foretoken.errors import InputError, RefusedError
from foretoken.generation_config import require_ids
from foretoken.loading.chosen import chosen, rounded
from foretoken.loading.draft import draft_of, name_of
from foretoken.loading.memory import usable
from foretoken.loading.options import LoadKeywords, LoadOptions
from foretoken.loading.pending import ModelDraft, PendingDraft
from foretoken.loading.runtimes import Placement, place, place_exact, place_parallel
from foretoken.loading.sources import read_of, unwrapped
from foretoken.loading.sources import tokenizer as tokenizer_of
from foretoken.loading.target import KnownTarget, LoadedTarget, ModelFacts
from foretoken.slow_log import log_if_slow
from foretoken.speculator import Speculator

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None = None,
    **options: Unpack[LoadKeywords],
) -> Speculator:
    """A target and a draft, ready to generate.

    target, draft: a local folder, a hub id or a model in memory (used as it is, in its own dtype
    and on its own device; of one that torch.compile or DataParallel wrapped, the model inside).
    target None is the pair that ships with the package. draft None is then
    its draft; else the fastest, by costs measured here once, of "lookup", "self:int4" and
    "self:int8", the last two with a look-up in front (logged at INFO). draft may also be "none",
    "lookup", "copy", "uniform", "ngram:FILE", "heads:FILE", any Drafter, or a Speculator from
    `load`: a cascade, whose target drafts here and is itself accelerated by its draft. "self:int4"
    (or "self") and "self:int8" are the target with
    its weights rounded, "self:0-3,8" the target with these layers alone: a copy that drafts over
    the target's own keys and values (docs/drafters.md); it needs OpenVINO. A decoder-only draft
    with another tokenizer is translated: how it guesses best is tried here, which takes seconds,
    and is told to the logger "foretoken".
    draft_dtype: the draft's, if not the target's. A draft that is a folder or of the hub and has
    two million parameters or more runs, on OpenVINO, in int8 or int4 where that is measured to be
    faster, once; its precision never changes the law, but where texts are sampled which text a
    seed gives.
    kv_dtype: "int8" keeps the target's keys and values in eight bits, token by token, in a quarter
    of the memory: another model of the target, as int8 weights are. It needs OpenVINO.
    exact_shapes: the target runs each row by itself, in passes of one width, so that greedy text is
    the same to the bit with and without guesses (docs/exact.md says what it costs); the draft
    cannot influence that text and runs as usual.
    same_tokenizer: True says that equal ids are equal tokens in a draft and a target of which there
    are no two tokenizers to compare, as with models in memory: their output layers may then be
    padded to different sizes.
    revision: of the target and its own tokenizer, on the hub.
    generation_config="ignore" passes over entries of the model's generation config that would
    change the law, which are refused otherwise. Its sampling settings are never followed: the
    logger "foretoken" warns once, at the first text sampled otherwise.

    tensor_parallel: processes that the target's weights are spread over, this one included: those
    of a decoder in a folder or of the hub, on torch (docs/deploy.md). The draft is whole here.

    Raises InputError for invalid options and unreadable models, RefusedError for what cannot be
    done exactly.
    """
    asked = LoadOptions(**options)
    device = usable(asked.device)
    ships = target is None
    target, draft = cast(Any, unwrapped(target, "target")), cast(Any, unwrapped(draft, "draft"))
    if target is None:
        target = asset("target")
        draft = asset("draft") if draft is None else draft
    placement = Placement(asked.dtype, device, asked.runtime, asked.kv_dtype)
    known = _known(target, asked, placement)
    # The draft first: what does not fit is refused before the target is loaded or converted
    pending = _pending(draft, known, asked, device)
    loaded = _loaded(known, asked, placement)
    name = "lookup" if draft is None else name_of(draft)
    spec = loaded.speculator(pending.attach(loaded), name)
    if draft is None:
        return chosen(spec, loaded)
    free = asked.draft_dtype is None and not ships and not asked.exact_shapes
    if free and isinstance(pending, ModelDraft) and pending.loaded:
        return rounded(spec, pending)
    return spec


def _known(
    target: str | Path | PreTrainedModel, asked: LoadOptions, placement: Placement
) -> KnownTarget:
    """Read all of a target that a draft must fit."""
    facts = ModelFacts(read_of(target, asked.revision, asked.trust_remote_code), placement)
    settings = facts.settings
    if asked.generation_config == "ignore":
        settings = replace(settings, controls={}, suggested={})
    elif settings.objection:
        raise RefusedError(settings.objection)
    require_ids(settings.ends, facts.V)
    if asked.tokenizer is None:
        tokenizer = tokenizer_of(target, asked.revision, asked.trust_remote_code)
    else:
        tokenizer = tokenizer_of(asked.tokenizer, None, asked.trust_remote_code, required=True)
    return KnownTarget(name_of(target), facts, settings, tokenizer)


def _pending(
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None,
    target: KnownTarget,
    asked: LoadOptions,
    device: torch.device,
) -> PendingDraft:
    """Load the draft; without one it looks up."""
    if draft is None:
        asked.refuse("same_tokenizer", "draft_dtype", because="there is no draft")
        draft = "lookup"
    placement = Placement(asked.draft_dtype or asked.dtype, device, asked.runtime)
    with log_if_slow(log, "loading %s", name_of(draft)):
        pending = draft_of(draft, target, asked, placement)
    pending.require(asked)
    return pending


def _loaded(target: KnownTarget, asked: LoadOptions, placement: Placement) -> LoadedTarget:
    """Load the target on its runtime."""
    read = target.facts.read
    with log_if_slow(log, "loading %s", target.name):
        if asked.tensor_parallel > 1:
            placed = place_parallel(read, placement, asked.tensor_parallel)
        else:
            placed = (place_exact if asked.exact_shapes else place)(read, placement)
    return LoadedTarget(target, placed.model)


def asset(name: str) -> Path:
    """A folder of the default pair."""
    folder = Path(str(files("foretoken") / "assets" / name))
    if not (folder / "config.json").exists():
        raise InputError(f"the default pair is missing at {folder}; install the package again")
    return folder


def _signature() -> Signature:
    """Return the signature of `load` with every option by its name, for `help` and notebooks."""
    own = signature(load)
    named = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(LoadOptions)
    ]
    first = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    return own.replace(parameters=[*first, *named])


cast(Any, load).__signature__ = _signature()
