"""Transcriptions as segments with their times, and their output as text, subtitles and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Word:
    """A word, with its start and end in seconds from the beginning of the audio."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of speech.

    Attributes:
        start: Seconds from the beginning of the audio.
        end: Seconds from the beginning of the audio.
        text: The transcribed text.
        tokens: Its token ids, with timestamp tokens.
        words: The words with their times; None if these were not requested.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    words: list[Word] | None = None


@dataclass(frozen=True, slots=True)
class Transcription:
    """The transcription of an audio recording.

    Attributes:
        seconds: The duration of the audio.
        segments: Its segments, in order.
        language: The language code, such as "en", given or detected; None if neither.
    """

    seconds: float
    segments: list[Segment]
    language: str | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


def to_text(transcription: Transcription) -> str:
    return "".join(f"{segment.text.strip()}\n" for segment in transcription.segments)


def to_srt(transcription: Transcription) -> str:
    blocks = [
        f"{i}\n{_format_time(s.start, ',')} --> {_format_time(s.end, ',')}\n{s.text.strip()}\n"
        for i, s in enumerate(transcription.segments, 1)
    ]
    return "\n".join(blocks)


def to_vtt(transcription: Transcription) -> str:
    blocks = [
        f"{_format_span(segment)}\n{segment.text.strip()}\n" for segment in transcription.segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def to_json(transcription: Transcription) -> str:
    document: dict[str, Any] = {"text": transcription.text, **asdict(transcription)}
    for segment in document["segments"]:
        if segment["words"] is None:  # not requested
            del segment["words"]
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


TRANSCRIPT_FORMATS: dict[str, Callable[[Transcription], str]] = {
    "text": to_text,
    "srt": to_srt,
    "vtt": to_vtt,
    "json": to_json,
}


def _format_span(segment: Segment) -> str:
    return f"{_format_time(segment.start, '.')} --> {_format_time(segment.end, '.')}"


def _format_time(seconds: float, point: str) -> str:
    """Return hh:mm:ss.mmm, with `point` as the decimal separator."""
    total = round(seconds * 1000)
    minutes, thousandths = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{thousandths // 1000:02}{point}{thousandths % 1000:03}"
