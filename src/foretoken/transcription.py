"""Speech to text by Whisper, with speculation: transformers cuts sounds into windows and times what
is said, and every window's text is generated here.

Knows no files of text and no command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from foretoken.errors import InputError, RefusedError, one_line
from foretoken.media.sounds import sound
from foretoken.media.spoken import Segment, Transcription

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


def transcribe(
    spec: Speculator,
    audio: Any,
    *,
    language: str | None = None,
    translate: bool = False,
    temperature: float = 0.0,
    gamma: int | None = None,
    progress: Callable[[float], None] | None = None,
    told: Callable[[str], None] | None = None,
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
        told: Is told the new text of each window, and "" with every token of it; an exception that
            it raises ends the transcription.

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
    if spec.processor is None or not transcribes(spec):
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
    windows = Windows(processor.tokenizer, network.generation_config, told)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    try:
        made = network.generate(
            inputs["input_features"].to(network.device, network.dtype),
            attention_mask=inputs["attention_mask"].to(network.device),
            return_timestamps=True,
            return_segments=True,
            custom_generate=spec,
            num_assistant_tokens=gamma,
            streamer=windows,
            **({"do_sample": False} | sampling | asked),
        )
    except ValueError as error:  # transformers', of a language that it does not know
        if isinstance(error, InputError):
            raise
        raise InputError(f"the model cannot transcribe so: {one_line(error)}") from None
    tokenizer = processor.tokenizer
    pieces = [_segment(piece, tokenizer) for piece in made["segments"][0]]
    spoken = [piece for piece in pieces if piece.text.strip()]
    return Transcription(len(samples) / rate, spoken, windows.language)


def transcribes(spec: Speculator) -> bool:
    """Tell whether `transcribe` takes this target: one whose `generate` cuts sounds into windows,
    as Whisper's, with its processor."""
    network: Any = getattr(spec.target, "model", None)
    if spec.processor is None or not hasattr(network, "generate"):
        return False
    return "return_segments" in inspect.signature(type(network).generate).parameters


class Windows:
    """A streamer of transformers that tells the text of each window once it is whole: Whisper
    throws a last piece away that the window cuts off, and hears it again in the next one."""

    def __init__(self, tokenizer: Any, config: Any, told: Callable[[str], None] | None) -> None:
        self.language: str | None = None
        self._tokenizer, self._told = tokenizer, told or (lambda text: None)
        self._languages = {
            i: mark for mark, i in (getattr(config, "lang_to_id", None) or {}).items()
        }
        self._times = getattr(config, "no_timestamps_token_id", 0) + 1  # the first id of a time
        self._tokens: list[int] | None = None  # None: what comes next is what a window begins with

    def put(self, value: torch.Tensor) -> None:
        ids = value.flatten().tolist()
        if self._tokens is None:
            self._tokens = []
            spoken = [self._languages[token] for token in ids if token in self._languages]
            self.language = spoken[-1].strip("<|>") if spoken else self.language
        else:
            self._tokens += ids
        self._told("")

    def end(self) -> None:
        text = self._tokenizer.decode(self._kept(self._tokens or []), skip_special_tokens=True)
        self._tokens = None
        if text.strip():
            self._told(text)

    def _kept(self, tokens: list[int]) -> list[int]:
        """The tokens up to the last two times in a row, between which a piece ends; all where there
        are none, or where the window ends with a piece."""
        ends = (self._tokenizer.eos_token_id, self._tokenizer.pad_token_id)
        times = [token >= self._times for token in tokens if token not in ends]
        pairs = [i + 1 for i in range(len(times) - 1) if times[i] and times[i + 1]]
        return tokens if not pairs or times[-2:] == [False, True] else tokens[: pairs[-1]]


def _segment(piece: dict[str, Any], tokenizer: Any) -> Segment:
    tokens = piece["tokens"].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Segment(round(float(piece["start"]), 2), round(float(piece["end"]), 2), text, tokens)


def _share(done: torch.Tensor) -> float:
    """The part of the frames that are done, of one sound."""
    at, total = (float(x) for x in done[0])
    return min(1.0, at / total) if total else 1.0
