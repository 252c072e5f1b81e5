"""Log-probabilities in OpenAI's formats, through the unmodified client."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest

from specdec.types import FinishReason, GenerationChunk, TokenLogprobs, TokenOrigin
from tests.api.fake_engine import MODEL_NAME, FakeEngine

TEXT = "a€b"
# "a", the three bytes of "€", "b", the end token.
PIECES = [b"a", b"\xe2", b"\x82", b"\xac", b"b", b"<end>"]
NAMES = ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "<end>"]
VALUES = [-0.1, -0.2, -0.3, -0.4, -20000.0, -0.6]
WRITTEN = [-0.1, -0.2, -0.3, -0.4, -9999.0, -0.6]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def tokens(engine: FakeEngine) -> list[int]:
    """The engine plays the text in chunks of 2, 3 and 1 tokens; the second alternative is always "z"."""
    ids = [*engine.tokenizer.encode(TEXT), *engine.tokenizer.eos_token_ids]
    z = engine.tokenizer.encode("z")[0]
    entries = [TokenLogprobs(value, ((token, value), (z, -7.5))) for token, value in zip(ids, VALUES, strict=True)]
    chunks = []
    for first, last, text in ((0, 2, "a"), (2, 5, "€b"), (5, 6, "")):
        origins = (TokenOrigin.PLAIN,) * (last - first)
        chunks.append(GenerationChunk(text, tuple(ids[first:last]), origins, logprobs=tuple(entries[first:last])))
    engine.play(*chunks[:-1], replace(chunks[-1], finish_reason=FinishReason.STOP))
    return ids


def test_completion(client: openai.OpenAI, tokens: list[int]) -> None:
    logprobs = client.completions.create(model=MODEL_NAME, prompt="abc", logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == NAMES
    assert logprobs.token_logprobs == WRITTEN
    assert logprobs.top_logprobs == [{name: value, "z": -7.5} for name, value in zip(NAMES, WRITTEN, strict=True)]
    assert logprobs.text_offset == [0, 1, 1, 1, 2, 3]


def test_completion_stream_goes_on_where_the_last_chunk_ended(client: openai.OpenAI, tokens: list[int]) -> None:
    stream = client.completions.create(model=MODEL_NAME, prompt="abc", logprobs=2, stream=True)
    parts = [piece.choices[0].logprobs for piece in stream]
    assert [len(part.tokens) for part in parts] == [2, 3, 1]
    assert [name for part in parts for name in part.tokens] == NAMES
    assert [value for part in parts for value in part.token_logprobs] == WRITTEN
    assert [offset for part in parts for offset in part.text_offset] == [0, 1, 1, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: openai.OpenAI, tokens: list[int], stream: bool) -> None:
    options = {"model": MODEL_NAME, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    if stream:
        pieces = client.chat.completions.create(**options, stream=True)
        content = [entry for piece in pieces for entry in piece.choices[0].logprobs.content]
    else:
        content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert [entry.token for entry in content] == NAMES
    assert [bytes(entry.bytes) for entry in content] == PIECES
    assert [entry.logprob for entry in content] == WRITTEN
    for entry in content:
        own, other = entry.top_logprobs
        assert (own.token, own.bytes, own.logprob) == (entry.token, entry.bytes, entry.logprob)
        assert (other.token, other.logprob) == ("z", -7.5)


def test_the_request_says_how_many(client: openai.OpenAI, engine: FakeEngine, tokens: list[int]) -> None:
    client.completions.create(model=MODEL_NAME, prompt="abc", logprobs=0)
    client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, logprobs=True)
    client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, logprobs=True, top_logprobs=5)
    client.completions.create(model=MODEL_NAME, prompt="abc")
    client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
    assert [request.sampling.logprobs for request in engine.requests] == [0, 0, 5, None, None]


def test_the_generated_token_is_among_the_alternatives_even_if_it_is_none(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    a, b = engine.tokenizer.encode("ab")
    origins = (TokenOrigin.PLAIN,)
    entries = (TokenLogprobs(-3.0, ((b, -0.5),)),)
    engine.play(GenerationChunk("a", (a,), origins, FinishReason.LENGTH, logprobs=entries))
    logprobs = client.completions.create(model=MODEL_NAME, prompt="abc", logprobs=1).choices[0].logprobs
    assert logprobs.top_logprobs == [{"b": -0.5, "a": -3.0}]
