"""Converts a call of transformers' `generate` to requests, and the outputs of the requests to the
output of `generate`.

When `generate` calls a custom_generate, it has completed the generation config, built logits
processors and stopping criteria from this config, padded the prompts, repeated prompts for several
outputs, and run the encoder. The processors that it built from the config are replaced by
foretoken's own controls, which give the same scores but ignore padding; the user's processors are
passed on. So no processor is applied twice. Unsupported arguments are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foretoken.controls.custom import (
    CustomStoppingCriterion,
    require_supported,
    require_supported_params,
)
from foretoken.errors import ForeignError, InputError, RefusedError
from foretoken.generation_config import place_forced_ids
from foretoken.media.inputs import Media, get_main_input_name, split_media
from foretoken.models.base import Model
from foretoken.request import Request, SequenceState
from foretoken.sampling.checks import as_id
from foretoken.sampling.distributions import warp_logits
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SAMPLING_OPTIONS, SamplingParams
from foretoken.transformers_integration.unsupported import (
    find_custom_processors,
    find_media,
    require_position_free,
    require_supported_config,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

# Entries of the generation config that are sampling params of the same name, except those of
# sampling (`_get_sampling_fields`), stop strings (a criterion) and a length that counts the padding
SHARED_OPTION_NAMES = tuple(
    name
    for name, each in SAMPLING_OPTIONS.items()
    if (each.off or each.check is as_id)
    and each.panel != "Sampling"
    and name not in ("min_new_tokens", "stop_strings")
)

SILENCE_DETECTOR = "WhisperNoSpeechDetection"
DEFAULT_ASSISTANT_TOKENS = (None, 20)  # 20 is transformers' own default


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call of `generate`, with the arguments that a custom_generate gets."""

    model: PreTrainedModel
    ids: Tensor  # [B, n]: prompts (of the decoder, if there is an encoder), padded on the left
    config: GenerationConfig
    processors: Sequence[Any]
    criteria: Sequence[Any]
    inputs: Tensor | None  # the encoder's input, one row per prompt, before prompts are repeated
    model_kwargs: Mapping[str, Any]  # for the model's forward

    @property
    def encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def reports(self) -> bool:
        """True if the call asks for scores or logits."""
        config = self.config
        return bool(
            config.return_dict_in_generate and (config.output_scores or config.output_logits)
        )

    @property
    def samples(self) -> bool:
        return bool(self.config.do_sample)

    def get_prompts(self) -> list[list[int]]:
        """Return the prompts without padding. Raises ForeignError for padding that is not on the
        left, and for position ids that do not count from 0."""
        mask = self.model_kwargs.get(
            "decoder_attention_mask" if self.encoder_decoder else "attention_mask"
        )
        valid = _make_mask(self.ids, mask)
        if not bool(valid[:, -1].all()) or bool((valid[:, 1:] < valid[:, :-1]).any()):
            raise ForeignError(
                "attention_mask leaves out tokens after the start of a prompt; pad on the left"
            )
        positions = self.model_kwargs.get("position_ids")
        if positions is not None and positions.ndim == 2:
            expected = (valid.cumsum(1) - 1).to(positions.device)
            if ((positions != expected) & valid.to(positions.device)).any():
                raise ForeignError(
                    "position_ids do not count a prompt's tokens from 0; leave position_ids out"
                )
        return [ids[mask].tolist() for ids, mask in zip(self.ids, valid, strict=True)]

    def get_sources(self) -> list[tuple[list[int], Tensor]]:
        """Return, for each sequence, the encoder's input ids without padding and the encoder's
        hidden states at these ids, `[n, H]`. Raises ForeignError if the input is not token ids, or
        if its padding is not on the right."""
        inputs = self.inputs
        if inputs is None or inputs.ndim != 2 or inputs.is_floating_point() or inputs.min() < 0:
            raise ForeignError("the encoder got no input_ids; give input_ids and no other input")
        inputs = inputs.repeat_interleave(len(self.ids) // len(inputs), 0)
        valid = _make_mask(inputs, self.model_kwargs.get("attention_mask"))
        if not bool(valid[:, 0].all()) or bool((valid[:, 1:] > valid[:, :-1]).any()):
            raise ForeignError(
                "attention_mask leaves out encoder tokens before the end; pad on the right"
            )
        states = self.model_kwargs["encoder_outputs"][0]
        rows = zip(inputs, states, valid, strict=True)
        return [(ids[mask].tolist(), own[mask.to(own.device)]) for ids, own, mask in rows]

    def get_media(self, target: Model) -> list[Media] | None:
        """Return the images and audio of each sequence; None if the call has none. Raises
        ForeignError for media that the target does not support."""
        given, inputs = find_media(self.model_kwargs), self.inputs
        kinds = {*_to_list(getattr(self.model, "input_modalities", ()))}
        encodes_media = (
            bool(given) or not kinds <= {"text"} or get_main_input_name(self.model) != "input_ids"
        )
        if self.encoder_decoder and inputs is not None and encodes_media:
            media = self._get_encoded_media(target, inputs, given)
        elif given and not self.encoder_decoder:
            media = self._split_decoder_media(given)
        else:
            return None
        for each in media:
            problem = target.find_media_problem(each)
            if problem is None:
                continue
            names = ", ".join(sorted(media[0].inputs))
            raise ForeignError(
                f"{names} are not supported by the target on {target.runtime}: {problem}"
            )
        return media

    def _split_decoder_media(self, media_inputs: Mapping[str, Any]) -> list[Media]:
        """Return the media of each sequence for a decoder-only model. Raises ForeignError for
        inputs that cannot be divided among the sequences because they are not tensors."""
        positions = self.model_kwargs.get("position_ids")
        if positions is not None and positions.ndim == 3:  # ids of each axis, from the images
            media_inputs = {**media_inputs, "position_ids": positions}
        if len(self.ids) == 1:
            return [Media(self.get_prompts()[0], media_inputs)]
        if not all(isinstance(x, Tensor) for x in media_inputs.values()):
            names = ", ".join(sorted(media_inputs))
            raise ForeignError(
                f"{names} cannot be divided among {len(self.ids)} prompts; call generate for each "
                "prompt"
            )
        mask = {"attention_mask": self.model_kwargs.get("attention_mask")}
        return split_media({"input_ids": self.ids, **mask, **media_inputs}, encodes=False)

    def _get_encoded_media(
        self, target: Model, inputs: Tensor, media_inputs: Mapping[str, Any]
    ) -> list[Media]:
        """Return the media of each sequence for an encoder-decoder, each with its part of the
        encoder output that `generate` has computed already."""
        output, name = self.model_kwargs["encoder_outputs"], get_main_input_name(self.model)
        if name == "input_ids":  # transformers has merged the images with the ids
            return [Media([], {"encoder_outputs": states[None]}) for states in output[0]]
        inputs = inputs.repeat_interleave(len(self.ids) // len(inputs), 0)
        mask = self.model_kwargs.get("attention_mask")
        media = split_media({name: inputs, "attention_mask": mask, **media_inputs}, encodes=True)
        # For a `PendingEncoderOutput`, the target will encode the media and store the output here
        if encoded := getattr(output, "encoded", None):
            repeats = len(media) // len(encoded)  # sequences with the same media
            return [replace(item, encoded=encoded[b // repeats]) for b, item in enumerate(media)]
        key = target.encoder_key
        for b, item in enumerate(media if key else ()):
            each = {n: x[b : b + 1] if isinstance(x, Tensor) else x for n, x in output.items()}
            item.encoded[cast(str, key)] = type(output)(**each)
        return media

    @contextmanager
    def share_encoder_states(self, target: Model) -> Iterator[None]:
        """While the `with` block runs, let the target use the encoder's hidden states from the
        call. Targets on the native decoder encode the sources again."""
        has_ids = self.inputs is not None and not self.inputs.is_floating_point()
        shared = target.shared_encoder_states
        if not has_ids or shared is None:
            yield
            return
        try:
            shared.update((tuple(ids), states) for ids, states in self.get_sources())
            yield
        finally:
            shared.clear()

    def choose_gamma(
        self, assistant: int | None, lookup: int | None, *, looks_up: bool
    ) -> int | None:
        """Return the gamma that transformers' options set, or None. Raises ForeignError for
        `prompt_lookup_num_tokens` with another drafter than prompt look-up.

        assistant: The call's `num_assistant_tokens`; None: the config's.
        lookup: The call's `prompt_lookup_num_tokens`; None: the config's.
        looks_up: True if the drafter is prompt look-up.
        """
        lookup = self.config.prompt_lookup_num_tokens if lookup is None else lookup
        if lookup is not None:
            if not looks_up:
                raise ForeignError(
                    "prompt_lookup_num_tokens is given, but the draft is not 'lookup'; leave "
                    "prompt_lookup_num_tokens out, or load with draft='lookup'"
                )
            return lookup
        count = self.config.num_assistant_tokens
        return assistant if assistant is not None or count in DEFAULT_ASSISTANT_TOKENS else count

    def get_eos_ids(self) -> frozenset[int]:
        """Return the end-of-sequence ids."""
        ids = getattr(self.config, "_eos_token_tensor", None)
        return frozenset() if ids is None else frozenset(cast(list[int], ids.flatten().tolist()))

    def build_requests(self, target: Model) -> list[Request]:
        """Return one request for each sequence of the call. Raises InputError for invalid values,
        ForeignError for values that foretoken does not support."""
        require_supported_config(self.config, self.model_kwargs)
        media = self.get_media(target)
        encodes_ids = self.encoder_decoder and media is None
        sources = [ids for ids, _ in self.get_sources()] if encodes_ids else None
        prompts = self.get_prompts()
        params = self._build_params()
        require_supported_params(params, target, has_tokenizer=False)
        V = (target.source_vocab_size if sources else None) or target.vocab_size
        for b, ids in enumerate(sources or prompts):
            if not 0 <= min(ids) <= max(ids) < V:
                # ImageGPT's start token has an embedding but no logit
                is_embedded = min(ids) >= 0 and self._has_embedding(max(ids))
                kind = ForeignError if is_embedded else InputError
                raise kind(f"row {b} of input_ids holds ids outside 0..{V - 1}")
        limit = params.max_new_tokens
        longest = max(map(len, prompts))
        max_length = target.max_context
        if max_length is not None and longest + limit > max_length:
            raise ForeignError(
                f"a sequence may grow to {longest + limit} tokens, but the model's context length "
                f"is {max_length}; give max_new_tokens={max_length - longest} or less"
            )
        _require_same_rope(target, [len(prompt) for prompt in prompts], limit)
        seed = int(torch.randint(2**63 - 1, ())) if self.samples else 0
        # forced_eos_token_id is forced at `max_length` only, not if a sequence ends before
        last = self.config.max_length - 1 - self.ids.shape[1]
        return [
            Request(
                prompt,
                limit,
                SequenceKey(seed, b),
                self.get_eos_ids(),
                sources[b] if sources else None,
                place_forced_ids(params, len(prompt), last),
                params,
                media=None if media is None else media[b],
            )
            for b, prompt in enumerate(prompts)
        ]

    def _has_embedding(self, token: int) -> bool:
        return 0 <= token < len(cast(Any, self.model.get_input_embeddings()).weight)

    def _build_params(self) -> SamplingParams:
        config, width = self.config, self.ids.shape[1]
        limit = max(1, min(_get_max_lengths(self.criteria)) - width)
        min_new_tokens = max(config.min_new_tokens or 0, (config.min_length or 0) - width, 0)
        fields: dict[str, Any] = {name: getattr(config, name, None) for name in SHARED_OPTION_NAMES}
        return SamplingParams(
            **fields,
            **(_get_sampling_fields(config) if self.samples else {}),
            max_new_tokens=limit,
            min_new_tokens=min(min_new_tokens, limit),
            processors=tuple(self._find_custom_processors()),
            stopping=tuple(self._find_custom_criteria()),
        )

    def _find_custom_processors(self) -> list[Any]:
        """Return the user's logits processors: all but those that transformers builds from the
        config."""
        first = self.ids if self.inputs is None else self.inputs
        build: Any = self.model._get_logits_processor
        built = build(
            generation_config=self.config,
            input_ids_seq_length=self.ids.shape[1],
            encoder_input_ids=first,
            device=first.device,
            model_kwargs=self.model_kwargs,
        )
        processors = self._remove_detectors(find_custom_processors(self.processors, built))
        _require_supported(processors)
        padded = any(len(prompt) < self.ids.shape[1] for prompt in self.get_prompts())
        if padded or len(self.ids) > 1:
            require_position_free(processors, padded=padded)
        return processors

    def _remove_detectors(self, processors: list[Any]) -> list[Any]:
        """Return the processors without Whisper's silence detectors. A detector does not change
        scores and needs only the first scores, so it is called here instead of at each token."""
        detectors = [each for each in processors if type(each).__name__ == SILENCE_DETECTOR]
        if detectors:
            inputs = {
                "decoder_input_ids": self.ids,
                "encoder_outputs": self.model_kwargs["encoder_outputs"],
            }
            scores = self.model(**inputs, use_cache=False, return_dict=True).logits[:, -1]
            for each in detectors:
                each(self.ids, scores)
        return [each for each in processors if each not in detectors]

    def _find_custom_criteria(self) -> list[Any]:
        """Return the user's stopping criteria: all but those that transformers builds from lengths
        and end-of-sequence ids."""
        criteria: list[Any] = []
        explained = not self.get_eos_ids()
        for each in self.criteria:
            name = type(each).__name__
            if (
                name == "EosTokenCriteria"
                and {*each.eos_token_id.flatten().tolist()} == self.get_eos_ids()
            ):
                explained = True
            elif name != "MaxLengthCriteria":
                criteria.append(each)
        _require_supported(criteria)
        if not explained:
            raise ForeignError(
                "EosTokenCriteria is given and eos_token_id is set to other ids; give one of "
                "the two"
            )
        if criteria and not self.get_eos_ids() and len(self.ids) > 1:
            raise ForeignError(
                f"{type(criteria[0]).__name__} may end one sequence before another, but without an "
                "eos_token_id no sequence can be padded; give an eos_token_id, or one prompt"
            )
        return criteria

    def decode(
        self,
        seqs: Sequence[SequenceState],
        steps: Iterable[object],
        target: Model,
        streamer: BaseStreamer | None,
    ) -> Any:
        """Run all decoding steps, stream the first sequence's new tokens to `streamer`, and return
        the output of `generate`. Raises the error of the first sequence that failed."""
        for seq in seqs if self.reports else ():
            seq.step_logits = []
            for ending in seq.stop_conditions:
                if self.config.output_scores and isinstance(ending, CustomStoppingCriterion):
                    ending.scores = WithheldScores(type(ending.criterion).__name__)
        sent = 0
        with self.share_encoder_states(target):
            for _ in steps:
                if streamer is None:
                    continue
                for token in seqs[0].new_tokens[sent:]:
                    streamer.put(torch.tensor([token]))
                    sent += 1
        for b, seq in enumerate(seqs):
            seq.raise_error(b)
        if streamer is not None:
            streamer.end()
        return self.build_output(seqs)

    def build_output(self, seqs: Sequence[SequenceState]) -> Any:
        """Return the ids `[B, n]`, padded on the right; with `return_dict_in_generate`,
        transformers' output object.

        The object's scores and logits are float32 tensors `[B, V]`, one for each new token, with
        zeros for sequences that have ended. The object has no cache, attentions or hidden states.
        """
        config = self.config
        pad = getattr(config, "_pad_token_tensor", None)
        new = pad_sequence(
            [torch.tensor(seq.new_tokens) for seq in seqs],
            batch_first=True,
            padding_value=0 if pad is None else int(pad),
        )
        sequences: Any = torch.cat([self.ids, new.to(self.ids)], 1)
        if not config.return_dict_in_generate:
            return sequences
        encoder_decoder = self.encoder_decoder
        kinds: Any = transformers.generation
        kind = kinds.GenerateDecoderOnlyOutput
        if encoder_decoder:
            kind = kinds.GenerateEncoderDecoderOutput
        return kind(
            sequences=sequences,
            scores=_split_positions([self._compute_scores(seq) for seq in seqs])
            if config.output_scores
            else None,
            logits=_split_positions([_get_raw_logits(seq) for seq in seqs])
            if config.output_logits
            else None,
        )

    def _compute_scores(self, seq: SequenceState) -> Tensor:
        """Return a sequence's scores `[n, V]` after logits processors, as transformers returns them
        with `output_scores`."""
        scores = torch.cat([block.shaped for block in seq.step_logits or ()])
        if self.samples:
            scores = warp_logits(scores, seq.request.params.standard)
        return (scores.log_softmax(-1) if self.config.renormalize_logits else scores).float()


class WithheldScores:
    """Takes the place of the scores that `generate` passes to stopping criteria. Here criteria run
    before the scores exist, so any use of them raises ForeignError."""

    def __init__(self, reader: str) -> None:
        self.reader = reader

    def _refuse(self, *_: object) -> Any:
        raise ForeignError(
            f"{self.reader} uses the scores of output_scores=True, which stopping criteria do not "
            "get here; leave out output_scores or this criterion"
        )

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = _refuse


def _split_positions(rows: list[Tensor]) -> Any:
    """Convert one tensor `[n, V]` per sequence to one tensor `[B, V]` per position."""
    return pad_sequence(rows, batch_first=True).unbind(1)


def _get_raw_logits(seq: SequenceState) -> Tensor:
    return torch.cat([block.raw for block in seq.step_logits or ()]).float()


def _require_same_rope(target: Model, lengths: list[int], limit: int) -> None:
    """Raise ForeignError for a batch in which transformers would use other rotary factors than for
    single sequences: transformers chooses the factors of a batch by its longest sequence."""
    switch = target.context
    if switch is None or switch == target.max_context or len(set(lengths)) == 1:
        return
    if min(lengths) <= switch < max(lengths) + limit:
        raise ForeignError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens may grow beyond {switch}; "
            "transformers then changes the rotary factors of the whole batch; call generate for "
            "each prompt"
        )


def _require_supported(objects: Sequence[Any]) -> None:
    """Raise ForeignError for processors or criteria that cannot run on a single sequence."""
    try:
        require_supported(objects)
    except RefusedError as error:
        raise ForeignError(str(error)) from None


def build_stop_criteria(
    strings: str | list[str] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[Any]:
    """Return transformers' stopping criterion for these stop strings, in a list; [] if there are
    none. Raises InputError without a tokenizer."""
    if not strings:
        return []
    if tokenizer is None:
        raise InputError("stop_strings needs a tokenizer; load the Speculator with a tokenizer")
    return [transformers.StopStringCriteria(tokenizer, strings)]


def _get_sampling_fields(config: GenerationConfig) -> dict[str, Any]:
    """Return foretoken's sampling params for a generation config with do_sample=True. If a value
    has no effect in transformers, the param is turned off."""
    cutoffs = {name: getattr(config, name) or 0.0 for name in ("epsilon_cutoff", "eta_cutoff")}
    return {
        "temperature": 1.0 if config.temperature is None else config.temperature,
        "top_k": config.top_k or 0,
        "top_p": 1.0 if config.top_p is None else min(1.0, config.top_p),
        "min_p": config.min_p or 0.0,
        "typical_p": 1.0 if config.typical_p is None else min(1.0, config.typical_p),
        **{name: value if 0 < value < 1 else 0.0 for name, value in cutoffs.items()},
    }


def _get_max_lengths(criteria: Sequence[Any]) -> list[int]:
    """Return the maximum lengths, including padding, that the stopping criteria set."""
    return [each.max_length for each in criteria if type(each).__name__ == "MaxLengthCriteria"]


def _make_mask(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return a mask `[B, n]`, False at padding."""
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else (mask != 0).to(ids.device)


def _to_list(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
