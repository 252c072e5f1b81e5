"""What the HTTP API answers: OpenAI's objects, with ``seed`` and ``speculative`` beside them.

They are plain dicts, since a key that is absent and one that is null are different answers, and since a stream
builds one per verify step.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class PromptTokensDetails(TypedDict):
    """Of the prompt's tokens, those that were not computed anew."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts. The end token counts as one of the completion, though it has no text."""

    prompt_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens: int
    total_tokens: int


class SpeculativeReport(TypedDict):
    """What speculation did for this answer; see `specdec.types.SpeculativeStats`."""

    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: float


class CompletionLogprobs(TypedDict):
    r"""Log-probabilities in the form of completions: lists with one entry per generated token, the end token included.

    They are the target's own, before temperature and all else the request asks for. ``top_logprobs`` has the most
    likely tokens and the generated one. A token that is not whole code points shows as ``bytes:\xe2\x82``.
    ``text_offset`` counts code points of the generated text.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TokenLogprob(TypedDict):
    """One token; joined, the ``bytes`` of all tokens are the UTF-8 of the text and of its special tokens' names."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A generated token and the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities in the form of chat completions; values as in `CompletionLogprobs`."""

    content: list[ContentLogprob]
    refusal: None


class Choice(TypedDict):
    """Base of the choices.

    ``finish_reason`` is null before a stream's last chunk. ``stop_reason`` is the stop string or stop token id of
    the request that ended the text; null where the model's own end token or the length did. ``token_ids`` are the
    generated tokens, the end token included, where the request has ``return_token_ids``.
    """

    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class CompletionChoice(Choice):
    """A text, or a stream's next piece of it."""

    text: str
    logprobs: CompletionLogprobs | None


class ChatMessageBody(TypedDict):
    """The assistant's turn; a client may send it back as it is. ``role`` is in a stream's first piece only."""

    role: NotRequired[Literal["assistant"]]
    content: str


class ChatChoice(Choice):
    """The assistant's turn."""

    message: ChatMessageBody
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice):
    """The next piece of the assistant's turn."""

    delta: ChatMessageBody
    logprobs: ChatLogprobs | None


class ResponseObject(TypedDict):
    """Base of all answers of a generation.

    ``id`` is the endpoint's prefix and the request's ``x-request-id``; ``created`` is Unix time in seconds;
    ``seed`` reproduces the answer. ``speculative`` is in whole answers and in a stream's chunk with the
    ``finish_reason``; ``usage`` in whole answers and, if asked for, in a chunk of its own after that.
    """

    id: str
    created: int
    model: str
    seed: int
    usage: NotRequired[Usage | None]
    speculative: NotRequired[SpeculativeReport]


class Completion(ResponseObject):
    """A completion, or a chunk of one."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(ResponseObject):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(ResponseObject):
    """A chunk of a chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ModelCard(TypedDict):
    """One served model. ``max_model_len`` counts the tokens of prompt and completion together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """All served models; one."""

    object: Literal["list"]
    data: list[ModelCard]


class HealthReport(TypedDict):
    """The server's process answers."""

    status: Literal["ok"]


class ReadinessReport(TypedDict):
    """Which workers have answered; see `specdec.orchestrator.base.Readiness`."""

    ready: bool
    target: bool
    draft: bool | None
    detail: str


class ErrorDetail(TypedDict):
    """What went wrong: for a person, its class, the offending field, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """The body of every answer that is an error."""

    error: ErrorDetail
