"""LoRA adapters (arXiv 2106.09685), saved by peft in a folder or on the hub; `merging` merges
adapters into the target.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from foretoken.errors import InputError, RefusedError, format_value, to_one_line
from foretoken.loading import hub
from foretoken.storage.files import parse_json

ADAPTER_CONFIG_FILE = "adapter_config.json"
SAFETENSORS_FILE, PICKLE_FILE = "adapter_model.safetensors", "adapter_model.bin"
SENTENCE_END = re.compile(r"(?<=[^.])\. ")
MAX_MESSAGE_CHARS = 400  # peft's messages may list all modules


def find_adapter(name: object) -> Path:
    """Return the folder of an adapter, downloaded from the hub if it is not local. Raises
    InputError if there is no adapter or peft is missing, RefusedError if the adapter is not of kind
    LORA."""
    if not isinstance(name, str | Path):
        raise InputError(f"adapter is {format_value(name)}; give a folder or a hub id")
    path = expand_home(name)
    folder = Path(path) if hub.is_folder(path) else _fetch(path)
    try:
        config = parse_json((folder / ADAPTER_CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name} contains no adapter: {ADAPTER_CONFIG_FILE}: {to_one_line(error)}"
        ) from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise RefusedError(
            f"the adapter {name} is of kind {kind}, and only LORA is supported; merge the adapter "
            "into its base model with peft"
        )
    if not any((folder / file).is_file() for file in (SAFETENSORS_FILE, PICKLE_FILE)):
        raise InputError(f"{name} contains no weights of an adapter; add {SAFETENSORS_FILE}")
    if find_spec("peft") is None:
        raise InputError("an adapter needs peft, not installed here; pip install 'foretoken[peft]'")
    return folder


def expand_home(name: str | Path) -> str:
    """Return the name of a folder or a hub id; a leading ~ is replaced by the home folder."""
    try:
        return str(Path(name).expanduser()) if str(name).startswith("~") else str(name)
    except RuntimeError:  # no such user
        return str(name)


def _fetch(name: str) -> Path:
    try:
        return Path(
            hub.import_hub().snapshot_download(hub.resolve_path(name), allow_patterns=["adapter_*"])
        )
    except InputError:
        raise InputError(f"adapter is {name!r:.100}; give a folder or a hub id") from None
    except Exception as error:  # of many types
        raise InputError(
            f"there is no folder {name!r}, and the hub does not provide it: "
            f"{take_first_sentence(error)}; give a folder or a hub id"
        ) from None


def take_first_sentence(error: Exception) -> str:
    """Return the first sentence of a library's error message, on one line."""
    first, *_ = SENTENCE_END.split(" ".join(str(error).split()))
    return first[:MAX_MESSAGE_CHARS].rstrip(".") or type(error).__name__


def list_files(adapter: Path) -> list[Path]:
    """Return all files of an adapter that a merged model depends on."""
    return sorted(file for file in adapter.glob("adapter_*") if file.is_file())
