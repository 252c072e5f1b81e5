"""Server-sent events: a stream of JSON objects, one ``data:`` line each, with ``[DONE]`` at the end.

A failure before the first event becomes an HTTP status; after it, the status is gone, and the failure is an
event of its own: ``data: {"error": {...}}``, then ``[DONE]``, as vLLM sends it and OpenAI's client expects it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.api.connection import run_while_connected
from specdec.api.errors import report_failure, to_json

DONE_EVENT = b"data: [DONE]\n\n"


def to_event(content: object) -> bytes:
    """One event. JSON escapes line breaks, so that it is one line."""
    return b"data: " + to_json(content) + b"\n\n"


async def event_stream(
    objects: AsyncGenerator[Mapping[str, object], None], request_id: str
) -> AsyncGenerator[bytes, None]:
    """The events for ``objects``. Raises only what ``objects`` raises before its first."""
    started = False
    async with aclosing(objects):
        try:
            async for content in objects:
                started = True
                yield to_event(content)
        except Exception as error:
            if not started:
                raise
            yield to_event(report_failure(error, request_id).body())
    yield DONE_EVENT


class EventStreamResponse(Response):
    """Sends events as they come, and closes their source when the last is sent or the client leaves.

    Unlike Starlette's streaming response it waits for the first event before it sends the status, so that an
    error there reaches the error handlers; and it runs the source in one task from start to end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application: answer one request.

        Raises:
            Exception: whatever the source raised before its first event; nothing has been sent then.
        """
        try:
            await run_while_connected(receive, self._send_events(send))
        except ClientDisconnect:
            if not self._started:
                raise

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events):
            async for event in self._events:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
