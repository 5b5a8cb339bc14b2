"""A call of transformers' `generate` as requests of our own.

By then the generation config is complete, processors and criteria are built from it, rows are
padded and repeated, an encoder has run. Processors that the config explains become our own
controls, which are equal to the letter and know no padding; the user's own are passed on. Nothing
is applied twice, and what cannot be honoured is refused by name. Finished rows become what
`generate` returns.
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

# Entries that are options of ours by the same name, but for sampling, and for those that come as
# criteria or count the padding
SHARED_OPTION_NAMES = tuple(
    name
    for name, each in SAMPLING_OPTIONS.items()
    if (each.off or each.check is as_id)
    and each.panel != "Sampling"
    and name not in ("min_new_tokens", "stop_strings")
)

SILENCE_DETECTOR = "WhisperNoSpeechDetection"
DEFAULT_ASSISTANT_TOKENS = (None, 20)  # transformers fills 20 in where nobody has asked


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call, as a decoding method gets it."""

    model: PreTrainedModel
    ids: Tensor  # [B, n], padded on the left: prompts, or what decoders begin with
    config: GenerationConfig
    processors: Sequence[Any]
    criteria: Sequence[Any]
    inputs: Tensor | None  # what an encoder has read, before its rows were repeated
    model_kwargs: Mapping[str, Any]  # for the model's forward

    @property
    def encoder_decoder(self) -> bool:
        return bool(self.model.config.is_encoder_decoder)

    @property
    def reports(self) -> bool:
        """True where scores or logits are to be returned."""
        config = self.config
        return bool(
            config.return_dict_in_generate and (config.output_scores or config.output_logits)
        )

    @property
    def samples(self) -> bool:
        return bool(self.config.do_sample)

    def get_prompts(self) -> list[list[int]]:
        """The ids that each row continues, without its padding."""
        mask = self.model_kwargs.get(
            "decoder_attention_mask" if self.encoder_decoder else "attention_mask"
        )
        keep = _make_mask(self.ids, mask)
        if not bool(keep[:, -1].all()) or bool((keep[:, 1:] < keep[:, :-1]).any()):
            raise ForeignError(
                "attention_mask leaves out tokens behind others; pad rows on the left"
            )
        positions = self.model_kwargs.get("position_ids")
        if positions is not None and positions.ndim == 2:
            expected = (keep.cumsum(1) - 1).to(positions.device)
            if ((positions != expected) & keep.to(positions.device)).any():
                raise ForeignError("position_ids do not count a row's tokens; leave them out")
        return [row[kept].tolist() for row, kept in zip(self.ids, keep, strict=True)]

    def get_sources(self) -> list[tuple[list[int], Tensor]]:
        """Return the ids that the encoder has read for each row, without padding, and its states
        there `[n, H]`. ForeignError where it was given no ids."""
        inputs = self.inputs
        if inputs is None or inputs.ndim != 2 or inputs.is_floating_point() or inputs.min() < 0:
            raise ForeignError("the encoder was given no input_ids; give these, and nothing else")
        inputs = inputs.repeat_interleave(len(self.ids) // len(inputs), 0)
        keep = _make_mask(inputs, self.model_kwargs.get("attention_mask"))
        if not bool(keep[:, 0].all()) or bool((keep[:, 1:] > keep[:, :-1]).any()):
            raise ForeignError("attention_mask leaves out tokens of the encoder before others")
        states = self.model_kwargs["encoder_outputs"][0]
        rows = zip(inputs, states, keep, strict=True)
        return [(ids[mask].tolist(), own[mask.to(own.device)]) for ids, own, mask in rows]

    def get_media(self, target: Model) -> list[Media] | None:
        """Return what each row holds beside ids; None where that is nothing. ForeignError for what
        the target cannot read."""
        given, inputs = find_media(self.model_kwargs), self.inputs
        kinds = {*_to_list(getattr(self.model, "input_modalities", ()))}
        heard = (
            bool(given) or not kinds <= {"text"} or get_main_input_name(self.model) != "input_ids"
        )
        if self.encoder_decoder and inputs is not None and heard:
            rows = self._get_encoded_media(target, inputs, given)
        elif given and not self.encoder_decoder:
            rows = self._split_decoder_media(given)
        else:
            return None
        for row in rows:
            problem = target.find_media_problem(row)
            if problem is None:
                continue
            names = ", ".join(sorted(rows[0].inputs))
            raise ForeignError(
                f"{names} cannot be read by the target on {target.runtime}: {problem}"
            )
        return rows

    def _split_decoder_media(self, media_inputs: Mapping[str, Any]) -> list[Media]:
        """The media that a decoder reads; ForeignError where they cannot be divided among rows."""
        positions = self.model_kwargs.get("position_ids")
        if positions is not None and positions.ndim == 3:  # of several axes, by the pictures
            media_inputs = {**media_inputs, "position_ids": positions}
        if len(self.ids) == 1:
            return [Media(self.get_prompts()[0], media_inputs)]
        if not all(isinstance(x, Tensor) for x in media_inputs.values()):
            names = ", ".join(sorted(media_inputs))
            raise ForeignError(f"{names} are of {len(self.ids)} rows; call generate for each")
        mask = {"attention_mask": self.model_kwargs.get("attention_mask")}
        return split_media({"input_ids": self.ids, **mask, **media_inputs}, encodes=False)

    def _get_encoded_media(
        self, target: Model, inputs: Tensor, media_inputs: Mapping[str, Any]
    ) -> list[Media]:
        """The media that an encoder has read, and its output for the target, which shares it."""
        output, name = self.model_kwargs["encoder_outputs"], get_main_input_name(self.model)
        if name == "input_ids":  # transformers has merged pictures with them
            return [Media([], {"encoder_outputs": states[None]}) for states in output[0]]
        inputs = inputs.repeat_interleave(len(self.ids) // len(inputs), 0)
        mask = self.model_kwargs.get("attention_mask")
        rows = split_media({name: inputs, "attention_mask": mask, **media_inputs}, encodes=True)
        if kept := getattr(output, "encoded", None):  # by `weightless`: the target reads them
            each = len(rows) // len(kept)  # rows that go on from the same media
            return [replace(row, encoded=kept[b // each]) for b, row in enumerate(rows)]
        key = target.encoder_key
        for b, row in enumerate(rows if key else ()):
            each = {n: x[b : b + 1] if isinstance(x, Tensor) else x for n, x in output.items()}
            row.encoded[cast(str, key)] = type(output)(**each)
        return rows

    @contextmanager
    def share_encoder_states(self, target: Model) -> Iterator[None]:
        """The encoder does not run twice for the target: it knows the states that there are. One
        that does not run on torch reads the sources itself."""
        texts = self.inputs is not None and not self.inputs.is_floating_point()
        known = target.shared_encoder_states
        if not texts or known is None:
            yield
            return
        try:
            known.update((tuple(ids), states) for ids, states in self.get_sources())
            yield
        finally:
            known.clear()

    def choose_gamma(
        self, assistant: int | None, lookup: int | None, *, looks_up: bool
    ) -> int | None:
        """The gamma that transformers' names ask for, in the call or in its config; None where
        nobody asks. `looks_up`: whether the draft copies from the prompt."""
        lookup = self.config.prompt_lookup_num_tokens if lookup is None else lookup
        if lookup is not None:
            if not looks_up:
                raise ForeignError(
                    "prompt_lookup_num_tokens is given, but the draft is another; leave it out, "
                    "or load with draft='lookup'"
                )
            return lookup
        count = self.config.num_assistant_tokens
        return assistant if assistant is not None or count in DEFAULT_ASSISTANT_TOKENS else count

    def get_eos_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        ids = getattr(self.config, "_eos_token_tensor", None)
        return frozenset() if ids is None else frozenset(cast(list[int], ids.flatten().tolist()))

    def build_requests(self, target: Model) -> list[Request]:
        """Its rows. Raises InputError for invalid values, else ForeignError."""
        require_supported_config(self.config, self.model_kwargs)
        media = self.get_media(target)
        reads_ids = self.encoder_decoder and media is None
        sources = [ids for ids, _ in self.get_sources()] if reads_ids else None
        prompts = self.get_prompts()
        params = self._build_params()
        require_supported_params(params, target, has_tokenizer=False)
        V = (target.source_vocab_size if sources else None) or target.vocab_size
        for b, ids in enumerate(sources or prompts):
            if not 0 <= min(ids) <= max(ids) < V:
                is_embedded = min(ids) >= 0 and self._has_embedding(
                    max(ids)
                )  # ImageGPT's start has no logit
                kind = ForeignError if is_embedded else InputError
                raise kind(f"row {b} of input_ids holds ids outside 0..{V - 1}")
        limit = params.max_new_tokens
        longest = max(map(len, prompts))
        max_length = target.max_context
        if max_length is not None and longest + limit > max_length:
            raise ForeignError(
                f"a row may grow to {longest + limit} tokens, the model holds {max_length}; "
                f"give max_new_tokens={max_length - longest} or less"
            )
        _require_same_rope(target, [len(prompt) for prompt in prompts], limit)
        seed = int(torch.randint(2**63 - 1, ())) if self.samples else 0
        last = self.config.max_length - 1 - self.ids.shape[1]  # whatever else ends a row
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
        """Tell whether the model reads an id."""
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
        """Return the processors that the config does not explain."""
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
        """The processors without Whisper's detection of silence, which changes no scores: it looks
        at the first ones only, and at the model, and does so here."""
        detectors = [each for each in processors if type(each).__name__ == SILENCE_DETECTOR]
        if detectors:
            begun = {
                "decoder_input_ids": self.ids,
                "encoder_outputs": self.model_kwargs["encoder_outputs"],
            }
            scores = self.model(**begun, use_cache=False, return_dict=True).logits[:, -1]
            for each in detectors:
                each(self.ids, scores)
        return [each for each in processors if each not in detectors]

    def _find_custom_criteria(self) -> list[Any]:
        """Return the criteria that the config does not explain; lengths are ours to count."""
        processors: list[Any] = []
        explained = not self.get_eos_ids()
        for each in self.criteria:
            name = type(each).__name__
            if (
                name == "EosTokenCriteria"
                and {*each.eos_token_id.flatten().tolist()} == self.get_eos_ids()
            ):
                explained = True
            elif name != "MaxLengthCriteria":
                processors.append(each)
        _require_supported(processors)
        if not explained:
            raise ForeignError("EosTokenCriteria is given, and eos_token_id is set too; give one")
        if processors and not self.get_eos_ids() and len(self.ids) > 1:
            raise ForeignError(
                f"{type(processors[0]).__name__} may end one row before another, and without an "
                "eos_token_id nothing is put behind it; give one, or one row"
            )
        return processors

    def decode(
        self,
        seqs: Sequence[SequenceState],
        steps: Iterable[object],
        target: Model,
        streamer: BaseStreamer | None,
    ) -> Any:
        """Take the steps of the rows, hand the first one's tokens to the streamer (the prompt it
        has), and return what `generate` returns. Raises what a row failed with."""
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
        """The ids `[B, n]`, padded on the right, or with `return_dict_in_generate` an output of
        transformers'.

        Its scores and logits are float32, one `[B, V]` for each new place; rows that have ended
        before have zeros there. It has no cache, and neither attentions nor hidden states.
        """
        config = self.config
        pad = getattr(config, "_pad_token_tensor", None)
        new = pad_sequence(
            [torch.tensor(row.new_tokens) for row in seqs],
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
            scores=_split_positions([self._compute_scores(row) for row in seqs])
            if config.output_scores
            else None,
            logits=_split_positions([_get_raw_logits(row) for row in seqs])
            if config.output_logits
            else None,
        )

    def _compute_scores(self, seq: SequenceState) -> Tensor:
        """Return the scores that transformers' processors would leave of a row's logits."""
        scores = torch.cat([block.shaped for block in seq.step_logits or ()])
        if self.samples:
            scores = warp_logits(scores, seq.request.params.standard)
        return (scores.log_softmax(-1) if self.config.renormalize_logits else scores).float()


class WithheldScores:
    """Stands for the scores that `generate` would hand a criterion: here it runs before there are
    any. One that does not read them is honoured."""

    def __init__(self, reader: str) -> None:
        self.reader = reader

    def _refuse(self, *_: object) -> Any:
        raise ForeignError(
            f"{self.reader} reads the scores that output_scores=True makes, which criteria do not "
            "get here; leave one of them out"
        )

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = _refuse


def _split_positions(rows: list[Tensor]) -> Any:
    """From a row's places `[n, V]` to the places' rows `[B, V]`."""
    return pad_sequence(rows, batch_first=True).unbind(1)


def _get_raw_logits(seq: SequenceState) -> Tensor:
    return torch.cat([block.raw for block in seq.step_logits or ()]).float()


def _require_same_rope(target: Model, lengths: list[int], limit: int) -> None:
    """ForeignError for a batch that transformers reads otherwise than its rows alone: the longest
    of them says for all which rotary factors they get."""
    switch = target.context
    if switch is None or switch == target.max_context or len(set(lengths)) == 1:
        return
    if min(lengths) <= switch < max(lengths) + limit:
        raise ForeignError(
            f"rows of {min(lengths)} to {max(lengths)} tokens may grow past {switch}, where this "
            "model changes its rotary factors, and transformers changes them for all rows at once; "
            "call generate for each row"
        )


def _require_supported(objects: Sequence[Any]) -> None:
    """ForeignError for a class of transformers that no row alone can call."""
    try:
        require_supported(objects)
    except RefusedError as error:
        raise ForeignError(str(error)) from None


def build_stop_criteria(
    strings: str | list[str] | None, tokenizer: PreTrainedTokenizerBase | None
) -> list[Any]:
    """transformers' criterion that ends a text with one of these; [] without any."""
    if not strings:
        return []
    if tokenizer is None:
        raise InputError("stop_strings needs a tokenizer; load the Speculator with one")
    return [transformers.StopStringCriteria(tokenizer, strings)]


def _get_sampling_fields(config: GenerationConfig) -> dict[str, Any]:
    """Our fields of a config that samples; values at which transformers does nothing are off."""
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
    """Tokens of a row, padding included, at which it ends."""
    return [each.max_length for each in criteria if type(each).__name__ == "MaxLengthCriteria"]


def _make_mask(ids: Tensor, mask: Tensor | None) -> Tensor:
    """`[B, n]`, False where a row is padded."""
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else (mask != 0).to(ids.device)


def _to_list(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
