"""Results of self-checks, saved in the user's cache. A result's key contains the model's structure
and the versions of the libraries, so that each family is checked only once."""

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
from foretoken.models.stock.third_party import find_third_party_sources
from foretoken.storage.cache import get_versions, load_cached_values, save_cached_value

# Incremented when the check or a checked backend changes its results: then checks run again
CHECK_FORMAT = 17
# By structure key: the deviation, or the error message of a family that failed
RESULTS_FILE = "selfcheck.json"
# Config fields that do not affect a check (quantized weights are dequantized when they are loaded)
IGNORED_CONFIG_FIELDS = (
    "_name_or_path",
    "architectures",
    "dtype",
    "transformers_version",
    "quantization_config",
)


def run_self_check(model: PreTrainedModel, backend: CheckedBackend = TORCH_BACKEND) -> CheckResult:
    """Return the self-check's result: the saved result, or the result of a new check. `model` may
    be on the meta device.

    Raises RefusedError, with the family and the reason, if the family is not exact over foretoken's
    cache.
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
    """Return a digest of everything that a check depends on: the class, the small copy's config,
    versions, `CHECK_FORMAT`, and the source code of classes that are not from installed libraries.
    Returns None if the config cannot be shrunk, or if a class has no source file."""
    try:
        switch = choose_rope_switch(model, backend)
        config = shrink_config(model.config, COPY_HEAD_DIM, switch).to_dict()
    except Exception:  # the check itself will report it
        return None
    for name in IGNORED_CONFIG_FIELDS:
        config.pop(name, None)
    try:
        code = find_third_party_sources(model)
    except (OSError, TypeError, UnicodeDecodeError):
        return None
    name = [type(model).__module__, type(model).__qualname__, backend.name]
    parts = json.dumps(
        [CHECK_FORMAT, name, config, get_versions(), code], sort_keys=True, default=str
    )
    return hashlib.sha256(parts.encode()).hexdigest()
