"""Speech to text by Whisper, with speculation: transformers cuts sounds into windows and times what
is said, and every window's text is generated here.

Knows no files of text and no command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretoken.errors import InputError, RefusedError, one_line
from foretoken.media.sounds import sound

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of speech.

    Attributes:
        start: Seconds from the beginning of the sound.
        end: Seconds from the beginning of the sound.
        text: The words.
        tokens: Their ids, with those of times.
    """

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Transcription:
    """The speech in a sound, written down.

    Attributes:
        seconds: The length of the sound.
        segments: Its pieces, in order.
    """

    seconds: float
    segments: list[Segment]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


def transcribe(
    spec: Speculator,
    audio: Any,
    *,
    language: str | None = None,
    translate: bool = False,
    temperature: float = 0.0,
    gamma: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Transcription:
    """Write down what is said, in the target's own distribution, window by window.

    Args:
        spec: A Whisper model, with its processor and perhaps a draft.
        audio: A file, its bytes, or samples `[n]` at 16,000 Hz.
        language: The language, such as "en"; None lets the model say.
        translate: Write it in English.
        temperature: 0 takes the likeliest tokens.
        gamma: Draft tokens for each target forward; None chooses before every step.
        progress: Is told the part that is done, from 0 to 1.

    Returns:
        The segments, with their times.

    Raises:
        InputError: The sound cannot be read, or the model does not know the language.
        RefusedError: The target is no Whisper, or has no processor.

    Examples:
        >>> import foretoken
        >>> transcribe(foretoken.load(), "talk.wav")
        Traceback (most recent call last):
        foretoken.errors.RefusedError: the target (...) is no Whisper model with its processor; ...
    """
    network: Any = getattr(spec.target, "model", None)
    if not hasattr(network, "generate") or spec.processor is None or not segments(network):
        kind = spec.target.runtime if network is None else type(network).__name__
        raise RefusedError(
            f"the target ({kind}) is no Whisper model with its processor; spec.generate takes what "
            "the processor of another model makes of a sound"
        )
    processor = spec.processor()
    rate = processor.feature_extractor.sampling_rate
    samples = sound(audio, rate, "the audio")
    inputs = processor(
        samples,
        sampling_rate=rate,
        return_tensors="pt",
        truncation=False,
        padding="longest" if len(samples) > processor.feature_extractor.n_samples else "max_length",
        return_attention_mask=True,
    )
    asked: dict[str, Any] = {"task": "translate" if translate else "transcribe"}
    if not getattr(network.generation_config, "is_multilingual", True):
        asked = {}
        if translate or language is not None:
            raise InputError("this Whisper knows one language; leave language and translate out")
    if language is not None:
        asked["language"] = language
    if progress is not None:
        asked["monitor_progress"] = lambda done: progress(_share(done))
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    try:
        made = network.generate(
            inputs["input_features"].to(network.device, network.dtype),
            attention_mask=inputs["attention_mask"].to(network.device),
            return_timestamps=True,
            return_segments=True,
            custom_generate=spec,
            num_assistant_tokens=gamma,
            **({"do_sample": False} | sampling | asked),
        )
    except ValueError as error:  # transformers', of a language that it does not know
        if isinstance(error, InputError):
            raise
        raise InputError(f"the model cannot transcribe so: {one_line(error)}") from None
    tokenizer = processor.tokenizer
    pieces = [_segment(piece, tokenizer) for piece in made["segments"][0]]
    return Transcription(len(samples) / rate, [piece for piece in pieces if piece.text.strip()])


def segments(network: Any) -> bool:
    """Tell whether a network's `generate` cuts sounds into windows, as Whisper's."""
    return "return_segments" in inspect.signature(type(network).generate).parameters


def _segment(piece: dict[str, Any], tokenizer: Any) -> Segment:
    tokens = piece["tokens"].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Segment(round(float(piece["start"]), 2), round(float(piece["end"]), 2), text, tokens)


def _share(done: torch.Tensor) -> float:
    """The part of the frames that are done, of one sound."""
    at, total = (float(x) for x in done[0])
    return min(1.0, at / total) if total else 1.0
