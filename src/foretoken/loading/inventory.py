"""Lists the models and drafts on this machine: those with a short name (such as novels), and those
in pip packages, in the hub's cache and in given folders. Reads only the headers of weight files.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, to_one_line
from foretoken.loading import hub, named_models, published_drafts

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
MAX_FOLDER_DEPTH = 3  # levels of subfolders that are searched
TEXT_CONFIG_KEYS = ("text_config", "decoder", "transformer_layer_config")  # a nested text config


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model or a draft found on this machine.

    Attributes:
        name: The value for `--target` or `--draft`.
        family: The model_type of its config, the architecture in its GGUF file, or the kind of a
            draft that uses hidden states.
        draft: True for a draft that cannot run without a target.
        precision: The dtype or quantization of its weights, or why its GGUF file cannot be read.
        size: Bytes of its weights.
        vocabulary: Rows of its output layer; None if its config does not specify it.
        width: The size of its hidden states; None if its config does not specify it.
        encoder: True for an encoder-decoder.
        path: Its folder or file.
    """

    name: str
    family: str
    draft: bool
    precision: str
    size: int
    vocabulary: int | None
    width: int | None
    encoder: bool
    path: Path

    def can_draft_for(self, target: FoundModel) -> bool:
        """Return whether this model or draft may draft for `target`, judged by the configs. The
        vocabularies must have the same size. A draft that uses hidden states must have the target's
        width. A model must be of the target's kind (encoder-decoder or not) and have at most half
        the target's bytes."""
        if target.draft or self.vocabulary is None or self.vocabulary != target.vocabulary:
            return False
        if self.draft:
            return self.width == target.width
        return self.encoder == target.encoder and 2 * self.size <= target.size


def list_models(folders: Iterable[Path] = ()) -> list[FoundModel]:
    """Return the models on this machine, each once; models with short names such as novels come
    first.

    Args:
        folders: Further folders to search, with their subfolders.

    Raises:
        InputError: One of `folders` is not a folder.

    Examples:
        >>> [model.name for model in list_models()][:2]
        ['novels', 'novels (draft)']
    """
    found: dict[Path, FoundModel] = {}
    for name, path in _find_places(folders):
        path = path.resolve()
        if path not in found and (model := read_model(name, path)) is not None:
            found[path] = model
    return [*found.values()]


def _find_places(folders: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the names of models and their folders or files; the same folder may occur several
    times."""
    yield named_models.NOVELS, named_models.get_asset("target")
    yield f"{named_models.NOVELS} (draft)", named_models.get_asset("draft")
    if file := named_models.find_smollm2():
        yield named_models.SMOLLM2, file
    yield f"{named_models.SMOLLM2} (draft)", named_models.get_asset("smollm2-draft")
    for root in dict.fromkeys(sys.path):
        for file in sorted(Path(root or ".").glob("*/*.gguf")) if root else ():
            yield str(file), file
    yield from _find_cached()
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; give a folder with models")
        for path in _walk_folder(folder):
            yield str(path), path


def _find_cached() -> Iterator[tuple[str, Path]]:
    """Yield the last version of each model in the hub's cache, and its GGUF files."""
    library = hub.import_hub()
    try:
        repos = library.scan_cache_dir().repos
    except library.errors.CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        folder = max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path
        yield repo.repo_id, folder
        for file in sorted(folder.rglob("*.gguf")):
            yield f"{repo.repo_id}:{file.relative_to(folder)}", file


def _walk_folder(folder: Path) -> Iterator[Path]:
    """Yield the folders with a config and the GGUF files, in a folder and its subfolders."""
    for root, names, files in os.walk(folder):
        path = Path(root)
        is_deepest = len(path.relative_to(folder).parts) >= MAX_FOLDER_DEPTH
        names[:] = [] if is_deepest else sorted(each for each in names if not each.startswith("."))
        if "config.json" in files:
            yield path
        yield from (path / each for each in sorted(files) if each.endswith(".gguf"))


def read_model(name: str, path: Path) -> FoundModel | None:
    """Return the model or draft in a folder or GGUF file; None for a folder without a config or
    without weights."""
    if path.is_file():
        return _read_gguf_model(name, path)
    config = read_config(path)
    size = sum(file.stat().st_size for kind in WEIGHT_PATTERNS for file in path.glob(kind))
    if not config or not size:
        return None
    kind = published_drafts.get_draft_kind(config)
    quantized = config.get("quantization_config") or {}
    return FoundModel(
        name,
        kind or str(config.get("model_type", "unknown")),
        kind is not None,
        str(
            quantized.get("quant_method") or config.get("dtype") or config.get("torch_dtype") or "?"
        ),
        size,
        config.get("vocab_size"),
        config.get("hidden_size"),
        bool(config.get("is_encoder_decoder")),
        path,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config in a folder, with the entries of its nested text config, if any, where it
    has no entry of its own; {} if it cannot be read."""
    config = published_drafts.read_config(folder / "config.json")
    nested = (config.get(each) for each in TEXT_CONFIG_KEYS)
    text_config = next((each for each in nested if isinstance(each, dict)), {})
    return {**text_config, **config}


def _read_gguf_model(name: str, file: Path) -> FoundModel | None:
    """Return the model in a GGUF file; if the file cannot be read, `precision` is the error."""
    size = file.stat().st_size
    facts: dict[str, Any] = {"family": "GGUF", "precision": "?", "vocabulary": None, "width": None}
    try:
        facts = _read_gguf_facts(file)
    except ImportError:
        facts["precision"] = "? (pip install 'foretoken[gguf]')"
    except Exception as error:  # a damaged file raises any type
        facts["precision"] = f"unreadable: {to_one_line(error)}"
    return FoundModel(name, draft=False, size=size, encoder=False, path=file, **facts)


def _read_gguf_facts(file: Path) -> dict[str, Any]:
    """Return family, precision (the type of most bytes of the weights), vocabulary and width from
    the header of a GGUF file."""
    from foretoken.loading import gguf  # imported late: `--help` does not need NumPy

    reader = gguf.read_header(file)
    family = reader.fields["general.architecture"].contents()
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    width = reader.fields.get(f"{family}.embedding_length")
    kinds = Counter[str]()
    for tensor in reader.tensors:
        kinds[tensor.tensor_type.name] += int(tensor.n_bytes)
    return {
        "family": family,
        "precision": kinds.most_common(1)[0][0],
        "vocabulary": None if tokens is None else len(tokens.data),
        "width": None if width is None else int(width.contents()),
    }
