"""Speech to text with all models but Whisper. The `generate` of these models does not split audio,
so long audio is split into windows here, and each window is transcribed by itself.

The model's processor determines the form of the model's input: the processor's own transcription
request if it has one, else the audio alone for an encoder-decoder, or a chat message with the
audio.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import torch
from torch import Tensor

from foretoken.errors import InputError, to_one_line
from foretoken.media.inputs import get_main_input_name
from foretoken.text.chat import MEDIA_PROCESSOR_ATTRIBUTES, process_media_chat

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCKS_PER_SECOND = 10  # windows are cut in the middle of such a block
MAX_WINDOW_SECONDS = 30.0  # as in the training of speech models
MAX_TOKENS_PER_SECOND, MAX_EXTRA_TOKENS = 32, 64  # limit the output of a model that never ends
REQUEST_METHOD = "apply_transcription_request"
# A chat model's instruction after the audio, unless `prompt` gives it; from Granite Speech
DEFAULT_INSTRUCTION = "can you transcribe the speech into a written format?"
# Options of `transcribe`, and their names in the methods of processors
REQUEST_PARAMETERS = {
    "language": ("language", "source_language"),
    "prompt": ("prompt",),
    "translate": ("target_language",),
}


def get_audio_feature_extractor(processor: Any) -> Any:
    """Return the part of a processor that takes audio, or None."""
    return next(
        (
            part
            for name in MEDIA_PROCESSOR_ATTRIBUTES["audio"]
            if (part := getattr(processor, name, None))
        ),
        None,
    )


def find_problem(network: Any, processor: Any) -> str | None:
    """Return why a network cannot transcribe audio; None if it can."""
    if get_audio_feature_extractor(processor) is None:
        return "its processor takes no audio"
    if "text" not in getattr(network, "output_modalities", ("text",)):
        return "it generates no text"
    if hasattr(processor, REQUEST_METHOD):
        return None
    if _has_chat_template(processor) and not network.config.is_encoder_decoder:
        return None
    if not network.config.is_encoder_decoder:
        return "its processor has neither a request for a transcription nor a chat template"
    return None if get_main_input_name(network) != "input_ids" else "its encoder takes text"


def _has_chat_template(processor: Any) -> bool:
    return bool(getattr(processor, "chat_template", None) or processor.tokenizer.chat_template)


@dataclass(frozen=True, slots=True)
class WindowTranscriber:
    """Transcribes audio window by window.

    Attributes:
        spec: The Speculator, which transformers' `generate` calls as its decoding method.
        network: The target.
        processor: The target's processor.
        generate_options: Arguments of `generate`.
        processor_arguments: Arguments of the processor.
        on_token: Called with "" at every token; an exception that it raises ends generation.
    """

    spec: Any
    network: Any
    processor: Any
    generate_options: dict[str, Any]
    processor_arguments: dict[str, Any]
    on_token: Callable[[str], None]

    def transcribe(self, samples: NDArray[np.float32]) -> Iterator[tuple[int, int, str, list[int]]]:
        """Transcribe samples `[n]`. Yields for each window its first sample, its end (exclusive),
        its text and its tokens; the texts, joined without separators, are the whole transcript."""
        feature_extractor, previous = get_audio_feature_extractor(self.processor), ""
        limits = [
            getattr(feature_extractor, name, None) for name in ("chunk_length", "max_audio_clip_s")
        ]
        # `max_audio_clip_s`: Cohere's processor splits longer audio itself
        max_seconds = min([MAX_WINDOW_SECONDS, *(float(each) for each in limits if each)])
        for begin, end in split_windows(samples, feature_extractor.sampling_rate, max_seconds):
            tokens = self._generate_tokens(
                samples[begin:end], (end - begin) / feature_extractor.sampling_rate
            )
            text = self._decode(tokens)
            if text and previous:
                text = _get_separator(previous[-1], text[0]) + text
            previous = text or previous
            yield begin, end, text, tokens

    def _generate_tokens(self, samples: NDArray[np.float32], seconds: float) -> list[int]:
        inputs = self._build_inputs(samples)
        prompt_ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        prompt: list[int] = [] if prompt_ids is None else prompt_ids[0].tolist()
        (output,) = self.network.generate(
            **inputs,
            **self._limit_new_tokens(len(prompt) + 1, seconds),
            **self.generate_options,
            custom_generate=self.spec,
            streamer=HeartbeatStreamer(self.on_token),
        )
        ids: list[int] = output.tolist()
        # without a prompt, `generate` has put the decoder's start token first
        has_prompt = bool(prompt) and ids[: len(prompt)] == prompt
        return ids[len(prompt) + (not has_prompt) :]

    def _build_inputs(self, samples: NDArray[np.float32]) -> dict[str, Tensor]:
        """Return the arguments of `generate`, which the processor makes from a window's samples.
        Raises InputError if the processor refuses the samples."""
        rate = get_audio_feature_extractor(self.processor).sampling_rate
        request = get_request_function(self.network, self.processor)
        if request is self.processor:
            options: dict[str, Any] = {"sampling_rate": rate, "return_tensors": "pt"}
        else:  # Voxtral's request first writes a file with the audio
            options = {"sampling_rate": rate, "format": "WAV", "model_id": "voxtral"}
            options = {name: options[name] for name in options if name in get_parameters(request)}
        try:
            output: Mapping[str, Any] = request(
                audio=samples, **options, **self.processor_arguments
            )
        except Exception as error:  # a chat template can raise any type
            problem = f"the processor refuses the audio: {to_one_line(error)}"
            raise InputError(problem) from None
        network = self.network
        return {
            name: x.to(network.device, network.dtype if x.is_floating_point() else None)
            for name, x in output.items()
            if isinstance(x, Tensor)
        }

    def _limit_new_tokens(self, prompt_length: int, seconds: float) -> dict[str, int]:
        """Return the limit of new tokens, or {} if the model's generation config sets one."""
        config, context = self.network.generation_config, self.spec.target.context
        if config.max_length is not None or config.max_new_tokens is not None:
            return {}
        max_tokens = int(seconds * MAX_TOKENS_PER_SECOND) + MAX_EXTRA_TOKENS
        return {
            "max_new_tokens": max_tokens
            if context is None
            else max(1, min(max_tokens, context - prompt_length))
        }

    def _decode(self, tokens: list[int]) -> str:
        decode = self.processor.decode
        options = {"return_format": "transcription_only"}
        options = options if "return_format" in get_parameters(decode) else {}
        return str(decode(tokens, skip_special_tokens=True, **options)).strip()


class HeartbeatStreamer:
    """A transformers streamer that calls `on_token` with "" at each token, so that the caller may
    end generation by an exception."""

    def __init__(self, on_token: Callable[[str], None]) -> None:
        self._on_token = on_token

    def put(self, value: torch.Tensor) -> None:
        self._on_token("")

    def end(self) -> None:
        """Do nothing: no text is held back."""


def get_request_function(network: Any, processor: Any) -> Callable[..., Any]:
    """Return the function that makes the model's inputs from its argument `audio` and the arguments
    from `build_arguments`: the processor's transcription request, the processor itself, or a
    function that builds a chat message."""
    if hasattr(processor, REQUEST_METHOD) or network.config.is_encoder_decoder:
        return getattr(processor, REQUEST_METHOD, processor)

    def chat(audio: Any, prompt: str = DEFAULT_INSTRUCTION) -> Mapping[str, Any]:
        parts = [{"type": "audio", "audio": audio}, {"type": "text", "text": prompt}]
        return process_media_chat([{"role": "user", "content": parts}], processor)

    return chat


def get_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def build_arguments(
    network: Any, processor: Any, language: str | None, prompt: str | None, translate: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the options of `transcribe` to arguments of the processor's request and arguments of
    `generate`, and return both. Raises InputError for an option that the model does not support, or
    if the model needs an option that is missing."""
    accepted = get_parameters(get_request_function(network, processor))
    request_arguments, options = dict[str, Any](), dict[str, Any]()
    if "tgt_lang" in get_parameters(type(network).generate):  # Seamless: translates to any language
        options["tgt_lang"], language = ("eng" if translate else language), None
        translate = False
        if options["tgt_lang"] is None:
            raise InputError("the model needs the language of its output; give language")
    values = {"language": language, "prompt": prompt, "translate": "en" if translate else None}
    for option, value in values.items():
        name = next((name for name in REQUEST_PARAMETERS[option] if name in accepted), None)
        if value is not None and name is None:
            raise InputError(f"the model takes no {option}; leave {option} out")
        if value is not None:
            request_arguments[str(name)] = value
        elif name and accepted[name].default is inspect.Parameter.empty:
            raise InputError(f"the model needs the {option}; give {option}")
    return request_arguments, options


def _get_separator(before: str, after: str) -> str:
    """Return the separator of two windows' texts, given the last character of the first text and
    the first of the second: "" if either belongs to a script without spaces, else a space."""
    joined = any(east_asian_width(x) in "WF" and not "가" <= x <= "힣" for x in (before, after))
    return "" if joined else " "


def split_windows(
    samples: NDArray[np.float32], sampling_rate: int, max_seconds: float
) -> list[tuple[int, int]]:
    """Return the windows into which audio is split, each as its first sample and its end
    (exclusive).

    Audio of at most `max_seconds` is one window. Longer audio is split into windows of about equal
    length, at most 5/6 of `max_seconds`; each cut is moved by up to 1/12 of `max_seconds` to the
    quietest tenth of a second.

    Args:
        samples: One channel, `[n]`.
        sampling_rate: Samples a second.
        max_seconds: Maximum length of a window.

    Examples:
        >>> import numpy
        >>> audio = numpy.ones(40, dtype="float32")
        >>> audio[21:24] = 0
        >>> split_windows(audio, 10, 3.0)
        [(0, 21), (21, 40)]
    """
    n, max_samples = len(samples), int(max_seconds * sampling_rate)
    count = 1 if n <= max_samples else ceil(n / (max_samples * 5 / 6))
    cuts = [
        _find_quietest(samples, i * n // count, max_samples // 12, sampling_rate)
        for i in range(1, count)
    ]
    return list(pairwise([0, *cuts, n]))


def _find_quietest(
    samples: NDArray[np.float32], middle: int, reach: int, sampling_rate: int
) -> int:
    """Return the middle of the quietest block within `reach` samples of `middle`."""
    begin, size = middle - reach, max(1, sampling_rate // BLOCKS_PER_SECOND)
    count = 2 * reach // size
    if not count:
        return middle
    blocks = samples[begin : begin + count * size].reshape(count, size)
    return begin + int((blocks**2).sum(1).argmin()) * size + size // 2
