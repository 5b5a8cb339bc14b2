"""Errors as OpenAI's clients read them: a body with message, type, param and code, and a status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.server.process.client import RefusedRequest, UnavailableError

if TYPE_CHECKING:
    from foretoken.server.api.wire import Wire

STATUS = {"input": 400, "refused": 400, "length": 400, "busy": 429, "failed": 500, "dead": 503}
CODES = {
    "length": "context_length_exceeded",
    "busy": "queue_full",
    "failed": "engine_failed",
    "dead": "engine_stopped",
}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.after = after  # seconds until it is worth another try

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.after is None else {"Retry-After": str(self.after)}


class BadRequestError(ApiError):
    """A value that is not honoured."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, param)


def api_error(error: Exception, asked: Wire | None = None) -> ApiError:
    """Return what the engine's refusal, or its absence, means to a client; `asked`: its request."""
    if isinstance(error, UnavailableError):
        return ApiError(503, error.message, code="unavailable", after=error.after)
    assert isinstance(error, RefusedRequest)
    after = {"busy": 1, "dead": 5}.get(error.kind)
    param = None if asked is None or error.option is None else asked.param(error.option)
    return ApiError(STATUS[error.kind], error.message, param, CODES.get(error.kind), after)
