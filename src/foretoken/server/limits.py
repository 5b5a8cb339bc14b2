"""What a request may take, and who may send one; before its body is looked at."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.api.errors import ApiError, BadRequestError

OPEN = ("/health", "/ready", "/version", "/metrics", "/", "/page/")  # need no key


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request."""

    body: int = 4_000_000  # bytes
    tokens: int | None = None  # new ones of a text; None: the context
    texts: int = 16  # of a request, of all its prompts

    def require(self, texts: int, tokens: int | None, name: str = "max_tokens") -> int | None:
        """New tokens of a text, as asked for (by the field of that name) or as these limits allow;
        BadRequestError beyond."""
        if texts > self.texts:
            raise BadRequestError(
                f"the request asks for {texts} texts, at most {self.texts} go", "n"
            )
        if self.tokens is not None and tokens is not None and tokens > self.tokens:
            raise BadRequestError(
                f"{name} is {tokens}, this server writes at most {self.tokens}", name
            )
        return tokens


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that are taken; without any, everybody is served."""

    keys: tuple[str, ...] = ()

    def salt(self, scope: Scope) -> str | None:
        """What keeps the prefixes of a key's holder apart; None for who may not ask."""
        if not self.keys:
            return ""
        scheme, _, key = _header(scope, b"authorization").partition(" ")
        token = key.encode("latin-1") if scheme.lower() == "bearer" else b""
        same = [hmac.compare_digest(token, key.encode()) for key in self.keys]  # all, always
        return hashlib.sha256(token).hexdigest() if any(same) else None


class Gate:
    """Around the app: keys, the size of a body, an id for every request; `answered` is told of
    each, and how many seconds it took."""

    def __init__(
        self, app: ASGIApp, limits: Limits, keys: Keys, answered: Callable[[Scope, float], None]
    ) -> None:
        self.app, self.limits, self.keys, self.answered = app, limits, keys, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = perf_counter()
        id = _header(scope, b"x-request-id")[:128] or uuid4().hex
        scope["state"]["id"] = id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["state"].setdefault("status", message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode("latin-1"))]
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, self._bounded(receive), named)
        except ApiError as error:
            await answer(error)(scope, receive, named)
        finally:
            self.answered(scope, perf_counter() - start)

    def _admit(self, scope: Scope) -> None:
        salt = self.keys.salt(scope)
        scope["state"]["salt"] = salt or ""
        path: str = scope["path"]
        if salt is None and path not in OPEN and not path.startswith("/page/"):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = _header(scope, b"content-length")
        if length.isdigit() and int(length) > self.limits.body:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.body:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.limits.body} bytes; send less")


def answer(error: ApiError) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(error.body, error.status, error.headers)


def _header(scope: Scope, name: bytes) -> str:
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == name), "")
