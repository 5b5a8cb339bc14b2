"""Drafts given by name: a model, a copy of the target, look-up, or a module that makes a drafter.

A draft that does not fit the target, or an option that the draft does not support, is refused
before the target is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from foretoken.drafters.base import Drafter, require_drafter, require_vocabulary
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.choice import DrafterChoice
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError, RefusedError, SameModelError, format_value
from foretoken.loading import named_models, published_drafts
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.hub import is_folder
from foretoken.loading.options import ROUNDED_DTYPES, LoadOptions, list_smaller_dtypes
from foretoken.loading.runtimes.native import make_companion
from foretoken.loading.runtimes.place import place
from foretoken.loading.sources import is_network, load_tokenizer, resolve_model
from foretoken.loading.target import LoadedTarget, PendingDraft, TargetInfo
from foretoken.loading.translated_drafts import make_dictionary, make_translated_drafter
from foretoken.speculator import Speculator
from foretoken.text.decoding import require_same_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENIZER_REMEDY = (
    "give the target's tokenizer as tokenizer= and the draft as a folder, or same_tokenizer=True "
    "if equal ids are equal tokens in target and draft"
)
MIN_NAME_SIMILARITY = 0.75  # of 1: a draft name at least this close is taken for a typing error
MIN_ROUNDED_PARAMETERS = 2_000_000  # rounding the weights of a smaller draft gains nothing
DEFAULT_COPY_DTYPE = "int4"
MAKER_FUNCTION = "drafter"  # the function of a user's module that makes its drafter


def make_target_copy(
    name: str, dtype: str | None, target: LoadedTarget, layers: tuple[int, ...] = ()
) -> LMDrafter:
    """Return a drafter that runs a copy of the target, rounded or with fewer layers, over the
    target's KV cache.

    Args:
        name: The draft's name, for error messages.
        dtype: Precision of the copy. None chooses the target's precision if `layers` are given,
            else int4.
        target: The target, on the native decoder.
        layers: Indices of the layers to run; empty for all.

    Raises:
        SameModelError: The copy would be the target itself.
        RefusedError: The target's backend does not share its KV cache.
    """
    _require_shared_cache(target.model.runtime)
    computed = target.model.compute_dtype
    dtype = dtype or (computed if layers else DEFAULT_COPY_DTYPE)
    copy = None
    if layers or dtype != computed:
        copy = make_companion(target.info.facts, target.model, dtype, layers)
    # converting int4 blocks to int8 leaves them in int4
    if copy is None or (not layers and copy.compute_dtype == computed):
        raise SameModelError(
            f"draft is {name!r}, but the target's weights are in {computed} too; give a target of "
            "another dtype, draft='self:LAYERS' (such as self:0-3,8), or another draft"
        )
    return LMDrafter(copy)


def _plan_target_copy(
    kind: str | None, target: TargetInfo, options: LoadOptions
) -> Callable[..., Drafter]:
    """Return a function that makes the drafter of "self:KIND", a copy of the target. `kind` is
    int4, int8 or layer indices such as "0-3,8"; None stands for "self". Raises InputError for any
    other kind and for options that contradict the kind, RefusedError if the requested backend does
    not share its KV cache."""
    name, dtype = "self" if kind is None else f"self:{kind}", options.draft_dtype
    rounding = kind in ROUNDED_DTYPES
    layers = () if rounding or kind is None else _parse_layers(kind, target.facts.layers)
    if rounding and dtype not in (None, kind):
        raise InputError(f"draft is {name!r}, but draft_dtype is {dtype!r}; leave out draft_dtype")
    options.refuse("same_tokenizer", "draft_revision", because="the draft is the target's copy")
    if options.runtime != "auto":
        _require_shared_cache(options.runtime)
    return partial(make_target_copy, name, kind if rounding else dtype, layers=layers)


def _require_shared_cache(runtime: str) -> None:
    """Raise RefusedError for a backend whose models cannot share their KV cache with a copy."""
    if runtime != "native":
        raise RefusedError(
            f"draft='self' uses the target's own keys and values, which {runtime} does not share; "
            "give runtime='native', or draft='lookup'"
        )


def list_target_copies(dtype: str, num_layers: int) -> list[str]:
    """Return the names of the copies worth trying for a target in `dtype` with `num_layers` layers:
    one in each smaller rounded dtype, and one with every other layer."""
    every_other = sorted({*range(0, num_layers, 2), num_layers - 1})
    layer_subsets = [",".join(map(str, every_other))] if num_layers > len(every_other) else []
    return [f"self:{kind}" for kind in (*list_smaller_dtypes(dtype), *layer_subsets)]


def _parse_layers(kind: str, num_layers: int) -> tuple[int, ...]:
    """Parse indices and ranges of layers, such as "0-3,8"."""
    layers: list[int] = []
    for part in kind.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(
                f"draft is {f'self:{kind}'!r:.60}; give self, self:int4, self:int8, or self: and "
                "indices of layers, such as self:0-3,8"
            )
        layers += range(int(first), min(int(last if dash else first), num_layers) + 1)
    if (
        not layers
        or layers[-1] >= num_layers
        or sorted(set(layers)) != layers
        or len(layers) == num_layers
    ):
        raise InputError(
            f"draft is {f'self:{kind}'!r:.60}; give some but not all of the target's {num_layers} "
            f"layers, 0 to {num_layers - 1}, in ascending order"
        )
    return tuple(layers)


def is_import_path(draft: str) -> bool:
    """Return whether `draft` has the form MODULE:ARGUMENT, which names a user's module that makes a
    drafter."""
    module, colon, _ = draft.partition(":")
    return bool(colon) and all(part.isidentifier() for part in module.split("."))


def import_drafter(draft: str) -> Callable[[LoadedTarget], Drafter] | None:
    """Import MODULE of a draft "MODULE:ARGUMENT", from the current folder or an installed package.
    Returns a function that makes the drafter for a loaded target; None if there is no such module.
    Raises InputError if the module has no function `drafter`, and all errors of the module's own
    code."""
    name, _, argument = draft.partition(":")
    module = _import_module(name)
    if module is None:
        return None
    make = getattr(module, MAKER_FUNCTION, None)
    if not callable(make):
        raise InputError(
            f"draft is {draft!r:.100}, but the module {name} has no function {MAKER_FUNCTION}; "
            f"define {MAKER_FUNCTION}(argument, target), which returns a Drafter"
        )
    return partial(_make_drafter, draft, make, argument)


def _import_module(name: str) -> ModuleType | None:
    """Return the module of this name; None if no such module exists. The current folder is searched
    last."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # the module itself imports a missing package


def _make_drafter(
    draft: str, make: Callable[[str, LoadedTarget], object], argument: str, target: LoadedTarget
) -> Drafter:
    """Return the drafter that the module's function `make` returns for `argument` and `target`.
    Raises InputError if the result is not a drafter or has another vocabulary."""
    result = make(argument, target)
    if isinstance(result, type) or not hasattr(result, "propose"):
        raise InputError(
            f"draft is {draft!r:.100}, but the module's function {MAKER_FUNCTION} returned "
            f"{format_value(result)}; return a Drafter"
        )
    drafter = require_drafter(result)
    require_vocabulary(drafter, target.vocab_size, "the target")
    return drafter


# For each name, a function that checks options and returns a function that makes the drafter. An
# argument follows a name that ends in ":"
DRAFTS_BY_NAME: dict[str, Callable[[str, TargetInfo, LoadOptions], Callable[..., Drafter]]] = {
    "self": lambda kind, target, options: _plan_target_copy(None, target, options),
    "self:": _plan_target_copy,
    "none": lambda kind, target, options: lambda loaded: NoDrafter(),
    "lookup": lambda kind, target, options: lambda loaded: LookupDrafter(),
    "copy": lambda kind, target, options: lambda loaded: CopyDrafter(),
    "uniform": lambda kind, target, options: lambda loaded: UniformDrafter(target.facts.V),
}


def is_draft_name(draft: object) -> bool:
    """Return whether `draft` names drafters (such as "lookup", "self:int4" or MODULE:ARGUMENT)
    rather than a model. Such a draft does not affect which backend runs the target."""
    if not isinstance(draft, str):
        return False
    return all(
        "".join(part.partition(":")[:2]) in DRAFTS_BY_NAME or is_import_path(part)
        for part in named_models.split_drafts(draft)
    )


def resolve_draft(
    draft: str | Path | PreTrainedModel | Drafter | Speculator,
    target: TargetInfo,
    options: LoadOptions,
    placement: Placement,
) -> PendingDraft:
    """Return the draft after checking it against the target; a draft model is loaded here. Raises
    InputError for an unknown draft, RefusedError for a draft that does not fit the target."""
    if isinstance(draft, str) and len(names := named_models.split_drafts(draft)) > 1:
        return _resolve_choice(names, target, options, placement)
    if draft == "mtp":
        return _resolve_hidden_state_draft(None, target, options)
    if (
        isinstance(draft, str)
        and (make_drafter := _resolve_named_draft(draft, target, options)) is not None
    ):
        options.refuse("draft_taps", because=f"{draft} does not use the target's hidden states")
        return PendingDraft(make_drafter)
    if isinstance(draft, str | Path):
        published_draft = published_drafts.find_published(draft, options.draft_revision)
        if published_draft is not None:
            return _resolve_hidden_state_draft(published_draft, target, options)
    because = f"{get_name(draft)} does not use the target's hidden states"
    options.refuse("draft_taps", because=because)
    if isinstance(draft, str | Path) or is_network(draft):
        return _load_model_draft(draft, target, options, placement)
    name = get_name(draft)
    if isinstance(draft, Speculator):
        _require_kind(draft.target_name, draft.target.encoder_decoder, target)
        draft_vocabulary = draft.target_name, draft.target.vocab_size, draft.tokenizer
        require_same_vocabulary(*draft_vocabulary, target.facts.V, target.tokenizer)
        draft = CascadeDrafter(draft.target, draft.drafter)
    drafter = require_drafter(draft)
    require_vocabulary(drafter, target.facts.V, "the target")
    _refuse_model_options(name, options)
    return PendingDraft(lambda loaded: drafter)


def _resolve_choice(
    names: list[str], target: TargetInfo, options: LoadOptions, placement: Placement
) -> PendingDraft:
    """Return a draft whose drafter chooses among the drafts of these names. Raises InputError for a
    name that cannot be part of a choice, RefusedError if two drafts need different targets."""
    given = "+".join(names)
    for name in names:
        if name in ("", "none", "lookup") or names.count(name) > 1:
            raise InputError(
                f"draft is {given!r:.100}; give different draft models, such as "
                "self:int4+DIR, or lookup+self:int4+DIR to look up first"
            )
    folders = [named_models.find_draft_folder(name) or name for name in names]
    parts = [resolve_draft(folder, target, options, placement) for folder in folders]
    taps = {part.taps for part in parts if part.taps}
    runtimes = {part.runtime for part in parts if part.runtime}
    if len(taps) > 1 or len(runtimes) > 1:
        raise RefusedError(
            f"the drafts of {given!r:.100} need other hidden states or another backend of the "
            "target; give only one of them"
        )
    return PendingDraft(
        lambda loaded: DrafterChoice([part.attach(loaded) for part in parts]),
        taps=next(iter(taps), ()),
        runtime=next(iter(runtimes), None),
    )


def _resolve_hidden_state_draft(
    draft: published_drafts.PublishedDraft | None, target: TargetInfo, options: LoadOptions
) -> PendingDraft:
    """Return a draft that uses the target's hidden states. `draft` None stands for the target's own
    layer for multi-token prediction."""
    # imported late: it imports transformers' networks, which takes seconds; other drafts need none
    from foretoken.loading.hidden_state_drafts import prepare_draft, prepare_mtp

    options.refuse("same_tokenizer", because="the draft has the target's tokens")
    return prepare_mtp(target, options) if draft is None else prepare_draft(draft, target, options)


def _refuse_model_options(name: str, options: LoadOptions) -> None:
    because = f"{name} is not loaded from a model"
    options.refuse("same_tokenizer", "draft_dtype", because=because)


def _resolve_named_draft(
    draft: str, target: TargetInfo, options: LoadOptions
) -> Callable[[LoadedTarget], Drafter] | None:
    """Return a function that makes the drafter called `draft`; None if `draft` is not the name of a
    drafter and so must be the name of a model. Raises InputError, with a list of all names, for a
    name that looks mistyped, and the errors of `import_drafter`."""
    name, colon, rest = draft.partition(":")
    if name + colon in DRAFTS_BY_NAME:
        if name != "self":
            _refuse_model_options(draft, options)
        return DRAFTS_BY_NAME[name + colon](rest, target, options)
    if is_folder(draft) or (not colon and "/" in draft):
        return None
    if is_import_path(draft) and (make := import_drafter(draft)) is not None:
        _refuse_model_options(draft, options)
        return make
    names = {n: f"{n}KIND" if n.endswith(":") else n for n in (*DRAFTS_BY_NAME, "mtp")}
    candidates = [n for n in names if n.endswith(colon)]
    nearest = get_close_matches(name.lower() + colon, candidates, n=1, cutoff=MIN_NAME_SIMILARITY)
    if nearest:
        raise InputError(
            f"draft is {draft!r:.100}; did you mean {names[nearest[0]]!r}? A model is a folder or "
            f"a hub id (owner/name), a drafter is one of {', '.join(names.values())}, or your own "
            "MODULE:ARGUMENT"
        )
    if is_import_path(draft):
        raise InputError(
            f"draft is {draft!r:.100}, but there is no module {name}; give a module that can be "
            "imported (from the current folder or an installed package), or a model's folder or "
            "hub id"
        )
    return None


def _load_model_draft(
    draft: str | Path | PreTrainedModel,
    target: TargetInfo,
    options: LoadOptions,
    placement: Placement,
) -> PendingDraft:
    origin = options.draft_revision, options.trust_remote_code
    facts = ModelFacts(resolve_model(draft, *origin), placement)
    name, tokenizer = get_name(draft), load_tokenizer(draft, *origin)
    same_tokenizer, is_loaded_here, V = (
        options.same_tokenizer,
        not is_network(draft),
        target.facts.V,
    )
    if not is_loaded_here:
        options.refuse("draft_dtype", because=f"{name} is in memory, so its dtype is fixed")
    if not facts.encoder_decoder and not same_tokenizer:
        dictionary = make_dictionary((name, tokenizer, facts.V), (target.name, target.tokenizer, V))
        if dictionary is not None:
            return PendingDraft(
                partial(make_translated_drafter, name, place(facts, placement).model, dictionary)
            )
    _require_kind(name, facts.encoder_decoder, target)
    if same_tokenizer and None in (tokenizer, target.tokenizer):
        _require_ids(tokenizer or target.tokenizer, (name, facts.V), (target.name, V))
    else:
        remedy = None if is_loaded_here else TOKENIZER_REMEDY
        require_same_vocabulary(name, facts.V, tokenizer, V, target.tokenizer, remedy)
    drafter = LMDrafter(place(facts, placement).model, V)
    may_round = is_loaded_here and options.draft_dtype is None
    if not may_round or drafter.runtime != "native" or facts.parameters < MIN_ROUNDED_PARAMETERS:
        return PendingDraft(lambda target: drafter)

    def load_rounded(dtype: str) -> LMDrafter:
        return LMDrafter(place(facts, replace(placement, dtype=dtype)).model, V)

    return PendingDraft(lambda target: drafter, load_rounded)


def _require_kind(name: str, encoder_decoder: bool, target: TargetInfo) -> None:
    if encoder_decoder and not target.facts.encoder_decoder:
        raise RefusedError(
            f"{name} is an encoder-decoder, which cannot draft for a decoder-only target; give a "
            "decoder-only draft"
        )


def _require_ids(tokenizer: PreTrainedTokenizerBase | None, *models: tuple[str, int]) -> None:
    """Raise RefusedError if `tokenizer` has ids that are not below V for one of the `models` (pairs
    of a name and V). `same_tokenizer` declares that both models use this tokenizer."""
    last = max(tokenizer.get_vocab().values(), default=-1) if tokenizer else -1
    for name, V in models:
        if V <= last:
            raise RefusedError(
                f"same_tokenizer is True, but the tokenizer has ids up to {last}, and {name} has "
                f"{V} output rows; give a draft with the same tokenizer, or same_tokenizer=False"
            )


def get_name(source: object) -> str:
    """Return the name of a model or drafter, for messages."""
    if isinstance(source, str | Path):
        return named_models.get_shipped_name(source)
    if is_network(source):
        return source.name_or_path or type(source).__name__
    if isinstance(source, Speculator):
        return f"{source.target_name} drafted for by {source.draft_name}"
    return type(source).__name__
