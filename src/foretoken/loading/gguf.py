"""GGUF files of llama.cpp: a model, its tokenizer and its chat template in one file.

transformers reads these files if the extra `gguf` is installed. It dequantizes weights to float32;
they may be rounded again like the weights of any model. Tokenizers are cached, because parsing a
tokenizer takes seconds.
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

REQUIRED_PACKAGES = ("gguf", "accelerate")  # transformers needs them for GGUF files
END_TOKEN_FIELDS = ("eos", "eot", "eom")  # end of a document, of a turn, of a message
CONTROL_TOKEN_TYPE = 3
PATCH_LOCK = Lock()  # concurrent threads would restore each other's patches


def require_packages() -> None:
    """Raise InputError, with the remedy, if a package is missing."""
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise InputError(
            f"a GGUF file needs {' and '.join(missing)}, not installed here; "
            "pip install 'foretoken[gguf]'"
        )


@contextmanager
def parse_once(file: Path | None) -> Iterator[None]:
    """Within this context, make transformers parse the file only once for config, tokenizer and
    weights, and build the table of weight names only once for each network. Otherwise transformers
    would repeat both steps, which takes seconds. If `file` is None, nothing changes."""
    if file is None:
        yield
        return
    library: Any = import_module("gguf")
    gguf_utils: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bars: Any = import_module("transformers.utils.logging")
    with PATCH_LOCK:
        originals = library.GGUFReader, library.get_tensor_name_map
        gguf_utils.tqdm = bars.tqdm  # silent if transformers' progress bars are disabled
        library.GGUFReader = lambda path: _parse_file(
            originals[0], str(path), os.stat(path).st_mtime_ns
        )
        library.get_tensor_name_map = lru_cache(originals[1])
        try:
            yield
        finally:
            library.GGUFReader, library.get_tensor_name_map = originals


def read_header(file: Path) -> Any:
    """Return the header of a file as a `GGUFReader` of the package gguf: fields and tensors."""
    with parse_once(file):
        return import_module("gguf").GGUFReader(str(file))


def find_end_ids(file: Path, configured: list[int]) -> list[int]:
    """Return the ids of the tokens that end a sequence: the end tokens that the file names, and
    those of its control tokens that are known to end turns.

    Args:
        file: The GGUF file.
        configured: The ids that transformers found. If the file names no EOS token, these ids are
            only transformers' default, and are ignored if any other id is found.
    """
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
    """Return the file, parsed by a subclass of `kind` (GGUFReader). The subclass slices a plain
    array instead of a memory map, which is three times as fast: parsing takes a few slices for each
    token of the vocabulary. `changed` is the modification time, so that a changed file is parsed
    again."""

    def with_plain_slices(reader: Any, *args: Any) -> Any:
        reader.data = np.asarray(reader.data)
        return kind._build_fields(reader, *args)

    return type(kind.__name__, (kind,), {"_build_fields": with_plain_slices})(path)


def forget_file() -> None:
    """Release the memory of the last parsed file."""
    _parse_file.cache_clear()


def read_weight(file: Path, name: str) -> Tensor | None:
    """Return one weight of a file in float32, by its GGUF name; None if there is none."""
    parts = read_header(file).tensors
    part = next((part for part in parts if part.name == name), None)
    if part is None:
        return None
    values = import_module("gguf.quants").dequantize(part.data, part.tensor_type)
    return torch.from_numpy(np.array(values, dtype=np.float32))


def get_dequantize_options() -> dict[str, Any]:
    """Return options that make `from_pretrained` dequantize the weights."""
    config = getattr(transformers, "GgufConfig", None)  # older than 5.23: it always dequantizes
    return {"quantization_config": config(dequantize=True)} if config else {}


def load_tokenizer(
    file: Path, read: Callable[[Path, dict[str, Any]], PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a file, with its chat template. `read(folder, options)` loads a
    tokenizer from a folder; it is called if there is a cached copy of the file's tokenizer. Raises
    InputError if transformers cannot read the tokenizer."""
    folder = _get_tokenizer_folder(file)
    if folder is not None and folder.exists():
        try:
            return read(folder, {"trust_remote_code": False})
        except Exception:  # the cached copy is damaged
            shutil.rmtree(folder, ignore_errors=True)
    try:
        with parse_once(file):
            loaded = transformers.AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
    except Exception as error:  # transformers raises many types
        raise InputError(f"the tokenizer in {file} cannot be read: {to_one_line(error)}") from None
    if folder is not None:
        _save_tokenizer(loaded, folder)
    return loaded


def _get_tokenizer_folder(file: Path) -> Path | None:
    """Return the folder in which the tokenizer of this version of the file is cached, whether it
    exists yet or not; None if there is no cache."""
    cache, state = get_cache_folder(), file.stat()
    parts = [str(file.resolve()), state.st_size, state.st_mtime_ns, *get_versions().values()]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    return cache / "gguf" / digest[:32] if cache else None


def _save_tokenizer(loaded: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer completely or not at all."""
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = tempfile.mkdtemp(dir=folder.parent)
    except OSError:  # not writable: the next load parses the file again
        return
    try:
        loaded.save_pretrained(fresh)
        os.rename(fresh, folder)
    except Exception:  # a full disk, or the library's own error
        shutil.rmtree(fresh, ignore_errors=True)
