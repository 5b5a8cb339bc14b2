"""Errors in OpenAI's format: an HTTP status, and a body with message, type, param and code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from foretoken.errors import describe_mismatch, to_one_line
from foretoken.server.process.client import RefusedRequest, UnavailableError

if TYPE_CHECKING:
    from foretoken.server.api.protocol import Body

STATUS_BY_KIND = {
    "input": 400,
    "refused": 400,
    "length": 400,
    "busy": 429,
    "failed": 500,
    "dead": 503,
}
CODE_BY_KIND = {
    "length": "context_length_exceeded",
    "busy": "queue_full",
    "failed": "engine_failed",
    "dead": "engine_stopped",
}
TYPE_BY_STATUS = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of an error response, for the OpenAPI document."""

    error: ErrorFields


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ErrorBody,
        "description": "The request is refused: 400, `param` names the invalid field; 401, the API "
        "key is missing or wrong; 404, the model or path is not served; 413, the body is too "
        "large; 429, the queue is full, retry after `Retry-After` seconds.",
    },
    "5XX": {
        "model": ErrorBody,
        "description": "500, a step failed; 503, no engine is running, retry after `Retry-After` "
        "seconds.",
    },
}


class ApiError(Exception):
    """An error that is answered with an HTTP status and a body in OpenAI's format.

    Attributes:
        status: The HTTP status.
        message: The error's text.
        param: The request's field that caused the error, if any.
        code: OpenAI's code of the error, if any.
        retry_after: Seconds until a retry is worthwhile; None: no `Retry-After` header.
        closes: True if the connection is closed after the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        *,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after
        self.closes = closes

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPE_BY_STATUS.get(
            self.status, "invalid_request_error" if self.status < 499 else "server_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"Connection": "close"} if self.closes else {})


class BadRequestError(ApiError):
    """Status 400: a field of the request, `param`, has an invalid or unsupported value."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, param)


def to_api_error(error: Exception, body: Body | None = None) -> ApiError:
    """Convert a RefusedRequest or UnavailableError to an ApiError. `body`: the request. The error's
    `param` is the field of `body` that set the invalid option."""
    if isinstance(error, UnavailableError):
        return ApiError(503, error.message, code="unavailable", retry_after=error.retry_after)
    assert isinstance(error, RefusedRequest)
    retry_after = {"busy": 1, "dead": 5}.get(error.kind)
    param = None if body is None or error.option is None else body.find_field(error.option)
    return ApiError(
        STATUS_BY_KIND[error.kind], error.message, param, CODE_BY_KIND.get(error.kind), retry_after
    )


def make_validation_error(problems: Sequence[Any]) -> BadRequestError:
    """Return the error for an invalid body. `problems`: pydantic's list; only the first problem is
    reported."""
    first = problems[0]
    context = first.get("ctx") or {}
    if first["type"] == "json_invalid":
        return BadRequestError(f"the body is not valid JSON: {context['error']}")
    place = [*first["loc"][1:], *([context["field"]] if first["type"] == "unknown" else [])]
    if not place:
        return BadRequestError("send a JSON object, with Content-Type: application/json")
    param = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in place
        if not _is_union_tag(part)
    ).lstrip(".")
    message = context["message"] if first["type"] == "unknown" else describe_mismatch(first)
    return BadRequestError(f"{param}: {message}", param)


def explain_unreadable(error: Exception) -> str:
    """Return why a body is not valid JSON. `error`: the exception of Python's JSON parser."""
    match error:
        case RecursionError():
            return "it is nested too deeply; flatten it"
        case UnicodeDecodeError():
            return "it is not in UTF-8; encode it in UTF-8"
        case _:  # a number with too many digits; the text after ";" is advice for Python programs
            return to_one_line(error).partition(";")[0]


def _is_union_tag(part: int | str) -> bool:
    """Return whether a part of an error's location is pydantic's name of a member of a union type,
    not a field or an index."""
    if not isinstance(part, str) or part.endswith("[]"):  # "...[]" is a field of a form
        return False
    return "[" in part or ":" in part or part in ("str", "int", "bool")
