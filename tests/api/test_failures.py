"""What the client sees when the engine fails, and what the log sees."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from specdec.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    WorkerRequestError,
    WorkerUnavailableError,
)
from specdec.orchestrator.base import Readiness
from tests.api.conftest import both_protocols
from tests.api.fake_engine import MODEL_NAME, STORY, FakeEngine, chunk

COMPLETION = {"model": MODEL_NAME, "prompt": "abc"}
SECRET = "secret-detail"

FAILURES: list[tuple[Exception, int, str, str | None]] = [
    (InvalidRequestError("no such thing", param="top_k"), 400, "invalid_value", None),
    (ContextLengthError("too long", param="prompt"), 400, "context_length_exceeded", None),
    (OverloadedError("full", retry_after_s=2.2), 429, "overloaded", "3"),
    (OverloadedError("full", retry_after_s=0.01), 429, "overloaded", "1"),
    (DeadlineExceededError("too late"), 504, "deadline_exceeded", None),
    (WorkerUnavailableError(SECRET), 503, "worker_unavailable", "1"),
    (WorkerRequestError(SECRET), 500, "internal_error", None),
    (ConfigError(SECRET), 500, "internal_error", None),
    (RuntimeError(SECRET), 500, "internal_error", None),
    (StopIteration(SECRET), 500, "internal_error", None),
]


def events(response: httpx.Response) -> list[str]:
    """The data of every event; the framing is checked on the way."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.content.endswith(b"\n\n")
    blocks = response.content.decode("ascii").removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code", "retry_after"), FAILURES)
def test_failure_before_the_first_chunk(
    http: httpx.Client,
    engine: FakeEngine,
    error: Exception,
    status: int,
    code: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    engine.play(error)
    response = http.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert response.headers["x-request-id"]
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["param"] == getattr(error, "param", None)
    assert SECRET not in response.text
    assert engine.cleaned_up.is_set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code", "retry_after"), FAILURES)
def test_failure_after_the_first_chunk(
    http: httpx.Client,
    engine: FakeEngine,
    error: Exception,
    status: int,
    code: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    engine.play(chunk("Hel", 1), error)
    response = http.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert SECRET not in response.text
    assert engine.cleaned_up.is_set()
    if not stream:
        assert response.status_code == status
        return
    assert response.status_code == 200
    first, second, third = events(response)
    assert json.loads(first)["choices"][0]["text"] == "Hel"
    assert json.loads(second).keys() == {"error"}
    assert json.loads(second)["error"]["code"] == code
    assert third == "[DONE]"


@pytest.mark.parametrize("script", [(), (chunk("Hel", 1),)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_just_ends_is_no_answer(
    http: httpx.Client, engine: FakeEngine, script: tuple[Any, ...], stream: bool
) -> None:
    engine.play(*script)
    response = http.post("/v1/completions", json={**COMPLETION, "stream": stream})
    if stream and script:
        assert json.loads(events(response)[1])["error"]["code"] == "internal_error"
    else:
        assert response.status_code == 500


@pytest.mark.parametrize("script", [(RuntimeError(SECRET),), (chunk("Hel", 1), RuntimeError(SECRET))])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_logged_with_its_traceback_and_the_request(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture, script: tuple[Any, ...], stream: bool
) -> None:
    engine.play(*script)
    http.post("/v1/completions", json={**COMPLETION, "stream": stream}, headers={"x-request-id": "the-id"})
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "the-id" in record.getMessage()
    assert record.exc_info is not None
    assert SECRET in str(record.exc_info[1])


def test_refused_requests_are_not_logged_as_errors(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.play(OverloadedError("full"))
    http.post("/v1/completions", json=COMPLETION)
    http.post("/v1/completions", json={**COMPLETION, "top_p": 2})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@both_protocols
def test_a_whole_stream_in_bytes(http: httpx.Client, engine: FakeEngine) -> None:
    body = {**COMPLETION, "stream": True, "seed": 3, "stream_options": {"include_usage": True}}
    response = http.post("/v1/completions", json=body, headers={"x-request-id": "the-id"})
    assert "content-length" not in response.headers
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == "the-id"
    *data, done = events(response)
    assert done == "[DONE]"
    first, second, third, usage = [json.loads(piece) for piece in data]
    common = {"id": "cmpl-the-id", "object": "text_completion", "created": first["created"], "model": MODEL_NAME}
    common["seed"] = 3
    choice = {"index": 0, "logprobs": None, "finish_reason": None, "stop_reason": None}
    assert first == {**common, "choices": [{**choice, "text": STORY[0].text}], "usage": None}
    assert second == {**common, "choices": [{**choice, "text": ""}], "usage": None}
    assert third["choices"] == [{**choice, "text": STORY[2].text, "finish_reason": "stop"}]
    assert third["speculative"].keys() == {
        "num_steps",
        "num_draft_tokens",
        "num_accepted_tokens",
        "acceptance_length",
    }
    assert usage == {
        **common,
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens": 6,
            "total_tokens": 9,
        },
    }


def test_health_does_not_ask_the_workers(http: httpx.Client, engine: FakeEngine) -> None:
    engine.state = WorkerUnavailableError("dead")
    response = http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("target", "draft", "status"),
    [(True, True, 200), (True, None, 200), (True, False, 503), (False, True, 503), (False, None, 503)],
)
def test_ready(http: httpx.Client, engine: FakeEngine, target: bool, draft: bool | None, status: int) -> None:
    engine.state = Readiness(target=target, draft=draft, detail="why")
    response = http.get("/ready")
    assert response.status_code == status
    assert response.json() == {"ready": status == 200, "target": target, "draft": draft, "detail": "why"}


def test_ready_when_nobody_can_say(http: httpx.Client, engine: FakeEngine) -> None:
    engine.state = WorkerUnavailableError("dead")
    response = http.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_unavailable"
