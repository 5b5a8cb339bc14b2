"""A draft by its name becomes a drafter: a model, n-grams, heads, a copy of the target, a look-up.

What does not fit the target is refused before the target runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from foretoken.drafters.base import Drafter, require_vocabulary
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.copying import CopyDrafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.ngram import NGram, NGramDrafter, fingerprint
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError, RefusedError
from foretoken.loading.hub import is_folder
from foretoken.loading.own import OwnCopy, own_copy
from foretoken.loading.runtimes import Known, Wish, place
from foretoken.loading.sources import Source, in_memory, source
from foretoken.loading.sources import tokenizer as tokenizer_of
from foretoken.loading.vocabularies import ForeignDraft, dictionary_of
from foretoken.models.base import Model, OpenModel
from foretoken.speculator import Speculator
from foretoken.text.decoding import require_same_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretoken.drafters.blockwise import Heads
    from foretoken.drafters.heads import HeadsDrafter

WORDS_MISSING = (
    "give tokenizer=, and the draft's folder, or same_tokenizer=True where equal ids are equal "
    "tokens in both"
)
SIMILAR = 0.75  # of 1: from here on a draft is taken for a mistyped name


class Fit(NamedTuple):
    """What a draft must fit, before the target runs."""

    name: str
    known: Known
    tokenizer: PreTrainedTokenizerBase | None


class DetachedHeads(NamedTuple):
    """Heads that fit the target, and wait for it to run."""

    name: str
    heads: Heads

    def attached(self, read: Source | PreTrainedModel, target: Model) -> HeadsDrafter:
        """The drafter, on the target's output layer: read anew where torch's weights are gone."""
        from foretoken.drafters.blockwise import ends_of
        from foretoken.drafters.heads import HeadsDrafter  # late: takes seconds

        network = getattr(target, "model", None)
        if network is None:
            loaded = isinstance(read, Source)
            network = read.network(torch.float32, target.device) if loaded else read
        self.heads.require_target(self.name, network)
        output, embeddings = ends_of(network)
        self.heads.to(embeddings.weight.device, embeddings.weight.dtype)
        return HeadsDrafter(cast(OpenModel, target), self.heads, output, embeddings)


def _own_copy(kind: str, target: Fit) -> OwnCopy:
    return own_copy(kind, target.known)


def _ngram(file: str, target: Fit) -> Drafter:
    mark = fingerprint(target.tokenizer.get_vocab()) if target.tokenizer else None
    return NGramDrafter(NGram.load(file, vocab_size=target.known.V, fingerprint=mark))


def _heads(file: str, target: Fit) -> DetachedHeads:
    from foretoken.drafters.blockwise import Heads  # late: takes seconds

    heads, name = Heads.load(file), f"heads:{file}"
    heads.require_shape(name, target.known.structure)
    return DetachedHeads(name, heads)


# Drafters by name; names that end in ":" are followed by a file, or by a kind of copy
NAMES: dict[str, Callable[[str, Fit], Drafter | DetachedHeads | OwnCopy]] = {
    "self": lambda kind, target: OwnCopy("self", None, ()),
    "self:": _own_copy,
    "none": lambda file, target: NoDrafter(),
    "lookup": lambda file, target: LookupDrafter(),
    "copy": lambda file, target: CopyDrafter(),
    "uniform": lambda file, target: UniformDrafter(target.known.V),
    "ngram:": _ngram,
    "heads:": _heads,
}


def drafter_of(
    draft: str | Path | PreTrainedModel | Drafter | Speculator,
    target: Fit,
    wish: Wish,
    revision: str | None,
    trust: bool,
    *,
    same_tokenizer: bool = False,
) -> Drafter | DetachedHeads | OwnCopy | ForeignDraft:
    if isinstance(draft, str) and (drafter_found := _drafter_named(draft, target)) is not None:
        return drafter_found
    if isinstance(draft, Speculator):
        own = draft.target.encoder_decoder, draft.target.vocab_size, draft.tokenizer
        _require_fit(draft.target_name, *own, target)
        draft = CascadeDrafter(draft.target, draft.drafter)
    if not isinstance(draft, str | Path) and not in_memory(draft):
        if isinstance(draft, type) or not hasattr(draft, "propose"):
            raise InputError(f"draft is {draft!r:.60}; give a folder, a name, a model or a Drafter")
        drafter = cast(Drafter, draft)
        require_vocabulary(drafter, target.known.V, "the target")
        return drafter
    read = read_of(draft, revision, trust)
    facts = Known(read, wish)
    name, tokenizer = name_of(draft), tokenizer_of(draft, revision, trust)
    if not facts.encoder_decoder and not same_tokenizer:
        there = target.name, target.tokenizer, target.known.V
        dictionary = dictionary_of((name, tokenizer, facts.V), there)
        if dictionary is not None:
            return ForeignDraft(name, place(read, wish).model, dictionary)
    if same_tokenizer and None in (tokenizer, target.tokenizer):
        _require_kind(name, facts.encoder_decoder, target)
        _require_ids(name, facts.V, target, tokenizer or target.tokenizer)
    else:
        remedy = WORDS_MISSING if in_memory(draft) else None
        _require_fit(name, facts.encoder_decoder, facts.V, tokenizer, target, remedy)
    return model_drafter(read, wish, target.known.V)


def _drafter_named(draft: str, target: Fit) -> Drafter | DetachedHeads | OwnCopy | None:
    """The drafter of that name; None for the name of a model. Raises InputError, with all names,
    for one that was mistyped."""
    name, colon, file = draft.partition(":")
    if name + colon in NAMES:
        return NAMES[name + colon](file, target)
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


def _require_fit(
    name: str,
    encoder_decoder: bool,
    V: int,
    own: PreTrainedTokenizerBase | None,
    target: Fit,
    remedy: str | None = None,
) -> None:
    """RefusedError for a draft of another kind or vocabulary than the target's. `remedy`: without
    two tokenizers."""
    _require_kind(name, encoder_decoder, target)
    require_same_words(name, V, own, target.known.V, target.tokenizer, remedy)


def _require_kind(name: str, encoder_decoder: bool, target: Fit) -> None:
    if encoder_decoder and not target.known.encoder_decoder:
        raise RefusedError(f"{name} is an encoder-decoder: it cannot draft for a causal target")


def _require_ids(name: str, V: int, target: Fit, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """RefusedError where one of both lacks ids of the tokenizer that they are said to share."""
    last = max(tokenizer.get_vocab().values(), default=-1) if tokenizer else -1
    for model, rows in ((name, V), (target.name, target.known.V)):
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


def model_drafter(
    read: Source | PreTrainedModel, wish: Wish, V: int, dtype: str | None = None
) -> LMDrafter:
    """A model as the drafter of a target of V tokens, in another dtype than that of the wish."""
    return LMDrafter(place(read, replace(wish, dtype=dtype or wish.dtype)).model, V)


def read_of(
    model: str | Path | PreTrainedModel, revision: str | None, trust: bool
) -> Source | PreTrainedModel:
    return model if in_memory(model) else source(cast(str | Path, model), revision, trust)
