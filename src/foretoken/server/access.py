"""Access control: checks of the API key before a body is received, and limits on a body's size."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from foretoken.server.api.errors import ApiError

AUDIO_PATH_PREFIX = "/v1/audio/"  # endpoints that take forms with files
MAX_FORM_FIELDS_BYTES = 100_000  # limit for the fields of a form, in addition to its file
# Paths that need no API key; paths below /page/ do not need one either
PUBLIC_PATHS = ("/", "/health", "/ready", "/version", "/metrics")


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The accepted API keys (empty: every client is accepted) and the maximum size of a request's
    body.

    Attributes:
        keys: The API keys.
        max_body_bytes: Maximum bytes of a JSON body.
        max_file_bytes: Maximum bytes of the audio file in a form.
    """

    keys: tuple[str, ...] = ()
    max_body_bytes: int = 4_000_000
    max_file_bytes: int = 25_000_000

    def require(self, scope: Scope) -> None:
        """Raise ApiError if a request has no valid key, has a Content-Length above the limit, or
        has both Content-Length and Transfer-Encoding. Store the key's cache salt in the request's
        state."""
        headers, path = Headers(scope=scope), scope["path"]
        if "transfer-encoding" in headers and "content-length" in headers:
            # RFC 9112, 6.3: if a proxy used the other header, requests could be smuggled
            problem = "the request has Content-Length and Transfer-Encoding; send one of the two"
            raise ApiError(400, problem, closes=True)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        scope["state"]["salt"] = salt = self.get_cache_salt(
            key if scheme.lower() == "bearer" else ""
        )
        if salt is None and path not in PUBLIC_PATHS and not path.startswith("/page/"):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._get_limit(path):
            raise ApiError(413, self._describe_too_large(path))

    def get_cache_salt(self, key: str) -> str | None:
        """Return the cache salt of an API key: "" if the server has no keys, None if the key is
        invalid. Clients with different keys never share cached prefixes."""
        if not self.keys:
            return ""
        token = key.encode("latin-1")  # the encoding of headers
        # compare with all keys, so that the time does not reveal which key matches
        matches = [hmac.compare_digest(token, each.encode()) for each in self.keys]
        return hashlib.sha256(token).hexdigest() if any(matches) else None

    def limit_body(self, receive: Receive, path: str) -> Receive:
        """Wrap `receive` so that it raises HTTPException once the body exceeds the limit. This
        limits requests without Content-Length too."""
        size = 0

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._get_limit(path):
                # FastAPI would replace any other exception by an error of its own
                raise HTTPException(413, self._describe_too_large(path))
            return message

        return receive_counted

    def _get_limit(self, path: str) -> int:
        return (
            self.max_file_bytes + MAX_FORM_FIELDS_BYTES
            if path.startswith(AUDIO_PATH_PREFIX)
            else self.max_body_bytes
        )

    def _describe_too_large(self, path: str) -> str:
        allows = "--max-media allows" if path.startswith(AUDIO_PATH_PREFIX) else "--max-body allows"
        return f"the body is larger than the {self._get_limit(path)} bytes that {allows}; send less"
