"""Drafts that are published with models: which kind a folder or a hub id holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import InputError, format_value, to_one_line
from foretoken.loading import hub
from foretoken.storage.files import parse_json

DRAFT_FILE_PATTERNS = ["*.json", "*.safetensors", "*.bin"]  # of a draft on the hub
BLOCK_KINDS = ("dflash", "dspark")
ASSISTANT_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
MUSE_MODEL_TYPE = "muse_glimmer_assistant"
ARCHITECTURE_KINDS = (
    ("Eagle3", "eagle3"),
    ("DSpark", "dspark"),
    ("DFlash", "dflash"),
)  # of architectures


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A draft in a folder, of a kind that is no model by itself."""

    name: str
    folder: Path
    kind: str
    config: dict[str, Any]
    # as conversions of models have them
    gguf = None
    commit = None
    adapter_files = list[Path]()

    @property
    def description(self) -> str:
        """Say what it is, and for which target."""
        named = self.config.get("speculators_config")
        named = named.get("verifier") if isinstance(named, dict) else None
        named = named.get("name_or_path") if isinstance(named, dict) else None
        target = format_value(named) if named else "the model that it was trained with"
        return (
            f"is a draft of kind {self.kind} for {target}; it runs where its target does: give it "
            "as --draft"
        )

    @property
    def path(self) -> str:
        return str(self.folder)

    def list_files(self) -> list[Path]:
        """Return all that a conversion of it depends on."""
        return sorted(file for pattern in DRAFT_FILE_PATTERNS for file in self.folder.glob(pattern))

    def list_custom_code(self) -> list[str]:
        """Return what makes this conversion differ from one of the folder's model."""
        return [f"a draft of kind {self.kind}, in a context of its own"]


def find_published(name: str | Path, revision: str | None) -> PublishedDraft | None:
    """Return the draft of that name, where it is a folder or on the hub and no model; None also
    where its config cannot be read. Raises InputError for one that the hub does not give."""
    folder = Path(name) if hub.is_folder(name) else None
    if folder is not None:
        hub.resolve_options(str(name), revision)  # refuses a revision
    if folder is None and (not isinstance(name, str) or not hub.HUB_ID.fullmatch(name)):
        return None
    config = _read_config(folder / "config.json" if folder else _fetch_config(str(name), revision))
    kind = get_draft_kind(config)
    if kind is None:
        return None
    return PublishedDraft(str(name), folder or _fetch(str(name), revision), kind, config)


def get_cached_kind(name: str, revision: str | None) -> str | None:
    """Return the kind of a draft in a folder, or on the hub where its config is in the cache; None
    for a model, and where that is not known. Nothing is fetched."""
    if hub.is_folder(name):
        return get_draft_kind(_read_config(Path(name) / "config.json"))
    if not hub.HUB_ID.fullmatch(name):
        return None
    cached = hub.import_hub().try_to_load_from_cache(name, "config.json", revision=revision)
    return get_draft_kind(_read_config(Path(cached))) if isinstance(cached, str) else None


def _read_config(file: Path | None) -> dict[str, Any]:
    """A config; empty where it cannot be read: whoever reads it as a model says what is wrong."""
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
    except Exception:  # as above
        return None


def _fetch(name: str, revision: str | None) -> Path:
    options: dict[str, Any] = {"revision": revision, "allow_patterns": DRAFT_FILE_PATTERNS}
    try:
        return Path(
            hub.import_hub().snapshot_download(
                name, **options, **hub.resolve_options(name, revision)
            )
        )
    except Exception as error:  # of many kinds
        raise InputError(f"{name} cannot be had from the hub: {to_one_line(error)}") from None


def get_draft_kind(config: dict[str, Any]) -> str | None:
    """Return the kind of draft that a config describes; None for a model."""
    named = config.get("speculators_model_type")
    if named:
        return str(named)
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
