"""The real application under a real uvicorn on a free port, over a fake engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from specdec.api.app import create_app
from specdec.config import ApiSettings
from tests.api.fake_engine import STORY, FakeEngine

MAX_BODY_BYTES = 4096
MAX_NUM_STOP = 3


@dataclass(frozen=True, slots=True)
class Server:
    engine: FakeEngine
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class _AnnouncingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@contextmanager
def _serving(engine: FakeEngine, http_protocol: str) -> Iterator[Server]:
    app = create_app(engine, ApiSettings(max_body_bytes=MAX_BODY_BYTES, max_num_stop=MAX_NUM_STOP))
    config = uvicorn.Config(app, http=http_protocol, ws="none", lifespan="off", log_level="warning")
    uvicorn_server = _AnnouncingServer(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert uvicorn_server.up.wait(timeout=60), "uvicorn did not start"
            yield Server(engine, host, port)
        finally:
            uvicorn_server.should_exit = True
            uvicorn_server.force_exit = True
            thread.join(timeout=60)


@pytest.fixture(scope="session")
def running_servers() -> Iterator[dict[str, Server]]:
    with _serving(FakeEngine(), "h11") as h11, _serving(FakeEngine(), "httptools") as httptools:
        yield {"h11": h11, "httptools": httptools}


@pytest.fixture
def server(request: pytest.FixtureRequest, running_servers: dict[str, Server]) -> Server:
    """A running server, with the standard story and no memory of other tests."""
    server = running_servers[getattr(request, "param", "httptools")]
    server.engine.play(*STORY)
    return server


both_protocols = pytest.mark.parametrize("server", ["h11", "httptools"], indirect=True)
"""For what depends on uvicorn's reading of the wire: it has two, and takes the one whose library is there."""


@pytest.fixture
def engine(server: Server) -> FakeEngine:
    return server.engine


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    # verify=False: there is no TLS here, and loading certificates would take most of a test's time.
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The unmodified client; without retries, which would hide errors."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def wait_for(event: threading.Event) -> None:
    """Wait for something on the server's thread without blocking this one's loop."""
    assert await asyncio.to_thread(event.wait, 60), "it did not happen"


def check_error(response: httpx.Response, status: int, param: str | None, in_message: str) -> dict[str, Any]:
    """Assert that ``response`` is the client's fault in OpenAI's shape; returns the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert error["param"] == param
    assert in_message in error["message"]
    return error
