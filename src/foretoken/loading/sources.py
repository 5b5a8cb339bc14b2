"""Models and tokenizers from a folder or the hub, checked as they are read: what is missing is
refused, never made up.

Names of transformers are taken from its module when they are needed: networks and families take
seconds to import, which a cached conversion does without. Does not know what a model is used for,
nor what it runs on.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import transformers

from foretoken.errors import InputError, RefusedError, to_one_line
from foretoken.generation_config import check_file, list_ids
from foretoken.loading import adapters, gguf, hub, memory, merging, named_models, weights
from foretoken.loading.published_drafts import get_cached_kind
from foretoken.models.stock.sizes import get_max_positions
from foretoken.models.stock.third_party import third_party_sources
from foretoken.storage.cache import get_versions, load_cached_values, save_cached_value
from foretoken.storage.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MODEL_FILE_PATTERNS = ("*.safetensors", "*.bin", "*.json", "*.py")
TOKENIZER_CLASSES_FILE = "tokenizers.json"  # cached classes of tokenizers
TOKENIZER_CLASS_INPUTS = ("config.json", "tokenizer_config.json")  # what the class follows from
# Wrappers that change neither weights nor what is computed, and where they keep the network
WRAPPED_ATTRIBUTES = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
}
PROCESSOR_LIBRARIES = (
    "torchaudio",
    "mistral-common",
    "librosa",
)  # that some processors need beside
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TOKENIZER_FILES = (
    "tokenizer_config.json",  # a tokenizer of bytes has no other file
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded; its parts are read when they are first needed."""

    name: str
    path: str  # a folder or a hub id
    options: dict[str, Any]  # of `from_pretrained`: revision, trust, and a GGUF file in the folder
    adapter: Path | None = None  # a folder, to be merged into the weights

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that holds the model, if it is in one."""
        name = self.options.get("gguf_file")
        return Path(self.path) / name if name else None

    @property
    def _hint(self) -> str:
        return "; the file may be cut off or damaged: fetch it again" if self.gguf else ""

    @property
    def trust(self) -> bool:
        return self.options["trust_remote_code"]

    @property
    def has_own_adapter(self) -> bool:
        """True for a model that brings an adapter for its sounds, which its `generate` turns off
        for text."""
        folder = hub.is_folder(self.path)
        if self.gguf or (folder and not _has_any(self.path, (adapters.ADAPTER_CONFIG_FILE,))):
            return False
        return getattr(self.config, "has_lora_adapter", False) is True

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's config. Raises InputError where it cannot be read."""
        try:
            with gguf.parse_once(self.gguf):
                config = transformers.AutoConfig.from_pretrained(self.path, **self.options)
        except Exception as error:  # the library raises many kinds
            revision = self.options.get("revision")
            if not self.gguf and (kind := get_cached_kind(self.path, revision)):
                raise InputError(
                    f"{self.name} is a draft ({kind}), no model; give it as --draft or draft="
                ) from None
            raise InputError(
                f"{self.name} cannot be read as a model: {to_one_line(error)}{self._hint}"
            ) from None
        weights.require_layer_count(self.name, config, self._dtypes)
        return config

    @cached_property
    def _dtypes(self) -> dict[str, str]:
        return weights.read_dtypes(self.path, self.gguf)

    @cached_property
    def structure(self) -> PreTrainedModel:
        """The structure, on the meta device, with the generation config. Raises InputError and
        RefusedError."""
        if hub.is_folder(self.path) and not self.gguf:
            check_file(Path(self.path))
        auto = _choose_auto_class(self.config, self.name, self.trust)
        try:
            with torch.device("meta"):
                network = auto.from_config(self.config, trust_remote_code=self.trust)
        except Exception as error:
            problem = f"{self.name} cannot be built from its config"
            raise InputError(f"{problem}: {to_one_line(error)}") from None
        get_max_positions(network.config.get_text_config(decoder=True))
        weights.require_matching_layers(
            self.name, network, self._dtypes, in_gguf=self.gguf is not None
        )
        if self.gguf:  # the model's config holds what else the file says
            settings: Any = network.generation_config
            settings.eos_token_id = gguf.find_end_ids(self.gguf, list_ids(settings, "eos_token_id"))
            return network.eval()
        options = {k: v for k, v in self.options.items() if k != "trust_remote_code"}
        options["revision"] = options["revision"] or "main"
        with suppress(OSError):  # it is missing: the library makes one from the model's config
            own = transformers.GenerationConfig.from_pretrained(self.path, **options)
            network.generation_config = own
        return network.eval()

    def list_custom_code(self) -> list[str]:
        """Return the source code of the model's classes that are not transformers' own."""
        if self.gguf:
            return ["all ends of the file"]  # earlier conversions of one know a single end
        if not self.trust:
            return []
        return third_party_sources(self.structure)

    def load_network(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Return the model with its weights. Raises InputError where some are missing, RefusedError
        where there is no room for them."""
        memory.require_memory(self.name, memory.count_weight_bytes(self.structure, dtype), device)
        if self.adapter is not None:
            merging.require_fit(self.structure, self.adapter)
        options = self.options | {"output_loading_info": True, "ignore_mismatched_sizes": True}
        options |= (
            gguf.get_dequantize_options()
            if self.gguf
            else weights.get_dequantize_options(self.config, self.name)
        )
        try:
            auto = _choose_auto_class(self.config, self.name, self.trust)
            with gguf.parse_once(self.gguf):
                network, report = auto.from_pretrained(self.path, dtype=dtype, **options)
        except Exception as error:
            raise InputError(
                f"{self.name} cannot be loaded: {to_one_line(error)}{self._hint}"
            ) from None
        _require_weights(self.name, type(network).__name__, report)
        if not self.gguf:
            weights.require_layers(self.name, network.state_dict(), report["unexpected_keys"])
        gguf.forget_file()
        if "quantization_config" in options:
            weights.finish_dequantizing(network, dtype, self.name)
        if self.has_own_adapter:
            network = merging.merge_own_adapter(network)
        if self.adapter is not None:
            network = merging.merge_adapter(network, self.adapter)
        ready: Any = network
        return ready.to(device).eval()

    def list_files(self) -> list[Path] | None:
        """Return all that it is made from, also where an index points outside the folder; None for
        a model of the hub, which a commit identifies."""
        folder = Path(self.path)
        if not hub.is_folder(self.path):
            return None
        if self.gguf:
            return [self.gguf, *self.adapter_files]
        files = {file for pattern in MODEL_FILE_PATTERNS for file in folder.glob(pattern)} | {
            *self.adapter_files
        }
        named = _read_json(folder / "config.json").get("transformers_weights")
        files |= {folder / named} if isinstance(named, str) else set()
        for index in [file for file in files if file.name.endswith(".index.json")]:
            shards = _read_json(index).get("weight_map")
            for name in set(shards.values()) if isinstance(shards, dict) else ():
                files |= {folder / str(name), index.parent / str(name)}
        return [file for file in files if file.is_file()]

    def require_weights(self) -> None:
        """Raise InputError for a folder without a file of weights."""
        files = self.list_files()
        if files is not None and all(file.suffix in (".json", ".py") for file in files):
            raise InputError(f"{self.name} holds no weights; {hub.FOLDER_CONTENTS}")

    @property
    def adapter_files(self) -> list[Path]:
        """The files of its adapter."""
        return [] if self.adapter is None else adapters.list_files(self.adapter)

    @property
    def commit(self) -> str | None:
        return getattr(self.config, "_commit_hash", None)


def _read_json(file: Path) -> dict[str, Any]:
    """Read the object in a file; {} where it cannot be read, which loading the model will
    report."""
    try:
        content = parse_json(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def find_source(
    name: str | Path, revision: str | None, trust: bool, adapter: str | Path | None = None
) -> ModelSource:
    """Return the model in a folder or on the hub, with an adapter where one is given. Raises
    InputError where there is no such model, RefusedError for an adapter in its place."""
    path, options = hub.resolve_path(name), {"revision": revision, "trust_remote_code": trust}
    if hub.is_folder(path) and (Path(path) / adapters.ADAPTER_CONFIG_FILE).exists():
        if _read_json(Path(path) / "config.json").get("has_lora_adapter") is not True:
            problem = f"{name} holds an adapter; give its base model, and adapter={path!r}"
            raise RefusedError(problem)
        adapters.find_adapter(path)  # says what it needs
        if adapter is not None:
            raise RefusedError(f"{name} brings an adapter, and takes no other; leave adapter out")
    adapter_folder = None if adapter is None else adapters.find_adapter(adapter)
    shown_name = named_models.get_shipped_name(name)
    shown_name = shown_name if adapter is None else f"{shown_name} with {adapter}"
    if file := hub.find_gguf(path, revision):
        gguf.require_packages()
        folder = {"revision": None, "gguf_file": file.name}
        return ModelSource(shown_name, str(file.parent), options | folder, adapter_folder)
    options |= hub.resolve_options(path, revision)
    if hub.is_folder(path):
        hub.require_config(path)
    return ModelSource(shown_name, path, options, adapter_folder)


def is_network(model: object) -> TypeGuard[PreTrainedModel]:
    """Tell whether it is a network. Before their module, slow to import, is imported, none
    exists."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def resolve_model(
    model: str | Path | PreTrainedModel,
    revision: str | None,
    trust: bool,
    adapter: str | Path | None = None,
) -> ModelSource | PreTrainedModel:
    """Return the model in a folder or on the hub, as `source` does, or the one in memory. Raises
    InputError for one in memory with an adapter, or with a context of no tokens."""
    if not is_network(model):
        return find_source(cast(str | Path, model), revision, trust, adapter)
    if adapter is not None:
        raise InputError(
            f"adapter is {adapter!r:.60}, but the target is in memory; merge it there: "
            "PeftModel.from_pretrained(target, adapter).merge_and_unload()"
        )
    get_max_positions(model.config.get_text_config(decoder=True))
    return model


def unwrap_model(model: object, name: str) -> object:
    """Return the network that torch.compile, DataParallel or DistributedDataParallel wrapped, as
    training leaves them; anything else as it is. `name`: of the argument, for an error.

    Raises InputError, with the remedy, for an adapter's wrapper, whose weights are not the
    network's, and for a pipeline.
    """
    while attribute := WRAPPED_ATTRIBUTES.get(
        f"{type(model).__module__}.{type(model).__qualname__}"
    ):
        model = getattr(model, attribute)
    if is_network(model) or isinstance(model, type) or hasattr(model, "propose"):
        config = getattr(model, "config", None)
        has_lora = getattr(config, "has_lora_adapter", False)
        if has_lora and getattr(model, "_hf_peft_config_loaded", False):
            raise InputError(
                f"{name} is a {type(model).__name__} whose generate turns its adapter on and off; "
                "give its folder, of which the adapter is merged"
            )
        return model
    kind = type(model).__name__
    if hasattr(model, "merge_and_unload"):
        raise InputError(
            f"{name} is a {kind}, a model with an adapter beside it; merge it first: "
            f"give {name}.merge_and_unload()"
        )
    if is_network(getattr(model, "model", None)):
        raise InputError(f"{name} is a {kind} around a model; give {name}.model")
    return model


def _require_weights(name: str, kind: str, report: dict[str, Any]) -> None:
    """InputError where weights are missing or of another shape; transformers would invent them."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise InputError(
            f"{name} holds no weights for {missing[0]} ({len(missing)} are missing); "
            f"give a complete {kind}"
        )
    if mismatched:
        key, shape, configured = mismatched[0]
        raise InputError(
            f"{name} holds {key} as {tuple(shape)}, its config says {tuple(configured)}; "
            f"give a config and weights of one {kind}"
        )


def _choose_auto_class(config: PreTrainedConfig, name: str, trust: bool) -> Any:
    """Return the auto class that loads such a model."""
    library: Any = transformers
    text_classes = (library.AutoModelForSeq2SeqLM, library.AutoModelForCausalLM)
    # Models that read pictures or sounds, too; older versions lack some
    names = ("ImageTextToText", "SpeechSeq2Seq", "MultimodalLM")
    media_classes = [getattr(library, f"AutoModelFor{name}", None) for name in names]
    media_classes.append(_make_image_auto_class())
    remote = getattr(config, "auto_map", None) or {}
    # not `in auto._model_mapping.keys()`: it imports the configs of all families
    candidates = [
        auto
        for auto in (*text_classes, *filter(None, media_classes))
        if type(config) in auto._model_mapping or (trust and auto.__name__ in remote)
        if auto not in text_classes or config.is_encoder_decoder == (auto is text_classes[0])
    ]
    # Some configs are those of a class that reads text, and of one that reads pictures, too
    named = {*(config.architectures or ())}
    for auto in candidates:
        class_names = auto._model_mapping._model_mapping.get(config.model_type, ())
        if named.intersection((class_names,) if isinstance(class_names, str) else class_names):
            return auto
    if candidates:
        return candidates[0]
    raise RefusedError(
        f"{name} is a {config.model_type} model, neither causal nor encoder-decoder; "
        "give a model that generates text"
    )


def _make_image_auto_class() -> Any:
    """Return the auto class of models that write images token by token (ImageGPT), of which
    transformers has the mapping alone."""
    auto: Any = transformers.models.auto  # its parts are imported when they are named
    mapping = {"_model_mapping": auto.modeling_auto.MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING}
    base = auto.auto_factory._BaseAutoModelClass
    return type("AutoModelForCausalImageModeling", (base,), mapping)


def load_tokenizer(
    model: str | Path | PreTrainedModel | PreTrainedTokenizerBase,
    revision: str | None,
    trust: bool,
    *,
    required: bool = False,
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a folder or on the hub; without one None, or InputError if
    `required`."""
    if isinstance(model, transformers.PreTrainedTokenizerBase):
        return model
    if is_network(model):
        return None
    if not isinstance(model, str | Path):
        raise InputError(f"tokenizer is {model!r:.60}; give a folder, a hub id or a tokenizer")
    if pair := named_models.find_pair(model):
        model = pair.target
    if file := hub.find_gguf(model, revision):
        gguf.require_packages()
        return gguf.load_tokenizer(file, _load_tokenizer)
    local = hub.is_folder(model)
    if local and not _has_any(model, TOKENIZER_FILES):
        if required:
            raise InputError(f"{model} holds no tokenizer; give a folder or hub id with one")
        return None
    try:
        options = {"revision": revision, "trust_remote_code": trust}
        loaded = _load_tokenizer(model, options | hub.resolve_options(str(model), revision))
        needed = set(loaded.vocab_files_names.values())
        if local and needed and not _has_any(model, {*TOKENIZER_FILES[1:], *needed}):
            raise OSError(f"there is none of {', '.join(sorted(needed))}")  # an empty one was made
        return loaded
    except Exception as error:
        if not local and not required:
            return None  # a hub model without one
        raise InputError(
            f"the tokenizer in {model!s:.100} cannot be read: {to_one_line(error)}"
        ) from None


def get_processor_loader(model: ModelSource) -> Callable[[], Any] | None:
    """Return what loads a model's processor of pictures and sounds, once; None where its folder
    holds none."""
    if model.gguf or (hub.is_folder(model.path) and not _has_any(model.path, PROCESSOR_FILES)):
        return None

    @cache
    def load() -> Any:
        try:
            return transformers.AutoProcessor.from_pretrained(model.path, **model.options)
        except Exception as error:  # the library raises many kinds, and its extras are missing
            problem = f"the processor of {model.name} cannot be read: {to_one_line(error)}"
            named = next(
                (each for each in PROCESSOR_LIBRARIES if each in str(error)), "'foretoken[media]'"
            )
            raise InputError(f"{problem}; pip install {named}") from None

    return load


def _load_tokenizer(name: str | Path, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that AutoTokenizer makes. The class that it chooses for a folder is
    cached: to choose, it imports the configs of all families, which takes a second."""
    local = hub.is_folder(name) and not options["trust_remote_code"]
    key = _compute_class_key(Path(name)) if local else ""
    module, _, kind = str(load_cached_values(TOKENIZER_CLASSES_FILE).get(key)).partition(":")
    if module.startswith("transformers."):  # never another class, whatever the cache says
        return getattr(import_module(module), kind).from_pretrained(name, **options)
    loaded = transformers.AutoTokenizer.from_pretrained(name, **options)
    if key:
        save_cached_value(
            TOKENIZER_CLASSES_FILE, key, f"{type(loaded).__module__}:{type(loaded).__qualname__}"
        )
    return loaded


def _compute_class_key(folder: Path) -> str:
    """Return a digest of all that the choice of a tokenizer's class depends on."""
    files = sorted(file.name for file in folder.iterdir())
    parts = [
        *files,
        *((folder / name).read_text() for name in TOKENIZER_CLASS_INPUTS if name in files),
    ]
    parts += get_versions().values()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _has_any(folder: str | Path, names: Iterable[str]) -> bool:
    return any((Path(folder) / name).exists() for name in names)
