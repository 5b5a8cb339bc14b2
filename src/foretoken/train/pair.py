"""Loads a target and the draft to train, and makes the sequences on which the draft is trained.

The draft is loaded from a folder, or randomly initialized with the target's architecture and
vocabulary but other sizes.

The draft generates on-policy sequences, with its weights of the current step. Off-policy sequences
come from the data, or the target generates them by speculative decoding with the same draft, which
does not change the target's distribution (Agarwal et al., arXiv 2306.13649; Zhou et al.,
DistillSpec, arXiv 2310.08461). A batch depends only on the seed, the step and the draft.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, RefusedError, to_one_line
from foretoken.inputs import Seed
from foretoken.loading import named_models, sources
from foretoken.loading.load import load
from foretoken.models.row_slots import pad_blocks
from foretoken.models.stock.check_results import run_self_check
from foretoken.models.stock.selfcheck import build_torch_model
from foretoken.models.stock.sizes import get_output_vocab_size, sketch_weights
from foretoken.request import Request, require_uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from foretoken.text.decoding import require_same_vocabulary
from foretoken.train.corpus import Example

CPU = torch.device("cpu")
ConfigSizes = dict[str, Any]  # sizes in a config, by name
NOT_A_SIZE = re.compile(r"^_|_id$|vocab|num_labels|pretraining_tp|_pattern$")


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft, as networks and as Speculators."""

    target: PreTrainedModel
    draft: PreTrainedModel
    target_spec: Speculator  # generates in the target's distribution, with the draft
    draft_spec: Speculator  # generates with the draft alone, in its own distribution


def load_pair(
    target: str | None,
    draft: str | None,
    shape: ConfigSizes,
    seed: int,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
    generation_config: str | None = None,
) -> Pair:
    """Load a target and the model `draft`, or make a random draft with the sizes in `shape`. If
    neither is given, the draft that ships for the target is loaded. The options are those of
    `foretoken.load`.

    Raises InputError if a model cannot be loaded or built, or if both `draft` and `shape` are
    given; RefusedError if the draft has another vocabulary than the target, or only one of the two
    is an encoder-decoder.
    """
    if draft is not None and shape:
        raise InputError("give a draft to continue from or the shape of a new draft, not both")
    target = target or named_models.get_default_target()
    own = named_models.find_pair(target)
    draft = str(own.draft) if own and own.draft and draft is None and not shape else draft
    if draft is None and not shape:
        raise InputError("no draft; give a folder to continue from, or the shape of a new draft")
    target_network, target_tokenizer = load_target(target, revision, trust_remote_code, tokenizer)
    target_network.requires_grad_(False)
    if shape:
        draft_network = make_random_draft(target_network, shape, seed)
    else:
        name = str(named_models.find_draft_folder(draft) or draft)
        draft_network = _load_draft(
            name, draft_revision, trust_remote_code, target_network, target_tokenizer
        )
    return make_pair(target_network, draft_network, target_tokenizer, generation_config)


def load_target(
    target: str | None,
    revision: str | None,
    trust_remote_code: bool,
    tokenizer: str | None,
    adapter: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Return a target's network, in float32 on the CPU, and its tokenizer. `target` None is the
    default target; `adapter` is merged into the weights; `tokenizer` None is the target's own."""
    target = target or named_models.get_default_target()
    name = str(pair.target) if (pair := named_models.find_pair(target)) else target
    source = sources.find_source(name, revision, trust_remote_code, adapter)
    network = source.load_network(torch.float32, CPU)
    if tokenizer is None:
        return network, sources.load_tokenizer(name, revision, trust_remote_code)
    return network, sources.load_tokenizer(tokenizer, None, trust_remote_code, required=True)


def make_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    generation_config: str | None = None,
) -> Pair:
    """Return the Pair of two networks in memory that share a vocabulary. Raises RefusedError if the
    draft's family fails the self-check."""
    spec = load(target, "none", tokenizer=tokenizer, generation_config=generation_config)
    run_self_check(draft)
    drafter = LMDrafter(build_torch_model(draft), get_output_vocab_size(target))
    together = Speculator(spec.target, drafter, tokenizer, spec.ends)
    alone = Speculator(build_torch_model(draft), NoDrafter(), tokenizer, spec.ends)
    return Pair(target, draft, together, alone)


def make_random_draft(target: PreTrainedModel, shape: ConfigSizes, seed: int) -> PreTrainedModel:
    """Return a randomly initialized float32 model of the target's architecture, on the target's
    device. `shape` gives the config's sizes that differ from the target's.

    Raises InputError if `shape` names something that is not a size, if a value is not a positive
    integer, or if the sizes do not fit each other.
    """
    config = target.config
    allowed = get_sizes(config)
    for name, value in shape.items():
        if config.attribute_map.get(name, name) not in allowed:
            raise InputError(
                f"{name} is not a size of a {config.model_type} model that may differ; "
                f"give one of {', '.join(allowed)}"
            )
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value}; give an integer of 1 or more")
    try:
        model = _make_random(
            target, {config.attribute_map.get(n, n): v for n, v in shape.items()}, seed
        )
    except Exception as error:  # architectures raise many types
        raise InputError(f"no model has the shape {shape}: {to_one_line(error)}") from None
    model.generation_config = copy.deepcopy(target.generation_config)
    model_any: Any = model
    return model_any.to(target.device)


def get_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Return the sizes in a config by name: the config's positive integers, without token ids and
    the vocabulary size."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if type(value) is int and value > 0 and not NOT_A_SIZE.search(name)
    }


def compute_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of a model's sizes and a few of its weights."""
    digest = hashlib.sha256(json.dumps(get_sizes(model.config), sort_keys=True).encode())
    digest.update(sketch_weights(model).numpy().tobytes())
    return digest.hexdigest()[:12]


def _make_random(target: PreTrainedModel, changes: ConfigSizes, seed: int) -> PreTrainedModel:
    values = target.config.to_dict() | changes
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    torch.manual_seed(seed)
    model = type(target)(type(target.config).from_dict(values)).float().eval()
    ids = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():  # only a forward pass detects a wrong ratio of heads
        model(ids, decoder_input_ids=ids) if model.config.is_encoder_decoder else model(ids)
    return model


def _load_draft(
    draft: str,
    revision: str | None,
    trust: bool,
    target: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> PreTrainedModel:
    source = sources.find_source(draft, revision, trust)
    kinds = {True: "an encoder-decoder", False: "decoder-only"}
    draft_kind, target_kind = (
        source.structure.config.is_encoder_decoder,
        target.config.is_encoder_decoder,
    )
    if draft_kind != target_kind:
        raise RefusedError(
            f"{draft} is {kinds[draft_kind]}, but the target is {kinds[target_kind]}; give a draft "
            "of the target's kind"
        )
    rows, V = get_output_vocab_size(source.structure), get_output_vocab_size(target)
    tokenizer = sources.load_tokenizer(draft, revision, trust)
    require_same_vocabulary(draft, rows, tokenizer, V, target_tokenizer)
    if rows > V:
        raise RefusedError(
            f"{draft} has {rows} output rows, but the target has {V}; give a draft with at most {V}"
        )
    return source.load_network(torch.float32, CPU)


OFF_POLICY_GAMMA = 4  # fixed: a measured gamma would change the outputs of a resumed run
SequenceOrigin = Literal["draft", "target", "data"]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A request and the new tokens that follow its prompt."""

    request: Request
    new_tokens: list[int]


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Makes batches of training sequences. The draft generates the fraction `on_policy` of the
    outputs, and the target generates the fraction `target_generated`. The other outputs are
    references from the data, or generated by the target if there is no reference."""

    pair: Pair
    temperature: float
    length: int  # maximum number of new tokens
    on_policy: float = 0.0  # fraction of sequences that the draft generates
    target_generated: float = 0.0  # fraction that the target generates

    def make_batch(
        self, examples: Sequence[Example], size: int, seed: int, step: int
    ) -> list[TrainingSequence]:
        """Return the batch of a step: `size` sequences, from examples drawn with replacement."""
        random = np.random.default_rng((seed, step))
        picked = [examples[i] for i in random.integers(len(examples), size=size).tolist()]
        shares = random.random(size).tolist()
        keys = [(seed, step * size + i) for i in range(size)]
        requests = self.make_requests(picked, keys)
        new_tokens = [
            [int(token) for token in example.reference][: request.limit]
            for example, request in zip(picked, requests, strict=True)
        ]
        origins = [
            self._choose_origin(share, tokens)
            for share, tokens in zip(shares, new_tokens, strict=True)
        ]
        for origin in ("draft", "target"):
            indices = [i for i in range(size) if origins[i] == origin]
            generated = self._generate(
                origin, [picked[i] for i in indices], [keys[i] for i in indices]
            )
            for i, tokens in zip(indices, generated, strict=True):
                new_tokens[i] = tokens
        return [TrainingSequence(r, tokens) for r, tokens in zip(requests, new_tokens, strict=True)]

    def _choose_origin(self, share: float, reference: list[int]) -> SequenceOrigin:
        """Return the origin of an output, selected by `share`, a random number in [0, 1)."""
        if share < self.on_policy:
            return "draft"
        off_policy = share < self.on_policy + self.target_generated
        return "target" if off_policy or not reference else "data"

    def generate_held_out(
        self, examples: Sequence[Example], count: int, seed: int
    ) -> list[TrainingSequence]:
        """Return sequences of up to `count` evenly spread examples, with outputs that the target
        generates without a draft. Alpha is measured on these outputs (C57: paper, section 4)."""
        picked = examples[:: max(1, len(examples) // count)][:count]
        keys = [(seed, 2**62 + i) for i in range(len(picked))]
        generated = self._generate("target", picked, keys, gamma=0)
        requests = self.make_requests(picked, keys)
        return [TrainingSequence(r, tokens) for r, tokens in zip(requests, generated, strict=True)]

    def make_requests(self, examples: Sequence[Example], keys: Seed = 0) -> list[Request]:
        """Return the examples' requests. Raises InputError for prompts beyond the target's
        context."""
        prompts = [[int(token) for token in e.prompt] for e in examples]
        return self.pair.target_spec.inputs.make_requests(list(prompts), self._sampling, keys)

    def _generate(
        self,
        origin: SequenceOrigin,
        examples: Sequence[Example],
        keys: list[tuple[int, int]],
        gamma: int = OFF_POLICY_GAMMA,
    ) -> list[list[int]]:
        if not examples:
            return []
        spec = self.pair.draft_spec if origin == "draft" else self.pair.target_spec
        prompts = [[int(token) for token in e.prompt] for e in examples]
        completions = spec.generate(list(prompts), self._sampling, gamma=gamma, seed=keys)
        return [output.tokens for output in require_uninterrupted(completions)]

    @property
    def _sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, max_new_tokens=self.length)


def compute_new_token_logits(network: PreTrainedModel, sequences: list[TrainingSequence]) -> Tensor:
    """Return the logits `[N, V]` that predict the N new tokens of all sequences, in order. Forced
    tokens are left out."""
    ids = pad_blocks([[*t.request.prompt, *t.new_tokens[:-1]] for t in sequences], network.device)
    return compute_logits(network, sequences, ids)[
        _mask_scored_positions(sequences, ids.shape[1]).to(network.device)
    ]


def compute_logits(
    network: PreTrainedModel, sequences: list[TrainingSequence], ids: Tensor
) -> Tensor:
    """Return the logits `[B, T, V]` that predict the token after each position of `ids [B, T]`, the
    padded tokens of the sequences. The input of an encoder comes from the sequences' requests."""
    device = network.device
    sources = [t.request.source for t in sequences if t.request.source is not None]
    if not sources:
        return network(input_ids=ids, use_cache=False).logits
    source_ids = pad_blocks(sources, device)
    lengths = torch.tensor([len(s) for s in sources], device=device)
    mask = torch.arange(source_ids.shape[1], device=device) < lengths[:, None]
    return network(
        input_ids=source_ids, attention_mask=mask.long(), decoder_input_ids=ids, use_cache=False
    ).logits


def _mask_scored_positions(sequences: list[TrainingSequence], width: int) -> Tensor:
    """Return a mask `[B, width]` of the positions that predict a new token that is not forced."""
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        first = len(sequence.request.prompt) - 1
        mask[b, first : first + len(sequence.new_tokens)] = True
        for offset in sequence.request.forced:
            if 0 <= offset < len(sequence.new_tokens):
                mask[b, first + offset] = False
    return mask
