"""The FastAPI application of `foretoken serve`: routes and error handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from foretoken.server.access import AccessPolicy
from foretoken.server.accounting import AccountingMiddleware, Metrics
from foretoken.server.api import answers
from foretoken.server.api.answers import Answer
from foretoken.server.api.chat import ChatAnswer, ChatCompletionRequest
from foretoken.server.api.completions import CompletionAnswer, CompletionRequest
from foretoken.server.api.errors import (
    ERROR_RESPONSES,
    ApiError,
    BadRequestError,
    explain_unreadable,
    make_validation_error,
    to_api_error,
)
from foretoken.server.api.protocol import ApiRequest, Body
from foretoken.server.api.responses import ResponseAnswer, ResponsesRequest
from foretoken.server.api.tokenization import DetokenizeRequest, TokenizeRequest
from foretoken.server.api.transcriptions import (
    TranscriptionForm,
    TranscriptionStream,
    TranslationForm,
    describe_form,
    parse_form,
    stream_events,
)
from foretoken.server.media import MediaLoader
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import RefusedRequest, UnavailableError
from foretoken.server.process.fleet import AnyEngine, ServedModels
from foretoken.server.process.generation import Generation, expand
from foretoken.server.process.messages import Prompt

VERSION = version("foretoken")
PUBLIC_FACTS = (
    *("target", "draft", "runtime", "draft_runtime", "dtype", "context", "vocab_size", "text"),
    *("max_rows", "media", "transcribes"),
)
PAGE_DIRECTORY = Path(__file__).parent / "page"
STREAM_RESPONSES: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}
API_KEY_SCHEME = HTTPBearer(auto_error=False)  # for OpenAPI only: AccessPolicy checks the key
ResultT = TypeVar("ResultT")
RequestT = TypeVar("RequestT", bound=ApiRequest)
log = logging.getLogger(__name__)


def create_app(models: ServedModels, options: ServerOptions) -> FastAPI:
    """Return the FastAPI application that serves `models`, and starts and stops the engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        await models.stop(options.drain)

    app = FastAPI(
        title="foretoken",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    routes = Routes(models, options)
    routes.add_routes(app)
    paths = app.openapi()["paths"]
    access = AccessPolicy(options.api_key, options.max_body, options.max_media)
    app.add_middleware(
        AccountingMiddleware,
        metrics=routes.metrics,
        is_known_path=paths.__contains__,
        access=access,
    )
    if options.allowed_origin:  # outermost, as browsers send preflight requests without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origin,
            allow_headers=["*"],
            allow_methods=["GET", "POST"],
        )
    return app


class Routes:
    """The handlers of all routes; `add_routes` registers them."""

    def __init__(self, models: ServedModels, options: ServerOptions) -> None:
        self.served_models, self.options = models, options
        self.metrics = Metrics(models.base, vllm=options.metrics_compat == "vllm")
        self.media = MediaLoader(options.allowed_media_host, options.max_media)
        self.start_time = int(time())

    def add_routes(self, app: FastAPI) -> None:
        """Register every path and the error handlers."""
        keyed: dict[str, Any] = {
            "dependencies": [Depends(API_KEY_SCHEME)],
            "responses": ERROR_RESPONSES,
        }
        api = APIRouter(prefix="/v1", **keyed)
        api.post("/chat/completions", responses=STREAM_RESPONSES)(self.chat)
        api.post("/completions", responses=STREAM_RESPONSES)(self.completions)
        api.post("/responses", responses=STREAM_RESPONSES)(self.responses)
        for kind, answer in (
            (TranscriptionForm, self.transcriptions),
            (TranslationForm, self.translations),
        ):
            path = f"/audio/{answer.__name__}"
            api.post(path, responses=STREAM_RESPONSES, openapi_extra=describe_form(kind))(answer)
        api.get("/models")(self.models)
        api.get("/models/{name:path}")(self.model)
        api.get("/speculation")(self.speculation)
        app.include_router(api)
        app.post("/tokenize", **keyed)(self.tokenize)
        app.post("/detokenize", **keyed)(self.detokenize)
        app.get("/health", responses={503: {"description": "No engine is running."}})(self.health)
        app.get("/ready", responses={503: {"description": "No engine is ready."}})(self.readiness)
        app.get("/version")(self.version)
        app.get("/metrics", response_class=PlainTextResponse)(self.get_metrics)
        app.get("/", include_in_schema=False)(self.page)
        app.mount("/page", StaticFiles(directory=PAGE_DIRECTORY), "page")
        refusals = ApiError, RefusedRequest, UnavailableError, RequestValidationError, HTTPException
        for kind in refusals:
            app.add_exception_handler(kind, _answer_error)
        app.add_exception_handler(Exception, _answer_bug)

    async def chat(self, request: Request, body: ChatCompletionRequest) -> Response:
        return await self._generate(request, body, ChatAnswer)

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        return await self._generate(request, body, ResponseAnswer)

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        return await self._generate(request, body, CompletionAnswer)

    async def transcriptions(self, request: Request) -> Response:
        return await self._transcribe(request, TranscriptionForm)

    async def translations(self, request: Request) -> Response:
        return await self._transcribe(request, TranslationForm)

    async def _transcribe(self, request: Request, kind: type[TranslationForm]) -> Response:
        try:
            fields = await parse_form(request, kind)
        except ClientDisconnect:
            raise ApiError(499, "the client disconnected") from None
        engine = self._choose_engine(request, fields)
        fields.require()
        if engine.info is not None and not engine.info.transcribes:
            problem = f"{request.state.model} does not transcribe speech; see the reason at the "
            remedy = "start of the server's log, or serve a speech model such as Whisper"
            raise BadRequestError(problem + remedy, "model")
        stream = TranscriptionStream(engine, fields.to_engine(self.options.gamma))
        if fields.is_streaming:
            return EventStream(fields, stream, stream_events(stream))
        async with stream:
            body = fields.build_body(await _run_unless_disconnected(request, stream.collect()))
        return PlainTextResponse(body) if isinstance(body, str) else JSONResponse(body)

    async def tokenize(self, request: Request, body: TokenizeRequest) -> dict[str, Any]:
        engine, options = self._choose_engine(request, body), self.options
        (prompt,) = await self._load_media(engine, body, [body.prompt_or_messages])
        if body.prompt is None:
            self._require_template(engine, "messages")
        answer = await engine.ask(
            "tokenize",
            prompt=prompt,
            template=None if body.messages is None else options.chat_template,
            chat_template_kwargs=body.template_variables,
            texts=body.return_token_strs,
        )
        return answer | {
            "count": len(answer["tokens"]),
            "max_model_len": _get_context_length(engine),
        }

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> dict[str, Any]:
        engine = self._choose_engine(request, body)
        return {"prompt": await engine.ask("detokenize", tokens=body.tokens)}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [*map(self._describe_model, self.served_models.engines)]}

    async def model(self, name: str) -> dict[str, Any]:
        self._get_engine(name)
        return self._describe_model(name)

    async def speculation(self, model: str | None = None) -> dict[str, Any]:
        name = self.served_models.base if model is None else model
        engine = self._get_engine(name)
        statistics = engine.statistics
        info, question = (
            engine.info,
            {"alpha": statistics.alpha, "made": dict(statistics.steps_by_drafted)},
        )
        costs, rates = await engine.ask("speculation", **question), statistics.compute_rates()
        assert info is not None  # because the engine has answered
        return {
            "model": name,
            **{each: getattr(info, each) for each in PUBLIC_FACTS},
            "chat": info.chat or self.options.chat_template is not None,
            "temperature": info.suggested["temperature"],
            **rates,
            **costs,
            "gamma": "automatic" if self.options.gamma is None else self.options.gamma,
            "active": info.draft is not None and rates["active"] is not False,
            "running": engine.running,
            "waiting": engine.waiting,
        }

    async def health(self) -> Response:
        """Return 200 if every model has an engine that runs, loads for the first time or drains;
        503 if a model has no such engine, for example while its dead engine restarts."""
        served, info = self.served_models, self.served_models.engines[self.served_models.base].info
        healthy = served.state in ("ready", "loading", "draining")
        health = {
            "status": served.state,
            "engine": None if info is None else info.pid,
            "engines": served.states,
            "models": {name: engine.state for name, engine in served.engines.items()},
        }
        return JSONResponse(health, 200 if healthy else 503)

    async def readiness(self) -> Response:
        """Return 200 if every model accepts requests now, else 503."""
        state = self.served_models.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    async def get_metrics(self) -> Response:
        text = self.metrics.render(self.served_models.engines)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        return FileResponse(PAGE_DIRECTORY / "index.html")

    def _get_engine(self, name: str) -> AnyEngine:
        """Return the engine of a model. Raises ApiError if the model is not served."""
        engines = self.served_models.engines
        if name not in engines:
            names = ", ".join(map(repr, engines))
            message = f"the model {name[:80]!r} is not served here; give one of {names}"
            raise ApiError(404, message, "model", "model_not_found")
        return engines[name]

    def _require_template(self, engine: AnyEngine, field: str | None) -> None:
        info = engine.info
        if self.options.chat_template is None and info and not info.chat:
            if info.transcribes:
                problem = "the model has no chat template, it transcribes speech; send a file to "
                raise BadRequestError(problem + "/v1/audio/transcriptions", "model")
            raise BadRequestError(
                "the model has no chat template; start the server with --chat-template FILE, or "
                "send a prompt to /v1/completions",
                field,
            )

    def _choose_engine(self, request: Request, body: Body) -> AnyEngine:
        """Return the engine of the model that a body names. Store the model's name and the body in
        the request's state, for error messages. Raises ApiError if the model is not served."""
        request.state.request_body = body
        name = self.served_models.base if body.model is None else body.model
        engine = self._get_engine(name)
        request.state.model = name
        return engine

    def _describe_model(self, name: str) -> dict[str, Any]:
        base = self.served_models.base
        return {
            "id": name,
            "object": "model",
            "created": self.start_time,
            "owned_by": "foretoken",
            "parent": None if name == base else base,  # as vLLM reports adapters
            "max_model_len": _get_context_length(self._get_engine(name)),
        }

    async def _load_media(
        self, engine: AnyEngine, body: Body, prompts: Sequence[Prompt]
    ) -> list[Prompt]:
        """Return the prompts after replacing the images and audio in their messages by bytes."""
        if engine.info is None:
            raise UnavailableError("the model is loading", 2)
        kinds = engine.info.media
        return await self.media.load(prompts, kinds, body.find_field("prompt"))

    async def _start_generation(self, request: Request, body: ApiRequest) -> Generation:
        """Return a Generation of a request's outputs; `async with` starts to generate the outputs.
        Raises ApiError if the request exceeds the server's limits."""
        engine, options = self._choose_engine(request, body), self.options
        prompts, n, info = body.prompts, body.n or 1, engine.info
        if body.uses_chat_template:
            self._require_template(engine, body.find_field("prompt"))
        if len(prompts) * n > options.max_texts:
            raise BadRequestError(
                f"the request asks for {len(prompts) * n} outputs, at most {options.max_texts} are "
                "allowed; split the request",
                "n" if len(prompts) == 1 else body.find_field("prompt"),
            )
        if options.max_tokens is not None and (body.max_new_tokens or 0) > options.max_tokens:
            name = body.find_field("max_new_tokens")
            message = f"{name} is {body.max_new_tokens}, but this server generates at most "
            raise BadRequestError(f"{message}{options.max_tokens} tokens; lower {name}", name)
        prompts = await self._load_media(engine, body, prompts)
        first = body.to_engine(prompts[0], info.suggested if info else {}, info and info.replies)
        first = replace(
            first,
            chat_template=options.chat_template if body.uses_chat_template else None,
            default_new_tokens=options.max_tokens,
            gamma=options.gamma if first.gamma is None else first.gamma,
            cache_salt=f"{request.state.salt}{first.cache_salt}",
        )
        generation = Generation(engine, expand(first, prompts, n), n)
        request.state.generation = generation
        return generation

    async def _generate(
        self, request: Request, body: RequestT, kind: type[Answer[RequestT]]
    ) -> Response:
        """Return the answer as JSON or as server-sent events. Unfinished outputs are aborted when
        the answer ends or the client disconnects."""
        generation = await self._start_generation(request, body)
        info = self._get_engine(request.state.model).info
        answer = kind(body, request.state.model, generation, info and info.replies)
        if body.stream:
            return EventStream(body, generation, answer.stream_events())
        async with generation:
            await _run_unless_disconnected(request, generation.collect())
            return JSONResponse(answer.build_body())


class EventStream(StreamingResponse):
    """Response that streams `events` as server-sent events within `async with work`, so that `work`
    ends when the stream ends or the client disconnects."""

    def __init__(
        self, body: Body, work: AbstractAsyncContextManager[Any], events: AsyncGenerator[str]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._write(), media_type="text/event-stream", headers=headers)
        self.request_body, self.work, self.events = body, work, events
        self.status = 499  # the client disconnected; `_write` sets another status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.work:  # a refusal is raised here, before anything is sent
            try:
                await super().__call__(scope, receive, send)
            finally:
                scope["state"]["status"] = self.status

    async def _write(self) -> AsyncGenerator[str]:
        """Yield the events. An error becomes the last event, because status 200 has already been
        sent."""
        try:
            async for event in self.events:
                yield event
            self.status = 200
        except (RefusedRequest, UnavailableError) as error:
            refusal = to_api_error(error, self.request_body)
            self.status = refusal.status
            yield answers.format_event(refusal.body)


def _get_context_length(engine: AnyEngine) -> int | None:
    """Return the maximum number of prompt and output tokens; None while the model loads."""
    return None if engine.info is None else engine.info.context


async def _run_unless_disconnected(request: Request, work: Awaitable[ResultT]) -> ResultT:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise
    ApiError (499)."""
    working, leaving = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(_wait_for_disconnect(request)),
    )
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client disconnected")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: Exception) -> Response:
    path, headers = request.url.path[:200], {}
    match error:
        case ApiError():
            refusal = error
        case RequestValidationError():
            refusal = make_validation_error(error.errors())
        case HTTPException(status_code=400, __cause__=Exception() as cause):  # invalid JSON
            refusal = BadRequestError(f"the body is not valid JSON: {explain_unreadable(cause)}")
        case HTTPException(status_code=status, detail=detail):
            paths = {404: f"there is no {path}", 405: f"{path} does not support {request.method}"}
            refusal = ApiError(status, paths.get(status, detail))
            headers = dict(error.headers or {})
        case _:
            refusal = to_api_error(error, getattr(request.state, "request_body", None))
    return JSONResponse(refusal.body, refusal.status, headers | refusal.headers)


async def _answer_bug(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return JSONResponse(ApiError(500, "the server failed; see its log").body, 500)
