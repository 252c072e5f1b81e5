"""A client that leaves frees its sequence: under uvicorn, and under a server that cancels the task."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message

from specdec.api.app import create_app
from specdec.config import ApiSettings
from tests.api.conftest import Server, both_protocols, wait_for
from tests.api.fake_engine import MODEL_NAME, FakeEngine, Hold, chunk

COMPLETION: dict[str, Any] = {"model": MODEL_NAME, "prompt": "abc"}
SCRIPTS = {"before the first chunk": (Hold(),), "after the first chunk": (chunk("Hel", 1), Hold())}
scripts = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def leave_while_held(server: Server, stream: bool) -> None:
    _, writer = await asyncio.open_connection(server.host, server.port)
    body = json.dumps({**COMPLETION, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    await writer.drain()
    await wait_for(server.engine.held)
    writer.close()
    await writer.wait_closed()


@both_protocols
@streams
@scripts
async def test_leaving_under_uvicorn(
    server: Server, script: tuple[Any, ...], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.play(*script)
    await leave_while_held(server, stream)
    await wait_for(server.engine.cleaned_up)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.get("/health")).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.name != "httpx"] == []


@both_protocols
async def test_closing_a_stream_of_the_openai_client(async_client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    engine.play(chunk("Hel", 1), Hold())
    stream = await async_client.completions.create(**COMPLETION, stream=True)
    assert (await anext(stream)).choices[0].text == "Hel"
    assert not engine.cleaned_up.is_set()
    await stream.close()
    await wait_for(engine.cleaned_up)


class Connection:
    """The server's side of one ASGI request: `leave` is the client's end of it."""

    def __init__(self, body: bytes, *, whole: bool = True) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": not whole})
        self.sent: list[Message] = []
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

    async def receive(self) -> Message:
        return await self.inbox.get()

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    def start(self, engine: FakeEngine, **options: Any) -> asyncio.Task[None]:
        app = create_app(engine, ApiSettings(), **options)
        return asyncio.create_task(app(self.scope, self.receive, self.send))


@streams
@scripts
async def test_a_server_that_cancels_the_task(script: tuple[Any, ...], stream: bool) -> None:
    engine = FakeEngine()
    engine.play(*script)
    connection = Connection(json.dumps({**COMPLETION, "stream": stream}).encode())
    task = connection.start(engine)
    await wait_for(engine.held)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cleaned_up.is_set(), "clean-up must be complete when the request's task is"
    assert len(asyncio.all_tasks()) == 1


@streams
@scripts
async def test_a_server_that_tells_of_the_disconnect(script: tuple[Any, ...], stream: bool) -> None:
    engine = FakeEngine()
    engine.play(*script)
    connection = Connection(json.dumps({**COMPLETION, "stream": stream}).encode())
    task = connection.start(engine)
    await wait_for(engine.held)
    connection.leave()
    await task
    assert engine.cleaned_up.is_set()
    assert len(asyncio.all_tasks()) == 1
    statuses = [message["status"] for message in connection.sent if message["type"] == "http.response.start"]
    assert statuses == ([200] if stream and len(script) == 2 else [499])


async def test_leaving_before_the_end_of_the_body() -> None:
    engine = FakeEngine()
    connection = Connection(b'{"model":', whole=False)
    task = connection.start(engine)
    connection.leave()
    await task
    assert engine.requests == []
    assert connection.sent[0]["status"] == 499


async def test_the_body_is_not_read_beyond_the_limit() -> None:
    engine = FakeEngine()
    connection = Connection(b"x" * (1 << 20), whole=False)
    connection.inbox.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
    connection.inbox.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
    await connection.start(engine)
    assert connection.sent[0]["status"] == 413
    assert connection.inbox.qsize() == 1


async def test_a_declared_length_beyond_the_limit_is_refused_unread() -> None:
    engine = FakeEngine()
    connection = Connection(b"x", whole=False)
    connection.scope["headers"].append((b"content-length", b"9" * 5000))
    async with asyncio.timeout(60):  # for the rest of the body it would wait for ever
        await connection.start(engine)
    assert connection.sent[0]["status"] == 413
    assert connection.inbox.qsize() == 1


class SlowConnection(Connection):
    """A client that stops reading: its first event stays in `send`."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self.stuck = asyncio.Event()

    async def send(self, message: Message) -> None:
        await super().send(message)
        if message["type"] == "http.response.body":
            self.stuck.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "told"])
async def test_leaving_without_reading(cancelled: bool) -> None:
    """The engine waits at its yield then: nothing but closing it frees the sequence."""
    engine = FakeEngine()
    connection = SlowConnection(json.dumps({**COMPLETION, "stream": True}).encode())
    task = connection.start(engine)
    await connection.stuck.wait()
    assert not engine.cleaned_up.is_set()
    if cancelled:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        connection.leave()
        await task
    assert engine.cleaned_up.is_set()


async def test_a_broken_connection_is_not_taken_for_an_answer() -> None:
    class Broken(Connection):
        async def send(self, message: Message) -> None:
            await super().send(message)
            if message["type"] == "http.response.body":
                raise OSError("broken pipe")

    engine = FakeEngine()
    connection = Broken(json.dumps({**COMPLETION, "stream": True}).encode())
    with pytest.raises(OSError, match="broken pipe"):
        await connection.start(engine)
    assert engine.cleaned_up.is_set()
    assert [message["type"] for message in connection.sent] == ["http.response.start", "http.response.body"]


async def test_a_failing_clean_up_after_a_disconnect_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeEngine):
        async def _play(self) -> Any:
            try:
                self.held.set()
                await asyncio.Event().wait()
                yield
            finally:
                raise RuntimeError("cannot free it")

    engine = Failing()
    connection = Connection(json.dumps(COMPLETION).encode())
    task = connection.start(engine)
    await wait_for(engine.held)
    connection.leave()
    await task
    assert any(record.exc_info and "cannot free it" in str(record.exc_info[1]) for record in caplog.records)


@pytest.mark.parametrize("send_request_id", [True, False])
async def test_the_request_id_can_be_left_to_a_proxy(send_request_id: bool) -> None:
    connection = Connection(json.dumps(COMPLETION).encode())
    await connection.start(FakeEngine(), send_request_id=send_request_id)
    assert connection.sent[0]["status"] == 200
    assert (b"x-request-id" in dict(connection.sent[0]["headers"])) is send_request_id
