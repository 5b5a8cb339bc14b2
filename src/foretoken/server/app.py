"""The routes, put together: `foretoken serve` hands them its engines."""

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

from foretoken.server.access import Access
from foretoken.server.accounting import Accounting, Metrics
from foretoken.server.api import answers
from foretoken.server.api.answers import Answer
from foretoken.server.api.chat import Chat, ChatAnswer
from foretoken.server.api.completions import Text, TextAnswer
from foretoken.server.api.errors import (
    DOCUMENTED,
    ApiError,
    BadRequestError,
    api_error,
    invalid,
    unreadable,
)
from foretoken.server.api.responses import ResponseAnswer, Responses
from foretoken.server.api.tokens import Detokenize, Tokenize
from foretoken.server.api.transcriptions import (
    Transcribing,
    TranscriptionStream,
    Translate,
    documented,
    events,
    form,
)
from foretoken.server.api.wire import ApiRequest, Body
from foretoken.server.media import MediaReader
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import RefusedRequest, UnavailableError
from foretoken.server.process.fleet import Engines, ServedModels
from foretoken.server.process.generation import Generation, expand
from foretoken.server.process.messages import Prompt

VERSION = version("foretoken")
PUBLIC_FACTS = (
    *("target", "draft", "runtime", "draft_runtime", "dtype", "context", "vocab_size", "text"),
    *("max_rows", "media", "transcribes"),
)
PAGE = Path(__file__).parent / "page"
STREAM: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}
KEY = HTTPBearer(auto_error=False)  # for the document: `Access` has looked at it already
T = TypeVar("T")
A = TypeVar("A", bound=ApiRequest)
log = logging.getLogger(__name__)


def make(models: ServedModels, options: ServerOptions) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        await models.stop(options.drain)

    app = FastAPI(
        title="foretoken",
        version=VERSION,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    routes = Routes(models, options)
    routes.route(app)
    paths = app.openapi()["paths"]
    access = Access(options.api_key, options.max_body, options.max_media)
    app.add_middleware(Accounting, metrics=routes.metrics, known=paths.__contains__, access=access)
    if options.allowed_origin:  # what browsers ask beforehand comes without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origin,
            allow_headers=["*"],
            allow_methods=["GET", "POST"],
        )
    return app


class Routes:
    """The answers to every route."""

    def __init__(self, models: ServedModels, options: ServerOptions) -> None:
        self.served, self.options = models, options
        self.metrics = Metrics(models.base, vllm=options.metrics_compat == "vllm")
        self.media = MediaReader(options.allowed_media_host, options.max_media)
        self.began = int(time())

    def route(self, app: FastAPI) -> None:
        """Every path, and what becomes of errors."""
        keyed: dict[str, Any] = {"dependencies": [Depends(KEY)], "responses": DOCUMENTED}
        api = APIRouter(prefix="/v1", **keyed)
        api.post("/chat/completions", responses=STREAM)(self.chat)
        api.post("/completions", responses=STREAM)(self.completions)
        api.post("/responses", responses=STREAM)(self.responses)
        for kind, answer in ((Transcribing, self.transcriptions), (Translate, self.translations)):
            path = f"/audio/{answer.__name__}"
            api.post(path, responses=STREAM, openapi_extra=documented(kind))(answer)
        api.get("/models")(self.models)
        api.get("/models/{name:path}")(self.model)
        api.get("/speculation")(self.speculation)
        app.include_router(api)
        app.post("/tokenize", **keyed)(self.tokenize)
        app.post("/detokenize", **keyed)(self.detokenize)
        app.get("/health", responses={503: {"description": "There is no engine now."}})(self.health)
        app.get("/ready", responses={503: {"description": "There is no engine now."}})(self.ready)
        app.get("/version")(self.version)
        app.get("/metrics", response_class=PlainTextResponse)(self.numbers)
        app.get("/", include_in_schema=False)(self.page)
        app.mount("/page", StaticFiles(directory=PAGE), "page")
        refusals = ApiError, RefusedRequest, UnavailableError, RequestValidationError, HTTPException
        for kind in refusals:
            app.add_exception_handler(kind, _answer_error)
        app.add_exception_handler(Exception, _answer_bug)

    async def chat(self, request: Request, asked: Chat) -> Response:
        return await self._generate(request, asked, ChatAnswer)

    async def responses(self, request: Request, asked: Responses) -> Response:
        return await self._generate(request, asked, ResponseAnswer)

    async def completions(self, request: Request, asked: Text) -> Response:
        return await self._generate(request, asked, TextAnswer)

    async def transcriptions(self, request: Request) -> Response:
        return await self._transcribe(request, Transcribing)

    async def translations(self, request: Request) -> Response:
        return await self._transcribe(request, Translate)

    async def _transcribe(self, request: Request, kind: type[Translate]) -> Response:
        try:
            asked = await form(request, kind)
        except ClientDisconnect:
            raise ApiError(499, "the client is gone") from None
        engine = self._chosen(request, asked)
        asked.require()
        if engine.info is not None and not engine.info.transcribes:
            problem = f"{request.state.model} writes no speech down as it is served; the server's "
            remedy = "log says why at its start, else serve a Whisper, or the like"
            raise BadRequestError(problem + remedy, "model")
        stream = TranscriptionStream(engine, asked.to_engine(self.options.gamma))
        if asked.streams:
            return Events(asked, stream, events(stream))
        async with stream:
            body = asked.body(await _unless_gone(request, stream.all()))
        return PlainTextResponse(body) if isinstance(body, str) else JSONResponse(body)

    async def tokenize(self, request: Request, asked: Tokenize) -> dict[str, Any]:
        engine, options = self._chosen(request, asked), self.options
        (prompt,) = await self._with_media(engine, asked, [asked.written])
        if asked.prompt is None:
            self._require_template(engine, "messages")
        answer = await engine.ask(
            "tokenize",
            prompt=prompt,
            template=None if asked.messages is None else options.chat_template,
            chat_template_kwargs=asked.variables,
            texts=asked.return_token_strs,
        )
        return answer | {"count": len(answer["tokens"]), "max_model_len": _context(engine)}

    async def detokenize(self, request: Request, asked: Detokenize) -> dict[str, Any]:
        engine = self._chosen(request, asked)
        return {"prompt": await engine.ask("detokenize", tokens=asked.tokens)}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [*map(self._model, self.served.engines)]}

    async def model(self, name: str) -> dict[str, Any]:
        self._engine(name)
        return self._model(name)

    async def speculation(self, model: str | None = None) -> dict[str, Any]:
        name = self.served.base if model is None else model
        engine = self._engine(name)
        statistics = engine.statistics
        info, asked = engine.info, {"alpha": statistics.alpha, "made": dict(statistics.made)}
        costs, rates = await engine.ask("speculation", **asked), statistics.rates()
        assert info is not None  # of an engine that was asked
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
        """Answer 200 where every model has an engine, or its first one loads; 503 while one that
        died is started again."""
        served, info = self.served, self.served.engines[self.served.base].info
        good = served.state in ("ready", "loading", "draining")
        health = {
            "status": served.state,
            "engine": None if info is None else info.pid,
            "engines": served.states,
            "models": {name: engine.state for name, engine in served.engines.items()},
        }
        return JSONResponse(health, 200 if good else 503)

    async def ready(self) -> Response:
        """Answer 200 where requests are taken now, whatever model they name."""
        state = self.served.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    async def numbers(self) -> Response:
        text = self.metrics.text(self.served.engines)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        return FileResponse(PAGE / "index.html")

    def _engine(self, name: str) -> Engines:
        """Return the engine of a model. ApiError for a name that is not served."""
        engines = self.served.engines
        if name not in engines:
            names = ", ".join(map(repr, engines))
            verb = "is" if len(engines) == 1 else "are"
            message = f"the model {name[:80]!r} is not served here; {names} {verb}"
            raise ApiError(404, message, "model", "model_not_found")
        return engines[name]

    def _require_template(self, engine: Engines, field: str | None) -> None:
        info = engine.info
        if self.options.chat_template is None and info and not info.chat:
            if info.transcribes:
                problem = "the model has no chat template; it writes speech down: send a file to "
                raise BadRequestError(problem + "/v1/audio/transcriptions", "model")
            raise BadRequestError(
                "the model has no chat template; start the server with --chat-template FILE, or "
                "send a text to /v1/completions",
                field,
            )

    def _chosen(self, request: Request, asked: Body) -> Engines:
        """Return the engine that a body asks for, and note both: the body, for errors about it, and
        the model's name."""
        request.state.asked = asked
        name = self.served.base if asked.model is None else asked.model
        engine = self._engine(name)
        request.state.model = name
        return engine

    def _model(self, name: str) -> dict[str, Any]:
        base = self.served.base
        return {
            "id": name,
            "object": "model",
            "created": self.began,
            "owned_by": "foretoken",
            "parent": None if name == base else base,  # as vLLM tells of adapters
            "max_model_len": _context(self._engine(name)),
        }

    async def _with_media(
        self, engine: Engines, asked: Body, prompts: Sequence[Prompt]
    ) -> list[Prompt]:
        """Return prompts with the bytes of their pictures and sounds."""
        if engine.info is None:
            raise UnavailableError("the model is loading", 2)
        kinds = engine.info.media
        return await self.media.read(prompts, kinds, asked.param("prompt"))

    async def _generation(self, request: Request, asked: ApiRequest) -> Generation:
        """Return the texts that are asked for, within the server's limits."""
        engine, options = self._chosen(request, asked), self.options
        prompts, n, info = asked.prompts, asked.n or 1, engine.info
        if asked.templated:
            self._require_template(engine, asked.param("prompt"))
        if len(prompts) * n > options.max_texts:
            raise BadRequestError(
                f"the request asks for {len(prompts) * n} texts, at most {options.max_texts} go",
                "n" if len(prompts) == 1 else asked.param("prompt"),
            )
        if options.max_tokens is not None and (asked.max_new_tokens or 0) > options.max_tokens:
            name = asked.param("max_new_tokens")
            message = f"{name} is {asked.max_new_tokens}, this server writes at most "
            raise BadRequestError(f"{message}{options.max_tokens}", name)
        prompts = await self._with_media(engine, asked, prompts)
        first = asked.to_engine(prompts[0], info.suggested if info else {}, info and info.replies)
        first = replace(
            first,
            chat_template=options.chat_template if asked.templated else None,
            default_new_tokens=options.max_tokens,
            gamma=options.gamma if first.gamma is None else first.gamma,
            cache_salt=f"{request.state.salt}{first.cache_salt}",
        )
        generation = Generation(engine, expand(first, prompts, n), n)
        request.state.generation = generation
        return generation

    async def _generate(self, request: Request, asked: A, kind: type[Answer[A]]) -> Response:
        """Return the answer, whole or as server-sent events. Outputs that still run are aborted
        at its end, and when the client is gone."""
        generation = await self._generation(request, asked)
        info = self._engine(request.state.model).info
        answer = kind(asked, request.state.model, generation, info and info.replies)
        if asked.stream:
            return Events(asked, generation, answer.events())
        async with generation:
            await _unless_gone(request, generation.all())
            return JSONResponse(answer.body())


class Events(StreamingResponse):
    """Server-sent events of one request, whose work ends with them."""

    def __init__(
        self, asked: Body, work: AbstractAsyncContextManager[Any], events: AsyncGenerator[str]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._write(), media_type="text/event-stream", headers=headers)
        self.asked, self.work, self.events = asked, work, events
        self.status = 499  # the client is gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.work:  # may raise, before anything is sent
            try:
                await super().__call__(scope, receive, send)
            finally:
                scope["state"]["status"] = self.status

    async def _write(self) -> AsyncGenerator[str]:
        """Yield the events, and what breaks them off, which comes too late for a status."""
        try:
            async for event in self.events:
                yield event
            self.status = 200
        except (RefusedRequest, UnavailableError) as error:
            refusal = api_error(error, self.asked)
            self.status = refusal.status
            yield answers.event(refusal.body)


def _context(engine: Engines) -> int | None:
    """Return the tokens that prompt and output may have; None while unknown."""
    return None if engine.info is None else engine.info.context


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work, or cancel it when the client is gone."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "the client is gone")
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that is not honoured."""
    path, headers = request.url.path[:200], {}
    match error:
        case ApiError():
            refusal = error
        case RequestValidationError():
            refusal = invalid(error.errors())
        case HTTPException(status_code=400, __cause__=Exception() as cause):  # of the body
            refusal = BadRequestError(f"the body is not valid JSON: {unreadable(cause)}")
        case HTTPException(status_code=status, detail=detail):
            paths = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
            refusal = ApiError(status, paths.get(status, detail))
            headers = dict(error.headers or {})
        case _:
            refusal = api_error(error, getattr(request.state, "asked", None))
    return JSONResponse(refusal.body, refusal.status, headers | refusal.headers)


async def _answer_bug(request: Request, error: Exception) -> Response:
    log.error("an answer failed", exc_info=error)
    return JSONResponse(ApiError(500, "the server failed; its log says how").body, 500)
