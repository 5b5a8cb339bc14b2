"""Lists the drafts for a target: those on this machine, those that foretoken knows by name, and
those that need no files of their own. `hub_search` adds those on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.errors import ForetokenError, InputError
from foretoken.loading import hub, inventory, known_drafts
from foretoken.loading.inventory import FoundModel
from foretoken.loading.published_drafts import SUPPORTED_KINDS

MODEL_KIND = "model"  # a smaller model
OTHER_KINDS = ("mtp", MODEL_KIND, "lookup", "self")  # in this order, after published drafts
# Reasons for which a draft is in the list, and their meanings; the best reason comes first
REASONS = {
    "known": f"in foretoken's table of published drafts ({known_drafts.KNOWN_DRAFTS_DATE})",
    "declared": "its config, or its page on the hub, names the target",
    "named": "named after the target",
    "fits": "the sizes in its config match the target",
    "smaller": "a smaller model of the target's family with as many tokens",
    "built-in": "needs no files except the target's",
}
MTP_COUNT_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
FOUR_BITS = re.compile(r"I?Q[1-4]_|MXFP4")  # a copy of such weights cannot be rounded further


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A draft that may serve a target.

    Attributes:
        name: The value for `--draft`.
        kind: A kind of published draft, or one of mtp, model, lookup and self.
        why: The reason why the draft is in the list, a key of `REASONS`.
        local: True if the draft needs no download.
        size: Bytes of its weights; None if unknown.
        license: The license that the hub states; None if unknown.
        downloads: Downloads from the hub in a month; 0 if unknown.
    """

    name: str
    kind: str
    why: str
    local: bool = False
    size: int | None = None
    license: str | None = None
    downloads: int = 0

    @property
    def supported(self) -> bool:
        """True if foretoken can load drafts of this kind."""
        return self.kind in (*SUPPORTED_KINDS, *OTHER_KINDS)

    @property
    def _rank(self) -> tuple[Any, ...]:
        order = OTHER_KINDS.index(self.kind) + 1 if self.kind in OTHER_KINDS else 0
        size = (self.size or 0) if self.kind == MODEL_KIND else 0  # smaller models are faster
        reason = [*REASONS].index(self.why)
        return not self.supported, order, not self.local, reason, size, -self.downloads


def find_target(name: str, models: Iterable[FoundModel]) -> FoundModel | None:
    """Return the target of this name: one of `models`, or the model in a folder or GGUF file. None
    if the name is a hub id that is not in the hub's cache. Raises InputError for a name that cannot
    be a model, and for a draft."""
    found = next((each for each in models if each.name == name), None)
    if found is None and not hub.HUB_GGUF.fullmatch(name):
        path = hub.find_gguf(name) or Path(hub.resolve_path(name))
        if hub.is_folder(path):
            hub.require_config(path)
        found = inventory.read_model(name, path) if path.exists() else None
    if found is None:
        kind = known_drafts.find_kind(name)
    else:
        kind = found.family if found.draft else None
    if kind is not None:
        raise InputError(f"{name} is a draft ({kind}), not a target; give its target")
    return found


def list_local_drafts(
    name: str, target: FoundModel | None, models: Iterable[FoundModel]
) -> list[DraftCandidate]:
    """Return the drafts for a target without a request to the hub.

    Args:
        name: The target's name: a folder, a GGUF file or a hub id.
        target: The target; None if its files are not on this machine.
        models: The models and drafts on this machine, such as from `list_models`.

    Returns:
        The drafts, each once, the most promising first.

    Examples:
        >>> models = inventory.list_models()
        >>> drafts = list_local_drafts("novels", models[0], models)
        >>> [draft.name for draft in drafts][0]
        'novels'
    """
    found = [each for model in models if (each := _judge_local(model, name, target)) is not None]
    known = [
        DraftCandidate(each, known_drafts.parse_kind(each) or "", "known")
        for each in known_drafts.list_table_drafts(name)
    ]
    built_in = [DraftCandidate("lookup", "lookup", "built-in", local=True)]
    if target is None or not FOUR_BITS.match(target.precision):
        copies = ("self:int8", "self:int4")
        built_in += [DraftCandidate(each, "self", "built-in", local=True) for each in copies]
    if target is not None and _has_mtp_layers(target.path):
        built_in.append(DraftCandidate("mtp", "mtp", "built-in", local=True))
    return merge_drafts((*found, *known, *built_in))


def merge_drafts(drafts: Iterable[DraftCandidate]) -> list[DraftCandidate]:
    """Return the drafts, each once, the most promising first. A draft that occurs several times has
    the best of its reasons, and its size and license from wherever they are given."""
    merged: dict[str, DraftCandidate] = {}
    reasons = [*REASONS]
    for each in drafts:
        first = merged.setdefault(each.name.lower(), each)
        merged[each.name.lower()] = replace(
            first,
            why=min(first.why, each.why, key=reasons.index),
            local=first.local or each.local,
            size=first.size or each.size,
            license=first.license or each.license,
            downloads=max(first.downloads, each.downloads),
        )
    return sorted(merged.values(), key=lambda each: each._rank)


def _judge_local(model: FoundModel, name: str, target: FoundModel | None) -> DraftCandidate | None:
    """Return a model on this machine as a draft for the target; None if it does not fit."""
    if model is target or model.name == name:
        return None
    is_declared = model.draft and known_drafts.is_declared_for(model.path, name)
    is_named = model.draft and known_drafts.is_named_for(model.name, name)
    why = "declared" if is_declared else "named" if is_named else "fits"
    if why == "fits" if target is None else not model.can_draft_for(target):
        return None
    return DraftCandidate(
        model.name.removesuffix(" (draft)"),
        model.family if model.draft else MODEL_KIND,
        why,
        local=True,
        size=model.size,
    )


def count_mtp_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers for multi-token prediction that a config states."""
    counts = (config.get(each) for each in MTP_COUNT_FIELDS)
    return max((each for each in counts if isinstance(each, int)), default=0)


def _has_mtp_layers(path: Path) -> bool:
    """Return whether a target's GGUF file has a layer for multi-token prediction, or its folder the
    weights of the layers that its config states."""
    if path.is_file():
        from foretoken.loading.gguf_mtp import has_mtp_layer  # late: imports torch

        try:
            return has_mtp_layer(path)
        except Exception:  # a damaged file raises any type; the inventory reports it
            return False
    config = inventory.read_config(path) if path.is_dir() else {}
    if not count_mtp_layers(config):
        return False
    from foretoken.loading.weights import FolderWeights  # late: imports torch
    from foretoken.models.stock.pair_files import map_mtp_names

    try:
        keys = FolderWeights(path).keys
        return bool(map_mtp_names(keys, config.get("num_hidden_layers", 0)))
    except ForetokenError:  # no safetensors
        return False
