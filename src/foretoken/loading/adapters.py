"""Adapters: low-rank changes of a target's weights (LoRA, arXiv 2106.09685), as peft saves them,
merged into the target when it is loaded, with the extra `peft`.

A merged target runs as any model does. Does not know drafts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError, RefusedError, one_line, shown
from foretoken.loading import hub
from foretoken.storage.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Late imports: `--help` does without torch, peft and the hub's library, which take seconds

CONFIG = "adapter_config.json"
REFUSED = (".*missing adapter keys", ".*tie_word_embeddings")  # warnings of peft's: errors here
SAFE, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
SENTENCE = re.compile(r"(?<=[^.])\. ")  # where the first one of a message ends
LONGEST = 400  # characters of a message of peft's, which names modules


def folder(name: object) -> Path:
    """Return the folder of an adapter, fetched from the hub where it is no folder. Raises
    InputError where it holds none, RefusedError for one that cannot be merged."""
    if not isinstance(name, str | Path):
        raise InputError(f"adapter is {shown(name)}; give a folder or a hub id")
    path = expanded(name)
    place = Path(path) if hub.is_folder(path) else _fetched(path)
    try:
        config = parse_json((place / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{name} holds no adapter: {CONFIG}: {one_line(error)}") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise RefusedError(
            f"the adapter {name} is of kind {kind}, and only LORA is merged here; merge it into "
            "its base model with peft"
        )
    if not any((place / file).is_file() for file in (SAFE, PICKLED)):
        raise InputError(f"{name} holds no weights of an adapter; {SAFE} must be there")
    if find_spec("peft") is None:
        raise InputError("an adapter needs peft, which is missing; pip install 'foretoken[peft]'")
    return place


def expanded(name: str | Path) -> str:
    """Return the name of a folder or of the hub with the home folder in place of a ~."""
    try:
        return str(Path(name).expanduser()) if str(name).startswith("~") else str(name)
    except RuntimeError:  # nobody of this name has one
        return str(name)


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub.path(name), allow_patterns=["adapter_*"]))
    except InputError:
        raise InputError(f"adapter is {name!r:.100}; give a folder or a hub id") from None
    except Exception as error:  # of many kinds
        raise InputError(
            f"there is no folder {name!r}, and the hub's cannot be had: {_first(error)}; give a "
            "folder or a hub id"
        ) from None


def require_fit(empty: PreTrainedModel, adapter: Path) -> None:
    """Raise InputError for an adapter of another model and RefusedError for one that cannot be
    merged, by names and shapes alone: before weights are loaded. empty: the base's structure."""
    import torch
    from peft import PeftConfig, PeftModel

    with _told(empty, adapter):
        network: Any = deepcopy(empty)  # which peft changes
        config: Any = PeftConfig.from_pretrained(str(adapter))
        config.init_lora_weights = False  # some kinds are computed from the base's weights
        with torch.device("meta"):
            wrapped = PeftModel(network, config)
        _require_every_key(wrapped, adapter)
        _require_own_tables(wrapped, adapter)


def merged(network: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Return the network with the changes of an adapter that fits in its weights. Raises InputError
    for weights that are invalid."""
    from peft import PeftModel

    with _told(network, adapter):
        wrapped: Any = PeftModel.from_pretrained(network, adapter)
        return wrapped.merge_and_unload(safe_merge=True)


def merged_inside(network: PreTrainedModel) -> PreTrainedModel:
    """Return a network that transformers has loaded with an adapter of its own, with that merged:
    its `generate` turns it off for text, so what is left reads text beside sounds alone."""
    changed: Any = network
    if not getattr(changed, "_hf_peft_config_loaded", False):
        raise InputError(
            f"{type(network).__name__} needs its adapter, and there is none, or no peft to read "
            "it; pip install 'foretoken[peft]'"
        )
    from peft.tuners.tuners_utils import BaseTunerLayer

    with _told(network, Path(str(network.name_or_path))):
        for name, part in [*network.named_modules()]:
            if isinstance(part, BaseTunerLayer):
                part.merge(safe_merge=True)
                above, _, own = name.rpartition(".")
                setattr(network.get_submodule(above), own, part.get_base_layer())
    changed._hf_peft_config_loaded = False
    changed.config.adapter_merged = True
    return network


@contextmanager
def _told(network: PreTrainedModel, adapter: Path) -> Iterator[None]:
    """InputError, in a line, for whatever peft raises of an adapter and a network."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for a name that is going
            for refused in REFUSED:
                warnings.filterwarnings("ignore", refused)
            yield
    except (InputError, RefusedError):
        raise
    except Exception as error:  # peft raises many kinds
        raise InputError(
            f"the adapter {adapter} does not fit {type(network).__name__}: {_first(error)}; "
            "give an adapter of this base"
        ) from None


def _first(error: Exception) -> str:
    """Return the first sentence of a library's message, in a line."""
    first, *_ = SENTENCE.split(" ".join(str(error).split()))
    return first[:LONGEST].rstrip(".") or type(error).__name__


def _shapes(adapter: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's weights by name, without reading them."""
    import torch
    from safetensors import safe_open

    if not (adapter / SAFE).is_file():
        weights = torch.load(adapter / PICKLED, "meta", weights_only=True, mmap=True)
        return {name: tuple(weight.shape) for name, weight in weights.items()}
    with safe_open(adapter / SAFE, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def _require_every_key(wrapped: Any, adapter: Path) -> None:
    """InputError where the file lacks a weight, of which peft would leave the random one, holds one
    that the network has no place for, or one of another shape."""
    from peft import get_peft_model_state_dict

    held, state = _shapes(adapter), get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    needed = {name: tuple(weight.shape) for name, weight in state.items()}
    surplus = {name for name in held.keys() - needed if "lora" in name}
    other = {
        f"{name} as {held[name]}, not {needed[name]}"
        for name in held.keys() & needed
        if held[name] != needed[name]
    }
    kinds = (needed.keys() - held, "lacks"), (surplus, "has no place in it for"), (other, "holds")
    for names, says in kinds:
        if names:
            raise InputError(
                f"the adapter {adapter} does not fit {type(wrapped.get_base_model()).__name__}: "
                f"it {says} {min(names)} ({len(names)} such); give the base that it was made for"
            )


def _require_own_tables(wrapped: Any, adapter: Path) -> None:
    """RefusedError for a change of embeddings that are the output layer too: merged, it would
    change both."""
    network = wrapped.get_base_model()
    tables = network.get_input_embeddings(), network.get_output_embeddings()
    tied = getattr(network.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    if tied and any(hasattr(table, "lora_A") for table in tables):
        raise RefusedError(
            f"the adapter {adapter} changes embeddings that {type(network).__name__} shares with "
            "its output layer, and a merge would change both; untie them and merge it with peft"
        )


def files(adapter: Path) -> list[Path]:
    """All that a merged model is made from beside its base."""
    return sorted(file for file in adapter.glob("adapter_*") if file.is_file())
