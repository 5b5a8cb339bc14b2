"""Limits of a request, and keys of those who may send one; both before its body is looked at."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.api.errors import ApiError, BadRequestError
from foretoken.server.options import ServerOptions

OPEN = ("/health", "/ready", "/version", "/metrics", "/", "/page/")  # need no key


def require(options: ServerOptions, texts: int, tokens: int | None, name: str) -> None:
    """Raise BadRequestError for more texts, or more new tokens of a text (asked for by the field of
    that name), than the server allows."""
    if texts > options.max_texts:
        raise BadRequestError(
            f"the request asks for {texts} texts, at most {options.max_texts} go", "n"
        )
    if options.max_tokens is not None and tokens is not None and tokens > options.max_tokens:
        raise BadRequestError(
            f"{name} is {tokens}, this server writes at most {options.max_tokens}", name
        )


def salt(keys: tuple[str, ...], scope: Scope) -> str | None:
    """Return the cache salt of the client's key, so that clients never share cached prefixes; None
    for an invalid key. Without any keys, everybody is served."""
    if not keys:
        return ""
    scheme, _, key = header(scope, b"authorization").partition(" ")
    token = key.encode("latin-1") if scheme.lower() == "bearer" else b""
    same = [hmac.compare_digest(token, key.encode()) for key in keys]  # all, always
    return hashlib.sha256(token).hexdigest() if any(same) else None


class Gate:
    """Middleware around the app: keys, and the size of a body."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app, self.options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._admit(scope)
            await self.app(scope, self._bounded(receive), send)
        except ApiError as error:
            await answer(error)(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        own_salt = salt(self.options.api_key, scope)
        scope["state"]["salt"] = own_salt or ""
        path: str = scope["path"]
        if own_salt is None and path not in OPEN and not path.startswith("/page/"):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = header(scope, b"content-length")
        if length.isdigit() and int(length) > self.options.max_body:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.options.max_body:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.options.max_body} bytes; send less")


def answer(error: ApiError) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(error.body, error.status, error.headers)


def header(scope: Scope, name: bytes) -> str:
    """Return a header's value; "" where it is missing."""
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == name), "")
