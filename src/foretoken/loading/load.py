"""Strings become objects here and nowhere else: models, drafters, tokenizers, from folders, the
hub or memory."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, cast

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
from foretoken.loading.hub import is_folder
from foretoken.loading.runtimes import Known, Wish, place, place_exact, require_torch
from foretoken.loading.sources import Source, in_memory, source
from foretoken.loading.sources import tokenizer as words_of
from foretoken.models.base import Model, OpenModel
from foretoken.speculator import Speculator
from foretoken.text import require_same_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretoken.drafters.heads import HeadsDrafter
    from foretoken.models.stock.blockwise import Heads

# Drafters that go by a name, for a vocabulary of V; and what a name of a file begins with
NAMES: dict[str, Callable[[int], Drafter]] = {
    "none": lambda V: NoDrafter(),
    "lookup": lambda V: LookupDrafter(),
    "copy": lambda V: CopyDrafter(),
    "uniform": UniformDrafter,
}
NGRAM, HEADS = "ngram:", "heads:"
ALIKE = 0.75  # of 1: how near a draft must be to a name to be one that was mistyped


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | PreTrainedModel | Drafter | Speculator | None = None,
    *,
    dtype: str = "float32",
    draft_dtype: str | None = None,
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
    and place). target None is the pair that ships with the package. draft None is then its draft,
    else "lookup". draft may also be "none", "lookup", "copy", "uniform", "ngram:FILE",
    "heads:FILE", any Drafter, or what `load` returned: a cascade, where that target drafts, itself
    accelerated by its draft.
    exact_shapes: the target runs each row by itself, in passes of one width, so that greedy text is
    the same to the bit with and without guesses (docs/exact.md says what it costs); the draft,
    which has no say in that text, runs as ever.
    revision: of the target and its own tokenizer, on the hub.
    generation_config="ignore" passes over entries of the model's generation config that would
    change the law, which are refused otherwise. How it would sample is not followed either: the
    first text that is made otherwise is told so (the logger "foretoken", a warning).

    Raises InputError for what cannot be read, RefusedError for what cannot be done exactly.
    """
    if generation_config not in (None, "ignore"):
        raise InputError(f"generation_config is {generation_config!r}; give None or 'ignore'")
    where = memory.usable(device)
    for name, value in (
        ("exact_shapes", exact_shapes),
        ("trust_remote_code", trust_remote_code),  # "False" would be true, and run the code
    ):
        if not isinstance(value, bool):
            raise InputError(f"{name} is {value!r:.60}; give True or False")
    wish, draft_wish = Wish(dtype, where, runtime), Wish(draft_dtype or dtype, where, runtime)
    if exact_shapes:
        require_torch(wish)
    if target is None:
        target = asset("target")
        draft = asset("draft") if draft is None else draft
    draft = "lookup" if draft is None else draft
    read = _read(target, revision, trust_remote_code)
    known = Known(read, wish)
    settings = known.settings
    if generation_config is None and settings.objection:
        raise RefusedError(settings.objection)
    require_ids(settings.ends, known.V)
    words = (
        words_of(target, revision, trust_remote_code)
        if tokenizer is None
        else words_of(tokenizer, None, trust_remote_code, wanted=True)
    )
    # What does not fit is said before anything large is loaded or converted
    heads = _heads(draft, known) if isinstance(draft, str) and draft.startswith(HEADS) else None
    wishes = (draft_wish, draft_revision, trust_remote_code)
    drafter = NoDrafter() if heads else _drafter(draft, known, words, *wishes)
    if draft_dtype is not None and (in_memory(draft) or not isinstance(drafter, LMDrafter)):
        raise InputError(
            f"draft_dtype is {draft_dtype!r}, but {_name(draft)} is no model that is loaded; "
            "leave it out"
        )
    if exact_shapes and heads:
        raise RefusedError(
            "exact_shapes=True shows no hidden states, which heads read; give another draft"
        )
    running = (place_exact if exact_shapes else place)(read, wish).model
    if heads:
        drafter = _attached(heads, _name(draft), read, running)
    return Speculator(
        target=running,
        drafter=drafter,
        tokenizer=words,
        ends=settings.ends,
        target_name=_name(target),
        draft_name=_name(draft),
        suggested=settings.suggested if generation_config is None else {},
    )


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
    target: Known,
    words: PreTrainedTokenizerBase | None,
    wish: Wish,
    revision: str | None,
    trust: bool,
) -> Drafter:
    V = target.V
    if isinstance(draft, Speculator):
        if draft.target.encoder_decoder:
            _require_encoder(draft.target_name, target)
        middle_V = draft.target.vocab_size
        require_same_words(draft.target_name, middle_V, draft.tokenizer, V, words)
        draft = CascadeDrafter(draft.target, draft.drafter)
    if not isinstance(draft, str | Path) and not in_memory(draft):
        if isinstance(draft, type) or not hasattr(draft, "propose"):
            raise InputError(f"draft is {draft!r:.60}; give a folder, a name, a model or a Drafter")
        drafter = cast(Drafter, draft)
        require_vocabulary(drafter, V, "the target")
        return drafter
    if isinstance(draft, str) and draft in NAMES:
        return NAMES[draft](V)
    if isinstance(draft, str) and draft.startswith(NGRAM):
        mark = fingerprint(words.get_vocab()) if words else None
        table = NGram.load(draft.removeprefix(NGRAM), vocab_size=V, fingerprint=mark)
        return NGramDrafter(table)
    if isinstance(draft, str):
        _require_no_misspelling(draft)
    read = _read(draft, revision, trust)
    own = Known(read, wish)
    if own.encoder_decoder:
        _require_encoder(_name(draft), target)
    spoken = words_of(draft, revision, trust)
    require_same_words(_name(draft), own.V, spoken, V, words)
    return LMDrafter(place(read, wish).model, V)


def _require_no_misspelling(draft: str) -> None:
    """InputError, with the nearest name, for what is nearly the name of a drafter."""
    head, colon, _ = draft.partition(":")
    if is_folder(draft) or (not colon and "/" in draft):
        return
    known = (NGRAM, HEADS) if colon else (*NAMES, NGRAM, HEADS)
    near = get_close_matches(head.lower() + colon, known, n=1, cutoff=ALIKE)
    if near:
        name = near[0] + "FILE" * near[0].endswith(":")
        raise InputError(
            f"draft is {draft!r:.100}; did you mean {name!r}? A model is a folder or a hub id "
            f"(owner/name), a drafter one of {', '.join(NAMES)}, {NGRAM}FILE, {HEADS}FILE"
        )


def _heads(draft: str, target: Known) -> Heads:
    """Heads that can be this target's."""
    from foretoken.models.stock.blockwise import Heads  # late: takes seconds

    heads = Heads.load(draft.removeprefix(HEADS))
    heads.require_shape(draft, target.structure)
    return heads


def _attached(
    heads: Heads, name: str, read: Source | PreTrainedModel, target: Model
) -> HeadsDrafter:
    """Heads on a target that runs, with its output layer: read anew where torch's weights are
    gone."""
    from foretoken.drafters.heads import HeadsDrafter  # late: takes seconds
    from foretoken.models.stock.blockwise import ends_of

    network = getattr(target, "model", None)
    if network is None:
        loaded = isinstance(read, Source)
        network = read.network(torch.float32, target.device) if loaded else read
    heads.require_target(name, network)
    output, words = ends_of(network)
    heads.to(words.weight.device, words.weight.dtype)
    return HeadsDrafter(cast(OpenModel, target), heads, output, words)


def _require_encoder(name: str, target: Known) -> None:
    if not target.encoder_decoder:
        raise RefusedError(f"{name} is an encoder-decoder: it cannot draft for a causal target")


def _name(source: object) -> str:
    if isinstance(source, str | Path):
        return str(source)
    if in_memory(source):
        return source.name_or_path or type(source).__name__
    if isinstance(source, Speculator):
        return f"{source.target_name} drafted for by {source.draft_name}"
    return type(source).__name__
