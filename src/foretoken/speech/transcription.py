"""Speech to text with speculative decoding. Whisper's own `generate` splits audio into windows and
assigns times to segments; for other models, the audio is cut into windows at quiet moments. The
Speculator generates the tokens of every window.

Does not depend on transcript files or the command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretoken.errors import InputError, RefusedError, format_value, to_one_line
from foretoken.media.audio import load_audio
from foretoken.media.transcripts import Segment, Transcription, Word
from foretoken.sampling.params import SamplingParams
from foretoken.speech.windows import (
    WindowTranscriber,
    build_arguments,
    find_problem,
    get_audio_feature_extractor,
)
from foretoken.speech.word_times import ALIGNMENT_HEADS, WordTimer

if TYPE_CHECKING:
    from foretoken.speculator import Speculator

PREVIOUS_TEXT_MARK = "<|startofprev|>"  # Whisper's token before the preceding transcript


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """Options of a call of `transcribe`; `generate_options` go to transformers' `generate`."""

    language: str | None
    translate: bool
    prompt: str | None
    words: bool
    generate_options: dict[str, Any]
    progress: Callable[[float], None]
    on_text: Callable[[str], None]


def transcribe(
    spec: Speculator,
    audio: Any,
    *,
    language: str | None = None,
    translate: bool = False,
    prompt: str | None = None,
    words: bool = False,
    temperature: float = 0.0,
    gamma: int | None = None,
    progress: Callable[[float], None] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Transcription:
    """Transcribe speech window by window, with tokens in the target's own distribution.

    Args:
        spec: A Speculator whose target takes audio and has a processor; a draft is optional.
        audio: A file, its bytes, or samples `[n]` at the processor's sampling rate.
        language: The language, such as "en"; None: the model detects the language, if it can.
        translate: Translate into English.
        prompt: A preceding transcript, or names and words that may occur: each window is
            transcribed as its continuation. For a chat model, `prompt` is the instruction after the
            audio, in place of "can you transcribe the speech into a written format?".
        words: Return the times of words. Needs a Whisper whose generation config has
            alignment_heads.
        temperature: 0 takes the most probable tokens.
        gamma: Number of draft tokens in each step; None: chosen before every step.
        progress: Called with the fraction that is done, from 0 to 1.
        on_text: Called with the new text of each window, and with "" at every token; an exception
            that it raises ends the transcription.

    Returns:
        The segments with their times; for models other than Whisper one segment for each window.

    Raises:
        InputError: The audio cannot be read, or the model does not support the language.
        RefusedError: The target does not transcribe speech, or cannot return the times of words.

    Examples:
        >>> import foretoken
        >>> transcribe(foretoken.load("novels"), "talk.wav")
        Traceback (most recent call last):
        foretoken.errors.RefusedError: the target (...) does not transcribe speech: ...
    """
    SamplingParams(temperature=temperature)  # raises InputError for an invalid temperature
    for name, value in (("language", language), ("prompt", prompt)):
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name} is {format_value(value)}; give a str, or leave it out")
    network, processor = _require_transcriber(spec)
    sampling_rate = get_audio_feature_extractor(processor).sampling_rate
    samples = load_audio(audio, sampling_rate, "the audio")
    generate_options: dict[str, Any] = {
        "do_sample": bool(temperature),
        "num_assistant_tokens": gamma,
    }
    generate_options |= {"temperature": temperature} if temperature else {}
    ignored: Callable[[Any], None] = lambda _: None  # noqa: E731
    options = TranscriptionOptions(
        language or None,
        translate,
        prompt or None,
        words,
        generate_options,
        progress or ignored,
        on_text or ignored,
    )
    transcribe_samples = _transcribe_whisper if splits_audio(network) else _transcribe_windows
    try:
        segments, found_language = transcribe_samples(spec, network, processor, samples, options)
    except ValueError as error:  # from transformers, for an unknown language
        if isinstance(error, InputError):
            raise
        raise InputError(f"the model cannot transcribe this: {to_one_line(error)}") from None
    segments = [segment for segment in segments if segment.text.strip()]
    return Transcription(len(samples) / sampling_rate, segments, found_language)


def can_transcribe(spec: Speculator) -> bool:
    """Return whether `transcribe` supports this target."""
    try:
        _require_transcriber(spec)
    except (InputError, RefusedError):
        return False
    return True


def can_time_words(spec: Speculator) -> bool:
    """Return whether `transcribe` can return the times of words for this target."""
    network: Any = spec.target.model
    config = getattr(network, "generation_config", None)
    return (
        config is not None
        and splits_audio(network)
        and getattr(config, ALIGNMENT_HEADS, None) is not None
    )


def _get_network(spec: Speculator) -> Any:
    """Return the target's transformers network, without weights if the target does not run on
    torch; None if it does not run on torch and takes no media."""
    network = spec.target.model
    if network is not None or not spec.target.needs_media or spec.structure is None:
        return network
    # imported late: takes seconds
    from foretoken.transformers_integration.weightless import make_weightless

    return make_weightless(spec.structure(), spec)


def splits_audio(network: Any) -> bool:
    """Return whether a network's own `generate` splits audio into windows, as with Whisper."""
    return "return_segments" in inspect.signature(type(network).generate).parameters


def _require_transcriber(spec: Speculator) -> tuple[Any, Any]:
    """Return the target's network and its processor. Raises RefusedError if the target does not
    transcribe speech."""
    network: Any = _get_network(spec)
    kind = spec.target.runtime if network is None else type(network).__name__
    processor = None
    if not hasattr(network, "generate"):
        reason: str | None = "its encoder is converted; load the target with runtime='transformers'"
    elif spec.processor is None:
        reason = "its folder has no processor, which audio input needs"
    else:
        processor = spec.processor()
        reason = None if splits_audio(network) else find_problem(network, processor)
    if reason:
        raise RefusedError(f"the target ({kind}) does not transcribe speech: {reason}")
    return network, processor


def _transcribe_windows(
    spec: Speculator, network: Any, processor: Any, samples: Any, options: TranscriptionOptions
) -> tuple[list[Segment], str | None]:
    if options.words:
        raise RefusedError(
            f"{type(network).__name__} does not return the times of words; leave words out"
        )
    processor_arguments, generate_options = build_arguments(
        network, processor, options.language, options.prompt, options.translate
    )
    transcriber = WindowTranscriber(
        spec,
        network,
        processor,
        options.generate_options | generate_options,
        processor_arguments,
        options.on_text,
    )
    sampling_rate, segments = get_audio_feature_extractor(processor).sampling_rate, list[Segment]()
    for begin, end, text, tokens in transcriber.transcribe(samples):
        segments.append(
            Segment(round(begin / sampling_rate, 2), round(end / sampling_rate, 2), text, tokens)
        )
        options.progress(end / len(samples))
        if text:
            options.on_text(text)
    return segments, options.language


def _transcribe_whisper(
    spec: Speculator, network: Any, processor: Any, samples: Any, options: TranscriptionOptions
) -> tuple[list[Segment], str | None]:
    feature_extractor, config = processor.feature_extractor, network.generation_config
    inputs = processor(
        samples,
        sampling_rate=feature_extractor.sampling_rate,
        return_tensors="pt",
        truncation=False,
        padding="longest" if len(samples) > feature_extractor.n_samples else "max_length",
        return_attention_mask=True,
    )
    arguments: dict[str, Any] = {"task": "translate" if options.translate else "transcribe"}
    if not getattr(config, "is_multilingual", True):
        arguments = {}
        if options.translate or options.language is not None:
            raise InputError("this Whisper is not multilingual; leave language and translate out")
    if options.language is not None:
        arguments["language"] = options.language
    if options.prompt is not None:
        arguments["prompt_ids"] = _encode_prompt(network, processor.tokenizer, options.prompt)
    streamer = WhisperTextStreamer(processor.tokenizer, config, options.on_text)
    frames = int(inputs["attention_mask"].sum())
    if options.words and spec.target.model is None:
        problem = f"words are timed on torch only, but the target runs on {spec.target.runtime}"
        raise RefusedError(f"{problem}; load the target with runtime='transformers'")
    timed = WordTimer(spec, network, frames, streamer) if options.words else None

    def on_window(done: torch.Tensor) -> None:
        at, total = (int(x) for x in done[0])
        if timed:
            timed.seek = at
        options.progress(min(1.0, at / total) if total else 1.0)

    output = network.generate(
        inputs["input_features"].to(network.device, network.dtype),
        attention_mask=inputs["attention_mask"].to(network.device),
        return_timestamps=True,
        return_segments=True,
        custom_generate=timed or spec,
        streamer=streamer,
        monitor_progress=on_window,
        **options.generate_options | arguments,
    )
    tokenizer, language = processor.tokenizer, streamer.language
    segments: list[Segment] = []
    for segment in output["segments"][0]:
        tokens = segment["tokens"].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        timed_words = timed.get_words(tokenizer, segment, language) if timed else None
        words = None if timed_words is None else [Word(*each) for each in timed_words]
        start, end = (round(float(segment[name]), 2) for name in ("start", "end"))
        segments.append(Segment(start, end, text, tokens, words))
    return segments, language


def _encode_prompt(network: Any, tokenizer: Any, text: str) -> torch.Tensor:
    """Return Whisper's mark of a preceding transcript and the transcript's ids; if there are too
    many ids, only the last ones. Raises InputError if the tokenizer has no such mark or the text
    contains a special token."""
    mark = tokenizer.convert_tokens_to_ids(PREVIOUS_TEXT_MARK)
    if mark is None or mark == tokenizer.unk_token_id:
        raise InputError(f"the tokenizer has no {PREVIOUS_TEXT_MARK}; leave prompt out")
    ids = tokenizer.encode(" " + text.strip(), add_special_tokens=False)
    if special := {*tokenizer.all_special_ids}.intersection(ids):
        named = tokenizer.convert_ids_to_tokens(min(special))
        raise InputError(f"prompt contains {named}, a special token; leave the token out")
    room = network.config.max_target_positions // 2 - 1  # the limit in Whisper's own code
    return torch.tensor([mark, *ids[-room:]], device=network.device)


class WhisperTextStreamer:
    """A transformers streamer that calls `on_text` with a window's text when the window is
    complete. If the window's end cuts off a last segment, that segment is left out, because Whisper
    transcribes it again in the next window."""

    def __init__(self, tokenizer: Any, config: Any, on_text: Callable[[str], None]) -> None:
        self.language: str | None = None
        self._tokenizer, self._on_text = tokenizer, on_text
        self._languages = {
            i: mark for mark, i in (getattr(config, "lang_to_id", None) or {}).items()
        }
        self._first_time_id = getattr(config, "no_timestamps_token_id", 0) + 1
        self._tokens: list[int] | None = None  # None: the next ids are a window's prompt

    def put(self, value: torch.Tensor) -> None:
        ids = value.flatten().tolist()
        if self._tokens is None:
            self._tokens = []
            spoken = [self._languages[token] for token in ids if token in self._languages]
            self.language = spoken[-1].strip("<|>") if spoken else self.language
        else:
            self._tokens += ids
        self._on_text("")

    def end(self) -> None:
        text = self._tokenizer.decode(
            self._drop_cut_piece(self._tokens or []), skip_special_tokens=True
        )
        self._tokens = None
        if text.strip():
            self._on_text(text)

    def _drop_cut_piece(self, tokens: list[int]) -> list[int]:
        """Return the tokens without a last segment that the window's end cuts off. Two adjacent
        timestamps separate segments: the tokens up to the last such pair are returned; all tokens
        if there is no pair, or if the window ends with a timestamp that completes its last
        segment."""
        ends = (self._tokenizer.eos_token_id, self._tokenizer.pad_token_id)
        times = [token >= self._first_time_id for token in tokens if token not in ends]
        pairs = [i + 1 for i in range(len(times) - 1) if times[i] and times[i + 1]]
        return tokens if not pairs or times[-2:] == [False, True] else tokens[: pairs[-1]]
