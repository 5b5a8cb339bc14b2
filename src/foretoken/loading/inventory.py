"""Models on this machine: those with names, in pip packages, in the hub's cache and in folders,
with the drafts among them that fit each. Weights are not read, only the heads of files.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, one_line
from foretoken.loading import hub, named, published
from foretoken.storage.files import parse_json

WEIGHTS = ("*.safetensors", "*.bin")
DEPTH = 3  # of folders below one that is searched
TEXT = ("text_config", "decoder", "transformer_layer_config")  # where a text model's config may be


@dataclass(frozen=True, slots=True)
class ModelHere:
    """A model or a draft on this machine.

    Attributes:
        name: As `--target` or `--draft` takes it.
        family: The kind of its config, or of a draft over a target's states.
        draft: True for a draft that is no model by itself.
        precision: The form of its weights.
        size: Bytes of its weights.
        vocabulary: Rows of its output layer; None where the head does not say.
        width: The size of its hidden states; None where the head does not say.
        encoder: True where an encoder reads the prompt.
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

    def fits(self, target: ModelHere) -> bool:
        """Tell whether this may draft for a target: over its states, or as a model of at most half
        its bytes with a vocabulary of the same size."""
        if target.draft or self.vocabulary is None or self.vocabulary != target.vocabulary:
            return False
        if self.draft:
            return self.width == target.width
        return self.encoder == target.encoder and 2 * self.size <= target.size


def models(folders: Iterable[Path] = ()) -> list[ModelHere]:
    """Return the models on this machine, each once, those with names first.

    Args:
        folders: Where to look as well, with what is below them.

    Raises:
        InputError: One of them is no folder.

    Examples:
        >>> [model.name for model in models()][:2]
        ['novels', 'novels (draft)']
    """
    found: dict[Path, ModelHere] = {}
    for name, path in _places(folders):
        path = path.resolve()
        if path not in found and (model := _model(name, path)) is not None:
            found[path] = model
    return [*found.values()]


def _places(folders: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the names of models and where they lie."""
    yield named.NOVELS, named.asset("target")
    yield f"{named.NOVELS} (draft)", named.asset("draft")
    if file := named.smollm2():
        yield named.SMOLLM2, file
    yield f"{named.SMOLLM2} (draft)", named.asset("smollm2-draft")
    for root in dict.fromkeys(sys.path):
        for file in sorted(Path(root or ".").glob("*/*.gguf")) if root else ():
            yield str(file), file
    yield from _cached()
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; give one that holds models")
        for place in _below(folder):
            yield str(place), place


def _cached() -> Iterator[tuple[str, Path]]:
    """Yield the models in the hub's cache, of each the last version."""
    library = hub.library()
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


def _below(folder: Path) -> Iterator[Path]:
    """Yield folders with a config, and GGUF files, in a folder and below it."""
    for place, names, files in os.walk(folder):
        at = Path(place)
        deep = len(at.relative_to(folder).parts) >= DEPTH
        names[:] = [] if deep else sorted(each for each in names if not each.startswith("."))
        if "config.json" in files:
            yield at
        yield from (at / each for each in sorted(files) if each.endswith(".gguf"))


def _model(name: str, path: Path) -> ModelHere | None:
    """The model in a folder or a file; None where there is none."""
    if path.is_file():
        return _of_gguf(name, path)
    try:
        config: Any = parse_json((path / "config.json").read_text())
    except (OSError, ValueError):
        return None
    size = sum(file.stat().st_size for kind in WEIGHTS for file in path.glob(kind))
    if not isinstance(config, dict) or not size:
        return None
    kind = published.kind_of(config)
    inner = next((config[each] for each in TEXT if isinstance(config.get(each), dict)), {})
    said: Any = {**inner, **config}
    quantized = config.get("quantization_config") or {}
    return ModelHere(
        name,
        kind or str(config.get("model_type", "unknown")),
        kind is not None,
        str(quantized.get("quant_method") or said.get("dtype") or said.get("torch_dtype") or "?"),
        size,
        said.get("vocab_size"),
        said.get("hidden_size"),
        bool(config.get("is_encoder_decoder")),
        path,
    )


def _of_gguf(name: str, file: Path) -> ModelHere | None:
    """The model in a GGUF file; a file that cannot be read is told as such."""
    size = file.stat().st_size
    facts: dict[str, Any] = {"family": "GGUF", "precision": "?", "vocabulary": None, "width": None}
    try:
        facts = _header(file)
    except ImportError:
        facts["precision"] = "? (pip install 'foretoken[gguf]')"
    except Exception as error:  # files hold anything
        facts["precision"] = f"unreadable: {one_line(error)}"
    return ModelHere(name, draft=False, size=size, encoder=False, path=file, **facts)


def _header(file: Path) -> dict[str, Any]:
    """Read a GGUF file's own account; its precision: the kind that most of its bytes have."""
    from foretoken.loading import gguf  # late: `--help` does without NumPy

    reader = gguf.header(file)
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
