"""Strings become objects here and nowhere else: models, drafters, tokenizers, from folders, the
hub or memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
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
from foretoken.ends import require_ids
from foretoken.errors import InputError, RefusedError
from foretoken.loading import memory
from foretoken.loading.chosen import chosen, rounded
from foretoken.loading.hub import is_folder
from foretoken.loading.own import OwnCopy, own_copy
from foretoken.loading.runtimes import Known, Wish, place, place_exact, require_torch
from foretoken.loading.sources import Source, in_memory, source
from foretoken.loading.sources import tokenizer as tokenizer_of
from foretoken.loading.vocabularies import ForeignDraft, dictionary_of
from foretoken.models.base import Model, OpenModel
from foretoken.options import require_place
from foretoken.speculator import Speculator
from foretoken.text.decoding import require_same_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretoken.drafters.blockwise import Heads
    from foretoken.drafters.heads import HeadsDrafter

SIMILAR = 0.75  # of 1: from here on a draft is taken for a mistyped name


class _Target(NamedTuple):
    """What a draft must fit, before the target runs."""

    name: str
    known: Known
    tokenizer: PreTrainedTokenizerBase | None


class _DetachedHeads(NamedTuple):
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


def _own(kind: str, target: _Target) -> OwnCopy:
    return own_copy(kind, target.known)


def _ngram(file: str, target: _Target) -> Drafter:
    mark = fingerprint(target.tokenizer.get_vocab()) if target.tokenizer else None
    return NGramDrafter(NGram.load(file, vocab_size=target.known.V, fingerprint=mark))


def _heads(file: str, target: _Target) -> _DetachedHeads:
    from foretoken.drafters.blockwise import Heads  # late: takes seconds

    heads, name = Heads.load(file), f"heads:{file}"
    heads.require_shape(name, target.known.structure)
    return _DetachedHeads(name, heads)


# Drafters by name; names that end in ":" are followed by a file, or by a kind of copy
NAMES: dict[str, Callable[[str, _Target], Drafter | _DetachedHeads | OwnCopy]] = {
    "self": lambda kind, target: OwnCopy("self", None, ()),
    "self:": _own,
    "none": lambda file, target: NoDrafter(),
    "lookup": lambda file, target: LookupDrafter(),
    "copy": lambda file, target: CopyDrafter(),
    "uniform": lambda file, target: UniformDrafter(target.known.V),
    "ngram:": _ngram,
    "heads:": _heads,
}


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
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    generation_config: str | None = None,
) -> Speculator:
    """A target and a draft, ready to generate.

    target, draft: a local folder, a hub id or a model in memory (used as it is, in its own dtype
    and on its own device). target None is the pair that ships with the package. draft None is then
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
    revision: of the target and its own tokenizer, on the hub.
    generation_config="ignore" passes over entries of the model's generation config that would
    change the law, which are refused otherwise. Its sampling settings are never followed: the
    logger "foretoken" warns once, at the first text sampled otherwise.

    Raises InputError for invalid options and unreadable models, RefusedError for what cannot be
    done exactly.
    """
    if generation_config not in (None, "ignore"):
        raise InputError(f"generation_config is {generation_config!r}; give None or 'ignore'")
    at = memory.usable(device)
    flags = {"exact_shapes": exact_shapes, "trust_remote_code": trust_remote_code}
    for name, value in flags.items():
        if not isinstance(value, bool):  # "False" would be true, and run a model's code
            raise InputError(f"{name} is {value!r:.60}; give True or False")
    require_place(runtime, dtype, kv_dtype=kv_dtype, draft_dtype=draft_dtype)
    wish = Wish(dtype, at, runtime, kv_dtype)
    draft_wish = Wish(draft_dtype or dtype, at, runtime)
    if exact_shapes:
        require_torch(wish)
    ships = target is None
    if target is None:
        target = asset("target")
        draft = asset("draft") if draft is None else draft
    choose, draft = draft is None, "lookup" if draft is None else draft
    read = _read(target, revision, trust_remote_code)
    known = Known(read, wish)
    settings = known.settings
    if generation_config is None and settings.objection:
        raise RefusedError(settings.objection)
    require_ids(settings.ends, known.V)
    own = (
        tokenizer_of(target, revision, trust_remote_code)
        if tokenizer is None
        else tokenizer_of(tokenizer, None, trust_remote_code, wanted=True)
    )
    # The draft first: what does not fit is refused before the target is loaded or converted
    drafter = _drafter(
        draft, _Target(_name(target), known, own), draft_wish, draft_revision, trust_remote_code
    )
    if isinstance(drafter, OwnCopy):
        drafter = drafter.rounded(draft_dtype)
        if draft_revision is not None:
            raise InputError(
                f"draft_revision is {draft_revision!r:.60}, but the draft is the target's copy; "
                "leave it out"
            )
        drafter.require("transformers" if exact_shapes else runtime)
    elif draft_dtype is not None and (
        in_memory(draft) or not isinstance(drafter, LMDrafter | ForeignDraft)
    ):
        given = "there is no draft" if choose else f"{_name(draft)} is no model that is loaded"
        raise InputError(f"draft_dtype is {draft_dtype!r}, but {given}; leave it out")
    if exact_shapes and isinstance(drafter, _DetachedHeads):
        raise RefusedError(
            "exact_shapes=True shows no hidden states, which heads read; give another draft"
        )
    running = (place_exact if exact_shapes else place)(read, wish).model
    if isinstance(drafter, _DetachedHeads | OwnCopy):
        drafter = drafter.attached(read, running)
    spec = Speculator(
        target=running,
        drafter=NoDrafter() if isinstance(drafter, ForeignDraft) else drafter,
        tokenizer=own,
        ends=settings.ends,
        controls=settings.controls if generation_config is None else {},
        target_name=_name(target),
        draft_name=_name(draft),
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
    own_read = _read(draft, draft_revision, trust_remote_code)
    fewer = partial(_model_drafter, own_read, draft_wish, known.V)
    return rounded(spec, dtype, fewer, Known(own_read, draft_wish).parameters)


def _model_drafter(
    read: Source | PreTrainedModel, wish: Wish, V: int, dtype: str | None = None
) -> LMDrafter:
    """A model as the drafter of a target of V tokens, in another dtype than that of the wish."""
    return LMDrafter(place(read, replace(wish, dtype=dtype or wish.dtype)).model, V)


def _read(
    given: str | Path | PreTrainedModel, revision: str | None, trust: bool
) -> Source | PreTrainedModel:
    return given if in_memory(given) else source(cast(str | Path, given), revision, trust)


def asset(name: str) -> Path:
    """A folder of the default pair."""
    folder = Path(str(files("foretoken") / "assets" / name))
    if not (folder / "config.json").exists():
        raise InputError(f"the default pair is missing at {folder}; install the package again")
    return folder


def _drafter(
    draft: str | Path | PreTrainedModel | Drafter | Speculator,
    target: _Target,
    wish: Wish,
    revision: str | None,
    trust: bool,
) -> Drafter | _DetachedHeads | OwnCopy | ForeignDraft:
    if isinstance(draft, str) and (named := _named(draft, target)) is not None:
        return named
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
    read = _read(draft, revision, trust)
    known = Known(read, wish)
    name, tokenizer = _name(draft), tokenizer_of(draft, revision, trust)
    if not known.encoder_decoder:
        there = target.name, target.tokenizer, target.known.V
        dictionary = dictionary_of((name, tokenizer, known.V), there)
        if dictionary is not None:
            return ForeignDraft(name, place(read, wish).model, dictionary)
    _require_fit(name, known.encoder_decoder, known.V, tokenizer, target)
    return _model_drafter(read, wish, target.known.V)


def _named(draft: str, target: _Target) -> Drafter | _DetachedHeads | OwnCopy | None:
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
    name: str, encoder_decoder: bool, V: int, own: PreTrainedTokenizerBase | None, target: _Target
) -> None:
    """RefusedError for a draft of another kind or vocabulary than the target's."""
    if encoder_decoder and not target.known.encoder_decoder:
        raise RefusedError(f"{name} is an encoder-decoder: it cannot draft for a causal target")
    require_same_words(name, V, own, target.known.V, target.tokenizer)


def _name(source: object) -> str:
    if isinstance(source, str | Path):
        return str(source)
    if in_memory(source):
        return source.name_or_path or type(source).__name__
    if isinstance(source, Speculator):
        return f"{source.target_name} drafted for by {source.draft_name}"
    return type(source).__name__
