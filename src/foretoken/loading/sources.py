"""Where models and tokenizers come from: a folder or the hub. What is read is checked; what a
folder lacks is never made up.

It does not know what a model is for, nor what it runs on.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from foretoken.ends import check_file
from foretoken.errors import InputError, RefusedError, one_line
from foretoken.loading import hub, memory
from foretoken.storage import disk, documents
from foretoken.storage.lineage import versions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("*.safetensors", "*.bin", "*.json", "*.py")  # what a model is made from
CLASSES = "tokenizers.json"  # by what they were chosen from, classes of tokenizers
CHOOSING = ("config.json", "tokenizer_config.json")
TOKENIZER_FILES = (
    "tokenizer_config.json",  # is all that a tokenizer of bytes has
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class Source:
    """A model that can be loaded; what it is made from is read when it is asked for."""

    name: str
    path: str  # a folder or a hub id
    where: dict[str, Any]  # revision and trust, for the library

    @property
    def trust(self) -> bool:
        return self.where["trust_remote_code"]

    @cached_property
    def config(self) -> PreTrainedConfig:
        """Raises InputError where there is none that can be read."""
        from transformers import AutoConfig  # late: takes seconds, and a kept conversion needs none

        try:
            return AutoConfig.from_pretrained(self.path, **self.where)
        except Exception as error:  # the library raises many kinds
            raise InputError(f"{self.name} cannot be read as a model: {one_line(error)}") from None

    @cached_property
    def empty(self) -> PreTrainedModel:
        """The structure, on the meta device, with the generation config. Raises InputError and
        RefusedError."""
        from transformers import GenerationConfig  # late: as above

        if hub.is_folder(self.path):
            check_file(Path(self.path))
        auto = _auto(self.config, self.name, self.trust)
        try:
            with torch.device("meta"):
                made = auto.from_config(self.config, trust_remote_code=self.trust)
        except Exception as error:
            what = f"{self.name} cannot be built from its config"
            raise InputError(f"{what}: {one_line(error)}") from None
        where = {name: value for name, value in self.where.items() if name != "trust_remote_code"}
        where["revision"] = where["revision"] or "main"
        try:
            made.generation_config = GenerationConfig.from_pretrained(self.path, **where)
        except OSError:
            pass  # there is none: the library makes one from the model's config
        return made.eval()

    @cached_property
    def code(self) -> list[str]:
        """The source of the model's classes that are not transformers' own."""
        if not self.trust:
            return []
        from foretoken.models.stock.selfcheck import strangers  # late: as above

        return strangers(self.empty)

    def network(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """The model with its weights. Raises InputError where some are missing, RefusedError where
        there is no room for them."""
        memory.require(self.name, memory.weight_bytes(self.empty, dtype), device)
        reports = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            auto = _auto(self.config, self.name, self.trust)
            network, found = auto.from_pretrained(self.path, dtype=dtype, **self.where, **reports)
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
        chosen = _json(folder / "config.json").get("transformers_weights")
        named |= {folder / chosen} if isinstance(chosen, str) else set()
        for index in [file for file in named if file.name.endswith(".index.json")]:
            shards = _json(index).get("weight_map")
            for name in set(shards.values()) if isinstance(shards, dict) else ():
                named |= {folder / str(name), index.parent / str(name)}
        return [file for file in named if file.is_file()]

    @property
    def commit(self) -> str | None:
        return getattr(self.config, "_commit_hash", None)


def _json(file: Path) -> dict[str, Any]:
    """An object; what is wrong with it is said in loading."""
    try:
        found = documents.read(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def source(given: str | Path, revision: str | None, trust: bool) -> Source:
    """A folder or hub id. Raises InputError for what is neither."""
    path = hub.path(given)
    way = hub.way(path, revision)
    return Source(str(given), path, {"revision": revision, "trust_remote_code": trust, **way})


def in_memory(given: object) -> TypeGuard[PreTrainedModel]:
    """Whether it is a network. What makes networks takes seconds to import: where it was not, there
    are none."""
    makers = sys.modules.get("transformers.modeling_utils")
    return makers is not None and isinstance(given, makers.PreTrainedModel)


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


def _auto(config: PreTrainedConfig, name: str, trust: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # late: as above

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
    from transformers import PreTrainedTokenizerBase  # late: a folder may have none

    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if in_memory(given):
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
        words = _tokenizer(given, where | hub.way(str(given), revision))
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


def _tokenizer(given: str | Path, where: dict[str, Any]) -> PreTrainedTokenizerBase:
    """As AutoTokenizer makes it. Which class it takes is remembered for folders: to find out, it
    imports the configs of all families, which takes a second."""
    local = hub.is_folder(given) and not where["trust_remote_code"]
    key = _class_key(Path(given)) if local else ""
    module, _, kind = str(disk.remembered(CLASSES).get(key)).partition(":")
    if module.startswith("transformers."):
        return getattr(import_module(module), kind).from_pretrained(given, **where)
    from transformers import AutoTokenizer  # late: takes seconds

    made = AutoTokenizer.from_pretrained(given, **where)
    if key:
        disk.remember(CLASSES, key, f"{type(made).__module__}:{type(made).__qualname__}")
    return made


def _class_key(folder: Path) -> str:
    """What the choice of a tokenizer's class depends on."""
    files = sorted(file.name for file in folder.iterdir())
    parts = [*files, *((folder / name).read_text() for name in CHOOSING if name in files)]
    parts += versions().values()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _holds(folder: str | Path, names: Iterable[str]) -> bool:
    return any((Path(folder) / name).exists() for name in names)
