"""Merges LoRA adapters into a target while it is loaded, with the extra `peft`. The merged network
runs like any model. Does not depend on drafts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from foretoken.errors import InputError, RefusedError
from foretoken.loading import adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# peft's warnings, silenced: the checks below raise errors instead
REFUSED_WARNINGS = (".*missing adapter keys", ".*tie_word_embeddings")


def _import_peft() -> Any:
    """Import peft at the time of use: it is an extra."""
    import peft

    return peft


def require_fit(structure: PreTrainedModel, adapter: Path) -> None:
    """Raise InputError if an adapter was made for another model, RefusedError if it cannot be
    merged. Only names and shapes of weights are compared; no weights are loaded."""
    peft = _import_peft()
    with _refuse_peft_errors(structure, adapter):
        network: Any = deepcopy(structure)  # peft modifies it
        config: Any = peft.PeftConfig.from_pretrained(str(adapter))
        config.init_lora_weights = False  # some initializations need the weights
        with torch.device("meta"):
            wrapped = peft.PeftModel(network, config)
        _require_every_key(wrapped, adapter)
        _require_untied_embeddings(wrapped, adapter)


def merge_adapter(network: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Return the network with an adapter merged into its weights. Raises InputError for non-finite
    weights."""
    with _refuse_peft_errors(network, adapter):
        wrapped: Any = _import_peft().PeftModel.from_pretrained(network, adapter)
        return wrapped.merge_and_unload(safe_merge=True)


def merge_own_adapter(network: PreTrainedModel) -> PreTrainedModel:
    """Merge the adapter that the model's own files include, and return the network. transformers
    has loaded the adapter, and the model's `generate` would turn the adapter off for input without
    audio, so the merged network is exact only for input with audio. Raises InputError if the
    adapter or peft is missing."""
    changed: Any = network
    if not getattr(changed, "_hf_peft_config_loaded", False):
        raise InputError(
            f"{type(network).__name__} needs its adapter, but the adapter or the package peft is "
            "missing; pip install 'foretoken[peft]'"
        )
    layer_class = _import_peft().tuners.tuners_utils.BaseTunerLayer
    with _refuse_peft_errors(network, Path(str(network.name_or_path))):
        parts: list[tuple[str, Any]] = [*network.named_modules()]
        for name, part in parts:
            if isinstance(part, layer_class):
                part.merge(safe_merge=True)
                parent, _, name_in_parent = name.rpartition(".")
                setattr(network.get_submodule(parent), name_in_parent, part.get_base_layer())
    changed._hf_peft_config_loaded = False
    changed.config.adapter_merged = True
    return network


@contextmanager
def _refuse_peft_errors(network: PreTrainedModel, adapter: Path) -> Iterator[None]:
    """Convert any exception that peft raises in this context to an InputError of one line, which
    names the adapter and the network."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name
            for refused in REFUSED_WARNINGS:
                warnings.filterwarnings("ignore", refused)
            yield
    except (InputError, RefusedError):
        raise
    except Exception as error:  # peft raises many types
        problem = f"the adapter {adapter} does not fit {type(network).__name__}"
        raise InputError(
            f"{problem}: {adapters.take_first_sentence(error)}; give an adapter made for this model"
        ) from None


def _read_shapes(adapter: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's weights by name, without loading the weights."""
    if not (adapter / adapters.SAFETENSORS_FILE).is_file():
        weights = torch.load(adapter / adapters.PICKLE_FILE, "meta", weights_only=True, mmap=True)
        return {name: tuple(weight.shape) for name, weight in weights.items()}
    with safe_open(adapter / adapters.SAFETENSORS_FILE, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def _require_every_key(wrapped: Any, adapter: Path) -> None:
    """Raise InputError if a weight of the adapter is missing from its file (peft would leave the
    weight random), is unknown to the network, or has another shape than in the network."""
    shapes = _read_shapes(adapter)
    state = _import_peft().get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    needed = {name: tuple(weight.shape) for name, weight in state.items()}
    surplus = {name for name in shapes.keys() - needed if "lora" in name}
    misshapen = {
        f"{name} in shape {shapes[name]}, not {needed[name]}"
        for name in shapes.keys() & needed
        if shapes[name] != needed[name]
    }
    kinds = (
        (needed.keys() - shapes, "lacks"),
        (surplus, "has the unknown weight"),
        (misshapen, "has"),
    )
    for names, verb in kinds:
        if names:
            raise InputError(
                f"the adapter {adapter} does not fit {type(wrapped.get_base_model()).__name__}: "
                f"it {verb} {min(names)} ({len(names)} in all); give the model that the "
                "adapter was made for"
            )


def _require_untied_embeddings(wrapped: Any, adapter: Path) -> None:
    """Raise RefusedError if the adapter changes embeddings that the network shares with its output
    layer: a merge would change both."""
    network = wrapped.get_base_model()
    tables = network.get_input_embeddings(), network.get_output_embeddings()
    tied = getattr(network.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    if tied and any(hasattr(table, "lora_A") for table in tables):
        raise RefusedError(
            f"the adapter {adapter} changes embeddings that {type(network).__name__} shares with "
            "its output layer, and a merge would change both; untie the two layers, then merge "
            "the adapter with peft"
        )
