"""Models and tokenizers from a folder or the hub. Missing or contradictory files are refused,
never filled in.

transformers' classes are looked up as attributes of its module when they are used, because
importing them takes seconds and a cached conversion needs none of them. Depends neither on the use
of a model nor on the backend that runs it.
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
from foretoken.models.stock.third_party import find_third_party_sources
from foretoken.storage.cache import get_versions, load_cached_values, save_cached_value
from foretoken.storage.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MODEL_FILE_PATTERNS = ("*.safetensors", "*.bin", "*.json", "*.py")
TOKENIZER_CLASSES_FILE = "tokenizers.json"  # cached classes of tokenizers
TOKENIZER_CLASS_INPUTS = ("config.json", "tokenizer_config.json")  # these determine the class
# Wrappers that change neither the weights nor the results, and the attribute that holds the network
WRAPPED_ATTRIBUTES = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
}
# Libraries that some processors need in addition to transformers
PROCESSOR_LIBRARIES = ("torchaudio", "mistral-common", "librosa")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
TOKENIZER_FILES = (
    "tokenizer_config.json",  # a byte-level tokenizer has no other file
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True)
class ModelSource:
    """A model in a folder, in a GGUF file or on the hub. Its config and structure are read when
    they are first used."""

    name: str
    path: str  # a folder or a hub id
    options: dict[str, Any]  # of `from_pretrained`: revision, trust, a GGUF file in the folder
    adapter: Path | None = None  # a folder, to be merged into the weights
    part = ""  # as in `ConversionSource`

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that holds the model; None if the model is not in a GGUF file."""
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
        """True if the model's files include a LoRA adapter, which its `generate` enables for audio
        only."""
        folder = hub.is_folder(self.path)
        if self.gguf or (folder and not _has_any(self.path, (adapters.ADAPTER_CONFIG_FILE,))):
            return False
        return getattr(self.config, "has_lora_adapter", False) is True

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's config. Raises InputError if it cannot be read."""
        try:
            with gguf.parse_once(self.gguf):
                config = transformers.AutoConfig.from_pretrained(self.path, **self.options)
        except Exception as error:  # transformers raises many types
            revision = self.options.get("revision")
            if not self.gguf and (kind := get_cached_kind(self.path, revision)):
                raise InputError(
                    f"{self.name} is a draft ({kind}), not a model; give it as --draft or draft="
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
        """The transformers network with its generation config, but without weights (on the device
        "meta"). Raises InputError if the model's files are invalid or contradict each other,
        RefusedError for a model that does not generate text."""
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
        if self.gguf:  # transformers puts the file's other settings into the config
            settings: Any = network.generation_config
            settings.eos_token_id = gguf.find_end_ids(self.gguf, list_ids(settings, "eos_token_id"))
            return network.eval()
        options = {k: v for k, v in self.options.items() if k != "trust_remote_code"}
        options["revision"] = options["revision"] or "main"
        with suppress(OSError):  # without the file, the network derives one from the model's config
            own = transformers.GenerationConfig.from_pretrained(self.path, **options)
            network.generation_config = own
        return network.eval()

    def list_custom_code(self) -> list[str]:
        """Return the source code of the model's classes that are not transformers' own, as part of
        the cache key of conversions. For a GGUF file, returns a version mark instead."""
        if self.gguf:
            return ["all ends of the file"]  # earlier conversions of a GGUF file had one end token
        if not self.trust:
            return []
        return find_third_party_sources(self.structure)

    def load_network(self, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Return the model with its weights. Raises InputError if weights are missing, RefusedError
        if there is not enough memory for them."""
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
        """Return all files that the model is loaded from, including shards that an index names
        outside the folder; None for a model on the hub, which its commit identifies."""
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
        """Raise InputError for a folder without a weight file."""
        files = self.list_files()
        if files is not None and all(file.suffix in (".json", ".py") for file in files):
            raise InputError(f"{self.name} holds no weights; {hub.FOLDER_CONTENTS}")

    @property
    def adapter_files(self) -> list[Path]:
        """The files of the adapter to merge; [] if there is no adapter."""
        return [] if self.adapter is None else adapters.list_files(self.adapter)

    @property
    def commit(self) -> str | None:
        return getattr(self.config, "_commit_hash", None)


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file cannot be read: loading the model then
    raises the error."""
    try:
        content = parse_json(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def find_source(
    name: str | Path, revision: str | None, trust: bool, adapter: str | Path | None = None
) -> ModelSource:
    """Return the source of a model, without loading weights. `name` is a folder, a GGUF file or a
    hub id; `adapter`, unless None, is an adapter to merge into the model. Raises InputError if
    there is no such model, RefusedError if `name` is itself an adapter, or if `adapter` is given
    for a model that has an adapter of its own."""
    path, options = hub.resolve_path(name), {"revision": revision, "trust_remote_code": trust}
    if hub.is_folder(path) and (Path(path) / adapters.ADAPTER_CONFIG_FILE).exists():
        if _read_json(Path(path) / "config.json").get("has_lora_adapter") is not True:
            problem = f"{name} is an adapter; give its base model, and adapter={path!r}"
            raise RefusedError(problem)
        adapters.find_adapter(path)  # raises an error with the remedy
        if adapter is not None:
            raise RefusedError(
                f"{name} has its own adapter and supports no second adapter; leave out adapter"
            )
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
    """Return whether `model` is a network of transformers. Does not import transformers' model
    module, which takes seconds: no network can exist before other code has imported it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def resolve_model(
    model: str | Path | PreTrainedModel,
    revision: str | None,
    trust: bool,
    adapter: str | Path | None = None,
) -> ModelSource | PreTrainedModel:
    """Return the source of a model in files, as `find_source` does, or the network itself if
    `model` is a network in memory. Raises InputError if `adapter` is given for a network in memory,
    or if the network's config has a context length of 0."""
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
    """Return the network inside the wrapper of torch.compile, DataParallel or
    DistributedDataParallel; any other object unchanged.

    Args:
        model: The network, its wrapper, or anything else.
        name: Name of the argument, for error messages.

    Raises:
        InputError: `model` is a pipeline or another object around a network, or has an adapter that
            is not merged into its weights.
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
                "give its folder instead: loading merges the adapter"
            )
        return model
    kind = type(model).__name__
    if hasattr(model, "merge_and_unload"):
        raise InputError(
            f"{name} is a {kind}, a model wrapped with an adapter; merge it first: "
            f"give {name}.merge_and_unload()"
        )
    if is_network(getattr(model, "model", None)):
        raise InputError(f"{name} is a {kind} around a model; give {name}.model")
    return model


def _require_weights(name: str, kind: str, report: dict[str, Any]) -> None:
    """Raise InputError if transformers' loading `report` lists weights that the files lack or have
    in another shape: transformers initializes such weights at random."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise InputError(
            f"{name} holds no weights for {missing[0]} ({len(missing)} are missing); "
            f"give a complete {kind}"
        )
    if mismatched:
        key, shape, configured = mismatched[0]
        raise InputError(
            f"{name} has {key} in shape {tuple(shape)}, but its config requires "
            f"{tuple(configured)}; give the config and weights of the same {kind}"
        )


def _choose_auto_class(config: PreTrainedConfig, name: str, trust: bool) -> Any:
    """Return the auto class that loads a model of this config. Raises RefusedError if there is
    none."""
    library: Any = transformers
    text_classes = (library.AutoModelForSeq2SeqLM, library.AutoModelForCausalLM)
    # Models that also take images or audio; older versions of transformers lack some classes
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
    # Some configs belong to two auto classes: one for text only, one for text and images
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
    """Return an auto class for models that generate images token by token (ImageGPT): transformers
    has the mapping of such models, but no auto class."""
    auto: Any = transformers.models.auto  # its submodules are imported on attribute access
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
    """Return the tokenizer of a folder, a GGUF file or a hub id; a tokenizer object unchanged. If
    there is no tokenizer, returns None, or raises InputError if `required`. Raises InputError for a
    tokenizer that cannot be read."""
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
            raise InputError(f"{model} holds no tokenizer; give a folder with a tokenizer")
        return None
    try:
        options = {"revision": revision, "trust_remote_code": trust}
        loaded = _load_tokenizer(model, options | hub.resolve_options(str(model), revision))
        needed = set(loaded.vocab_files_names.values())
        if local and needed and not _has_any(model, {*TOKENIZER_FILES[1:], *needed}):
            # without these files, transformers makes an empty tokenizer
            raise OSError(f"the folder has none of {', '.join(sorted(needed))}")
        return loaded
    except Exception as error:
        if not local and not required:
            return None  # a model on the hub without a tokenizer
        raise InputError(
            f"the tokenizer in {model!s:.100} cannot be read: {to_one_line(error)}"
        ) from None


def get_processor_loader(model: ModelSource) -> Callable[[], Any] | None:
    """Return a function that loads a model's processor of images and audio at its first call, and
    returns the same processor later; None if the model's folder holds no processor."""
    if model.gguf or (hub.is_folder(model.path) and not _has_any(model.path, PROCESSOR_FILES)):
        return None

    @cache
    def load() -> Any:
        try:
            return transformers.AutoProcessor.from_pretrained(model.path, **model.options)
        except Exception as error:  # of many types; also a missing extra package
            problem = f"the processor of {model.name} cannot be read: {to_one_line(error)}"
            named = next(
                (each for each in PROCESSOR_LIBRARIES if each in str(error)), "'foretoken[media]'"
            )
            raise InputError(f"{problem}; pip install {named}") from None

    return load


def _load_tokenizer(name: str | Path, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that AutoTokenizer makes. The class of a folder's tokenizer is cached,
    because AutoTokenizer imports the configs of all families to choose it, which takes a second."""
    local = hub.is_folder(name) and not options["trust_remote_code"]
    key = _compute_class_key(Path(name)) if local else ""
    module, _, kind = str(load_cached_values(TOKENIZER_CLASSES_FILE).get(key)).partition(":")
    if module.startswith("transformers."):  # never another module's class, even if cached
        return getattr(import_module(module), kind).from_pretrained(name, **options)
    loaded = transformers.AutoTokenizer.from_pretrained(name, **options)
    if key:
        save_cached_value(
            TOKENIZER_CLASSES_FILE, key, f"{type(loaded).__module__}:{type(loaded).__qualname__}"
        )
    return loaded


def _compute_class_key(folder: Path) -> str:
    """Return a digest of everything that determines the class of a folder's tokenizer."""
    files = sorted(file.name for file in folder.iterdir())
    parts = [
        *files,
        *((folder / name).read_text() for name in TOKENIZER_CLASS_INPUTS if name in files),
    ]
    parts += get_versions().values()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _has_any(folder: str | Path, names: Iterable[str]) -> bool:
    return any((Path(folder) / name).exists() for name in names)
