"""Whatever a client sends wrong: a 4xx in OpenAI's shape that names the field, and nothing started."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import MAX_NUM_STOP, check_error
from tests.api.fake_engine import MAX_MODEL_LEN, MODEL_NAME, FakeEngine

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL_NAME, "prompt": "abc"},
    "/v1/chat/completions": {"model": MODEL_NAME, "messages": [USER]},
}
PATHS = list(BODIES)

# field, its value, something in the message; `param` is the field
BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("model", "gpt-4", MODEL_NAME),
    ("model", 3, "string"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("temperature", -0.1, ">= 0"),
    ("temperature", [1], "number"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.01, "(0, 1]"),
    ("top_p", -1, "(0, 1]"),
    ("top_k", -2, ">= 0"),
    ("top_k", 1.5, "integer"),
    ("top_k", True, "integer"),
    ("max_tokens", 0, ">= 1"),
    ("max_tokens", -5, ">= 1"),
    ("max_tokens", 1.5, "integer"),
    ("max_tokens", True, "integer"),
    ("max_tokens", "16", "integer"),
    ("max_tokens", MAX_MODEL_LEN, f"limited to {MAX_MODEL_LEN}"),
    ("max_tokens", 10**30, "limited"),
    ("seed", -1, "2**63"),
    ("seed", 2**63, "2**63"),
    ("seed", 0.5, "integer"),
    ("seed", "7", "integer"),
    ("stop", "", "empty"),
    ("stop", ["a", ""], "empty"),
    ("stop", ["a"] * (MAX_NUM_STOP + 1), f"at most {MAX_NUM_STOP}"),
    ("stop", 5, "string"),
    ("stop", ["a", 5], "string"),
    ("stop_token_ids", [-1], "not in [0, "),
    ("stop_token_ids", [1, 10**6], "1000000"),
    ("stop_token_ids", 5, "list"),
    ("stop_token_ids", ["5"], "integer"),
    ("stop_token_ids", [True], "integer"),
    ("ignore_eos", 1, "boolean"),
    ("ignore_eos", "yes", "boolean"),
    ("speculative", True, "object"),
    ("speculative.enabled", {"enabled": "yes"}, "boolean"),
    ("speculative.enabled", {"enabled": 1}, "boolean"),
    ("speculative.num_draft_tokens", {"num_draft_tokens": -1}, ">= 0"),
    ("speculative.num_draft_tokens", {"num_draft_tokens": 9}, "<= 8"),
    ("speculative.num_draft_tokens", {"num_draft_tokens": 1.5}, "integer"),
    ("speculative.k", {"k": 4}, "unknown or unsupported"),
    ("stream", "true", "boolean"),
    ("stream", 1, "boolean"),
    ("stream_options", {"include_usage": True}, "stream: true"),
    ("cache_salt", "", "empty"),
    ("cache_salt", 5, "string"),
    ("n", 2, "only 1"),
    ("n", True, "only 1"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", 1.5, "[0, 1]"),
    ("min_p", "0.5", "number"),
    ("presence_penalty", 2.5, "[-2, 2]"),
    ("presence_penalty", False, "number"),
    ("frequency_penalty", -2.01, "[-2, 2]"),
    ("frequency_penalty", [1], "number"),
    ("repetition_penalty", 0, "[1e-06, 1e+06]"),
    ("repetition_penalty", -1, "[1e-06, 1e+06]"),
    ("repetition_penalty", 1e300, "[1e-06, 1e+06]"),
    ("repetition_penalty", True, "number"),
    ("logit_bias", {"5": 100.5}, "[-100, 100]"),
    ("logit_bias", {"5": -(10**400)}, "[-100, 100]"),
    ("logit_bias", {"5": "1"}, "numbers"),
    ("logit_bias", {"5": True}, "numbers"),
    ("logit_bias", {"5": None}, "numbers"),
    ("logit_bias", {"five": 1}, "decimal"),
    ("logit_bias", {"-1": 1}, "decimal"),
    ("logit_bias", {"5.0": 1}, "decimal"),
    ("logit_bias", {"": 1}, "decimal"),
    ("logit_bias", {"\u0665": 1}, "decimal"),
    ("logit_bias", {"9" * 500: 1}, "decimal"),
    ("logit_bias", {"5": 1, "05": 1}, "twice"),
    ("logit_bias", {"257": 1}, "not in [0, 257)"),
    ("logit_bias", {str(n): 1 for n in range(301)}, "at most 300"),
    ("logit_bias", [[5, 1]], "object"),
    ("min_tokens", -1, ">= 0"),
    ("min_tokens", 50, "more than max_tokens"),
    ("min_tokens", 1.5, "integer"),
    ("bad_words", "word", "list of strings"),
    ("bad_words", ["word", 5], "list of strings"),
    ("bad_words", [""], "empty"),
    ("bad_words", ["  "], "empty"),
    ("bad_words", ["a"] * 301, "at most 300"),
    ("user", 5, "string"),
    *(
        (field, value, "unknown or unsupported")
        for field, value in {
            "best_of": 1,
            "echo": False,
            "suffix": "x",
            "tools": [],
            "response_format": {"type": "text"},
            "metadata": {},
            "tempratur": 1.0,
        }.items()
    ),
]

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "empty"),
    ([], "empty"),
    ([[]], "empty"),
    ([""], "empty"),
    (5, "string or a list of token ids"),
    (None, "string or a list of token ids"),
    ([1, "a"], "string or a list of token ids"),
    ([1, 1.0], "string or a list of token ids"),
    ([True], "string or a list of token ids"),
    ({"text": "a"}, "string or a list of token ids"),
    (["a", "b"], "one prompt"),
    ([[1], [2]], "one prompt"),
    (["a", [1]], "one prompt"),
    ([-1], "token id -1"),
    ([1, 257], "[0, 257)"),
    ([10**30], "[0, 257)"),
]

BAD_MESSAGES: list[tuple[str, Any, str]] = [
    ("messages", [], "at least 1"),
    ("messages", "hi", "array"),
    ("messages", None, "array"),
    ("messages", {}, "array"),
    ("messages", [{"role": "assistant", "content": "hi"}], "a user speaks first"),
    ("messages[0]", ["hi"], "object"),
    ("messages[0].role", [{"content": "hi"}], "missing field"),
    ("messages[0].content", [{"role": "user"}], "missing field"),
    ("messages[1].role", [USER, {"role": "tool", "content": "hi"}], "'system', 'user' or 'assistant'"),
    ("messages[0].role", [{"role": 1, "content": "hi"}], "'system', 'user' or 'assistant'"),
    ("messages[0].content", [{"role": "user", "content": None}], "string or a non-empty list"),
    ("messages[0].content", [{"role": "user", "content": []}], "string or a non-empty list"),
    ("messages[0].content", [{"role": "user", "content": ["hi"]}], "text only"),
    ("messages[0].content", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "text only"),
    ("messages[0].content", [{"role": "user", "content": [{"type": "text", "text": 1}]}], "text only"),
    ("messages[0].content", [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "text only"),
    ("messages[0].name", [{**USER, "name": 1}], "string"),
    ("messages[0].tool_call_id", [{**USER, "tool_call_id": "1"}], "unknown or unsupported"),
    ("messages[0].tool_calls", [{**USER, "tool_calls": []}], "null"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("param", "value", "in_message"), BAD_FIELDS)
def test_bad_field(http: httpx.Client, engine: FakeEngine, path: str, param: str, value: Any, in_message: str) -> None:
    response = http.post(path, json={**BODIES[path], param.partition(".")[0]: value})
    check_error(response, 404 if value == "gpt-4" else 400, param, in_message)
    assert engine.requests == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("param", "value", "in_message"),
    [
        ("top_p", 2, "(0, 1]"),
        ("top_p", "2", "number"),
        ("max_tokens", MAX_MODEL_LEN, "limited"),
        ("stream_options.include_usage", {"include_usage": 1}, "boolean"),
        ("stream_options.x", {"x": 1}, "unknown or unsupported"),
    ],
)
def test_bad_field_of_a_stream(
    http: httpx.Client, engine: FakeEngine, path: str, param: str, value: Any, in_message: str
) -> None:
    """The stream does not start: the fault is a status, not an event."""
    body = {**BODIES[path], "stream": True, param.partition(".")[0]: value}
    check_error(http.post(path, json=body), 400, param, in_message)
    assert engine.requests == []


@pytest.mark.parametrize(("prompt", "in_message"), BAD_PROMPTS)
def test_bad_prompt(http: httpx.Client, engine: FakeEngine, prompt: Any, in_message: str) -> None:
    check_error(http.post(PATHS[0], json={**BODIES[PATHS[0]], "prompt": prompt}), 400, "prompt", in_message)
    assert engine.requests == []


@pytest.mark.parametrize(("param", "messages", "in_message"), BAD_MESSAGES)
def test_bad_messages(http: httpx.Client, engine: FakeEngine, param: str, messages: Any, in_message: str) -> None:
    check_error(http.post(PATHS[1], json={**BODIES[PATHS[1]], "messages": messages}), 400, param, in_message)
    assert engine.requests == []


def test_checking_messages_ends_at_the_first_bad_one(http: httpx.Client) -> None:
    """So that a body full of faults costs no more than one with a single fault."""
    response = http.post(PATHS[1], json={**BODIES[PATHS[1]], "messages": [1] * 500})
    assert "more" not in check_error(response, 400, "messages[0]", "object")["message"]


@pytest.mark.parametrize(
    ("fields", "param", "in_message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
        ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens", "limited"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens", "differ"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs", "logprobs: true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "[0, 20]"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs", "[0, 20]"),
        ({"top_logprobs": True, "logprobs": True}, "top_logprobs", "integer"),
        ({"logprobs": 1}, "logprobs", "boolean"),
    ],
)
def test_bad_chat_fields(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, int], param: str, in_message: str
) -> None:
    check_error(http.post(PATHS[1], json={**BODIES[PATHS[1]], **fields}), 400, param, in_message)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("logprobs", "in_message"),
    [(-1, "[0, 20]"), (21, "[0, 20]"), (True, "integer"), (False, "integer"), (1.5, "integer")],
)
def test_bad_logprobs_of_a_completion(http: httpx.Client, engine: FakeEngine, logprobs: float, in_message: str) -> None:
    check_error(http.post(PATHS[0], json={**BODIES[PATHS[0]], "logprobs": logprobs}), 400, "logprobs", in_message)
    assert engine.requests == []


@pytest.mark.parametrize(("path", "field"), [(PATHS[0], "prompt"), (PATHS[1], "messages"), (PATHS[0], "model")])
def test_missing_field(http: httpx.Client, engine: FakeEngine, path: str, field: str) -> None:
    body = {key: value for key, value in BODIES[path].items() if key != field}
    error = check_error(http.post(path, json=body), 400, field, "missing field")
    assert error["code"] == "missing_required_parameter"
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 5])
def test_a_prompt_too_long(http: httpx.Client, engine: FakeEngine, length: int, stream: bool) -> None:
    response = http.post(PATHS[0], json={"model": MODEL_NAME, "prompt": "a" * length, "stream": stream})
    error = check_error(response, 400, "prompt", f"limited to {MAX_MODEL_LEN} tokens; the prompt has {length}")
    assert error["code"] == "context_length_exceeded"
    assert engine.requests == []


def test_a_conversation_too_long(http: httpx.Client, engine: FakeEngine) -> None:
    response = http.post(PATHS[1], json={**BODIES[PATHS[1]], "messages": [USER] * 20})
    error = check_error(response, 400, "messages", f"limited to {MAX_MODEL_LEN} tokens")
    assert error["code"] == "context_length_exceeded"
    assert engine.requests == []


def test_max_tokens_beyond_the_context_names_all_three_numbers(http: httpx.Client, engine: FakeEngine) -> None:
    response = http.post(PATHS[0], json={**BODIES[PATHS[0]], "max_tokens": 62})
    error = check_error(response, 400, "max_tokens", "limited to 64 tokens; the prompt has 3 and max_tokens is 62")
    assert error["code"] == "context_length_exceeded"
    assert "at most 61" in error["message"]
    assert engine.requests == []
