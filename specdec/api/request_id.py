"""The outermost layer of the API: every request has an id, every response names it, every fault is answered."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.api.errors import error_response, report_failure

REQUEST_ID_HEADER = "x-request-id"

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class RequestScope:
    """ASGI middleware: request ids, and the answer to exceptions nobody foresaw.

    The id is the client's ``x-request-id`` where that is short and plain (it goes into logs and into the ids of
    responses), else a new one; it is at ``request.state.request_id``. ``send_request_id`` False leaves the
    response's header to a proxy in front.
    """

    def __init__(self, app: ASGIApp, *, send_request_id: bool) -> None:
        self._app = app
        self._send_request_id = send_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope = {**scope, "state": {**scope.get("state", {}), "request_id": request_id}}
        response_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                if self._send_request_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            api_error = report_failure(error, request_id)
            if response_started:
                raise  # the server cuts the connection: the client must not take this for a whole answer
            await error_response(api_error)(scope, receive, send_with_id)


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
