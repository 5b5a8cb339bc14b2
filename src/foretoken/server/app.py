"""The routes, put together: `foretoken serve` hands them its engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from foretoken.server.accounting import Accounting, Metrics
from foretoken.server.api import answers
from foretoken.server.api.answers import Answer
from foretoken.server.api.chat import Chat, ChatAnswer
from foretoken.server.api.completions import Echo, Text, TextAnswer
from foretoken.server.api.conversation import turns
from foretoken.server.api.errors import ApiError, BadRequestError, api_error
from foretoken.server.api.responses import ResponseAnswer, Responses
from foretoken.server.api.wire import ApiRequest, Detokenize, T, Tokenize, read
from foretoken.server.document import STATES, errors, post
from foretoken.server.limits import Gate, require
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import RefusedRequest, UnavailableError
from foretoken.server.process.fleet import Engines
from foretoken.server.process.generation import Generation, several
from foretoken.server.process.messages import TokenLogprob

VERSION = version("foretoken")
PAGE = Path(__file__).parent / "page"
log = logging.getLogger(__name__)


def make(engine: Engines, options: ServerOptions) -> FastAPI:
    """Return the application."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop(options.drain)

    app = FastAPI(
        title="foretoken",
        version=VERSION,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )
    routes = Routes(engine, options)
    routes.route(app)
    paths = {route.path for route in app.routes if isinstance(route, APIRoute)}
    app.add_middleware(Gate, options=options)
    app.add_middleware(Accounting, metrics=routes.metrics, known=paths.__contains__)
    if options.allowed_origin:  # around the gate: what browsers ask beforehand comes without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origin,
            allow_headers=["*"],
            allow_methods=["GET", "POST"],
        )
    return app


class Routes:
    """The answers to every route."""

    def __init__(self, engine: Engines, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.metrics = Metrics(options.name, vllm=options.metrics_compat == "vllm")
        self.began = int(time())

    def route(self, app: FastAPI) -> None:
        """Every path, and what becomes of errors."""
        app.post("/v1/chat/completions", **post(Chat, streams=True))(self.chat)
        app.post("/v1/completions", **post(Text, streams=True))(self.completions)
        app.post("/v1/responses", **post(Responses, streams=True))(self.responses)
        app.post("/tokenize", **post(Tokenize))(self.tokenize)
        app.post("/detokenize", **post(Detokenize))(self.detokenize)
        app.get("/v1/models", responses=errors(401))(self.models)
        app.get("/v1/models/{name:path}", responses=errors(401, 404))(self.model)
        app.get("/v1/speculation", responses=errors(401, 500, 503))(self.speculation)
        app.get("/health", responses=STATES)(self.health)
        app.get("/ready", responses=STATES)(self.ready)
        app.get("/version")(self.version)
        app.get("/metrics", response_class=PlainTextResponse)(self.numbers)
        app.get("/", include_in_schema=False)(self.page)
        app.mount("/page", StaticFiles(directory=PAGE), "page")
        app.add_exception_handler(ApiError, _told)
        app.add_exception_handler(RefusedRequest, _told)
        app.add_exception_handler(UnavailableError, _told)
        app.add_exception_handler(HTTPException, _missing)
        app.add_exception_handler(ClientDisconnect, _gone_already)
        app.add_exception_handler(Exception, _broken)

    async def chat(self, request: Request) -> Response:
        asked = await self._read(request, Chat)
        generation = self._generation(request, asked)
        return await self._answer(request, ChatAnswer(asked, self.options.name, generation))

    async def responses(self, request: Request) -> Response:
        asked = await self._read(request, Responses)
        generation = self._generation(request, asked)
        return await self._answer(request, ResponseAnswer(asked, self.options.name, generation))

    async def completions(self, request: Request) -> Response:
        asked = await self._read(request, Text)
        generation = self._generation(request, asked)
        echoes = [await self._echo(asked, prompt) for prompt in asked.prompts]
        answer = TextAnswer(asked, self.options.name, generation, echoes)
        return await self._answer(request, answer)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = await self._read(request, Tokenize)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequestError("give prompt or messages, one of them", "prompt")
        prompt, template = body.prompt, None
        if body.messages is not None:
            prompt, template = turns(body.messages, "messages"), self._template("messages")
        answer = await self.engine.ask(
            "tokenize",
            prompt=prompt,
            chat_template=template,
            chat_template_kwargs=body.chat_template_kwargs,
            texts=body.return_token_strs,
        )
        return answer | {
            "count": len(answer["tokens"]),
            "max_model_len": self._context,
        }

    async def detokenize(self, request: Request) -> dict[str, Any]:
        body = await self._read(request, Detokenize)
        return {"prompt": await self.engine.ask("detokenize", tokens=body.tokens)}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._require_model(name)
        return self._model()

    async def speculation(self) -> dict[str, Any]:
        answer = await self.engine.ask("speculation")
        info = self.engine.info
        assert info is not None  # it has answered
        names = ("target", "draft", "runtime", "draft_runtime", "dtype", "context", "vocab_size")
        facts = {name: getattr(info, name) for name in (*names, "chat", "text")}
        facts |= {"temperature": info.suggested["temperature"], "max_rows": info.max_rows}
        if self.options.chat_template is not None:
            facts["chat"] = True
        answer["gamma"] = "automatic" if self.options.gamma is None else self.options.gamma
        return (
            facts
            | answer
            | {"active": facts["draft"] is not None and answer["active"] is not False}
        )

    async def health(self) -> Response:
        """Answer 200 where there is an engine, or the first one loads; 503 while one that died is
        started again."""
        good = self.engine.state in ("ready", "loading", "draining")
        health = {
            "status": self.engine.state,
            "engine": None if self.engine.info is None else self.engine.info.pid,
        }
        health |= {"engines": self.engine.states}
        return JSONResponse(health, 200 if good else 503)

    async def ready(self) -> Response:
        """Answer 200 where requests are taken now."""
        return JSONResponse(
            {"status": self.engine.state}, 200 if self.engine.state == "ready" else 503
        )

    async def version(self) -> dict[str, str]:
        return {"version": VERSION}

    async def numbers(self) -> Response:
        return Response(self.metrics.text(self.engine), media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        return FileResponse(PAGE / "index.html")

    async def _read(self, request: Request, kind: type[T]) -> T:
        raw = await request.body()
        try:
            document = json.loads(raw, parse_constant=_refuse)
            if b"\\u" in raw:  # halves of characters are no text
                json.dumps(document, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            reason = str(error).encode(errors="replace").decode()
            raise BadRequestError(f"the body is no JSON: {reason}"[:200]) from None
        body = request.state.asked = read(kind, document)
        model = getattr(body, "model", None)
        if model is not None:
            self._require_model(model)
        return body

    @property
    def _suggested(self) -> dict[str, Any]:
        """The generation config's values for what a request leaves out."""
        return {} if self.engine.info is None else self.engine.info.suggested

    @property
    def _context(self) -> int | None:
        return None if self.engine.info is None else self.engine.info.context

    def _require_model(self, name: str) -> None:
        served = self.options.name
        if name != served:
            raise ApiError(
                404,
                f"the model {name[:80]!r} is not served here; {served!r} is",
                "model",
                "model_not_found",
            )

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.options.name,
            "object": "model",
            "created": self.began,
            "owned_by": "foretoken",
            "max_model_len": self._context,
        }

    async def _echo(self, asked: Text, prompt: str | list[int]) -> Echo:
        """Return what is told again of a prompt."""
        if not asked.echo:
            return Echo()
        ask, first = self.engine.ask, list[TokenLogprob]()
        text = prompt if isinstance(prompt, str) else await ask("detokenize", tokens=prompt)
        if asked.logprobs is not None:
            answer = await ask("tokenize", prompt=prompt, texts=True)
            first = [
                TokenLogprob(word, word.encode(), 0.0, [], 0, 0)
                for word in answer["token_strs"][:1]
            ]
        return Echo(text, tuple(first))

    def _template(self, field: str) -> str | None:
        """Return the server's own chat template; None for the model's. BadRequestError where there
        is neither."""
        template, info = self.options.chat_template, self.engine.info
        if template is None and info is not None and not info.chat:
            raise BadRequestError(
                "the model has no chat template; start the server with --chat-template FILE, or "
                "send a text to /v1/completions",
                field,
            )
        return template

    def _generation(self, request: Request, asked: ApiRequest) -> Generation:
        """Return the texts that are asked for, within the server's limits."""
        prompts, n, options = asked.prompts, asked.candidates, self.options
        first = asked.to_engine(prompts[0], self._suggested)
        template = None if asked.template_field is None else self._template(asked.template_field)
        name = asked.param("max_new_tokens") or "max_tokens"
        require(options, len(prompts) * n, asked.max_new_tokens, name)
        first = replace(
            first,
            chat_template=template,
            most_tokens=options.max_tokens,
            gamma=options.gamma if first.gamma is None else first.gamma,
            cache_salt=f"{request.state.salt}{first.cache_salt}",
        )
        generation = Generation(self.engine, several(first, prompts, n), n)
        request.state.generation = generation
        return generation

    async def _answer(self, request: Request, answer: Answer[Any]) -> Response:
        """Return the answer, whole or as server-sent events. What still runs is freed with its end,
        and when the client is gone."""
        if answer.asked.stream:
            return Events(answer)
        async with answer.generation as generation:
            await _unless_gone(request, generation.all())
            return JSONResponse(answer.body())


class Events(StreamingResponse):
    """Server-sent events of one request, whose texts end with them."""

    def __init__(self, answer: Answer[Any]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._told(), media_type="text/event-stream", headers=headers)
        self.answer, self.status = answer, 499  # the client is gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.answer.generation:  # may raise, before anything is sent
            try:
                await super().__call__(scope, receive, send)
            finally:
                scope["state"]["status"] = self.status

    async def _told(self) -> AsyncGenerator[str]:
        """Yield the events, and what breaks them off, which comes too late for a status."""
        try:
            async for event in self.answer.events():
                yield event
            self.status = 200
        except (RefusedRequest, UnavailableError) as error:
            refusal = api_error(error, self.answer.asked)
            self.status = refusal.status
            yield answers.event(refusal.body)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> None:
    """Wait for the work, or break it off when the client is gone."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "the client is gone")
        doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number")


async def _told(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        refusal = error
    else:
        refusal = api_error(error, getattr(request.state, "asked", None))
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


async def _missing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    message = (
        f"{path} does not take {request.method}"
        if error.status_code == 405
        else f"there is no {path}"
    )
    headers = dict(error.headers or {})
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, headers)


async def _gone_already(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads


async def _broken(request: Request, error: Exception) -> Response:
    log.error("an answer failed", exc_info=error)
    return JSONResponse(ApiError(500, "the server failed; its log says how").body, 500)
