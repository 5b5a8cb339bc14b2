"""Drafts that were published for one target (EAGLE-3, MTP, DFlash, DSpark, assistants). Such a
draft and its kind are recognized by the config in its folder or on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, format_value, to_one_line
from foretoken.loading import hub
from foretoken.models import store
from foretoken.models.store import ConversionSource
from foretoken.storage.files import parse_json

MASK_EMBEDDING_FILE = "mask_embedding.pt"  # an embedding of the mask token, trained separately
DRAFT_FILE_PATTERNS = ["*.json", "*.safetensors", "*.bin", MASK_EMBEDDING_FILE]  # of the hub
BLOCK_KINDS = ("dflash", "dspark")
SUPPORTED_KINDS = ("eagle3", "mtp", "dflash", "dflash2", "dspark", "assistant")
DFLASH2_MODEL_TYPE = "dflash2"  # of speculators; its drafts are DFlash with additions
ASSISTANT_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
MUSE_MODEL_TYPE = "muse_glimmer_assistant"
ARCHITECTURE_KINDS = (
    ("Eagle3", "eagle3"),
    ("DSpark", "dspark"),
    ("DFlash", "dflash"),
    ("Domino", "dflash"),
)


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A draft in a folder that was published for one target and cannot run without it."""

    name: str
    folder: Path
    kind: str
    config: dict[str, Any]
    target_source: ConversionSource | None = None  # the target, if the conversion depends on it
    # attributes of a `ModelSource`, read when a draft is converted
    gguf = None
    commit = None
    adapter_files = list[Path]()
    part = ""

    @property
    def description(self) -> str:
        """The kind of draft and its target, for messages."""
        named = get_target_name(self.config)
        target = format_value(named) if named else "the model that it was trained with"
        return (
            f"is a draft of kind {self.kind} for {target}; it runs only with its target: give it "
            "as --draft"
        )

    @property
    def path(self) -> str:
        return str(self.folder)

    def list_files(self) -> list[Path]:
        """Return all files that a conversion of the draft depends on."""
        return sorted(file for pattern in DRAFT_FILE_PATTERNS for file in self.folder.glob(pattern))

    def list_custom_code(self) -> list[str]:
        """Return the part of a conversion's cache key that distinguishes this draft from a model in
        the same folder."""
        source = self.target_source
        target = [] if source is None else [store.compute_key(source, "target")]
        return [f"a draft of kind {self.kind}, in a context of its own", *target]


def find_published(name: str | Path, revision: str | None) -> PublishedDraft | None:
    """Return the published draft in a folder or on the hub; None if `name` is a model or its config
    cannot be read. A draft on the hub is downloaded. Raises InputError if the draft cannot be
    downloaded, or if a revision is given for a folder."""
    folder = Path(name) if hub.is_folder(name) else None
    if folder is not None:
        hub.resolve_options(str(name), revision)  # raises for a revision of a folder
    if folder is None and (not isinstance(name, str) or not hub.HUB_ID.fullmatch(name)):
        return None
    config = read_config(folder / "config.json" if folder else _fetch_config(str(name), revision))
    kind = get_draft_kind(config)
    if kind is None:
        return None
    return PublishedDraft(str(name), folder or _fetch(str(name), revision), kind, config)


def get_cached_kind(name: str, revision: str | None) -> str | None:
    """Return the kind of a draft in a folder or in the hub's cache; None for a model and for an
    uncached name. Downloads nothing."""
    if hub.is_folder(name):
        return get_draft_kind(read_config(Path(name) / "config.json"))
    if not hub.HUB_ID.fullmatch(name):
        return None
    cached = hub.import_hub().try_to_load_from_cache(name, "config.json", revision=revision)
    return get_draft_kind(read_config(Path(cached))) if isinstance(cached, str) else None


def read_config(file: Path | None) -> dict[str, Any]:
    """Return the config in a file; {} if the file cannot be read: loading the model then raises the
    error."""
    try:
        config = parse_json(file.read_text()) if file else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _fetch_config(name: str, revision: str | None) -> Path | None:
    try:
        options = hub.resolve_options(name, revision)
        return Path(
            hub.import_hub().hf_hub_download(name, "config.json", revision=revision, **options)
        )
    except Exception:  # of many types; loading the name as a model reports the problem
        return None


def _fetch(name: str, revision: str | None) -> Path:
    options: dict[str, Any] = {"revision": revision, "allow_patterns": DRAFT_FILE_PATTERNS}
    try:
        return Path(
            hub.import_hub().snapshot_download(
                name, **options, **hub.resolve_options(name, revision)
            )
        )
    except Exception as error:  # of many types
        raise InputError(
            f"{name} cannot be downloaded from the hub: {to_one_line(error)}"
        ) from None


def get_target_name(config: dict[str, Any]) -> str | None:
    """Return the name of the target that a draft's config in speculators' layout states; None if it
    states none."""
    for key in ("speculators_config", "verifier"):
        config = config.get(key) or {}
        if not isinstance(config, dict):
            return None
    name = config.get("name_or_path")
    return name if isinstance(name, str) else None


def get_draft_kind(config: dict[str, Any]) -> str | None:
    """Return the kind of draft that a config describes; None for a model."""
    named = config.get("speculators_model_type")
    if named:
        return "dflash" if named == DFLASH2_MODEL_TYPE else str(named)
    if config.get("model_type") in ASSISTANT_MODEL_TYPES:
        return "assistant"
    named = config.get("architectures")
    kinds = " ".join(map(str, named)) if isinstance(named, list) else ""
    for word, kind in ARCHITECTURE_KINDS:
        if word in kinds:
            return kind
    return (
        "dflash"
        if "dflash_config" in config or config.get("model_type") == MUSE_MODEL_TYPE
        else None
    )
