"""Speech written down: pieces with their times, and their forms as text, subtitles and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Word:
    """A word, with the seconds from the beginning of the sound at which it starts and ends."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of speech.

    Attributes:
        start: Seconds from the beginning of the sound.
        end: Seconds from the beginning of the sound.
        text: The words.
        tokens: Their ids, with those of times.
        words: The words with their times, where these were asked for.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    words: list[Word] | None = None


@dataclass(frozen=True, slots=True)
class Transcription:
    """The speech in a sound, written down.

    Attributes:
        seconds: The length of the sound.
        segments: Its pieces, in order.
        language: The code of the language, such as "en", that was given or heard; None where the
            model does not say.
    """

    seconds: float
    segments: list[Segment]
    language: str | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


def as_text(made: Transcription) -> str:
    return "".join(f"{segment.text.strip()}\n" for segment in made.segments)


def as_srt(made: Transcription) -> str:
    blocks = [
        f"{i}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{s.text.strip()}\n"
        for i, s in enumerate(made.segments, 1)
    ]
    return "\n".join(blocks)


def as_vtt(made: Transcription) -> str:
    blocks = [f"{_span(segment)}\n{segment.text.strip()}\n" for segment in made.segments]
    return "\n".join(["WEBVTT\n", *blocks])


def as_json(made: Transcription) -> str:
    document: dict[str, Any] = {"text": made.text, **asdict(made)}
    for segment in document["segments"]:
        if segment["words"] is None:  # the model does not tell
            del segment["words"]
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Transcription], str]] = {
    "text": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "json": as_json,
}


def _span(segment: Segment) -> str:
    return f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}"


def _clock(seconds: float, point: str) -> str:
    """hh:mm:ss.mmm, with that point."""
    total = round(seconds * 1000)
    minutes, thousandths = divmod(total, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{thousandths // 1000:02}{point}{thousandths % 1000:03}"
