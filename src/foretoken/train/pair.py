"""A target and the draft to be taught: both networks, and a speculator of the pair and of the
draft alone.

The draft is a folder's, or a fresh one: the target's own architecture with some fields of its
config changed, so that its vocabulary is the target's.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, RefusedError, one_line
from foretoken.loading import sources
from foretoken.loading.load import asset, load
from foretoken.models.stock.selfcheck import on_torch, self_check
from foretoken.models.stock.sizes import output_rows, sketch
from foretoken.speculator import Speculator
from foretoken.text.decoding import require_same_words

CPU = torch.device("cpu")
Shape = dict[str, Any]  # sizes in a config
NO_SIZE = re.compile(r"^_|_id$|vocab|num_labels|pretraining_tp|_pattern$")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two networks, and what generates with them."""

    target: PreTrainedModel
    draft: PreTrainedModel
    together: Speculator  # in the target's distribution
    alone: Speculator  # the draft, in its own


def pair(
    target: str | None,
    draft: str | None,
    shape: Shape,
    seed: int,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
    generation_config: str | None = None,
) -> Pair:
    """Load a target, and a draft or a fresh one of that `shape`; by default the pair that ships.
    The options are those of `foretoken.load`.

    Raises InputError for what cannot be read or built, RefusedError for a draft of another kind or
    with another vocabulary.
    """
    if draft is not None and shape:
        raise InputError("give a draft to go on from or the shape of a fresh one, not both")
    if target is not None and draft is None and not shape:
        raise InputError("no draft; give a folder to go on from, or the shape of a fresh one")
    teacher, target_tokenizer = read_target(target, revision, trust_remote_code, tokenizer)
    teacher.requires_grad_(False)
    if shape:
        student = fresh(teacher, shape, seed)
    else:
        name = str(asset("draft")) if draft is None else draft
        student = _read_draft(name, draft_revision, trust_remote_code, teacher, target_tokenizer)
    return joined(teacher, student, target_tokenizer, generation_config)


def read_target(
    target: str | None, revision: str | None, trust_remote_code: bool, tokenizer: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A target by name (None: the one that ships) in float32 on the CPU, and the tokenizer of that
    name (None: its own)."""
    name = str(asset("target")) if target is None else target
    network = sources.source(name, revision, trust_remote_code).network(torch.float32, CPU)
    if tokenizer is None:
        return network, sources.tokenizer(name, revision, trust_remote_code)
    return network, sources.tokenizer(tokenizer, None, trust_remote_code, required=True)


def joined(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: str | None = None,
) -> Pair:
    """The pair of two networks in memory with one vocabulary."""
    spec = load(target, "none", tokenizer=tokenizer, generation_config=generation_config)
    self_check(draft)
    drafter = LMDrafter(on_torch(draft), output_rows(target))
    together = Speculator(spec.target, drafter, tokenizer, spec.ends)
    alone = Speculator(on_torch(draft), NoDrafter(), tokenizer, spec.ends)
    return Pair(target, draft, together, alone)


def fresh(target: PreTrainedModel, shape: Shape, seed: int) -> PreTrainedModel:
    """A random float32 model of the target's architecture, with the sizes in `shape`.

    Raises InputError for names that are no sizes, values that are no counts, and sizes that do
    not fit each other.
    """
    config = target.config
    allowed = sizes(config)
    for name, value in shape.items():
        if config.attribute_map.get(name, name) not in allowed:
            raise InputError(
                f"{name} is no size of a {config.model_type} model that may differ; "
                f"give of {', '.join(allowed)}"
            )
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value}; give a whole number, 1 or more")
    try:
        model = _random(target, {config.attribute_map.get(n, n): v for n, v in shape.items()}, seed)
    except Exception as error:  # architectures raise many kinds
        raise InputError(f"no model has the shape {shape}: {one_line(error)}") from None
    model.generation_config = copy.deepcopy(target.generation_config)
    return model


def sizes(config: PreTrainedConfig) -> dict[str, int]:
    """The counts in a config that define its architecture, without the vocabulary's."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if type(value) is int and value > 0 and not NO_SIZE.search(name)
    }


def fingerprint(model: PreTrainedModel) -> str:
    """A digest of its sizes and a few of its weights."""
    digest = hashlib.sha256(json.dumps(sizes(model.config), sort_keys=True).encode())
    digest.update(sketch(model).numpy().tobytes())
    return digest.hexdigest()[:12]


def _random(target: PreTrainedModel, changes: Shape, seed: int) -> PreTrainedModel:
    values = target.config.to_dict() | changes
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    torch.manual_seed(seed)
    model = type(target)(type(target.config).from_dict(values)).float().eval()
    ids = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():  # a wrong ratio of heads is an error only here
        model(ids, decoder_input_ids=ids) if model.config.is_encoder_decoder else model(ids)
    return model


def _read_draft(
    draft: str,
    revision: str | None,
    trust: bool,
    target: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> PreTrainedModel:
    source = sources.source(draft, revision, trust)
    kinds = {True: "an encoder-decoder", False: "decoder-only"}
    own, other = source.empty.config.is_encoder_decoder, target.config.is_encoder_decoder
    if own != other:
        raise RefusedError(
            f"{draft} is {kinds[own]}, the target {kinds[other]}; give a draft of its kind"
        )
    rows, V = output_rows(source.empty), output_rows(target)
    tokenizer = sources.tokenizer(draft, revision, trust)
    require_same_words(draft, rows, tokenizer, V, target_tokenizer)
    if rows > V:
        raise RefusedError(
            f"{draft} has {rows} output rows, the target {V}; give a draft that has no more"
        )
    return source.network(torch.float32, CPU)
