"""Reads weights from a model's files by name, without building the model, and checks the files'
headers against the model's config before anything is loaded. Quantized weights are dequantized if
transformers can do so.

Does not check shapes: transformers checks them while it loads the weights.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from foretoken.errors import InputError, RefusedError, format_value, to_one_line
from foretoken.loading import gguf
from foretoken.loading.hub import is_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WEIGHT_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
)  # or an index: NAME.index.json
LAYER_COUNT_FIELDS = ("num_hidden_layers", "num_layers", "num_encoder_layers", "num_decoder_layers")
LAYER_COUNT_FIELDS += ("encoder_layers", "decoder_layers", "depth")
MAX_LAYERS = 10_000  # the limit if a model's weight files are not on this machine
PLAIN_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
INTEGER_DTYPE = re.compile(r"(torch\.)?(u?int\d+|[iu]\d+|bool)", re.IGNORECASE)


class FolderWeights:
    """The weights in a folder. Its methods and properties raise InputError if the folder holds no
    weights or the weights cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _file_of_key(self) -> dict[str, Path]:
        """The file that holds each weight."""
        try:
            for name in WEIGHT_FILES:
                if (index := self.folder / f"{name}.index.json").exists():
                    named = json.loads(index.read_text())["weight_map"]
                    return {key: self.folder / file for key, file in named.items()}
                if (file := self.folder / name).exists():
                    return dict.fromkeys(_read_dtypes(file), file)
        except Exception as error:  # the libraries raise many types
            raise self._refusal(error) from None
        raise InputError(
            f"{self.folder} holds no weights; it must contain {' or '.join(WEIGHT_FILES)}"
        )

    @property
    def keys(self) -> Iterable[str]:
        """Names of all weights."""
        return self._file_of_key.keys()

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each weight by its name, from the files' headers."""
        try:
            files = {*self._file_of_key.values()}
            dtypes = {key: kind for file in files for key, kind in _read_dtypes(file).items()}
        except Exception as error:  # as above
            raise self._refusal(error) from None
        return dtypes

    def read_weights(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the weights of these names."""
        by_file: dict[Path, list[str]] = {}
        for key in keys:
            by_file.setdefault(self._file_of_key[key], []).append(key)
        try:
            return {
                k: x for file, some in by_file.items() for k, x in _read_tensors(file, some).items()
            }
        except Exception as error:  # as above
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> InputError:
        return InputError(
            f"the weights in {self.folder} cannot be read: {to_one_line(error)}; fetch them again"
        )


def _read_dtypes(file: Path) -> dict[str, str]:
    if file.suffix == ".bin":
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {key: str(tensor.dtype) for key, tensor in tensors.items()}
    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_slice(key).get_dtype() for key in opened.keys()}


def _read_tensors(file: Path, keys: list[str]) -> dict[str, Tensor]:
    if file.suffix == ".bin":
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {key: tensors[key] for key in keys}
    with safe_open(file, framework="pt") as opened:
        return {key: opened.get_tensor(key) for key in keys}


def read_dtypes(path: str, file: Path | None) -> dict[str, str]:
    """Return the dtype of each weight by its name, from the folder or its GGUF file; {} if the
    files are not on this machine or are damaged. Loading damaged files raises the error."""
    if file is not None:
        try:
            return {each.name: each.tensor_type.name for each in gguf.read_header(file).tensors}
        except Exception:  # the package gguf raises many types
            return {}
    try:
        return FolderWeights(Path(path)).dtypes if is_folder(path) else {}
    except InputError:
        return {}


def require_layer_count(name: str, config: PreTrainedConfig, dtypes: dict[str, str]) -> None:
    """Raise InputError if a config has no layers, or more layers than the files have weights (more
    than MAX_LAYERS if `dtypes` is empty)."""
    parts = [getattr(config, part, None) for part in config.sub_configs]
    for part in filter(None, [config, *parts]):
        for entry in LAYER_COUNT_FIELDS:
            count, limit = getattr(part, entry, None), len(dtypes) or MAX_LAYERS
            if not isinstance(count, int):
                continue
            if count > limit:
                held = (
                    f"its files hold only {len(dtypes)} tensors"
                    if dtypes
                    else f"at most {MAX_LAYERS} are supported"
                )
                raise InputError(
                    f"{name} has {entry} {format_value(count)} in its config, but {held}; give "
                    "the config and weights of the same model"
                )
            if count < 1 and entry == "num_hidden_layers":
                problem = f"{name} has {entry} {format_value(count)} in its config"
                raise InputError(f"{problem}; give an integer of 1 or more")


def require_matching_layers(
    name: str, network: PreTrainedModel, dtypes: dict[str, str], *, in_gguf: bool
) -> None:
    """Raise InputError if the files have more layers than the network, or if they have integer
    weights and the config has no quantization_config."""
    if in_gguf:  # weights have other names there, with the same layer numbers
        count = max(getattr(network.config, entry, None) or 0 for entry in LAYER_COUNT_FIELDS)
        blocks = {key: re.search(r"\bblk\.(\d+)\.", key) for key in dtypes}
        model_keys = [key for key, block in blocks.items() if block and int(block[1]) < count]
        require_layers(name, model_keys, dtypes)
        return
    ignored = [re.compile(each) for each in network._keys_to_ignore_on_load_unexpected or ()]
    stored_keys = [key for key in dtypes if not any(each.search(key) for each in ignored)]
    model_keys, prefix = {*network.state_dict()}, f"{network.base_model_prefix}."
    # files of a model without a head omit the prefix
    model_keys |= {key.removeprefix(prefix) for key in model_keys}
    require_layers(name, model_keys, stored_keys)
    parts: list[Any] = [network.config, network.config.get_text_config(decoder=True)]
    if any(getattr(part, "quantization_config", None) for part in parts):
        return
    for key in stored_keys:
        if INTEGER_DTYPE.fullmatch(dtypes[key]) and (
            key.endswith(".weight") or _is_weight(network, key)
        ):
            raise InputError(
                f"{name} has {key} in {dtypes[key]}, but its config has no quantization_config; "
                "give weights in float32, float16 or bfloat16"
            )


def _is_weight(network: PreTrainedModel, key: str) -> bool:
    names = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    return key in names or f"{network.base_model_prefix}.{key}" in names


def require_layers(name: str, model_keys: Iterable[str], stored_keys: Iterable[str]) -> None:
    """Raise InputError if the files (`stored_keys`) have more layers of a stack than the model
    (`model_keys`). An additional layer is allowed if its weights have other names than the weights
    of the model's layers: it may be for multi-token prediction."""
    model_stacks, stored_stacks = _group_by_layer(model_keys), _group_by_layer(stored_keys)
    for stack, layers in model_stacks.items():
        parts, last = set[str]().union(*layers.values()), max(layers)
        extra = [i for i, names in stored_stacks[stack].items() if i > last and names <= parts]
        if extra:
            raise InputError(
                f"{name} holds weights of layer {max(extra)} of {stack}, but its config has "
                f"{last + 1} layers; give the config and weights of the same model"
            )


def _group_by_layer(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Return the names of each layer's weights: "layers.3.norm.weight" gives "norm.weight" at
    ["layers"][3]."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        for number in re.finditer(r"\.(\d+)\.", name):
            stacks[name[: number.start()]][int(number[1])].add(name[number.end() :])
    return stacks


def get_dequantize_options(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """Return options of `from_pretrained` with which it dequantizes the weights; {} for plain
    weights. Raises RefusedError for a quantization that transformers cannot undo."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return {}
    settings: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    method = str(settings.get("quant_method") or "a method that it does not name")
    library: Any = transformers  # its submodules are imported on attribute access
    kind = library.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        raise RefusedError(
            f"{name} is quantized by {method}, which transformers cannot dequantize; "
            "give the model before quantization, or a GGUF file of it"
        )
    try:
        return {"quantization_config": kind(dequantize=True)}
    except ImportError as error:  # the message names the package to install
        raise InputError(f"{name} is quantized by {method}: {to_one_line(error)}") from None


def finish_dequantizing(network: PreTrainedModel, dtype: torch.dtype, name: str) -> None:
    """Turn a dequantized network into a plain one in `dtype`: transformers still treats it as
    quantized and leaves some weights in another dtype. Raises InputError if weights are still
    quantized, for instance because their scales are missing."""
    for key, weight in network.named_parameters():
        if weight.dtype not in PLAIN_DTYPES:
            kind = str(weight.dtype).removeprefix("torch.")
            raise InputError(
                f"{name} has {key} in {kind} without the scales of its values; "
                "give a complete checkpoint"
            )
    if (quantizer := getattr(network, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(network)
    network.to(dtype)  # pyright: ignore[reportArgumentType]
