"""Every failure of a request as OpenAI's ``{"error": {"message", "type", "param", "code"}}``.

- 400: the request is wrong; ``param`` names the field
- 404: unknown path or model
- 413: the body is too large
- 415: the body is not declared as JSON
- 429: no room now; ``Retry-After`` says when to come back
- 500: a fault of ours; logged with its traceback, told without it
- 503: the workers do not answer; ``Retry-After``
- 504: the request's deadline passed
"""

from __future__ import annotations

import http
import json
import logging
import math
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from specdec.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    SpecdecError,
    WorkerError,
    WorkerRequestError,
)

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""The status logged, by nginx's custom, for a request whose client went away before the answer."""

WORKER_RETRY_AFTER_S = 1.0


class ApiError(SpecdecError):
    """A failure in the words of the HTTP API.

    Attributes:
        status: the HTTP status.
        kind: OpenAI's ``type``, the class of the failure.
        param: the offending field, or None.
        code: a word for programs, or None.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The response body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def as_api_error(error: Exception) -> ApiError:
    """Translate an exception. One that nobody foresaw becomes a 500 that tells nothing of the inside."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
            return ApiError(400, str(error), param=error.param, code=code)
        case OverloadedError():
            headers = _retry_after(error.retry_after_s)
            return ApiError(429, str(error), kind="rate_limit_error", code="overloaded", headers=headers)
        case DeadlineExceededError():
            return ApiError(504, str(error), kind="server_error", code="deadline_exceeded")
        case WorkerError() if not isinstance(error, WorkerRequestError):
            message = "the model's workers do not answer now; try again"
            headers = _retry_after(WORKER_RETRY_AFTER_S)
            return ApiError(503, message, kind="server_error", code="worker_unavailable", headers=headers)
        case _:
            return ApiError(500, "internal error; the server's log has it", kind="server_error", code="internal_error")


def report_failure(error: Exception, request_id: str) -> ApiError:
    """Translate an exception, and log it where the server, not the client, is at fault."""
    api_error = as_api_error(error)
    if api_error.status == http.HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("request %s failed", request_id, exc_info=error)
    elif api_error.status > http.HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.warning("request %s failed: %s: %s", request_id, type(error).__name__, error)
    return api_error


def to_json(content: object) -> bytes:
    """Compact JSON in pure ASCII: no text, however odd, can fail to encode or split an event's line."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def error_response(error: ApiError) -> Response:
    """The HTTP response for a failure."""
    return Response(to_json(error.body()), error.status, headers=error.headers, media_type="application/json")


async def _answer_failure(request: Request, error: Exception) -> Response:
    return error_response(report_failure(error, request.state.request_id))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = http.HTTPStatus(error.status_code).phrase
    message = f"{phrase}: {request.method} {request.url.path}"
    code = phrase.lower().replace(" ", "_")
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def install_error_handlers(app: FastAPI) -> None:
    """Make ``app`` answer every deliberate error in OpenAI's shape. `RequestScope` answers the others."""
    app.add_exception_handler(SpecdecError, _answer_failure)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
