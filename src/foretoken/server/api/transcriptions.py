"""POST /v1/audio/transcriptions and /v1/audio/translations: transcribe an audio file in the
language of the speech, or translate the speech to English."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request

from foretoken.media.transcripts import TRANSCRIPT_FORMATS, Transcription
from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.protocol import Body
from foretoken.server.process.client import Notification
from foretoken.server.process.fleet import AnyEngine
from foretoken.server.process.messages import Reply, TranscribeRequest, TranscriptDelta

MAX_FORM_FIELDS = 32
FORM_CONTENT_TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")
TimestampGranularity = Literal["segment", "word"]
GRANULARITIES_FIELD = "timestamp_granularities[]"


class TranslationForm(Body):
    """Form that requests an English translation of speech."""

    file: bytes = Field(min_length=1, description="an audio file: WAV, FLAC, OGG or MP3")
    prompt: str | None = Field(
        None, description="text that precedes the audio; the transcript follows its style"
    )
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 0.0

    translates: ClassVar[bool] = True
    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {"audio": ("file",)}

    @property
    def is_streaming(self) -> bool:
        return False

    def require(self) -> None:
        """Raise BadRequestError for fields that contradict one another."""

    def to_engine(self, gamma: int | None) -> TranscribeRequest:
        """Return the engine's request. `gamma`: draft tokens per target call; None: automatic."""
        return TranscribeRequest(
            self.file,
            translate=self.translates,
            prompt=self.prompt or None,
            temperature=self.temperature,
            gamma=gamma,
        )

    def build_body(self, transcription: Transcription) -> str | dict[str, Any]:
        """Return the body of the answer in the requested format: a dict for JSON formats, otherwise
        a string."""
        usage = _usage(transcription)
        if self.response_format == "json":
            return {"text": transcription.text, "usage": usage}
        if self.response_format != "verbose_json":
            return TRANSCRIPT_FORMATS[self.response_format](transcription)
        settings = {"temperature": self.temperature}
        segments = [
            {"id": i, **asdict(each), **settings} for i, each in enumerate(transcription.segments)
        ]
        words = [word for segment in segments for word in segment.pop("words") or ()]
        word_entries = [{"word": each.pop("text"), **each} for each in words]
        return ({"words": word_entries} if word_entries else {}) | {
            "task": "translate" if self.translates else "transcribe",
            "language": transcription.language,
            "duration": transcription.seconds,
            "text": transcription.text,
            "segments": segments,
            "usage": usage,
        }


class TranscriptionForm(TranslationForm):
    """Form that requests a transcription in the language of the speech."""

    language: str | None = Field(None, description="code such as en; default: detected")
    timestamp_granularities: list[TimestampGranularity] = Field(
        ["segment"], alias=GRANULARITIES_FIELD
    )
    chunking_strategy: Literal["auto"] | None = None
    stream: bool = False

    translates: ClassVar[bool] = False
    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {
        **TranslationForm.option_fields,
        "language": ("language",),
        "words": (GRANULARITIES_FIELD,),
    }

    @property
    def is_streaming(self) -> bool:
        return self.stream

    @property
    def has_word_times(self) -> bool:
        return "word" in self.timestamp_granularities

    def to_engine(self, gamma: int | None) -> TranscribeRequest:
        request = super().to_engine(gamma)
        return replace(request, language=self.language, words=self.has_word_times)

    def require(self) -> None:
        if self.has_word_times and self.response_format != "verbose_json":
            problem = f"need verbose_json, but response_format is {self.response_format}"
            raise BadRequestError(
                f"timestamps of words {problem}; give verbose_json", GRANULARITIES_FIELD
            )
        if self.stream and self.response_format != "json":
            problem = f"stream needs json, but response_format is {self.response_format}"
            raise BadRequestError(f"{problem}; leave out one of the two", "stream")


def _usage(transcription: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcription.seconds)}


def describe_form(kind: type[TranslationForm]) -> dict[str, Any]:
    """Return the description of an endpoint's form for the OpenAPI document."""
    schema = kind.model_json_schema()
    schema["properties"]["file"] |= {"type": "string", "format": "binary"}
    return {
        "requestBody": {"content": {"multipart/form-data": {"schema": schema}}, "required": True}
    }


async def parse_form(request: Request, kind: type[TranslationForm]) -> TranslationForm:
    """Parse a request's form and return its validated fields. Raises BadRequestError if the body is
    not a form or a field is repeated, RequestValidationError for invalid fields."""
    values: dict[str, Any] = {}
    if request.headers.get("content-type", "").partition(";")[0].strip() not in FORM_CONTENT_TYPES:
        raise BadRequestError(f"send a form, with Content-Type: {FORM_CONTENT_TYPES[0]}")
    async with request.form(max_files=2, max_fields=MAX_FORM_FIELDS) as fields:
        for name, value in fields.multi_items():
            content = await value.read() if isinstance(value, UploadFile) else value
            if name.endswith("[]"):
                values.setdefault(name, []).append(content)
            elif name in values:
                raise BadRequestError(f"{name} is given twice; give {name} once", name)
            else:
                values[name] = content
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems: list[Any] = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise RequestValidationError(problems) from None


class TranscriptionStream:
    """A transcription that `async with` starts, and at the end aborts if it is not finished. Raises
    RefusedRequest or UnavailableError if the engine refuses the request."""

    def __init__(self, engine: AnyEngine, request: TranscribeRequest) -> None:
        self._engine, self._request = engine, request
        self._notifications: asyncio.Queue[Notification] = asyncio.Queue()

    async def __aenter__(self) -> TranscriptionStream:
        self._abort = self._engine.submit(self._request, self._notifications.put_nowait)
        try:
            self._first = await self._notifications.get()
            if isinstance(self._first, Exception):
                raise self._first
        except BaseException:
            self._abort()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort()

    async def stream_parts(self) -> AsyncGenerator[str | Transcription]:
        """Yield new text as it is transcribed and, at the end, the complete Transcription. Raises
        RefusedRequest or UnavailableError if the engine fails."""
        message = self._first
        while not isinstance(message, Reply):
            if isinstance(message, Exception):
                raise message
            assert isinstance(message, TranscriptDelta), message
            yield message.text
            message = await self._notifications.get()
        yield message.value

    async def collect(self) -> Transcription:
        """Wait for the complete transcription and return it."""
        async for part in self.stream_parts():
            if isinstance(part, Transcription):
                return part
        raise AssertionError("a transcription has no end")


async def stream_events(stream: TranscriptionStream) -> AsyncGenerator[str]:
    """Yield server-sent events of a transcription."""
    begun = False
    async for part in stream.stream_parts():
        if isinstance(part, str):
            if part:
                delta = part if begun else part.lstrip()
                begun = True
                yield answers.format_event({"type": "transcript.text.delta", "delta": delta})
            continue
        done = {"type": "transcript.text.done", "text": part.text, "usage": _usage(part)}
        yield answers.format_event(done)
    yield answers.DONE_EVENT
