"""The two reports of `foretoken doctor`: a description of the machine, and a description of a model
with its backend."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import torch

from foretoken.costing import contention
from foretoken.errors import InputError
from foretoken.loading import published_drafts
from foretoken.loading.facts import ModelFacts, Placement
from foretoken.loading.memory import get_free_bytes, require_device
from foretoken.loading.options import LoadOptions
from foretoken.loading.runtimes.native import describe_abilities
from foretoken.loading.runtimes.place import place
from foretoken.loading.sources import ModelSource, find_source, get_processor_loader, load_tokenizer
from foretoken.loading.target import add_turn_ends
from foretoken.measurement import machine
from foretoken.storage.cache import get_versions

REPORTED_PACKAGES = "foretoken torch transformers tokenizers safetensors numpy".split()


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine as JSON: versions, processor, devices, and the memory
    bandwidth, which takes a second or two to measure."""
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    reading, here = contention.take_reading(), machine.get_processor()
    seconds, size = machine.measure_bandwidth(torch.device("cpu"))
    rate = {"bytes_per_second": size / seconds.median, "read_bytes": size}
    return {
        "versions": {"python": platform.python_version()} | get_versions(*REPORTED_PACKAGES),
        "machine": platform.platform(),
        "processor": {**asdict(here), "lacks": here.lacks, **rate},
        "threads": torch.get_num_threads(),
        "devices": [{"name": n, "free_bytes": get_free_bytes(torch.device(n))} for n in names],
        "native": describe_abilities(),
        "others": contention.compute_others_share([contention.measure_since(reading)]),
    }


def describe_model(model: str, options: LoadOptions) -> dict[str, Any]:
    """Return a description of a model as JSON: its backend, the reason for this backend, and
    whether greedy output with draft tokens is bitwise identical to plain decoding.

    Raises:
        InputError, RefusedError: The model cannot be loaded.
    """
    if draft := published_drafts.find_published(model, options.revision):
        return {"model": draft.name, "runtime": None, "why": draft.description}
    device = require_device(options.device)
    placement = Placement(options.dtype, device, options.runtime, kv_dtype=options.kv_dtype)
    model_source = find_source(model, options.revision, options.trust_remote_code, options.adapter)
    facts = ModelFacts(model_source, placement)
    placed = place(facts, placement)
    batch_invariant = placed.model.capabilities.batch_invariant
    return {
        "model": model_source.name,
        "runtime": placed.model.runtime,
        "why": placed.reason,
        "exact": "bitwise" if batch_invariant else "rounding",
        "lacks": _find_processor_problem(model_source),
        "ends": _describe_ends(model_source, facts),
        "dtype": placed.model.compute_dtype,
        "asked": placement.dtype,
    }


def _describe_ends(model_source: ModelSource, facts: ModelFacts) -> str | None:
    """Return a remark if the chat template ends a turn with a token that the model's files do not
    list as an end token; otherwise None."""
    file = model_source.path if model_source.gguf is None else model_source.gguf
    tokenizer = load_tokenizer(file, model_source.options.get("revision"), model_source.trust)
    return add_turn_ends(facts.settings.ends, tokenizer)[1]


def _find_processor_problem(model_source: ModelSource) -> str | None:
    """Return why the processor for a model's images and audio cannot be loaded; None if the
    processor can be loaded, or if the model has no processor."""
    load = get_processor_loader(model_source)
    try:
        if load is not None:
            load()
    except InputError as error:
        return str(error)
    return None
