"""A target and the draft to be taught, on torch and in memory, and the same two as they serve.

The draft is a folder's, or a fresh one: the target's own architecture with some fields of its
config changed, so that its vocabulary is the target's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, RefusedError, one_line
from foretoken.loading import asset, load
from foretoken.models.causal import output_rows
from foretoken.models.selfcheck import on_torch, self_check
from foretoken.sources import source
from foretoken.sources import tokenizer as words_of
from foretoken.speculator import Speculator
from foretoken.text import require_same_words

CPU = torch.device("cpu")
Shape = dict[str, Any]  # fields of a config


@dataclass(frozen=True, slots=True)
class Pair:
    """Two networks, and who writes with them: the pair has the target's law, the draft alone its
    own."""

    target: PreTrainedModel
    draft: PreTrainedModel
    together: Speculator
    alone: Speculator


def pair(target: str | None, draft: str | None, shape: Shape, seed: int) -> Pair:
    """Load a target, and a draft or a fresh one of that `shape`; without any the pair that ships.

    Raises InputError for what cannot be read or built, RefusedError for a draft of another kind or
    with another vocabulary.
    """
    if draft is not None and shape:
        raise InputError("give a draft to go on from or the shape of a fresh one, not both")
    if target is not None and draft is None and not shape:
        raise InputError("no draft; give a folder to go on from, or the shape of a fresh one")
    where = str(asset("target")) if target is None else target
    teacher = source(where, None, False).network(torch.float32, CPU).requires_grad_(False)
    words = words_of(where, None, False)
    if shape:
        student = fresh(teacher, shape, seed)
    else:
        student = _given(str(asset("draft")) if draft is None else draft, teacher, words)
    return joined(teacher, student, words)


def joined(
    target: PreTrainedModel, draft: PreTrainedModel, words: PreTrainedTokenizerBase | None
) -> Pair:
    """The pair of two networks in memory with one vocabulary."""
    plain = load(target, "none", tokenizer=words)
    self_check(draft)
    drafter = LMDrafter(on_torch(draft), output_rows(target))
    together = Speculator(plain.target, drafter, words, plain.ends)
    return Pair(
        target, draft, together, Speculator(on_torch(draft), NoDrafter(), words, plain.ends)
    )


def fresh(target: PreTrainedModel, shape: Shape, seed: int) -> PreTrainedModel:
    """A random model like the target but for the fields in `shape`, float32."""
    config = copy.deepcopy(target.config)
    for name, value in shape.items():
        if name == "vocab_size" or not hasattr(config, name):
            raise InputError(
                f"{name} is no field of a {config.model_type} config that may differ; "
                "give such as num_hidden_layers or hidden_size"
            )
        setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(seed)
    try:
        model = type(target)(config).float().eval()
    except Exception as error:  # whatever the architecture has to say
        raise InputError(f"no model has the shape {shape}: {one_line(error)}") from None
    model.generation_config = copy.deepcopy(target.generation_config)
    return model


def _given(
    draft: str, target: PreTrainedModel, words: PreTrainedTokenizerBase | None
) -> PreTrainedModel:
    read = source(draft, None, False)
    kinds = {True: "an encoder-decoder", False: "decoder-only"}
    mine, theirs = read.empty.config.is_encoder_decoder, target.config.is_encoder_decoder
    if mine != theirs:
        raise RefusedError(
            f"{draft} is {kinds[mine]}, the target {kinds[theirs]}; give a draft of its kind"
        )
    rows, V = output_rows(read.empty), output_rows(target)
    require_same_words(draft, rows, words_of(draft, None, False), V, words)
    if rows > V:
        raise RefusedError(
            f"{draft} has {rows} output rows, the target {V}; give a draft that has no more"
        )
    return read.network(torch.float32, CPU)
