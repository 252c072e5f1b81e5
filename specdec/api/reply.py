"""From an engine's chunks to the objects of an endpoint, whole or streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Literal

from specdec.api.connection import closing
from specdec.api.logprobs import LogprobsWriter
from specdec.api.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessageBody,
    Choice,
    Completion,
    ResponseObject,
    SpeculativeReport,
    Usage,
)
from specdec.types import FinishReason, GenerationChunk, GenerationRequest

FinishWord = Literal["stop", "length"]

_FINISH_WORDS: dict[FinishReason, FinishWord] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Reply(ABC):
    """One request's answer, in the words of its endpoint.

    Attributes:
        id: shown to the client.
        model: the served model's name.
        request: what the engine was asked for.
        return_token_ids: whether choices carry their token ids.
        logprobs: writes log-probabilities where the request has them.
        created: Unix time in seconds.
    """

    id: str
    model: str
    request: GenerationRequest
    return_token_ids: bool = False
    logprobs: LogprobsWriter | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def whole(self, joined: GenerationChunk) -> ResponseObject:
        """The whole answer, given all chunks as one."""

    @abstractmethod
    def piece(self, chunk: GenerationChunk, *, first: bool) -> ResponseObject:
        """One chunk of a stream."""

    @abstractmethod
    def no_choices(self) -> ResponseObject:
        """A chunk of a stream without text, to carry the usage."""

    def header(self) -> ResponseObject:
        """What all objects of this answer share."""
        return {"id": self.id, "created": self.created, "model": self.model, "seed": self.request.sampling.seed}

    def usage(self, num_tokens: int, num_cached: int) -> Usage:
        """The token counts, with ``num_tokens`` generated, and ``num_cached`` of the prompt's not computed."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    def choice(self, chunk: GenerationChunk) -> Choice:
        """What the choices of both endpoints share."""
        choice: Choice = {
            "index": 0,
            "finish_reason": None if chunk.finish_reason is None else _FINISH_WORDS[chunk.finish_reason],
            "stop_reason": chunk.stop_reason,
        }
        if self.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return choice


class CompletionReply(Reply):
    """The answer of ``/v1/completions``."""

    def whole(self, joined: GenerationChunk) -> Completion:
        """See `Reply.whole`."""
        completion = self.piece(joined, first=True)
        completion["usage"] = self.usage(len(joined.token_ids), joined.num_cached_tokens)
        return completion

    def piece(self, chunk: GenerationChunk, *, first: bool) -> Completion:
        """See `Reply.piece`."""
        logprobs = None if self.logprobs is None else self.logprobs.completion(chunk)
        completion = self.no_choices()
        completion["choices"] = [{**self.choice(chunk), "text": chunk.text, "logprobs": logprobs}]
        if chunk.finish_reason is not None:
            completion["speculative"] = _speculative(chunk)
        return completion

    def no_choices(self) -> Completion:
        """See `Reply.no_choices`."""
        return {**self.header(), "object": "text_completion", "choices": []}


class ChatReply(Reply):
    """The answer of ``/v1/chat/completions``."""

    def whole(self, joined: GenerationChunk) -> ChatCompletion:
        """See `Reply.whole`."""
        message: ChatMessageBody = {"role": "assistant", "content": joined.text}
        return {
            **self.header(),
            "object": "chat.completion",
            "choices": [{**self.choice(joined), "message": message, "logprobs": self._logprobs(joined)}],
            "usage": self.usage(len(joined.token_ids), joined.num_cached_tokens),
            "speculative": _speculative(joined),
        }

    def piece(self, chunk: GenerationChunk, *, first: bool) -> ChatCompletionChunk:
        """See `Reply.piece`. The role comes with the first text, so that nothing is sent ahead of a first token."""
        delta: ChatMessageBody = {"role": "assistant", "content": chunk.text} if first else {"content": chunk.text}
        piece = self.no_choices()
        piece["choices"] = [{**self.choice(chunk), "delta": delta, "logprobs": self._logprobs(chunk)}]
        if chunk.finish_reason is not None:
            piece["speculative"] = _speculative(chunk)
        return piece

    def no_choices(self) -> ChatCompletionChunk:
        """See `Reply.no_choices`."""
        return {**self.header(), "object": "chat.completion.chunk", "choices": []}

    def _logprobs(self, chunk: GenerationChunk) -> ChatLogprobs | None:
        return None if self.logprobs is None else self.logprobs.chat(chunk)


async def whole_reply(chunks: AsyncIterator[GenerationChunk], reply: Reply) -> ResponseObject:
    """Wait for the whole generation. Raises what ``chunks`` raises; closes it in any case."""
    received: list[GenerationChunk] = []
    async with closing(chunks):
        async for chunk in chunks:
            received.append(chunk)
    last = _finished(received[-1] if received else None)
    return reply.whole(
        replace(
            last,
            text="".join(chunk.text for chunk in received),
            token_ids=tuple(token for chunk in received for token in chunk.token_ids),
            num_cached_tokens=sum(chunk.num_cached_tokens for chunk in received),
            origins=tuple(origin for chunk in received for origin in chunk.origins),
            logprobs=tuple(entry for chunk in received for entry in chunk.logprobs),
        )
    )


async def streamed_reply(
    chunks: AsyncIterator[GenerationChunk], reply: Reply, *, include_usage: bool
) -> AsyncGenerator[ResponseObject, None]:
    """One object per chunk, then one with the usage if asked for. Raises and closes as `whole_reply`."""
    num_tokens = num_cached = 0
    last: GenerationChunk | None = None
    async with closing(chunks):
        async for chunk in chunks:
            piece = reply.piece(chunk, first=last is None)
            if include_usage:
                piece["usage"] = None
            num_tokens += len(chunk.token_ids)
            num_cached += chunk.num_cached_tokens
            last = chunk
            yield piece
    _finished(last)
    if include_usage:
        closing_piece = reply.no_choices()
        closing_piece["usage"] = reply.usage(num_tokens, num_cached)
        yield closing_piece


def _finished(last: GenerationChunk | None) -> GenerationChunk:
    """The last chunk; an engine that just stops has a fault, and its text must not pass for a whole one."""
    if last is None or last.finish_reason is None:
        raise RuntimeError("the engine ended a generation without a finish reason")
    return last


def _speculative(chunk: GenerationChunk) -> SpeculativeReport:
    return {
        "num_steps": chunk.stats.num_steps,
        "num_draft_tokens": chunk.stats.num_draft_tokens,
        "num_accepted_tokens": chunk.stats.num_accepted_tokens,
        "acceptance_length": chunk.stats.acceptance_length,
    }
