"""Resolves the name of a model to a folder, a GGUF file, or a model on the hub or in the hub's
cache. A name without a model is refused at once, whereas the libraries would retry for twenty
seconds.

Imports no torch, so that a mistake on the command line is reported without delay.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, format_value, to_one_line
from foretoken.loading import named_models

HUB_ID = re.compile(r"(?=.{1,96}$)\w[\w.-]*(/\w[\w.-]*)?")  # ./NAME is a path
GGUF_MAGIC = b"GGUF"
GGUF_PART = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")  # "1 of 1" is a complete file
HUB_TIMEOUT_SECONDS = 5.0  # for the hub's first answer
HUB_GGUF = re.compile(r"(?P<id>[\w.-]+(/[\w.-]+)?):(?P<file>[\w./-]+\.gguf)")
NAME_REMEDY = "give a model's folder, a GGUF file or a hub id"
OFFLINE_REMEDY = "give a folder or GGUF file, or a model in the hub's cache (foretoken cache list)"
NO_SUCH_MODEL = "the hub has no such model"
FOLDER_CONTENTS = "give a folder with config.json, a tokenizer and weights (*.safetensors)"


def import_hub():  # not annotated: the type is the module's
    """Import the hub's library at the time of use: `--help` does not need it."""
    import huggingface_hub

    return huggingface_hub


def resolve_path(name: str | Path) -> str:
    """Return the folder, GGUF file or hub id of a model as a string. Raises InputError for a name
    that cannot be any of these. Does not check that the hub has the model."""
    if not isinstance(name, str | Path):
        raise InputError(
            f"target is {format_value(name)}; give a folder, a hub id or a network of transformers "
            "(a foretoken Model goes to Speculator(model, drafter))"
        )
    if pair := named_models.find_pair(name):
        return str(pair.target)
    if is_folder(name) or str(name).endswith(".gguf"):
        return str(name)
    _refuse_file(Path(name))
    if isinstance(name, Path) or not HUB_ID.fullmatch(name):
        raise InputError(f"{str(name)!r:.100} is not a folder; {NAME_REMEDY}")
    return name


def _refuse_file(file: Path) -> None:
    """Raise InputError, with a remedy, if `file`, given as the name of a model, is an existing
    file, such as one of the model's weight files, instead of the model's folder."""
    try:
        if not file.is_file():
            return
        with file.open("rb") as content:
            is_gguf = content.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:  # a name that is too long, or a file that cannot be read
        return
    if is_gguf:
        raise InputError(
            f"{file} is a GGUF file without the suffix .gguf; rename it to {file.stem}.gguf"
        )
    if file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name == "config.json":
        raise InputError(
            f"{file} is one file of a model; give the model's folder: {file.resolve().parent}"
        )
    raise InputError(f"{file} is not a model file; {NAME_REMEDY}")


def require_config(folder: str | Path) -> None:
    """Raise InputError for a folder without a model's config. The folder of an adapter passes: it
    is refused later, with a better remedy."""
    path = Path(folder)
    if (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return
    holds = "holds no config.json" if any(path.iterdir()) else "is an empty folder"
    raise InputError(f"{folder} {holds}; {FOLDER_CONTENTS}, or a GGUF file")


def is_folder(name: str | Path) -> bool:
    """Return whether `name` is an existing folder; False if `name` is too long for a path."""
    try:
        return bool(str(name)) and Path(name).is_dir()
    except OSError:  # the name is too long
        return False


def is_model(name: str) -> bool:
    """Return whether `name` is the folder or the GGUF file of a model on this machine."""
    path = Path(name)
    if is_folder(name):
        return (path / "config.json").exists() or any(path.glob("*.gguf"))
    return path.suffix == ".gguf" and path.is_file()


def list_file_stamps(name: str | Path) -> list[tuple[str, int, int]]:
    """Return name, size and modification time (ns) of each file of the model `name`; [] if there is
    no such model on this machine."""
    path = Path(pair.target if (pair := named_models.find_pair(name)) else name)
    if not is_folder(path) and not is_model(str(path)):
        return []
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(each.name, each.stat()) for each in files if each.is_file()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]


def find_gguf(name: str | Path, revision: str | None = None) -> Path | None:
    """Return the GGUF file that a name stands for; None if the name stands for anything else. The
    name may be "smollm2", a file, a folder with a single GGUF file and no config.json, or ID:FILE
    on the hub, which is downloaded if it is not cached. Raises InputError if the file does not
    exist or is not in GGUF format, or if the folder has several GGUF files."""
    if pair := named_models.find_pair(name):
        name = pair.target
    if is_folder(name):
        folder = Path(name)
        files = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(each.name for each in files)
            raise InputError(f"{name} has several GGUF files ({names}); give one of these files")
        file = files[0] if files else None
    elif not str(name).endswith(".gguf"):
        return None
    elif match := HUB_GGUF.fullmatch(str(name)):
        file = _fetch(match["id"], match["file"], revision)
    else:
        file = Path(name)
        _refuse_revision(str(name), "file", revision)
    if file is not None:
        _require_gguf(file)
    return file


def _require_gguf(file: Path) -> None:
    try:
        with file.open("rb") as content:
            magic = content.read(len(GGUF_MAGIC))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}; {NAME_REMEDY}") from None
    if magic != GGUF_MAGIC:
        raise InputError(f"{file} is not a GGUF file despite its name; {NAME_REMEDY}")
    if GGUF_PART.search(file.name):
        raise InputError(
            f"{file} is one of several parts; merge them first: llama-gguf-split --merge"
        )


def _fetch(id: str, name: str, revision: str | None) -> Path:
    try:
        return Path(import_hub().hf_hub_download(id, name, revision=revision))
    except Exception as error:  # of many types
        raise InputError(
            f"{id}:{name} cannot be downloaded from the hub: {to_one_line(error)}"
        ) from None


def _refuse_revision(name: str, kind: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(
            f"revision is {format_value(revision)}, but {name} is a {kind}, which has no revision; "
            "leave out the revision"
        )


def require_model(name: str | Path, revision: str | None) -> None:
    """Raise InputError if `name` is not a model on this machine or on the hub."""
    path = resolve_path(name)
    if find_gguf(path, revision) is None:
        resolve_options(path, revision)
        if is_folder(path):
            require_config(path)


def resolve_options(path: str, revision: str | None) -> dict[str, Any]:
    """Return the additional arguments of `from_pretrained` for a folder or hub id:
    `local_files_only` if the hub cannot be reached but its cache has the model, else {}. Raises
    InputError if neither the hub nor its cache has the model, or if a revision is given for a
    folder."""
    if not is_folder(path):
        return dict(_resolve_hub_options(path, revision))
    _refuse_revision(path, "folder", revision)
    return {}


@cache  # called for a model and again for its tokenizer
def _resolve_hub_options(name: str, revision: str | None) -> dict[str, Any]:
    hub = import_hub()
    try:
        url = hub.hf_hub_url(name, "config.json", revision=revision)
        hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS)
        return {}
    except (hub.errors.GatedRepoError, hub.errors.EntryNotFoundError):
        return {}  # the hub has it; transformers reports the problem
    except hub.errors.RevisionNotFoundError:
        raise InputError(
            f"the hub has {name}, but no revision {revision!r}; give another revision"
        ) from None
    except hub.errors.HFValidationError:
        raise InputError(f"{name!r} is not a folder; {NAME_REMEDY}") from None
    except Exception as error:  # network errors are of many types
        why = describe_hub_error(error)
        remedy = NAME_REMEDY if why == NO_SUCH_MODEL else OFFLINE_REMEDY
    if isinstance(hub.try_to_load_from_cache(name, "config.json", revision=revision), str):
        return {"local_files_only": True}
    raise InputError(f"there is no folder {name!r}, and {why}; {remedy}")


def describe_hub_error(error: Exception) -> str:
    """Return why a request to the hub failed, for messages."""
    errors = import_hub().errors
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE prevents access to the hub"
    status = getattr(getattr(error, "response", None), "status_code", None)
    is_gated = isinstance(error, errors.GatedRepoError)  # a kind of RepositoryNotFoundError
    is_missing = isinstance(error, errors.RepositoryNotFoundError) and not is_gated
    if is_missing or status == 404:
        return NO_SUCH_MODEL
    if status is not None:
        return f"the hub answered with status {status}"
    if isinstance(error, ValueError | TypeError | AttributeError | KeyError):
        return "the hub's answer cannot be read"
    return f"the hub cannot be reached ({to_one_line(error)})"


def list_cached_ids() -> list[str]:
    """Return the ids of the models in the hub's cache, from the names of its folders only, which
    takes no time even for a large cache."""
    from huggingface_hub import constants  # late, as in `import_hub`

    try:
        names = sorted(os.listdir(constants.HF_HUB_CACHE))
    except OSError:  # there is no cache
        return []
    parts = [each.split("--") for each in names if each.startswith("models--")]
    return ["/".join(each[1:]) for each in parts]
