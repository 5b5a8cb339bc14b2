"""Strings become objects here and nowhere else: models, drafters, tokenizers, from folders, the
hub or memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from foretoken import memory
from foretoken.drafters.base import Drafter
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.ngram import NGram, NGramDrafter, fingerprint
from foretoken.drafters.none import NoDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.ends import check_file, read_ends
from foretoken.errors import InputError, RefusedError, one_line
from foretoken.models.base import Model
from foretoken.models.causal import CausalModel
from foretoken.models.selfcheck import self_check
from foretoken.models.seq2seq import Seq2SeqModel
from foretoken.speculator import Speculator
from foretoken.text import require_same_words

DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
TOKENIZER_FILES = (
    "tokenizer_config.json",  # is all that a tokenizer of bytes has
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "vocab.json",
    "vocab.txt",
)
HUB_ID = re.compile(r"(?=.{1,96}$)[\w.-]+(/[\w.-]+)?")


def load(
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | PreTrainedModel | Drafter | None = None,
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
    else "lookup". draft may also be "none", "lookup", "uniform", "ngram:FILE" or any Drafter.
    generation_config="ignore" passes over entries of the model's generation config that would
    change the law, which are refused otherwise.

    Raises InputError for what cannot be read, RefusedError for what cannot be done exactly.
    """
    _refuse_unbuilt(runtime, exact_shapes, dtype, draft_dtype)
    if generation_config not in (None, "ignore"):
        raise InputError(f"generation_config is {generation_config!r}; give None or 'ignore'")
    place = memory.usable(device)
    if target is None:
        target = _asset("target")
        draft = _asset("draft") if draft is None else draft
    if isinstance(target, str | Path) and _is_folder(target):
        check_file(Path(target))
    network = _network(target, dtype, place, revision, trust_remote_code)
    model = _model(network)
    words = (
        _tokenizer(target, revision, trust_remote_code)
        if tokenizer is None
        else _tokenizer(tokenizer, revision, trust_remote_code, wanted=True)
    )
    options = (draft_dtype or dtype, place, draft_revision, trust_remote_code)
    return Speculator(
        target=model,
        drafter=_drafter("lookup" if draft is None else draft, model, words, *options),
        tokenizer=words,
        ends=read_ends(network, refuse=generation_config is None),
        target_name=_name(target),
        draft_name=_name("lookup" if draft is None else draft),
    )


def _refuse_unbuilt(runtime: str, exact_shapes: bool, *dtypes: str | None) -> None:
    if runtime not in ("auto", "transformers"):
        raise RefusedError(f"runtime={runtime!r} is not built yet; give 'auto' or 'transformers'")
    if exact_shapes:
        raise RefusedError("exact_shapes=True is not built yet; leave it at False")
    for dtype in dtypes:
        if dtype == "int8":
            raise RefusedError("dtype='int8' is not built yet; give 'float32' or 'bfloat16'")
        if dtype is not None and dtype not in DTYPES:
            raise InputError(f"dtype is {dtype!r}; give one of {', '.join(DTYPES)}")


def _asset(name: str) -> Path:
    """A folder of the default pair."""
    folder = Path(str(files("foretoken") / "assets" / name))
    if not (folder / "config.json").exists():
        raise InputError(f"the default pair is missing at {folder}; install the package again")
    return folder


def _network(
    source: str | Path | PreTrainedModel,
    dtype: str,
    device: torch.device,
    revision: str | None,
    trust: bool,
) -> PreTrainedModel:
    """The transformers model on its device; one in memory as it is."""
    if isinstance(source, PreTrainedModel):
        return source
    path = _path(source)
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust}
    try:
        config = AutoConfig.from_pretrained(path, **where)
    except Exception as error:  # the library raises many kinds
        raise InputError(f"{source} cannot be read as a model: {one_line(error)}") from None
    auto = _auto(config, str(source), trust)
    kind = _torch_dtype(dtype, config)
    try:
        with torch.device("meta"):
            empty = auto.from_config(config, trust_remote_code=trust)
    except Exception as error:
        raise InputError(f"{source} cannot be built from its config: {one_line(error)}") from None
    memory.require(str(source), memory.weight_bytes(empty, kind), device)
    where |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        network, found = auto.from_pretrained(path, dtype=kind, **where)
    except Exception as error:
        raise InputError(f"{source} cannot be loaded: {one_line(error)}") from None
    _require_weights(str(source), type(network).__name__, found)
    return network.to(device).eval()


def _require_weights(name: str, kind: str, found: dict[str, Any]) -> None:
    """Raise where weights are missing or of another size: transformers would make them up."""
    missing, unlike = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if missing:
        raise InputError(
            f"{name} holds no weights for {missing[0]} ({len(missing)} are missing); "
            f"give a complete {kind}"
        )
    if unlike:
        key, held, wanted = unlike[0]
        raise InputError(
            f"{name} holds {key} as {tuple(held)}, its config says {tuple(wanted)}; "
            f"give a config and weights of one {kind}"
        )


def _path(source: str | Path) -> str:
    """A folder that exists, or a hub id."""
    if not isinstance(source, str | Path):
        raise InputError(f"target is {source!r:.60}; give a folder, a hub id or a model")
    if _is_folder(source):
        return str(source)
    if isinstance(source, Path) or not HUB_ID.fullmatch(source):
        raise InputError(f"{str(source)!r:.100} is no folder; give a model's folder or a hub id")
    return source


def _is_folder(source: str | Path) -> bool:
    try:
        return bool(str(source)) and Path(source).is_dir()
    except OSError:  # a name that is too long
        return False


def _auto(config: PretrainedConfig, name: str, trust: bool) -> Any:
    remote = getattr(config, "auto_map", None) or {}
    for auto in (AutoModelForSeq2SeqLM, AutoModelForCausalLM):
        if type(config) in auto._model_mapping.keys() or (trust and auto.__name__ in remote):
            if config.is_encoder_decoder == (auto is AutoModelForSeq2SeqLM):
                return auto
    raise RefusedError(
        f"{name} is a {config.model_type} model, neither causal nor encoder-decoder; "
        "give a model that generates text"
    )


def _torch_dtype(name: str, config: PretrainedConfig) -> torch.dtype:
    if name == "auto":
        stated = config.dtype
        return stated if isinstance(stated, torch.dtype) else torch.float32
    return getattr(torch, name)


def _model(network: PreTrainedModel) -> Model:
    """The network behind the Model protocol, once its family has passed the self-check."""
    self_check(network)
    return (Seq2SeqModel if network.config.is_encoder_decoder else CausalModel)(network)


def _tokenizer(
    source: str | Path | PreTrainedModel | PreTrainedTokenizerBase,
    revision: str | None,
    trust: bool,
    *,
    wanted: bool = False,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder or on the hub; None where there is none, unless `wanted`."""
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    if isinstance(source, PreTrainedModel):
        return None
    if not isinstance(source, str | Path):
        raise InputError(f"tokenizer is {source!r:.60}; give a folder, a hub id or a tokenizer")
    local = _is_folder(source)
    if local and not _holds(source, TOKENIZER_FILES):
        if wanted:
            raise InputError(f"{source} holds no tokenizer; give a folder or hub id with one")
        return None
    try:
        words = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust)
        needs = set(words.vocab_files_names.values())
        if local and needs and not _holds(source, {*TOKENIZER_FILES[1:], *needs}):
            raise OSError(f"there is none of {', '.join(sorted(needs))}")  # an empty one was made
        return words
    except Exception as error:
        if not local and not wanted:
            return None  # a hub model without one
        raise InputError(
            f"the tokenizer in {source!s:.100} cannot be read: {one_line(error)}"
        ) from None


def _holds(folder: str | Path, names: Iterable[str]) -> bool:
    return any((Path(folder) / name).exists() for name in names)


def _drafter(
    draft: str | Path | PreTrainedModel | Drafter,
    target: Model,
    words: PreTrainedTokenizerBase | None,
    dtype: str,
    device: torch.device,
    revision: str | None,
    trust: bool,
) -> Drafter:
    if not isinstance(draft, str | Path | PreTrainedModel):
        if isinstance(draft, type) or not hasattr(draft, "propose"):
            raise InputError(f"draft is {draft!r:.60}; give a folder, a name, a model or a Drafter")
        return draft
    if draft == "none":
        return NoDrafter()
    if draft == "lookup":
        return LookupDrafter()
    if draft == "uniform":
        return UniformDrafter(target.vocab_size)
    if isinstance(draft, str) and draft.startswith("heads:"):
        raise RefusedError(
            f"draft={draft!r}: heads are not built yet; give a model or 'ngram:FILE'"
        )
    if isinstance(draft, str) and draft.startswith("ngram:"):
        mark = fingerprint(words.get_vocab()) if words else None
        table = NGram.load(
            draft.removeprefix("ngram:"), vocab_size=target.vocab_size, fingerprint=mark
        )
        return NGramDrafter(table)
    model = _model(_network(draft, dtype, device, revision, trust))
    if model.encoder_decoder and not target.encoder_decoder:
        raise RefusedError(
            f"{_name(draft)} is an encoder-decoder: it cannot draft for a causal target"
        )
    require_same_words(
        _name(draft), model.vocab_size, _tokenizer(draft, revision, trust), target.vocab_size, words
    )
    return LMDrafter(model, target.vocab_size)


def _name(source: object) -> str:
    if isinstance(source, str | Path):
        return str(source)
    if isinstance(source, PreTrainedModel):
        return source.name_or_path or type(source).__name__
    return type(source).__name__
