"""Input processing: turns the prompts and options of a call into requests and sequences, and checks
them before a model runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from secrets import randbits
from typing import TYPE_CHECKING, Any, Protocol, cast

from foretoken.controls import custom
from foretoken.controls.chain import Matcher, build_chain
from foretoken.controls.custom import require_supported_params
from foretoken.controls.grammar import CompiledGrammar, get_vocabulary
from foretoken.errors import (
    ForetokenError,
    InputError,
    format_value,
    is_whole_number,
    name_option_in_errors,
)
from foretoken.generation_config import EndTokens, place_forced_ids, resolve_params
from foretoken.media import TEXT_INPUTS
from foretoken.media.inputs import Media, has_media_inputs, split_media
from foretoken.models.base import Model
from foretoken.models.guidance import GuidedModel
from foretoken.request import OutputPredictor, Request, SequenceState
from foretoken.sampling import verifier
from foretoken.sampling.acceptance_rules import Rule
from foretoken.sampling.checks import SEED, Structured, as_ids
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams, gather_params
from foretoken.sampling.speculation import COUPLED_RULE, SpeculationOptions
from foretoken.sampling.verifier import Verifier
from foretoken.text import chat
from foretoken.text.decoding import StoppingDetokenizer
from foretoken.text.messages import Message, as_conversations, has_media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ArrayLike(Protocol):
    """A tensor or a NumPy array."""

    def tolist(self) -> Any: ...


Prompt = str | list[int]  # or a Media, from a processor's output
Prompts = Prompt | ArrayLike | Mapping[str, Any] | Sequence[Prompt | ArrayLike]
Seed = int | Sequence[int | tuple[int, int]] | None


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Turns the prompts and params of a call into requests for one target. For `controls` and
    `predicted_output` see the attributes of `Speculator`."""

    target: Model
    tokenizer: PreTrainedTokenizerBase | None
    ends: EndTokens
    controls: dict[str, Any]
    predicted_output: Callable[[Request], OutputPredictor] | None = None
    processor: Callable[[], Any] | None = None  # loads the processor of images and audio
    max_length: int | None = None  # of prompt and output together; None: the context length

    def list_prompts(
        self,
        prompts: Prompts,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Prompt]:
        """Return the prompts of a call as a list of strings, lists of ids or Media. Conversations
        are encoded with a chat template. Raises InputError for an invalid prompt, or if a template
        is given for prompts that are not messages."""
        template = chat_template, chat_template_kwargs
        media = self._find_media(prompts)
        if media is not None:
            return cast(list[Prompt], media)
        chats = as_conversations(prompts)
        if chats is not None:
            return [self._encode_chat(messages, template) for messages in chats]
        if template != (None, None):
            raise InputError(
                "chat_template or chat_template_kwargs is given, but the prompts are not messages; "
                "leave out both"
            )
        return to_prompt_list(prompts)

    def assemble(
        self,
        method: str,
        prompts: Prompts,
        params: SamplingParams | Iterable[SamplingParams] | None,
        controls: Mapping[str, Any],
        seed: Seed,
        *template: Any,
    ) -> list[Request]:
        """Return the requests for the arguments of a public method. `method` is the method's name,
        for error messages; `template` is chat_template and chat_template_kwargs."""
        listed = self.list_prompts(prompts, *template)
        return self.make_requests(
            listed, gather_params(params, controls, len(listed), method), seed
        )

    def make_requests(
        self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams], seed: Seed
    ) -> list[Request]:
        """Return `num_return_sequences` requests for each prompt. Raises InputError for an invalid
        prompt or option, RefusedError for an option that cannot be followed exactly."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        counts = [sampling.num_return_sequences for sampling in each]
        keys = iter(make_keys(seed, counts))
        requests: list[Request] = []
        for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            media = prompt if isinstance(prompt, Media) else None
            ids = (
                self.encode_prompt(prompt, f"prompt {i}")
                if media is None
                else self._require_media_ids(media, i)
            )
            if media is None or not self.target.encoder_decoder:
                self._require_fit(ids, i)
            with _naming_prompt_in_errors(i, count=len(prompts)):
                copies = islice(keys, sampling.num_return_sequences)
                made = self._make_requests(ids, sampling, list(copies), media)
                requests += [replace(request, media=media) for request in made]
        return requests

    def _encode_chat(
        self, messages: list[Message], template: tuple[str | None, Mapping[str, Any] | None]
    ) -> Prompt:
        """Return a conversation as ids, or as Media if it contains images or audio. Raises
        InputError if it contains images or audio and the model has no processor."""
        if not has_media(messages):
            return chat.encode_chat(messages, self.tokenizer, *template)
        if self.processor is None:
            raise InputError(
                "messages contain images or audio, but the model has no processor in its folder; "
                "give text, or load a model with a processor (for a model in memory, give its "
                "processor's output)"
            )
        output = chat.process_media_chat(messages, self.processor(), *template)
        (media,) = split_media(output, encodes=self.target.encoder_decoder)
        return cast(Prompt, media)

    def _find_media(self, prompts: Any) -> list[Media | Prompt] | None:
        """Return None if no prompt is the output of a processor. Otherwise return all prompts:
        each output of a processor as Media, or as ids if it contains only text, and each other
        prompt as ids or a string."""
        if isinstance(prompts, Media):  # a conversation that has been encoded
            return [prompts]
        several = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
        outputs = [each for each in several if isinstance(each, Mapping)]
        listed = isinstance(prompts, list | tuple)
        known = (has_media_inputs(each) or (listed and "input_ids" in each) for each in outputs)
        if any("role" in each for each in outputs) or not any(known):
            return None
        found: list[Media | Prompt] = []
        for each in several:
            if isinstance(each, Mapping):
                made = split_media(each, encodes=self.target.encoder_decoder)
                found += [media if media.inputs else media.ids for media in made]
            else:
                found += to_prompt_list([each])
        return found

    def _require_media_ids(self, media: Media, i: int) -> list[int]:
        """Return the ids of a prompt with media. Raises InputError if the target does not accept
        the media."""
        accepts, problem = self.target.capabilities.media, self.target.find_media_problem(media)
        if problem is not None:
            names = ", ".join(sorted(media.inputs))
            reason = problem if accepts else f"the target on {self.target.runtime} accepts only ids"
            remedy = "give text, or load a model that accepts media"
            remedy += ", with runtime='transformers'" if not accepts else ""
            if isinstance(self.target, GuidedModel):
                reason, remedy = "guidance accepts only ids", "leave out the media or the guidance"
            if self.target.needs_media:
                remedy = "give the output of the target's processor for an image or audio"
            raise InputError(f"prompt {i} contains {names}: {reason}; {remedy}")
        ids = _require_ids(media.ids, self.target.vocab_size, f"prompt {i}")
        if not ids and not self.target.encoder_decoder:
            raise InputError(f"prompt {i} is empty; give a text or ids to continue")
        return ids

    def _make_requests(
        self, ids: list[int], params: SamplingParams, keys: list[SequenceKey], media: Media | None
    ) -> list[Request]:
        """Return a request for each key, all with this prompt and these params."""
        head, source = (
            self.split_prompt(ids) if media is None else (self._decoder_prompt(ids), None)
        )
        if media is not None and params.prompt_logprobs is not None:
            raise InputError(
                "prompt_logprobs is not supported for a prompt with media; leave out "
                "prompt_logprobs"
            )
        context, limit = self.target.max_context, params.max_new_tokens
        limit = limit if context is None else min(limit, context - len(head))
        if self.max_length is not None and self.max_length - len(head) < limit:
            limit = _count_new_tokens(len(head), self.max_length)
            params = replace(params, max_new_tokens=limit)
        params = resolve_params(params, self.controls, self.ends, len(head))
        require_supported_params(params, self.target, self.tokenizer is not None)
        eos = {*(() if params.ignore_eos else self.ends.eos), *params.stop_token_ids}
        stops = self._find_stop_string_ids(params) - eos
        eos |= stops
        late = frozenset[int]() if params.structured is not None else frozenset(stops)
        forced = place_forced_ids(params, len(head), limit - 1)
        if params.structured is not None:  # raises the error of an invalid grammar here
            with name_option_in_errors("structured"):
                self._grammar(params.structured, frozenset(eos))
        return [
            Request(head, limit, k, frozenset(eos), source, forced, params, late_eos=late)
            for k in keys
        ]

    def _find_stop_string_ids(self, params: SamplingParams) -> set[int]:
        """Return the ids of added tokens that are equal to a stop string. Such tokens must stop by
        id, because a special token may be decoded to an empty string."""
        if not params.stop_strings or self.tokenizer is None:
            return set()
        added = self.tokenizer.added_tokens_decoder.items()
        return {token for token, word in added if word.content in params.stop_strings}

    def _require_fit(self, ids: list[int], i: int) -> None:
        """Raise InputError if prompt `i` leaves no room for an output token."""
        encodes = self.target.encoder_decoder  # output tokens take no room of the encoder's input
        max_tokens = self.target.source_context if encodes else self.target.max_context
        if max_tokens is not None and len(ids) >= max_tokens + encodes:
            raise InputError(
                f"prompt {i} has {len(ids)} tokens, but the model's context length is {max_tokens};"
                " give a shorter prompt"
            )

    def make_sequences(self, requests: list[Request]) -> list[SequenceState]:
        """Return a new sequence for each request, with its controls and stop conditions."""
        return [self._make_sequence(number, request) for number, request in enumerate(requests)]

    def _make_sequence(self, number: int, request: Request) -> SequenceState:
        seq, params = SequenceState.from_request(request), request.params
        if seq.output_predictor is None and self.predicted_output is not None:
            seq.output_predictor = self.predicted_output(request)
        seq.controls = build_chain(
            request, self.target.vocab_size, number, self._make_matcher(request)
        )
        if params.stop_strings:
            assert self.tokenizer is not None  # checked by `require_supported_params`
            seq.stop_conditions.append(make_transcript(request, self.tokenizer))
        seq.stop_conditions += custom.wrap_criteria(params.stopping, request.prompt)
        return seq

    def _make_matcher(self, request: Request) -> Matcher | None:
        structured = request.params.structured
        return None if structured is None else self._grammar(structured, request.eos).make_matcher()

    def prepare_grammars(self) -> None:
        """Convert the tokenizer, if there is one, for llguidance. The conversion blocks all other
        threads, so it is done before anything is generated."""
        with suppress(InputError):
            get_vocabulary(self.tokenizer, self.target.vocab_size, self.ends.eos, self.ends.eos)

    def _grammar(self, structured: Structured, eos: frozenset[int]) -> CompiledGrammar:
        vocabulary = get_vocabulary(self.tokenizer, self.target.vocab_size, eos, self.ends.eos)
        return vocabulary.compile_grammar(structured)

    def split_prompt(self, ids: list[int]) -> tuple[list[int], list[int] | None]:
        """Return the decoder's prompt and the encoder's input: `ids` and None for a decoder-only
        model, else the decoder's start token and `ids`."""
        if not self.target.encoder_decoder:
            return ids, None
        assert self.ends.decoder_start is not None
        return [self.ends.decoder_start], ids

    def _decoder_prompt(self, ids: list[int]) -> list[int]:
        """Return the decoder's prompt for the ids of a prompt with media. If the target has an
        encoder, the decoder's prompt begins with the decoder's start token."""
        start = self.ends.decoder_start
        if not self.target.encoder_decoder or (ids and ids[0] == start):
            return ids
        assert start is not None
        return [start, *ids]

    @property
    def prompt_vocab_size(self) -> int:
        """The vocabulary size of prompts: that of the encoder if the encoder has its own
        vocabulary, else that of the target."""
        return self.target.source_vocab_size or self.target.vocab_size

    def encode_prompt(self, prompt: Prompt, name: str = "prompt 0") -> list[int]:
        """Return a prompt's ids; a string is tokenized with the tokenizer's special tokens. Raises
        InputError for an invalid prompt; `name` stands for the prompt in the message."""
        if self.target.needs_media:
            problem = f"{name} is only text, but the target needs an image or audio"
            remedy = "give the output of the target's processor, or use foretoken transcribe"
            raise InputError(f"{problem}; {remedy}")
        if len(prompt) == 0:
            raise InputError(f"{name} is empty; give a text or ids to continue")
        if isinstance(prompt, str):
            prompt = self._tokenize(prompt, name)
            if not prompt:
                raise InputError(f"{name} has no tokens after tokenization; give another text")
        return _require_ids(prompt, self.prompt_vocab_size, name)

    def tokenize_prediction(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of an expected output, given as a string or as ids. A string is tokenized
        without special tokens."""
        if isinstance(prompt, str):
            prompt = self._tokenize(prompt, "prediction", special=False)
        ids = as_ids("prediction", prompt)
        return tuple(_require_ids(ids, self.target.vocab_size, "prediction"))

    def _tokenize(self, text: str, name: str, *, special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{name} is not valid text; give text in UTF-8") from None
        if self.tokenizer is None:
            raise InputError(f"{name} is text, but there is no tokenizer; give token ids")
        encoding = self.tokenizer(
            text, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        return cast(list[int], encoding.input_ids)


def make_transcript(request: Request, tokenizer: PreTrainedTokenizerBase) -> StoppingDetokenizer:
    """Return a detokenizer for the output of a request. The detokenizer ends the text at the
    request's stop strings."""
    params, strings = request.params, request.params.stop_strings or ()
    return StoppingDetokenizer(
        tokenizer,
        request.prompt,
        strings,
        include_stop_string=params.include_stop_string,
        keep_special_tokens=not params.skip_special_tokens,
        min_tokens=params.min_new_tokens or 0,
    )


def _require_ids(ids: Iterable[int], V: int, name: str) -> list[int]:
    """Return the ids as a list. Raises InputError unless all ids are in 0..V-1."""
    for token in (ids := list(ids)):
        if not 0 <= token < V:
            raise InputError(
                f"{name} holds the id {format_value(token)}; ids must be in 0..{V - 1}"
            )
    return ids


def _count_new_tokens(prompt: int, max_length: int) -> int:
    """Return the number of new tokens that max_length allows after a prompt of `prompt` tokens.
    Raises InputError if this number is 0."""
    if prompt >= max_length:
        raise InputError(
            f"the prompt has {prompt} tokens, so max_length={max_length} leaves no room for new "
            "tokens; give a shorter prompt, or give the engine a greater max_length"
        )
    return max_length - prompt


@contextmanager
def _naming_prompt_in_errors(i: int, *, count: int) -> Generator[None]:
    """Put the index `i` of the prompt before the message of an error raised within the `with`. If
    the number of prompts, `count`, is 1, leave the message unchanged."""
    try:
        yield
    except ForetokenError as error:
        if count == 1:
            raise
        named = type(error)(f"prompt {i}: {error}")
        raise named.with_option(error.option or "prompt") from None


def resolve_verifier(gamma: int | None, rule: str | Rule, lenience: float) -> Verifier:
    """Return the verifier for these options. Raises the errors of `SpeculationOptions`, which
    checks the options."""
    options = SpeculationOptions(gamma, rule, lenience)
    if rule == COUPLED_RULE:
        return verifier.COUPLED_VERIFIER
    distribution_rule = (
        verifier.RULES_BY_NAME[rule] if isinstance(rule, str) else verifier.CustomRule(rule)
    )
    return verifier.make_verifier(distribution_rule, options.lenience)


def to_prompt_list(prompts: Prompts) -> list[Prompt]:
    """Return one prompt (a str, or ids) or several prompts as a list of prompts.

    Ids may be lists, tensors or arrays. A tensor `[B, n]` stands for B prompts. Prompts may also be
    a tokenizer's output; tokens with attention mask 0 are then dropped. Raises InputError for
    anything else.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = _list_encoded(prompts) if isinstance(prompts, Mapping) else _to_lists(prompts)
    if not isinstance(listed, list):
        raise InputError(
            f"prompts is a {type(prompts).__name__}; give a str, ids, or a list of prompts"
        )
    if listed and all(_is_id(part) for part in listed):
        return [listed]
    for i, prompt in enumerate(listed):
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(_is_id(token) for token in cast(list[Any], prompt))
        ):
            raise InputError(f"prompt {i} is {format_value(prompt)}; give a str or a list of ids")
    return listed


def _to_lists(value: Any) -> Any:
    """Convert tensors, arrays and tuples to lists, and NumPy numbers to Python numbers. Return
    anything else unchanged."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [_to_lists(part) for part in value] if isinstance(value, list | tuple) else value


def _list_encoded(batch: Mapping[str, Any]) -> list[Any]:
    """Return the ids in a tokenizer's output, without the padding on either side."""
    if "input_ids" not in batch:
        raise InputError("prompts has no input_ids; give the output of a tokenizer, or ids")
    if media := sorted(batch.keys() - TEXT_INPUTS):
        raise InputError(
            f"prompts contain {', '.join(media)}, but only ids are accepted here; give only "
            "input_ids"
        )
    ids, mask = _to_lists(batch["input_ids"]), _to_lists(batch.get("attention_mask"))
    if mask is not None and not _have_same_shape(ids, mask):
        raise InputError(
            "attention_mask does not have the shape of input_ids; give both from the same call of "
            "the tokenizer"
        )
    return ids if mask is None or not isinstance(ids, list) else _apply_mask(ids, mask)


def _have_same_shape(ids: Any, mask: Any) -> bool:
    """Return whether nested lists have equal lengths at every level."""
    if isinstance(ids, list) and isinstance(mask, list):
        return len(ids) == len(mask) and all(map(_have_same_shape, ids, mask))
    return not isinstance(ids, list) and not isinstance(mask, list)


def _apply_mask(ids: list[Any], mask: list[Any]) -> list[Any]:
    pairs = zip(ids, mask, strict=True)
    return [
        _apply_mask(a, b) if isinstance(a, list) else a
        for a, b in pairs
        if isinstance(a, list) or b
    ]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def make_keys(seed: Seed, counts: list[int]) -> list[SequenceKey]:
    """Return the keys (seed, number) of all sequences, `counts[i]` keys for prompt i.

    If `seed` is an int, all keys have this seed (a random seed for None) and are numbered from 0
    across all prompts. If `seed` is a list, entry i is for prompt i. If the entry is an int, the
    prompt's keys are numbered from 0; if it is a pair (seed, number), they are numbered from
    `number`.
    """
    if seed is None:
        seed = randbits(63)
    if is_whole_number(seed):
        return [SequenceKey(SEED("seed", seed), number) for number in range(sum(counts))]
    if not isinstance(seed, list | tuple):
        raise InputError(
            f"seed is {format_value(seed)}; give an integer, or a list of one seed per prompt"
        )
    if len(seed) != len(counts):
        raise InputError(
            f"seed has {len(seed)} entries for {len(counts)} prompts; give one entry per prompt"
        )
    pairs = [s if isinstance(s, list | tuple) else (s, 0) for s in seed]
    for pair in pairs:
        if len(pair) != 2:
            raise InputError(
                f"seed holds {format_value(pair)}; give integers, or pairs of integers"
            )
    return [
        SequenceKey(SEED("seed", s), SEED("seed", SEED("seed", number) + j))
        for (s, number), count in zip(pairs, counts, strict=True)
        for j in range(count)
    ]
