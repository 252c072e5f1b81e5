"""Bodies that are no JSON, no UTF-8, too large or of another type; paths and methods that do not exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import MAX_BODY_BYTES, both_protocols, check_error
from tests.api.fake_engine import MODEL_NAME, FakeEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL_NAME, "prompt": "abc"},
    "/v1/chat/completions": {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]},
}
PATHS = list(BODIES)
JSON_TYPE = {"content-type": "application/json"}


def raw(path: str, extra: str) -> bytes:
    """A good body with ``extra`` JSON members after it, however bad."""
    return (json.dumps(BODIES[path])[:-1] + extra + "}").encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed", "presence_penalty"])
def test_numbers_json_does_not_have(http: httpx.Client, engine: FakeEngine, path: str, field: str, number: str) -> None:
    response = http.post(path, content=raw(path, f', "{field}": {number}'), headers=JSON_TYPE)
    check_error(response, 400, field, field)
    assert engine.requests == []


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"model": "org/tiny", ',
    "not json": b"hello",
    "trailing": b'{"model": "org/tiny", "prompt": "a"} x',
    "a list": b"[1]",
    "null": b"null",
    "a text": b'"prompt"',
    "deep list": b"[" * 4000,
    "deep object": b'{"a":' * 800,
    "deep field": raw(PATHS[0], ', "user": ' + "[" * 3900),
    "not utf-8": b'{"model": "org/tiny", "prompt": "\xff"}',
    "utf-16": '{"model": "org/tiny", "prompt": "a"}'.encode("utf-16"),
    "lone surrogate": b'{"model": "org/tiny", "prompt": "\\ud800"}',
    "lone surrogate in a list": b'{"model": "org/tiny", "prompt": ["a\\udfff"]}',
    "lone surrogate in a message": b'{"model": "org/tiny", "messages": [{"role": "user", "content": "\\ud800x"}]}',
    "lone surrogate in a name": b'{"model": "org/tiny", "prompt": "a", "\\ud800": 1}',
    "encoded surrogate": b'{"model": "org/tiny", "prompt": "\xed\xa0\x80"}',
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_json(http: httpx.Client, engine: FakeEngine, path: str, name: str) -> None:
    check_error(http.post(path, content=BAD_BODIES[name], headers=JSON_TYPE), 400, None, "")
    assert engine.requests == []


def test_an_endless_name_is_not_repeated_in_full(http: httpx.Client, engine: FakeEngine) -> None:
    response = http.post(PATHS[0], json={**BODIES[PATHS[0]], "x" * 3000: 1})
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert engine.requests == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_content_type(http: httpx.Client, engine: FakeEngine, path: str, given: str | None) -> None:
    headers = {} if given is None else {"content-type": given}
    response = http.post(path, content=raw(path, ""), headers=headers)
    check_error(response, 415, None, "application/json")
    assert engine.requests == []


def test_content_type_with_a_charset(http: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(PATHS[0], content=raw(PATHS[0], ""), headers=headers).status_code == 200


def padded(size: int) -> bytes:
    body = raw(PATHS[0], "")
    return body + b" " * (size - len(body))


def in_pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


@both_protocols
@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(http: httpx.Client, engine: FakeEngine, chunked: bool) -> None:
    def send(size: int) -> httpx.Response:
        content = in_pieces(padded(size)) if chunked else padded(size)
        return http.post(PATHS[0], content=content, headers=JSON_TYPE)

    assert send(MAX_BODY_BYTES).status_code == 200
    assert len(engine.requests) == 1
    check_error(send(MAX_BODY_BYTES + 1), 413, None, str(MAX_BODY_BYTES))
    check_error(send(MAX_BODY_BYTES * 50), 413, None, str(MAX_BODY_BYTES))
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/%ED%A0%80", 404),
    ],
)
def test_unknown_paths_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    check_error(response, status, "model" if path.startswith("/v1/models/") else None, "")
    assert (status == 405) == ("allow" in response.headers)
