"""A target and the draft to be taught, and the texts that it is taught on.

The draft is a folder's, or a fresh one: the target's own architecture with some fields of its
config changed, so that its vocabulary is the target's.

On-policy texts are written by the draft itself, as it is at that step; off-policy ones by the
target (by speculative decoding with that draft, so in its own distribution), or they are the data's
(Agarwal et al., arXiv 2306.13649; Zhou et al., DistillSpec, arXiv 2310.08461). A batch depends on
the seed, the step and the draft alone.
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
from foretoken.models.stock.check_results import self_check
from foretoken.models.stock.selfcheck import build_torch_model
from foretoken.models.stock.sizes import get_output_vocab_size, sketch_weights
from foretoken.request import Request, require_uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from foretoken.text.decoding import require_same_vocabulary
from foretoken.train.corpus import Example

CPU = torch.device("cpu")
ConfigSizes = dict[str, Any]  # sizes in a config
NOT_A_SIZE = re.compile(r"^_|_id$|vocab|num_labels|pretraining_tp|_pattern$")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two networks, and what generates with them."""

    target: PreTrainedModel
    draft: PreTrainedModel
    target_spec: Speculator  # in the target's distribution
    draft_spec: Speculator  # the draft, in its own


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
    """Load a target, and a draft or a fresh one of that `shape`; by default that of the target's
    name, if it has one. The options are those of `foretoken.load`.

    Raises InputError for what cannot be read or built, RefusedError for a draft of another kind or
    with another vocabulary.
    """
    if draft is not None and shape:
        raise InputError("give a draft to go on from or the shape of a fresh one, not both")
    target = target or named_models.get_default_target()
    own = named_models.find_pair(target)
    draft = str(own.draft) if own and own.draft and draft is None and not shape else draft
    if draft is None and not shape:
        raise InputError("no draft; give a folder to go on from, or the shape of a fresh one")
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
    """A target by name (None: the one that ships) in float32 on the CPU, with an adapter merged
    where one is given, and the tokenizer of that name (None: its own)."""
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
    """The pair of two networks in memory with one vocabulary."""
    spec = load(target, "none", tokenizer=tokenizer, generation_config=generation_config)
    self_check(draft)
    drafter = LMDrafter(build_torch_model(draft), get_output_vocab_size(target))
    together = Speculator(spec.target, drafter, tokenizer, spec.ends)
    alone = Speculator(build_torch_model(draft), NoDrafter(), tokenizer, spec.ends)
    return Pair(target, draft, together, alone)


def make_random_draft(target: PreTrainedModel, shape: ConfigSizes, seed: int) -> PreTrainedModel:
    """A random float32 model of the target's architecture and device, with the sizes in `shape`.

    Raises InputError for names that are no sizes, values that are no counts, and sizes that do
    not fit each other.
    """
    config = target.config
    allowed = get_sizes(config)
    for name, value in shape.items():
        if config.attribute_map.get(name, name) not in allowed:
            raise InputError(
                f"{name} is no size of a {config.model_type} model that may differ; "
                f"give of {', '.join(allowed)}"
            )
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value}; give a whole number, 1 or more")
    try:
        model = _make_random(
            target, {config.attribute_map.get(n, n): v for n, v in shape.items()}, seed
        )
    except Exception as error:  # architectures raise many kinds
        raise InputError(f"no model has the shape {shape}: {to_one_line(error)}") from None
    model.generation_config = copy.deepcopy(target.generation_config)
    model_any: Any = model
    return model_any.to(target.device)


def get_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """The counts in a config that define its architecture, without the vocabulary's."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if type(value) is int and value > 0 and not NOT_A_SIZE.search(name)
    }


def compute_fingerprint(model: PreTrainedModel) -> str:
    """A digest of its sizes and a few of its weights."""
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
    with torch.no_grad():  # a wrong ratio of heads is an error only here
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
            f"{draft} is {kinds[draft_kind]}, the target {kinds[target_kind]}; give a draft of "
            "its kind"
        )
    rows, V = get_output_vocab_size(source.structure), get_output_vocab_size(target)
    tokenizer = sources.load_tokenizer(draft, revision, trust)
    require_same_vocabulary(draft, rows, tokenizer, V, target_tokenizer)
    if rows > V:
        raise RefusedError(
            f"{draft} has {rows} output rows, the target {V}; give a draft that has no more"
        )
    return source.load_network(torch.float32, CPU)


OFF_POLICY_GAMMA = 4  # fixed: one chosen by the clock would give a resumed run other texts
SequenceOrigin = Literal["draft", "target", "data"]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A request, and the new tokens behind it."""

    request: Request
    new_tokens: list[int]


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Makes batches. Texts in neither share are the data's where they hold a reference, else the
    target's."""

    pair: Pair
    temperature: float
    length: int  # new tokens at most
    on_policy: float = 0.0  # the share of texts that the draft writes
    target_generated: float = 0.0  # the share that the target writes

    def make_batch(
        self, examples: Sequence[Example], size: int, seed: int, step: int
    ) -> list[TrainingSequence]:
        """`size` texts, drawn with replacement."""
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
            self._choose_origin(share, text) for share, text in zip(shares, new_tokens, strict=True)
        ]
        for origin in ("draft", "target"):
            indices = [i for i in range(size) if origins[i] == origin]
            generated = self._generate(
                origin, [picked[i] for i in indices], [keys[i] for i in indices]
            )
            for i, tokens in zip(indices, generated, strict=True):
                new_tokens[i] = tokens
        return [TrainingSequence(r, text) for r, text in zip(requests, new_tokens, strict=True)]

    def _choose_origin(self, share: float, reference: list[int]) -> SequenceOrigin:
        """Whose text it is, by a number in [0, 1)."""
        if share < self.on_policy:
            return "draft"
        off_policy = share < self.on_policy + self.target_generated
        return "target" if off_policy or not reference else "data"

    def generate_held_out(
        self, examples: Sequence[Example], count: int, seed: int
    ) -> list[TrainingSequence]:
        """The target's own continuation of up to `count` examples, evenly spread, without a draft:
        the prefixes on which alpha is measured (C57: paper, section 4)."""
        picked = examples[:: max(1, len(examples) // count)][:count]
        keys = [(seed, 2**62 + i) for i in range(len(picked))]
        generated = self._generate("target", picked, keys, gamma=0)
        requests = self.make_requests(picked, keys)
        return [TrainingSequence(r, text) for r, text in zip(requests, generated, strict=True)]

    def make_requests(self, examples: Sequence[Example], keys: Seed = 0) -> list[Request]:
        """Return the requests of the examples; raises InputError for a prompt that the target
        cannot hold."""
        prompts = [[int(token) for token in e.prompt] for e in examples]
        return self.pair.target_spec.inputs.requests(list(prompts), self._sampling, keys)

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
        return [text.tokens for text in require_uninterrupted(completions)]

    @property
    def _sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, max_new_tokens=self.length)


def compute_new_token_logits(network: PreTrainedModel, sequences: list[TrainingSequence]) -> Tensor:
    """At the new tokens of all texts, in order, without forced ones, `[N, V]`."""
    ids = pad_blocks([[*t.request.prompt, *t.new_tokens[:-1]] for t in sequences], network.device)
    return compute_logits(network, sequences, ids)[
        _mask_scored_positions(sequences, ids.shape[1]).to(network.device)
    ]


def compute_logits(
    network: PreTrainedModel, sequences: list[TrainingSequence], ids: Tensor
) -> Tensor:
    """Logits behind each of the texts' `ids [B, T]`, `[B, T, V]`."""
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
    """Where a new token is predicted that is not forced, `[B, width]`."""
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        first = len(sequence.request.prompt) - 1
        mask[b, first : first + len(sequence.new_tokens)] = True
        for offset in sequence.request.forced:
            if 0 <= offset < len(sequence.new_tokens):
                mask[b, first + offset] = False
    return mask
