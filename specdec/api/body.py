"""From the bytes of a request to a checked request model."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specdec.api.errors import ApiError
from specdec.api.schema import RequestModel

RequestModelT = TypeVar("RequestModelT", bound=RequestModel)

MAX_SHOWN_CHARS = 200
"""A name the client made up is repeated to it at most this long."""

MAX_LENGTH_DIGITS = 18
"""A Content-Length of more digits is too large whatever it says; Python refuses to read very long numbers."""

_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}


async def read_model(request: Request, model: type[RequestModelT], max_bytes: int) -> RequestModelT:
    """Read the body as JSON into ``model``.

    Raises:
        ApiError: 415 not declared as JSON; 413 longer than ``max_bytes``; 400 not JSON, or not a ``model``.
        ClientDisconnect: the client left before the end of the body.
    """
    # Demanding the type also keeps a foreign web page from posting here: a browser asks first (CORS).
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "send the request as Content-Type: application/json", code="unsupported_media_type")
    body = await _read_body(request, max_bytes)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        raise _invalid_body(faults) from error


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > MAX_LENGTH_DIGITS or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        body += piece
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {max_bytes} bytes", code="body_too_large")


def _invalid_body(faults: list[ErrorDetails]) -> ApiError:
    """The first fault in full, since OpenAI's shape has room for one; the number of the others."""
    first = faults[0]
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        message = f"unknown or unsupported field: {param}"
    elif first["type"] == "missing":
        message = f"missing field: {param}"
    elif param is None:
        message = first["msg"]
    else:
        message = f"{param}: {first['msg']}"
    if len(faults) > 1:
        message += f" (and {len(faults) - 1} more)"
    return ApiError(400, message, param=param, code=_CODES.get(first["type"], "invalid_value"))


def _param(location: tuple[int | str, ...]) -> str | None:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    if not location:
        return None
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{part}"
    param = param.removeprefix(".")
    return param if len(param) <= MAX_SHOWN_CHARS else param[:MAX_SHOWN_CHARS] + "..."
