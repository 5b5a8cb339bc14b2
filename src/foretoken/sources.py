"""Where models and tokenizers come from: a folder or the hub. What is read is checked; what a
folder lacks is never made up.

It does not know what a model is for, nor what it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from foretoken import documents, hub, memory
from foretoken.ends import check_file
from foretoken.errors import InputError, RefusedError, one_line

WEIGHTS = ("*.safetensors", "*.bin", "*.json", "*.py")  # what a model is made from
TOKENIZER_FILES = (
    "tokenizer_config.json",  # is all that a tokenizer of bytes has
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be loaded: its structure is known, its weights are still where they are."""

    name: str
    path: str  # a folder or a hub id
    empty: PreTrainedModel  # on the meta device, with the generation config
    auto: Any
    where: dict[str, Any]  # revision and trust, for the library

    def network(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """The model with its weights. Raises InputError where some are missing, RefusedError where
        there is no room for them."""
        memory.require(self.name, memory.weight_bytes(self.empty, dtype), device)
        reports = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            network, found = self.auto.from_pretrained(
                self.path, dtype=dtype, **self.where, **reports
            )
        except Exception as error:
            raise InputError(f"{self.name} cannot be loaded: {one_line(error)}") from None
        _require_weights(self.name, type(network).__name__, found)
        return network.to(device).eval()

    def files(self) -> list[Path] | None:
        """What the model is made from, wherever an index of weights says that it stands; None
        where it comes from the hub, by a commit. Raises RefusedError for an adapter, whose base
        stands elsewhere."""
        folder = Path(self.path)
        if not hub.is_folder(self.path):
            return None
        if (folder / "adapter_config.json").exists():
            raise RefusedError(f"{self.name} holds an adapter: merge it into its base model")
        named = {file for kind in WEIGHTS for file in folder.glob(kind)}
        for index in folder.glob("*.index.json"):
            named |= {folder / name for name in _indexed(index)}
        return [file for file in named if file.is_file()]

    @property
    def commit(self) -> str | None:
        return getattr(self.empty.config, "_commit_hash", None)


def _indexed(index: Path) -> set[str]:
    """The files of weights that an index names; what is wrong with it is said in loading."""
    try:
        return set(documents.read(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def source(given: str | Path, revision: str | None, trust: bool) -> Source:
    """A folder or hub id, read as far as its config. Raises InputError and RefusedError."""
    path = hub.path(given)
    if hub.is_folder(given):
        check_file(Path(given))
    way = hub.way(path, revision)
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust, **way}
    try:
        config = AutoConfig.from_pretrained(path, **where)
    except Exception as error:  # the library raises many kinds
        raise InputError(f"{given} cannot be read as a model: {one_line(error)}") from None
    auto = _auto(config, str(given), trust)
    try:
        with torch.device("meta"):
            empty = auto.from_config(config, trust_remote_code=trust)
    except Exception as error:
        raise InputError(f"{given} cannot be built from its config: {one_line(error)}") from None
    try:
        empty.generation_config = GenerationConfig.from_pretrained(
            path, revision=revision or "main", **way
        )
    except OSError:
        pass  # there is none: the library makes one from the model's config
    return Source(str(given), path, empty.eval(), auto, where)


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


def _auto(config: PretrainedConfig, name: str, trust: bool) -> Any:
    remote = getattr(config, "auto_map", None) or {}
    for auto in (AutoModelForSeq2SeqLM, AutoModelForCausalLM):
        # not in its keys(): they import the configs of all families
        if type(config) in auto._model_mapping or (trust and auto.__name__ in remote):
            if config.is_encoder_decoder == (auto is AutoModelForSeq2SeqLM):
                return auto
    raise RefusedError(
        f"{name} is a {config.model_type} model, neither causal nor encoder-decoder; "
        "give a model that generates text"
    )


def tokenizer(
    given: str | Path | PreTrainedModel | PreTrainedTokenizerBase,
    revision: str | None,
    trust: bool,
    *,
    wanted: bool = False,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder or on the hub; None where there is none, unless `wanted`."""
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if isinstance(given, PreTrainedModel):
        return None
    if not isinstance(given, str | Path):
        raise InputError(f"tokenizer is {given!r:.60}; give a folder, a hub id or a tokenizer")
    local = hub.is_folder(given)
    if local and not _holds(given, TOKENIZER_FILES):
        if wanted:
            raise InputError(f"{given} holds no tokenizer; give a folder or hub id with one")
        return None
    try:
        where = {"revision": revision, "trust_remote_code": trust}
        words = AutoTokenizer.from_pretrained(given, **where, **hub.way(str(given), revision))
        needs = set(words.vocab_files_names.values())
        if local and needs and not _holds(given, {*TOKENIZER_FILES[1:], *needs}):
            raise OSError(f"there is none of {', '.join(sorted(needs))}")  # an empty one was made
        return words
    except Exception as error:
        if not local and not wanted:
            return None  # a hub model without one
        raise InputError(
            f"the tokenizer in {given!s:.100} cannot be read: {one_line(error)}"
        ) from None


def _holds(folder: str | Path, names: Iterable[str]) -> bool:
    return any((Path(folder) / name).exists() for name in names)
