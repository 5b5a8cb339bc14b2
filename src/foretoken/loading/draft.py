"""Drafts by name: a model, n-grams, heads, a copy of the target, a look-up.

A draft that does not fit the target is refused before the target runs.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.drafters.base import Drafter, require_drafter, require_vocabulary
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.ngram import NGram, NGramDrafter, fingerprint
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.loading.hub import is_folder
from foretoken.loading.options import LoadOptions
from foretoken.loading.pending import (
    DetachedHeads,
    ModelDraft,
    OwnCopy,
    PendingDraft,
    ReadyDraft,
    own_copy,
)
from foretoken.loading.runtimes import Placement, place
from foretoken.loading.sources import in_memory, read_of
from foretoken.loading.sources import tokenizer as tokenizer_of
from foretoken.loading.target import KnownTarget, ModelFacts
from foretoken.loading.vocabularies import ForeignDraft, dictionary_of
from foretoken.speculator import Speculator
from foretoken.text.decoding import require_same_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WORDS_MISSING = (
    "give tokenizer=, and the draft's folder, or same_tokenizer=True where equal ids are equal "
    "tokens in both"
)
SIMILAR = 0.75  # of 1: from here on a draft is taken for a mistyped name


def _ngram(file: str, target: KnownTarget, options: LoadOptions) -> ReadyDraft:
    mark = fingerprint(target.tokenizer.get_vocab()) if target.tokenizer else None
    table = NGram.load(file, vocab_size=target.facts.V, fingerprint=mark)
    return ReadyDraft(f"ngram:{file}", NGramDrafter(table))


def _heads(file: str, target: KnownTarget, options: LoadOptions) -> DetachedHeads:
    from foretoken.drafters.blockwise import Heads  # late: takes seconds

    heads, name = Heads.load(file), f"heads:{file}"
    heads.require_shape(name, target.facts.structure)
    return DetachedHeads(name, heads)


# Drafts by name; names that end in ":" are followed by a file, or by a kind of copy
NAMES: dict[str, Callable[[str, KnownTarget, LoadOptions], PendingDraft]] = {
    "self": lambda kind, target, options: OwnCopy("self", options.draft_dtype, ()),
    "self:": lambda kind, target, options: own_copy(kind, target.facts, options.draft_dtype),
    "none": lambda file, target, options: ReadyDraft("none", NoDrafter()),
    "lookup": lambda file, target, options: ReadyDraft("lookup", LookupDrafter()),
    "copy": lambda file, target, options: ReadyDraft("copy", CopyDrafter()),
    "uniform": lambda file, target, options: ReadyDraft("uniform", UniformDrafter(target.facts.V)),
    "ngram:": _ngram,
    "heads:": _heads,
}


def draft_of(
    draft: str | Path | PreTrainedModel | Drafter | Speculator,
    target: KnownTarget,
    options: LoadOptions,
    placement: Placement,
) -> PendingDraft:
    """Return the draft that fits the target; it is loaded where it is a model. Raises InputError
    for an unknown one, RefusedError for one that does not fit."""
    if isinstance(draft, str) and (named := _named(draft, target, options)) is not None:
        return named
    if isinstance(draft, str | Path) or in_memory(draft):
        return _model_draft(draft, target, options, placement)
    name = name_of(draft)
    if isinstance(draft, Speculator):
        own = draft.target.encoder_decoder, draft.target.vocab_size, draft.tokenizer
        _require_fit(draft.target_name, *own, target)
        draft = CascadeDrafter(draft.target, draft.drafter)
    drafter = require_drafter(draft)
    require_vocabulary(drafter, target.facts.V, "the target")
    return ReadyDraft(name, drafter)


def _named(draft: str, target: KnownTarget, options: LoadOptions) -> PendingDraft | None:
    """Return the draft of that name; None for the name of a model. Raises InputError, with all
    names, for one that was mistyped."""
    name, colon, file = draft.partition(":")
    if name + colon in NAMES:
        return NAMES[name + colon](file, target, options)
    if is_folder(draft) or (not colon and "/" in draft):
        return None
    names = {n: f"{n}FILE" if n.endswith(":") else n for n in NAMES} | {"self:": "self:KIND"}
    candidates = [n for n in NAMES if n.endswith(colon)]
    nearest = get_close_matches(name.lower() + colon, candidates, n=1, cutoff=SIMILAR)
    if nearest:
        raise InputError(
            f"draft is {draft!r:.100}; did you mean {names[nearest[0]]!r}? A model is a folder or "
            f"a hub id (owner/name), a drafter one of {', '.join(names.values())}"
        )
    return None


def _model_draft(
    draft: str | Path | PreTrainedModel,
    target: KnownTarget,
    options: LoadOptions,
    placement: Placement,
) -> ModelDraft | ForeignDraft:
    origin = options.draft_revision, options.trust_remote_code
    facts = ModelFacts(read_of(draft, *origin), placement)
    name, tokenizer = name_of(draft), tokenizer_of(draft, *origin)
    same = options.same_tokenizer
    if not facts.encoder_decoder and not same:
        there = target.name, target.tokenizer, target.facts.V
        dictionary = dictionary_of((name, tokenizer, facts.V), there)
        if dictionary is not None:
            model = place(facts.read, placement).model
            return ForeignDraft(name, model, dictionary, loaded=not in_memory(draft))
    if same and None in (tokenizer, target.tokenizer):
        _require_kind(name, facts.encoder_decoder, target)
        _require_ids(name, facts.V, target, tokenizer or target.tokenizer)
    else:
        remedy = WORDS_MISSING if in_memory(draft) else None
        _require_fit(name, facts.encoder_decoder, facts.V, tokenizer, target, remedy)
    drafter = LMDrafter(place(facts.read, placement).model, target.facts.V)
    return ModelDraft(name, facts, placement, drafter)


def _require_fit(
    name: str,
    encoder_decoder: bool,
    V: int,
    own: PreTrainedTokenizerBase | None,
    target: KnownTarget,
    remedy: str | None = None,
) -> None:
    """RefusedError for a draft of another kind or vocabulary than the target's. `remedy`: without
    two tokenizers."""
    _require_kind(name, encoder_decoder, target)
    require_same_words(name, V, own, target.facts.V, target.tokenizer, remedy)


def _require_kind(name: str, encoder_decoder: bool, target: KnownTarget) -> None:
    if encoder_decoder and not target.facts.encoder_decoder:
        raise RefusedError(f"{name} is an encoder-decoder: it cannot draft for a causal target")


def _require_ids(
    name: str, V: int, target: KnownTarget, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """RefusedError where one of both lacks ids of the tokenizer that they are said to share."""
    last = max(tokenizer.get_vocab().values(), default=-1) if tokenizer else -1
    for model, rows in ((name, V), (target.name, target.facts.V)):
        if rows <= last:
            raise RefusedError(
                f"same_tokenizer is True, but the tokenizer has ids up to {last}, and {model} has "
                f"{rows} output rows; give a draft of the target's tokenizer, or leave it out"
            )


def name_of(source: object) -> str:
    if isinstance(source, str | Path):
        return str(source)
    if in_memory(source):
        return source.name_or_path or type(source).__name__
    if isinstance(source, Speculator):
        return f"{source.target_name} drafted for by {source.draft_name}"
    return type(source).__name__
