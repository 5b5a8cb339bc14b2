"""Results of self-checks, remembered in the user's cache by structure and versions: a family is
checked once."""

from __future__ import annotations

import hashlib
import json
import time

from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.stock.selfcheck import (
    TORCH_BACKEND,
    CheckedBackend,
    CheckResult,
    UnfinishedCheckError,
    check,
    choose_rope_switch,
)
from foretoken.models.stock.small_copy import COPY_HEAD_DIM, shrink_config
from foretoken.models.stock.third_party import third_party_sources
from foretoken.storage.cache import get_versions, load_cached_values, save_cached_value

# Raised where the check, or a runtime that it checks, computes something else: it then runs again
CHECK_FORMAT = 15
RESULTS_FILE = (
    "selfcheck.json"  # by structure: the deviation of a family that passed, or the refusal
)
# What a check does not depend on: weights are plain when they are here
IGNORED_CONFIG_FIELDS = (
    "_name_or_path",
    "architectures",
    "dtype",
    "transformers_version",
    "quantization_config",
)


def self_check(model: PreTrainedModel, backend: CheckedBackend = TORCH_BACKEND) -> CheckResult:
    """Refuse a model whose family is not exact over our cache; once per structure and versions.

    `model` may be on the meta device. Raises RefusedError naming the family and what failed.
    """
    backend.admit(model)
    start, key = time.perf_counter(), compute_structure_key(model, backend)
    if key is None:
        return check(model, backend)
    result = load_cached_values(RESULTS_FILE).get(key)
    if isinstance(result, str):
        raise RefusedError(result)
    if isinstance(result, float):
        return CheckResult(type(model).__name__, result, time.perf_counter() - start, True)
    try:
        passed = check(model, backend)
    except UnfinishedCheckError:
        raise
    except RefusedError as error:
        save_cached_value(RESULTS_FILE, key, str(error))
        raise
    save_cached_value(RESULTS_FILE, key, passed.delta)
    return passed


def compute_structure_key(
    model: PreTrainedModel, backend: CheckedBackend = TORCH_BACKEND
) -> str | None:
    """A digest of what a check depends on: class, small configuration, versions, `CHECK_FORMAT` and
    the code of classes from no library; None where that code cannot be read, or the configuration
    not be made."""
    try:
        switch = choose_rope_switch(model, backend)
        config = shrink_config(model.config, COPY_HEAD_DIM, switch).to_dict()
    except Exception:  # the check itself will say so
        return None
    for name in IGNORED_CONFIG_FIELDS:
        config.pop(name, None)
    try:
        code = third_party_sources(model)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    name = [type(model).__module__, type(model).__qualname__, backend.name]
    parts = json.dumps(
        [CHECK_FORMAT, name, config, get_versions(), code], sort_keys=True, default=str
    )
    return hashlib.sha256(parts.encode()).hexdigest()
