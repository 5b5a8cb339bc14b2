"""Adapters: low-rank changes of a target's weights (LoRA, arXiv 2106.09685), as peft saves them,
merged into the target when it is loaded, with the extra `peft`.

A merged target runs as any model does. Does not know drafts.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError, RefusedError, one_line, shown
from foretoken.loading import hub
from foretoken.storage.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
REFUSED = (".*missing adapter keys", ".*tie_word_embeddings")  # warnings of peft's: errors here


def folder(name: object) -> Path:
    """Return the folder of an adapter, fetched from the hub where it is no folder. Raises
    InputError where it holds none, RefusedError for one that cannot be merged."""
    if not isinstance(name, str | Path):
        raise InputError(f"adapter is {shown(name)}; give a folder or a hub id")
    place = Path(name) if hub.is_folder(name) else _fetched(str(name))
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
    if not any((place / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise InputError(f"{name} holds no weights of an adapter: no adapter_model.safetensors")
    if find_spec("peft") is None:
        raise InputError("an adapter needs peft, which is missing; pip install 'foretoken[peft]'")
    return place


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download  # late: `--help` does without it

    try:
        return Path(snapshot_download(hub.path(name), allow_patterns=["adapter_*"]))
    except InputError:
        raise InputError(f"adapter is {name!r:.100}; give a folder or a hub id") from None
    except Exception as error:  # of many kinds
        raise InputError(f"{name} cannot be had from the hub: {one_line(error)}") from None


def merged(network: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Return the network with the adapter's changes in its weights. Raises InputError for an
    adapter of another model, or whose weights are invalid."""
    from peft import PeftModel  # late: takes a second

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for a name that is going
            for refused in REFUSED:
                warnings.filterwarnings("ignore", refused)
            wrapped: Any = PeftModel.from_pretrained(network, adapter)
        _require_every_key(wrapped, adapter)
        _require_own_tables(wrapped, adapter)
        return wrapped.merge_and_unload(safe_merge=True)
    except (InputError, RefusedError):
        raise
    except Exception as error:  # peft raises many kinds
        raise InputError(
            f"the adapter {adapter} does not fit {type(network).__name__}: {one_line(error)}"
        ) from None


def _require_every_key(wrapped: Any, adapter: Path) -> None:
    """InputError where the file lacks a weight, of which peft would leave the random one, or holds
    one that the network has no place for."""
    from peft import get_peft_model_state_dict, load_peft_weights

    held = {*load_peft_weights(str(adapter), device="cpu")}
    needed = {*get_peft_model_state_dict(wrapped, save_embedding_layers=False)}
    surplus = {name for name in held - needed if "lora" in name}
    for names, says in ((needed - held, "lacks"), (surplus, "has no place in it for")):
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
