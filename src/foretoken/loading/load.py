"""A target and a draft, from folders, the hub or memory, become a Speculator."""

from __future__ import annotations

import logging
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foretoken.drafters.base import Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.generation_config import require_ids
from foretoken.loading import memory
from foretoken.loading.chosen import chosen, rounded
from foretoken.loading.draft import (
    DetachedHeads,
    Fit,
    drafter_of,
    model_drafter,
    name_of,
    read_of,
)
from foretoken.loading.own import OwnCopy
from foretoken.loading.runtimes import Known, Wish, place, place_exact, require_torch
from foretoken.loading.sources import in_memory
from foretoken.loading.sources import tokenizer as tokenizer_of
from foretoken.loading.vocabularies import ForeignDraft
from foretoken.loading.wrapped import unwrapped
from foretoken.options import SPREAD, require_place
from foretoken.slow_log import log_if_slow
from foretoken.speculator import Speculator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None = None,
    *,
    dtype: str = "float32",
    draft_dtype: str | None = None,
    kv_dtype: str | None = None,
    device: str = "cpu",
    runtime: str = "auto",
    exact_shapes: bool = False,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
    same_tokenizer: bool = False,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    generation_config: str | None = None,
    tensor_parallel: None = None,
) -> Speculator:
    """Load a target and a draft, ready to generate.

    Args:
        target: A local folder, a hub id or a model in memory, which is used as it is, in its own
            dtype and on its own device (of one that torch.compile or DataParallel wrapped, the
            model inside). None is the default pair, which ships with the package.
        draft: A folder, an id or a model in memory; "none", "lookup", "copy", "uniform",
            "ngram:FILE", "heads:FILE"; "self:int4" (or "self") and "self:int8", the target with
            rounded weights, or "self:0-3,8", the target with these layers alone, which share the
            target's keys and values and need OpenVINO; any Drafter; or a Speculator from `load`, a
            cascade: its target drafts here and is itself accelerated by its draft
            (docs/drafters.md). None is the shipped draft for the shipped target, else the fastest
            of "lookup", "self:int4" and "self:int8" by costs measured here once (logged at INFO). A
            decoder-only draft with another tokenizer is translated; how it drafts best is tried
            here, which takes seconds.
        dtype: The arithmetic: "float32", "float64", "bfloat16", "float16", "auto"; "int8" and
            "int4" round the weights, which makes the target another model.
        draft_dtype: The draft's; None is the target's, or on OpenVINO int8 or int4 where that is
            measured to be faster. It never changes the output's distribution, only which text a
            seed gives.
        kv_dtype: "int8" keeps the target's keys and values in eight bits, in a quarter of the
            memory: another model, as rounded weights are. Needs OpenVINO.
        device: A device of torch, such as "cuda".
        runtime: The backend: "auto", "transformers", "openvino" or "graphs".
        exact_shapes: True runs each sequence by itself, in forwards of one width, so that greedy
            text is the same to the bit with and without draft tokens (docs/exact.md says what it
            costs).
        revision: The target's and its own tokenizer's, on the hub.
        draft_revision: The draft's, on the hub.
        trust_remote_code: True runs code that comes with a model.
        same_tokenizer: True says that equal ids are equal tokens in a draft and a target of which
            there are no two tokenizers to compare, as with models in memory.
        tokenizer: A folder, an id or a tokenizer in memory; None is the target's.
        generation_config: "ignore" passes over entries of the model's generation config that would
            change the distribution, which are refused otherwise. Its sampling settings are never
            followed: a warning names them once, at the first text that is sampled otherwise.
        tensor_parallel: No longer an option; anything but None is an error.

    Returns:
        The Speculator.

    Raises:
        InputError: An option is invalid, or a model cannot be read.
        RefusedError: Something that cannot be done exactly.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load()  # the default pair; or load("target", "draft")
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.text
        ' at the doctor, and the doctor said'
    """
    if generation_config not in (None, "ignore"):
        raise InputError(f"generation_config is {generation_config!r}; give None or 'ignore'")
    at = memory.usable(device)
    for name, value in (
        ("exact_shapes", exact_shapes),
        ("trust_remote_code", trust_remote_code),
        ("same_tokenizer", same_tokenizer),
    ):
        if not isinstance(value, bool):  # "False" would be true, and run a model's code
            raise InputError(f"{name} is {value!r:.60}; give True or False")
    require_place(runtime, dtype, kv_dtype=kv_dtype, draft_dtype=draft_dtype)
    if tensor_parallel is not None:
        raise InputError(f"tensor_parallel {SPREAD}")
    wish = Wish(dtype, at, runtime, kv_dtype)
    draft_wish = Wish(draft_dtype or dtype, at, runtime)
    if exact_shapes:
        require_torch(wish)
    ships = target is None
    target, draft = cast(Any, unwrapped(target, "target")), cast(Any, unwrapped(draft, "draft"))
    if target is None:
        target = asset("target")
        draft = asset("draft") if draft is None else draft
    choose, draft = draft is None, "lookup" if draft is None else draft
    read = read_of(target, revision, trust_remote_code)
    facts = Known(read, wish)
    settings = facts.settings
    if generation_config is None and settings.objection:
        raise RefusedError(settings.objection)
    require_ids(settings.ends, facts.V)
    own = (
        tokenizer_of(target, revision, trust_remote_code)
        if tokenizer is None
        else tokenizer_of(tokenizer, None, trust_remote_code, required=True)
    )
    # The draft first: what does not fit is refused before the target is loaded or converted
    fit = Fit(name_of(target), facts, own)
    with log_if_slow(log, "loading %s", name_of(draft)):
        drafter = drafter_of(
            draft, fit, draft_wish, draft_revision, trust_remote_code, same_tokenizer=same_tokenizer
        )
    if same_tokenizer and (drafter is draft or not isinstance(drafter, LMDrafter)):
        reason = "there is no draft" if choose else f"{name_of(draft)} is no model that is loaded"
        raise InputError(f"same_tokenizer is True, but {reason}; leave it out")
    if isinstance(drafter, OwnCopy):
        drafter = _copied(drafter, draft_dtype, draft_revision)
        drafter.require("transformers" if exact_shapes else runtime)
    elif draft_dtype is not None and (
        in_memory(draft) or not isinstance(drafter, LMDrafter | ForeignDraft)
    ):
        reason = "there is no draft" if choose else f"{name_of(draft)} is no model that is loaded"
        raise InputError(f"draft_dtype is {draft_dtype!r}, but {reason}; leave it out")
    if exact_shapes and isinstance(drafter, DetachedHeads):
        raise RefusedError(
            "exact_shapes=True shows no hidden states, which heads read; give another draft"
        )
    with log_if_slow(log, "loading %s", name_of(target)):
        running = (place_exact if exact_shapes else place)(read, wish).model
    if isinstance(drafter, DetachedHeads | OwnCopy):
        drafter = drafter.attached(read, running)
    spec = Speculator(
        target=running,
        drafter=NoDrafter() if isinstance(drafter, ForeignDraft) else drafter,
        tokenizer=own,
        ends=settings.ends,
        controls=settings.controls if generation_config is None else {},
        target_name=name_of(target),
        draft_name=name_of(draft),
        suggested=settings.suggested if generation_config is None else {},
    )
    if isinstance(drafter, ForeignDraft):
        return drafter.attached(spec)
    if choose:
        return chosen(spec, read)
    free = draft_dtype is None and not ships and not exact_shapes
    if not (free and isinstance(draft, str | Path) and isinstance(drafter, LMDrafter)):
        return spec
    if drafter.shares:
        return spec
    draft_read = read_of(draft, draft_revision, trust_remote_code)
    return rounded(
        spec,
        dtype,
        partial(model_drafter, draft_read, draft_wish, facts.V),
        Known(draft_read, draft_wish).parameters,
    )


def _copied(copy: OwnCopy, draft_dtype: str | None, draft_revision: str | None) -> OwnCopy:
    """The target's copy in the bits asked for; it has no revision of its own."""
    copy = copy.rounded(draft_dtype)
    if draft_revision is not None:
        raise InputError(
            f"draft_revision is {draft_revision!r:.60}, but the draft is the target's copy; "
            "leave it out"
        )
    return copy


def asset(name: str) -> Path:
    """A folder of the default pair."""
    folder = Path(str(files("foretoken") / "assets" / name))
    if not (folder / "config.json").exists():
        raise InputError(f"the default pair is missing at {folder}; install the package again")
    return folder
