"""The unmodified OpenAI client against every endpoint, whole and streamed."""

from __future__ import annotations

import openai
import pytest

from specdec.errors import DeadlineExceededError, OverloadedError, WorkerUnavailableError
from specdec.types import FinishReason
from tests.api.conftest import Server
from tests.api.fake_engine import MODEL_NAME, STATS, STORY_CACHED_TOKENS, STORY_TEXT, STORY_TOKENS, FakeEngine, chunk

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_TEXT = "<user>hi<assistant>"
SPECULATIVE = {"num_steps": 3, "num_draft_tokens": 8, "num_accepted_tokens": 4, "acceptance_length": 1 + 4 / 3}


def test_completion(client: openai.OpenAI, engine: FakeEngine) -> None:
    completion = client.completions.create(model=MODEL_NAME, prompt="abc", seed=7)
    assert completion.object == "text_completion"
    assert completion.model == MODEL_NAME
    assert completion.id.startswith("cmpl-")
    assert completion.choices[0].text == STORY_TEXT
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].logprobs is None
    assert completion.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": STORY_CACHED_TOKENS},
        "completion_tokens": STORY_TOKENS,
        "total_tokens": 3 + STORY_TOKENS,
    }
    assert completion.seed == 7
    assert completion.speculative == SPECULATIVE
    assert engine.cleaned_up.is_set()


def test_completion_stream_has_one_chunk_per_step(client: openai.OpenAI, engine: FakeEngine) -> None:
    chunks = list(client.completions.create(model=MODEL_NAME, prompt="abc", seed=7, stream=True))
    assert [piece.choices[0].text for piece in chunks] == [step.text for step in engine.script]
    assert [piece.choices[0].finish_reason for piece in chunks] == [None, None, "stop"]
    assert {piece.id for piece in chunks} == {chunks[0].id}
    assert {piece.seed for piece in chunks} == {7}
    assert [piece.model_extra.get("speculative") for piece in chunks] == [None, None, SPECULATIVE]
    assert all(piece.usage is None for piece in chunks)
    assert engine.cleaned_up.is_set()


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    chat = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, seed=7)
    assert chat.object == "chat.completion"
    assert chat.id.startswith("chatcmpl-")
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content == STORY_TEXT
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.prompt_tokens == len(CHAT_TEXT)
    assert chat.usage.completion_tokens == STORY_TOKENS
    assert chat.usage.prompt_tokens_details.cached_tokens == STORY_CACHED_TOKENS
    assert chat.seed == 7
    assert chat.speculative == SPECULATIVE
    assert engine.tokenizer.decode(list(engine.requests[0].prompt_token_ids)) == CHAT_TEXT


@pytest.mark.parametrize("resend", ["message", "dump"])
def test_an_answer_can_be_sent_back(client: openai.OpenAI, engine: FakeEngine, resend: str) -> None:
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES).choices[0].message
    turn = answer if resend == "message" else answer.model_dump()
    engine.play(chunk("ok", 1, finish=FinishReason.LENGTH))
    again = client.chat.completions.create(model=MODEL_NAME, messages=[*MESSAGES, turn, *MESSAGES], max_tokens=1)
    assert again.choices[0].finish_reason == "length"


def test_chat_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    stream = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = stream
    assert [piece.object for piece in pieces] == ["chat.completion.chunk"] * 3
    assert [piece.choices[0].delta.content for piece in pieces] == [step.text for step in engine.script]
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant", None, None]
    assert [piece.choices[0].finish_reason for piece in pieces] == [None, None, "stop"]
    assert all(piece.usage is None for piece in pieces)
    assert pieces[-1].speculative == SPECULATIVE
    assert last.choices == []
    assert last.usage.prompt_tokens == len(CHAT_TEXT)
    assert last.usage.completion_tokens == STORY_TOKENS
    assert last.usage.prompt_tokens_details.cached_tokens == STORY_CACHED_TOKENS
    assert last.usage.total_tokens == len(CHAT_TEXT) + STORY_TOKENS


async def test_async_client(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.completions.create(model=MODEL_NAME, prompt=[1, 2, 3])
    assert whole.choices[0].text == STORY_TEXT
    stream = await async_client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True)
    assert "".join([piece.choices[0].delta.content async for piece in stream]) == STORY_TEXT
    assert [model.id async for model in async_client.models.list()] == [MODEL_NAME]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError, match=MODEL_NAME) as raised:
        client.models.retrieve("org/other")
    assert raised.value.code == "model_not_found"


def test_stop_reason_is_told(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play(chunk("a", 2, finish=FinishReason.STOP, stop_reason="\n", stats=STATS))
    completion = client.completions.create(model=MODEL_NAME, prompt="abc", stop="\n")
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].stop_reason == "\n"


def test_an_unknown_model_is_not_found(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL_NAME) as raised:
        client.completions.create(model="gpt", prompt="abc")
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OverloadedError("full", retry_after_s=2.5), openai.RateLimitError),
        (DeadlineExceededError("too late"), openai.InternalServerError),
        (WorkerUnavailableError("dead"), openai.InternalServerError),
        (ValueError("a bug"), openai.InternalServerError),
    ],
)
def test_an_early_error_is_a_status(
    client: openai.OpenAI, engine: FakeEngine, error: Exception, expected: type[Exception], stream: bool
) -> None:
    engine.play(error)
    with pytest.raises(expected):
        client.completions.create(model=MODEL_NAME, prompt="abc", stream=stream)
    assert engine.cleaned_up.is_set()


def test_an_error_in_mid_stream_is_raised(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.play(chunk("Hel", 1), DeadlineExceededError("too late"))
    stream = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True)
    assert next(stream).choices[0].delta.content == "Hel"
    with pytest.raises(openai.APIError, match="too late") as raised:
        next(stream)
    assert raised.value.code == "deadline_exceeded"


def test_the_client_retries_when_told_to(server: Server) -> None:
    server.engine.play(OverloadedError("full", retry_after_s=0.1))
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1) as client,
        pytest.raises(openai.RateLimitError),
    ):
        client.completions.create(model=MODEL_NAME, prompt="abc")
    assert len(server.engine.requests) == 2
