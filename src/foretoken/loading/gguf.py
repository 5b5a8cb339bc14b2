"""GGUF files: a model, its tokenizer and its chat template in one, as users of llama.cpp have them.

transformers reads them, with the extra `gguf`: each weight is the value that its block in the file
stands for, in float32, and may be rounded afterwards as any model's. A tokenizer is kept in the
user's cache, because reading it from the file takes seconds. Does not know which file a name
stands for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor

from foretoken.errors import InputError, to_one_line
from foretoken.storage.cache import get_cache_folder, get_versions
from foretoken.text.templates import find_turn_end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUIRED_PACKAGES = ("gguf", "accelerate")  # transformers reads such files with these
END_TOKEN_FIELDS = ("eos", "eot", "eom")  # of the ids that end a document, a turn and a message
CONTROL_TOKEN_TYPE = 3  # the type of control tokens
PATCH_LOCK = Lock()  # two threads would put back each other's functions


def require_packages() -> None:
    """Raise InputError, with the remedy, where a package is missing."""
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(
            f"a GGUF file needs {' and '.join(missing)}, which is missing; "
            "pip install 'foretoken[gguf]'"
        )


@contextmanager
def parse_once(file: Path | None) -> Iterator[None]:
    """Let transformers read this file, for which it parses the whole header, in Python, once for a
    config, a tokenizer and the weights, and makes the table of names once for each part of a
    network. Both take seconds. None: no such file is read."""
    if file is None:
        yield
        return
    library: Any = import_module("gguf")
    gguf_utils: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bars: Any = import_module("transformers.utils.logging")
    with PATCH_LOCK:
        originals = library.GGUFReader, library.get_tensor_name_map
        gguf_utils.tqdm = bars.tqdm  # which is silent if transformers' bars are turned off
        library.GGUFReader = lambda path: _parse_file(
            originals[0], str(path), os.stat(path).st_mtime_ns
        )
        library.get_tensor_name_map = lru_cache(originals[1])
        try:
            yield
        finally:
            library.GGUFReader, library.get_tensor_name_map = originals


def read_header(file: Path) -> Any:
    """Return a file's fields and the places of its tensors, as a reader of the package gguf."""
    with parse_once(file):
        return import_module("gguf").GGUFReader(str(file))


def find_end_ids(file: Path, configured: list[int]) -> list[int]:
    """Return the ids that end a text: those that the file names, and control tokens that are known
    to. configured: what transformers reads of it, its own default where no field names an end."""
    fields = read_header(file).fields
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in END_TOKEN_FIELDS]
    tokens, types = (fields.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    token_types = types.contents() if types else []
    control = {
        tokens.contents(i): i for i, kind in enumerate(token_types) if kind == CONTROL_TOKEN_TYPE
    }
    found = find_turn_end_ids(control) | {field.contents() for field in named if field}
    return sorted(found | set(configured) if named[0] or not found else found)


@lru_cache(maxsize=1)
def _parse_file(kind: Any, path: str, changed: int) -> Any:
    """The parsed file. Its header is read in slices of a plain array: those of a memory map take
    three times as long, and a vocabulary has a few for each token."""

    def with_plain_slices(reader: Any, *args: Any) -> Any:
        reader.data = np.asarray(reader.data)
        return kind._build_fields(reader, *args)

    return type(kind.__name__, (kind,), {"_build_fields": with_plain_slices})(path)


def forget_file() -> None:
    """Let go of the last file that was parsed."""
    _parse_file.cache_clear()


def read_weight(file: Path, name: str) -> Tensor | None:
    """Return a single weight of a file in float32, by its name there; None for another."""
    parts = read_header(file).tensors
    part = next((part for part in parts if part.name == name), None)
    if part is None:
        return None
    values = import_module("gguf.quants").dequantize(part.data, part.tensor_type)
    return torch.from_numpy(np.array(values, dtype=np.float32))


def get_dequantize_options() -> dict[str, Any]:
    """Return options of `from_pretrained` that make plain weights of a file's blocks."""
    config = getattr(transformers, "GgufConfig", None)  # before 5.23 there is no other way
    return {"quantization_config": config(dequantize=True)} if config else {}


def load_tokenizer(
    file: Path, read: Callable[[Path, dict[str, Any]], PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a file, with its chat template, by `read` from the folder where it is
    kept. Raises InputError where it has none that transformers can read."""
    folder = _get_tokenizer_folder(file)
    if folder is not None and folder.exists():
        try:
            return read(folder, {"trust_remote_code": False})
        except Exception:  # damaged: it is made again
            shutil.rmtree(folder, ignore_errors=True)
    try:
        with parse_once(file):
            loaded = transformers.AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
    except Exception as error:  # the library raises many kinds
        raise InputError(f"the tokenizer in {file} cannot be read: {to_one_line(error)}") from None
    if folder is not None:
        _save_tokenizer(loaded, folder)
    return loaded


def _get_tokenizer_folder(file: Path) -> Path | None:
    """The folder in the cache for the tokenizer of a file as it is now; None without a cache."""
    cache, state = get_cache_folder(), file.stat()
    parts = [str(file.resolve()), state.st_size, state.st_mtime_ns, *get_versions().values()]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    return cache / "gguf" / digest[:32] if cache else None


def _save_tokenizer(loaded: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer whole or not at all."""
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = tempfile.mkdtemp(dir=folder.parent)
    except OSError:  # it is read from the file again next time
        return
    try:
        loaded.save_pretrained(fresh)
        os.rename(fresh, folder)
    except Exception:  # of a full disk, a library's own
        shutil.rmtree(fresh, ignore_errors=True)
