"""POST /v1/audio/transcriptions and /v1/audio/translations: a file with speech in, its text out."""

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

from foretoken.media.spoken import FORMATS, Transcription
from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import Body
from foretoken.server.process.client import Notification
from foretoken.server.process.fleet import Engines
from foretoken.server.process.messages import Reply, TranscribeRequest, TranscriptDelta

MOST_FIELDS = 32
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
Unit = Literal["segment", "word"]
UNITS = "timestamp_granularities[]"


class Translate(Body):
    """Request to write speech down in English, as the fields of a form."""

    file: bytes = Field(min_length=1, description="an audio file: WAV, FLAC, OGG or MP3")
    prompt: str | None = Field(None, description="text before it, whose style is followed")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] = 0.0

    translates: ClassVar[bool] = True
    sets: ClassVar[dict[str, tuple[str, ...]]] = {"audio": ("file",)}

    @property
    def streams(self) -> bool:
        return False

    def require(self) -> None:
        """Raise BadRequestError for fields that contradict one another."""

    def to_engine(self, gamma: int | None) -> TranscribeRequest:
        """Return the engine's request; gamma: draft tokens per target call."""
        return TranscribeRequest(
            self.file,
            translate=self.translates,
            prompt=self.prompt or None,
            temperature=self.temperature,
            gamma=gamma,
        )

    def body(self, made: Transcription) -> str | dict[str, Any]:
        """Return the answer: JSON, or text in another format."""
        usage = _usage(made)
        if self.response_format == "json":
            return {"text": made.text, "usage": usage}
        if self.response_format != "verbose_json":
            return FORMATS[self.response_format](made)
        asked = {"temperature": self.temperature}
        segments = [{"id": i, **asdict(each), **asked} for i, each in enumerate(made.segments)]
        words = [word for segment in segments for word in segment.pop("words") or ()]
        told = [{"word": each.pop("text"), **each} for each in words]
        return ({"words": told} if told else {}) | {
            "task": "translate" if self.translates else "transcribe",
            "language": made.language,
            "duration": made.seconds,
            "text": made.text,
            "segments": segments,
            "usage": usage,
        }


class Transcribing(Translate):
    """Request to write speech down in its own language, as the fields of a form."""

    language: str | None = Field(None, description="its code, such as en; else as the model hears")
    timestamp_granularities: list[Unit] = Field(["segment"], alias=UNITS)
    chunking_strategy: Literal["auto"] | None = None
    stream: bool = False

    translates: ClassVar[bool] = False
    sets: ClassVar[dict[str, tuple[str, ...]]] = {
        **Translate.sets,
        "language": ("language",),
        "words": (UNITS,),
    }

    @property
    def streams(self) -> bool:
        return self.stream

    @property
    def tells_words(self) -> bool:
        return "word" in self.timestamp_granularities

    def to_engine(self, gamma: int | None) -> TranscribeRequest:
        asked = super().to_engine(gamma)
        return replace(asked, language=self.language, words=self.tells_words)

    def require(self) -> None:
        if self.tells_words and self.response_format != "verbose_json":
            problem = f"are told in verbose_json, and response_format is {self.response_format}"
            raise BadRequestError(f"times of words {problem}; change one of them", UNITS)
        if self.stream and self.response_format != "json":
            problem = f"stream gives events of JSON, and response_format is {self.response_format}"
            raise BadRequestError(f"{problem}; leave one out", "stream")


def _usage(made: Transcription) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(made.seconds)}


def documented(kind: type[Translate]) -> dict[str, Any]:
    """Return a form as the OpenAPI document has it."""
    schema = kind.model_json_schema()
    schema["properties"]["file"] |= {"type": "string", "format": "binary"}
    return {
        "requestBody": {"content": {"multipart/form-data": {"schema": schema}}, "required": True}
    }


async def form(request: Request, kind: type[Translate]) -> Translate:
    """Return a form's fields, checked. Raises BadRequestError or RequestValidationError."""
    given: dict[str, Any] = {}
    if request.headers.get("content-type", "").partition(";")[0].strip() not in FORMS:
        raise BadRequestError(f"send a form, with Content-Type: {FORMS[0]}")
    async with request.form(max_files=2, max_fields=MOST_FIELDS) as fields:
        for name, value in fields.multi_items():
            held = await value.read() if isinstance(value, UploadFile) else value
            if name.endswith("[]"):
                given.setdefault(name, []).append(held)
            elif name in given:
                raise BadRequestError(f"{name} is given twice; give it once", name)
            else:
                given[name] = held
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problems: list[Any] = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
        raise RequestValidationError(problems) from None


class TranscriptionStream:
    """A transcription in an engine: use it within `async with`, whose end stops it. Entering it
    raises the engine's refusal, before anything is sent."""

    def __init__(self, engine: Engines, request: TranscribeRequest) -> None:
        self._engine, self._request = engine, request
        self._notifications: asyncio.Queue[Notification] = asyncio.Queue()

    async def __aenter__(self) -> TranscriptionStream:
        self._end = self._engine.submit(self._request, self._notifications.put_nowait)
        try:
            self._first = await self._notifications.get()
            if isinstance(self._first, Exception):
                raise self._first
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def parts(self) -> AsyncGenerator[str | Transcription]:
        """Yield new text as it comes, and the transcription last. Raises the engine's refusal."""
        message = self._first
        while not isinstance(message, Reply):
            if isinstance(message, Exception):
                raise message
            assert isinstance(message, TranscriptDelta), message
            yield message.text
            message = await self._notifications.get()
        yield message.value

    async def all(self) -> Transcription:
        """Return the whole transcription."""
        async for part in self.parts():
            if isinstance(part, Transcription):
                return part
        raise AssertionError("a transcription has no end")


async def events(stream: TranscriptionStream) -> AsyncGenerator[str]:
    """Yield server-sent events of a transcription."""
    begun = False
    async for part in stream.parts():
        if isinstance(part, str):
            if part:
                delta = part if begun else part.lstrip()
                begun = True
                yield answers.event({"type": "transcript.text.delta", "delta": delta})
            continue
        done = {"type": "transcript.text.done", "text": part.text, "usage": _usage(part)}
        yield answers.event(done)
    yield answers.DONE
