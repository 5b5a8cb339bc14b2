"""Searches the Hugging Face hub for drafts that were made for a target.

A draft is found by its base model on the hub or by its name, and by its kind in its name, tags or
config. Smaller models of the target's owner and family are found by their names, and compared with
the target by their configs. Answers have the format of huggingface_hub's `ModelInfo`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError
from foretoken.loading import hub, inventory, known_drafts
from foretoken.loading.draft_candidates import MODEL_KIND, DraftCandidate, count_mtp_layers
from foretoken.loading.published_drafts import get_draft_kind

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

SEARCHED_WORDS = ("speculator", "eagle3", "dflash", "domino", "dspark", "assistant")
# kinds that are stated in a draft's name or tags; other kinds are stated in its config
NAMED_KINDS = ("eagle3", "dflash2", "dflash", "dspark", "peagle")
# of `ModelInfo`; the config is only a part of the draft's config
PROPERTIES: list[Any] = ["config", "downloads", "safetensors", "tags"]
OTHER_FORMAT_TAGS = {"gguf", "mlx", "onnx", "openvino"}  # foretoken loads drafts in safetensors
MAX_ANSWERS = 50  # per request, the most downloaded first
MAX_SIBLINGS = 8  # smaller models whose configs are fetched
NUM_THREADS = 8
MODEL_SIZE = re.compile(r"[-_]E?\d+(?:\.\d+)?[BM](?![a-z])", re.IGNORECASE)  # "-8B", "_135M"
BASE_MODEL_TAG = re.compile(r"base_model:(?:\w+:)?(.+)")
QUANTIZED_TAG, LICENSE_TAG = "base_model:quantized:", "license:"
REMEDY = "leave out --online, or check the network, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE"


def search_hub(target: str) -> list[DraftCandidate]:
    """Return the drafts that the hub has for a target. If the target is a quantized copy, the
    drafts for the original are returned too.

    Args:
        target: The target's hub id, or ID:FILE for a GGUF file on the hub.

    Returns:
        The drafts in no particular order; a draft may occur several times.

    Raises:
        InputError: `target` is not a hub id, the hub does not have it, or the hub does not answer.

    Examples:
        >>> search_hub("Qwen/Qwen3-8B")[0].name  # doctest: +SKIP
        'RedHatAI/Qwen3-8B-speculator.eagle3'
    """
    name = target.rpartition(":")[0] if hub.HUB_GGUF.fullmatch(target) else target
    if hub.is_folder(name) or not hub.HUB_ID.fullmatch(name):
        raise InputError(
            f"--online needs the hub id of the target (owner/name), not {target!r:.100}; give the "
            "hub id, or leave out --online"
        )
    try:
        api = hub.import_hub().HfApi()
        info = api.model_info(name, expand=PROPERTIES, timeout=hub.HUB_TIMEOUT_SECONDS)
        if (kind := _find_kind(info)) is not None:
            raise InputError(f"{name} is a draft ({kind}), not a target; give its target")
        return _search(api, info)
    except InputError:
        raise
    except Exception as error:  # network errors are of many types
        why = hub.describe_hub_error(error)
        remedy = hub.NAME_REMEDY if why == hub.NO_SUCH_MODEL else REMEDY
        raise InputError(f"{name} cannot be searched for drafts: {why}; {remedy}") from None


def _search(api: Any, target: ModelInfo) -> list[DraftCandidate]:
    """Send the requests of a search in parallel, and judge the answers."""
    tags = [each for each in target.tags or () if each.startswith(QUANTIZED_TAG)]
    ids = list(dict.fromkeys((target.id, *(each.removeprefix(QUANTIZED_TAG) for each in tags))))
    queries: list[dict[str, Any]] = []
    for each in ids:
        queries += [{"filter": f"base_model:{each}", "search": word} for word in SEARCHED_WORDS]
        queries += [{"search": f"{each.rpartition('/')[2]} {word}"} for word in SEARCHED_WORDS]
    known = list(dict.fromkeys(chain(*map(known_drafts.list_table_drafts, ids))))
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        siblings = pool.submit(_search_siblings, api, target, ids[-1])
        infos = pool.map(partial(_find_model, api), known)
        answers = pool.map(partial(_list_models, api), queries)
        drafts = [_describe(each, "known") for each in infos if each is not None]
        drafts += [
            _describe(each, why)
            for each in chain(*answers)
            if _find_kind(each) is not None and (why := _find_reason(each, ids)) is not None
        ]
        return drafts + siblings.result()


def _list_models(api: Any, query: dict[str, Any]) -> list[ModelInfo]:
    """Return the models that the hub lists for a query, as `HfApi.list_models`, which would wait
    without limit for the answer."""
    library = hub.import_hub()
    answer = library.get_session().get(
        f"{api.endpoint}/api/models",
        params={**query, "expand": PROPERTIES, "sort": "downloads", "limit": MAX_ANSWERS},
        headers=library.utils.build_hf_headers(),
        timeout=hub.HUB_TIMEOUT_SECONDS,
    )
    library.hf_raise_for_status(answer)
    return [library.ModelInfo(**each) for each in answer.json()]


def _find_model(api: Any, name: str) -> ModelInfo | None:
    """Return the hub's description of a known draft; None if the hub no longer has the draft."""
    try:
        return api.model_info(name, expand=PROPERTIES, timeout=hub.HUB_TIMEOUT_SECONDS)
    except hub.import_hub().errors.RepositoryNotFoundError:
        return None


def _find_kind(info: ModelInfo) -> str | None:
    """Return the kind of a draft, as its name, tags or config state it; None for a model and for a
    draft in another format than safetensors."""
    tags = {each.lower() for each in info.tags or ()}
    if tags & OTHER_FORMAT_TAGS:
        return None
    named = known_drafts.parse_kind(info.id)
    if named in NAMED_KINDS:
        return named
    tagged = (each for each in NAMED_KINDS if each in tags)
    return next(tagged, None) or get_draft_kind(info.config or {})


def _find_reason(info: ModelInfo, targets: Iterable[str]) -> str | None:
    """Return why a draft is for one of the targets; None if it may be for another model."""
    matches = [BASE_MODEL_TAG.fullmatch(each) for each in info.tags or ()]
    bases = {match[1].lower() for match in matches if match}
    if any(each.lower() in bases for each in targets):
        return "declared"
    return "named" if any(known_drafts.is_named_for(info.id, each) for each in targets) else None


def _describe(info: ModelInfo, why: str) -> DraftCandidate:
    licenses = [each for each in info.tags or () if each.startswith(LICENSE_TAG)]
    kind = _find_kind(info) or known_drafts.parse_kind(info.id) or MODEL_KIND
    return DraftCandidate(
        info.id,
        kind,
        why,
        size=_compute_size(info),
        license=licenses[0].removeprefix(LICENSE_TAG) if licenses else None,
        downloads=info.downloads or 0,
    )


def _compute_size(info: ModelInfo) -> int | None:
    """Return the bytes of the weights, from the number of parameters in each dtype; None if the hub
    does not state these numbers."""
    if not info.safetensors:
        return None
    bits = {each: re.search(r"\d+", each) for each in info.safetensors.parameters}
    return sum(
        count * (int(match[0]) if (match := bits[dtype]) else 8) // 8
        for dtype, count in info.safetensors.parameters.items()
    )


def _search_siblings(api: Any, target: ModelInfo, original: str) -> list[DraftCandidate]:
    """Return "mtp", if the config of `original` states layers for multi-token prediction, and the
    smaller models by the same owner, in the same family and with the same vocabulary size.
    `original`: the model that the target is a quantized copy of, or else the target itself."""
    config = _fetch_config(api, original)
    drafts = [DraftCandidate("mtp", "mtp", "built-in")] if count_mtp_layers(config) else []
    info = target if target.id == original else _find_model(api, original)
    size = MODEL_SIZE.search(original)
    target_bytes = None if info is None else _compute_size(info)
    if size is None or target_bytes is None or "vocab_size" not in config:
        return drafts
    prefix = original[: size.start()]  # the owner and the family
    owner, _, family = prefix.rpartition("/")
    siblings = [
        each
        for each in _list_models(api, {"author": owner, "search": family})
        if each.id.startswith(prefix)
        and MODEL_SIZE.match(each.id, len(prefix))
        and 2 * (_compute_size(each) or target_bytes) <= target_bytes
        and not OTHER_FORMAT_TAGS & {tag.lower() for tag in each.tags or ()}
    ]
    for each in siblings[:MAX_SIBLINGS]:
        other = _fetch_config(api, each.id)
        if get_draft_kind(other) is None and other.get("vocab_size") == config["vocab_size"]:
            drafts.append(_describe(each, "smaller"))
    return drafts


def _fetch_config(api: Any, name: str) -> dict[str, Any]:
    """Return a model's config from the hub; {} if the hub does not give it, for example because the
    model is gated."""
    try:
        return inventory.read_config(Path(api.hf_hub_download(name, "config.json")).parent)
    except Exception:  # of many types; the model is then left out
        return {}
