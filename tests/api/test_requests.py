"""What the engine is asked for, given what the client sent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from specdec.types import FinishReason, SamplingParams, SpeculativeParams
from tests.api.fake_engine import MAX_MODEL_LEN, MODEL_NAME, FakeEngine, chunk, with_logprobs

COMPLETION = {"model": MODEL_NAME, "prompt": "abc"}
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
CHAT_LENGTH = len("<user>hi<assistant>")


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_defaults(http: httpx.Client, engine: FakeEngine) -> None:
    answer = post(http, "/v1/completions", COMPLETION)
    (request,) = engine.requests
    assert list(request.prompt_token_ids) == engine.tokenizer.encode("abc")
    assert request.max_tokens == 16
    assert request.sampling == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=answer["seed"])
    assert request.speculative == SpeculativeParams(enabled=True, num_draft_tokens=None)
    assert request.stop == ()
    assert request.stop_token_ids == ()
    assert request.ignore_eos is False
    assert request.timeout_s is None
    assert request.cache_salt is None


def test_every_parameter_reaches_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    given = {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 9,
        "seed": 2**63 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "speculative": {"enabled": False, "num_draft_tokens": 8},
        "cache_salt": "a tenant's secret",
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100, "256": 1.5},
        "min_tokens": 5,
        "bad_words": ["ab", " c"],
        "logprobs": 20,
        "user": "someone",
    }
    engine.play(with_logprobs(chunk("x", 1, finish=FinishReason.LENGTH)))
    answer = post(http, "/v1/completions", {**COMPLETION, **given})
    (request,) = engine.requests
    assert request.max_tokens == 5
    a, b, c, space = (engine.tokenizer.encode(text)[0] for text in "abc ")
    assert request.sampling == SamplingParams(
        temperature=0.0,
        top_k=9,
        top_p=0.5,
        seed=2**63 - 1,
        min_p=0.1,
        presence_penalty=-2.0,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (256, 1.5)),
        min_tokens=5,
        bad_words=((a, b), (space, a, b), (space, c), (c,)),
        logprobs=20,
    )
    assert request.stop == ("a", "b")
    assert request.stop_token_ids == (3, 4)
    assert request.ignore_eos is True
    assert request.cache_salt == "a tenant's secret"
    assert request.speculative == SpeculativeParams(enabled=False, num_draft_tokens=8)
    assert answer["seed"] == 2**63 - 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client, engine: FakeEngine, path: str) -> None:
    body = COMPLETION if path == "/v1/completions" else CHAT
    nothing = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "top_k": -1, "stop": None, "logit_bias": {}}
    nulls = dict.fromkeys(["max_tokens", "temperature", "top_p", "seed", "speculative", "stream", "stream_options"])
    nulls |= dict.fromkeys(["min_p", "repetition_penalty", "min_tokens", "bad_words", "logprobs"])
    post(http, path, {**body, **nothing, **nulls})
    if path != "/v1/completions":
        post(http, path, {**body, "logprobs": False, "top_logprobs": 0})
        assert engine.requests.pop().sampling.logprobs is None
    (request,) = engine.requests
    assert request.sampling == SamplingParams(seed=request.sampling.seed)
    assert request.sampling.top_k == 0
    assert request.sampling.temperature == 1.0


def test_drawn_seeds_differ_and_survive_a_double(http: httpx.Client, engine: FakeEngine) -> None:
    seeds = {post(http, "/v1/completions", COMPLETION)["seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert all(int(float(seed)) == seed for seed in seeds)


@pytest.mark.parametrize("prompt", ["abc", ["abc"], "ids", ["ids"]])
def test_forms_of_one_prompt(http: httpx.Client, engine: FakeEngine, prompt: str | list[str]) -> None:
    ids = engine.tokenizer.encode("abc")
    sent: object = {"ids": ids, "abc": "abc"}[prompt if isinstance(prompt, str) else prompt[0]]
    post(http, "/v1/completions", {**COMPLETION, "prompt": sent if isinstance(prompt, str) else [sent]})
    assert list(engine.requests[0].prompt_token_ids) == ids


def test_a_prompt_that_fills_the_context_but_for_one(http: httpx.Client, engine: FakeEngine) -> None:
    post(http, "/v1/completions", {**COMPLETION, "prompt": "a" * (MAX_MODEL_LEN - 1)})
    assert engine.requests[0].max_tokens == 1  # a default is cut to what is left; a wish is not


def test_max_tokens_may_fill_the_context(http: httpx.Client, engine: FakeEngine) -> None:
    post(http, "/v1/completions", {**COMPLETION, "max_tokens": MAX_MODEL_LEN - 3})
    assert engine.requests[0].max_tokens == MAX_MODEL_LEN - 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, MAX_MODEL_LEN - CHAT_LENGTH),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
def test_chat_max_tokens(http: httpx.Client, engine: FakeEngine, given: dict[str, int], expected: int) -> None:
    post(http, "/v1/chat/completions", {**CHAT, **given})
    assert engine.requests[0].max_tokens == expected


def test_chat_messages_reach_the_template(http: httpx.Client, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts, "name": "bo"},
        {"role": "assistant", "content": "a"},
    ]
    post(http, "/v1/chat/completions", {**CHAT, "messages": messages, "max_tokens": 1})
    text = engine.tokenizer.decode(list(engine.requests[0].prompt_token_ids))
    assert text == "<system>s<user bo>x\ny<assistant>a<assistant>"


def test_request_ids(http: httpx.Client, engine: FakeEngine) -> None:
    first = http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "my-id.1"})
    second = http.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "my-id.1"})
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "my-id.1"
    assert first.json()["id"] == "cmpl-my-id.1"
    engine_ids = [request.request_id for request in engine.requests]
    assert len(set(engine_ids)) == 2, "the engine needs ids that are unique, whatever clients do"
    assert all(engine_id.startswith("cmpl-my-id.1-") for engine_id in engine_ids)


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "a\tb", "é".encode("latin-1"), "{id}", "-x"])
def test_an_odd_request_id_is_replaced(http: httpx.Client, given: str | bytes | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    ids = [http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(len(request_id) == 32 for request_id in ids)


def test_the_api_describes_itself(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert {"prompt", "model", "seed", "speculative"} <= schema["properties"].keys()
    references = [
        part.split('"')[0] for part in http.get("/openapi.json").text.split('"$ref":"#/components/schemas/')[1:]
    ]
    assert references
    assert set(references) <= document["components"]["schemas"].keys()


@pytest.mark.parametrize("path_and_body", [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_token_ids_are_returned_where_asked_for(
    http: httpx.Client, engine: FakeEngine, path_and_body: tuple[str, dict[str, Any]]
) -> None:
    path, body = path_and_body
    generated = [0, 1, 2, 0, 0, 1]
    assert "token_ids" not in post(http, path, body)["choices"][0]
    assert post(http, path, {**body, "return_token_ids": True})["choices"][0]["token_ids"] == generated
    streamed = http.post(path, json={**body, "return_token_ids": True, "stream": True}).text
    pieces = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [token for piece in pieces for token in piece["choices"][0]["token_ids"]] == generated
